"""Replacements for parts of PyTorch that cannot run over fake tensors, or that bypass the operations they consist of."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import register_pytree_node

from nntask import UsageError

from .recorder import CallRecorder
from .refusals import line_of_program


@contextmanager
def plain_python(recorder: CallRecorder) -> Iterator[None]:
    """Run control flow operators and re-entrant checkpoints as plain Python during a capture, and turn each value that is read into a guard."""
    thread = threading.get_ident()  # other threads of the program keep PyTorch's own functions
    with ExitStack() as stack:

        def replaced(owner: Any, name: str, value: Any) -> None:
            has, before = name in vars(owner), getattr(owner, name)

            def here(*args: Any, **kwargs: Any) -> Any:
                return (value if threading.get_ident() == thread else before)(*args, **kwargs)

            setattr(owner, name, here)
            stack.callback(lambda: setattr(owner, name, before) if has else delattr(owner, name))

        replaced(torch, "cond", _cond)
        replaced(torch.utils.checkpoint.CheckpointFunction, "apply", _run_plainly)
        replaced(torch.Tensor, "data_ptr", _refuse_address)
        replaced(torch.Tensor, "retain_grad", _refuse_kept_gradient)
        for owner in (torch, torch.Tensor):
            replaced(owner, "tensor_split", _with_values(recorder, owner.tensor_split))
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu", "_pack_padded_sequence"):
            replaced(torch._VF, name, _with_values(recorder, getattr(torch._VF, name)))
        replaced(torch._VF, "_pad_packed_sequence", _with_values(recorder, _pad_packed_sequence))
        for name in ("numpy", "tolist", "__array__"):
            replaced(torch.Tensor, name, _reading(recorder, name, getattr(torch.Tensor, name)))
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # attention in evaluation then uses separate operations, which this package knows
        yield


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    """Replace `torch.cond` by a branch on the value of the predicate."""
    return (true_fn if bool(pred) else false_fn)(*operands)


def _run_plainly(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """Run a re-entrant checkpoint without its recomputation, which the planner decides about; without an input that has a gradient it gives none."""
    if any(isinstance(each, torch.Tensor) and each.requires_grad for each in args):
        return run(*args)
    with torch.no_grad():
        return run(*args)


def _refuse_address(tensor: torch.Tensor) -> int:
    raise UsageError(f"{line_of_program()} reads the address of a tensor, and a session moves tensors", "compute without addresses")


def _refuse_kept_gradient(tensor: torch.Tensor) -> None:
    if not tensor.is_leaf:
        raise UsageError(
            f"{line_of_program()} keeps the gradient of an activation (retain_grad), which a session does not give back",
            "compute with it in the backward pass, by torch.autograd.grad or a Function",
        )


def _with_values(recorder: CallRecorder, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of PyTorch that gets real values for lengths or indices, vectors of integers, since it reads them without an operation."""

    def real(value: Any) -> Any:
        is_lengths = isinstance(value, FakeTensor) and value.dtype == torch.int64 and value.dim() == 1
        return recorder.value(value) if is_lengths else value

    def called(first: Any, *args: Any, **kwargs: Any) -> Any:
        return function(first, *map(real, args), **{name: real(value) for name, value in kwargs.items()})

    return called


def _pad_packed_sequence(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad a packed sequence as PyTorch's function of this name does, which writes the lengths to memory that a fake tensor does not have."""
    sizes = batch_sizes.tolist()
    output = data.new_full((max(len(sizes), total_length), sizes[0], *data.shape[1:]), padding_value)  # (T, B, ...)
    begin = 0
    for number, size in enumerate(sizes):
        output[number, :size] = data[begin : begin + size]
        begin += size
    lengths = torch.tensor([sum(size > row for size in sizes) for row in range(sizes[0])])
    return output.transpose(0, 1) if batch_first else output, lengths


def _reading(recorder: CallRecorder, name: str, read: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for a method of tensors that reads values without an operation."""

    def reading(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if name == "numpy" and tensor.requires_grad and not kwargs.get("force", False):
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        if not isinstance(tensor, FakeTensor) and not recorder.is_watched(tensor):
            return read(tensor, *args, **kwargs)
        with torch.no_grad():
            value = recorder.value(tensor.detach())
        with _disable_current_modes():
            return read(value.clone(), *args, **kwargs)

    return reading


def with_plain_classes(value: Any) -> Any:
    """Return a result with `Fields` in place of dataclass objects that are not containers of PyTorch's."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type | Mapping | list | tuple):
        return value
    return Fields(type(value), {field.name: with_plain_classes(getattr(value, field.name)) for field in dataclasses.fields(value)})


@dataclasses.dataclass
class Fields:
    """The fields of a dataclass object, as a container that PyTorch's functions on trees support."""

    kind: type
    values: dict[str, Any]

    def made(self) -> Any:
        """Return an object of the dataclass with these fields."""
        result: Any = object.__new__(self.kind)
        for name, value in self.values.items():
            object.__setattr__(result, name, value.made() if isinstance(value, Fields) else value)
        return result


register_pytree_node(
    Fields,
    lambda fields: (list(fields.values.values()), (fields.kind, tuple(fields.values))),
    lambda values, spec: Fields(spec[0], dict(zip(spec[1], values, strict=True))),
)
