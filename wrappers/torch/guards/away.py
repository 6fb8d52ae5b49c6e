"""Tensors whose values a session holds: outside a capture any use of them raises, inside a capture each is replaced by its fake twin.

A session takes the values of parameters and buffers. The program still holds the tensor objects, and PyTorch would compute with whatever bytes they
have. So their class is replaced, in place, by one whose `__torch_function__` allows metadata (shape, type, `requires_grad`) and refuses everything
else: reading, writing, copying, averaging, clipping, saving. The twin is found by the identity of the tensor, so the name under which the program
reaches it does not matter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Final

import torch
from torch.utils._pytree import tree_map_only

from nntask import UsageError

_GETTERS: Final = frozenset(
    (
        *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "output_nr", "requires_grad", "grad_fn"),
        *("is_leaf", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_cuda", "is_cpu"),
        *("_backward_hooks", "_post_accumulate_grad_hooks"),
    )
)
"""Attributes that can be read."""
_METHODS: Final = frozenset(
    (
        *("size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "storage_offset", "get_device", "__len__"),
        *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_conj", "is_neg", "is_inference", "is_shared", "is_pinned"),
        "_has_compatible_shallow_copy_type",
    )
)
"""Methods that can be called."""
_WITHOUT_GRADIENTS: Final = frozenset({"zero_grad", "_init_group", "_apply"})
"""Functions of PyTorch that skip missing gradients: they clear them, step an optimizer, or move a module to its own device."""
_TWINS: ContextVar[Mapping[int, torch.Tensor] | None] = ContextVar("twins", default=None)
"""While a module is captured: id of a tensor that is away -> its fake twin."""


def _function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """`__torch_function__` of tensors that are away."""
    kwargs = kwargs or {}
    twins = _TWINS.get()
    if twins is not None:
        given, named = tree_map_only((AwayParameter, AwayTensor), lambda tensor: _twin_of(tensor, twins), (args, kwargs))
        return func(*given, **named)
    name = getattr(func, "__name__", str(func))
    is_getter = name == "__get__"
    if is_getter:
        name = func.__self__.__name__
    is_switch = name == "requires_grad_" or (name == "__set__" and func.__self__.__name__ == "requires_grad")
    if is_switch or name in (_GETTERS if is_getter else _METHODS):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if is_getter and name == "grad" and sys._getframe(1).f_code.co_name in _WITHOUT_GRADIENTS:
        return None  # gradients live in the session, for one step
    if name == "to" and _changes_nothing(*args, **kwargs):
        return args[0]
    if name == "__set__" and func.__self__.__name__ == "data" and args[1] is args[0]:
        return None
    raise UsageError(
        f"the weights of the module are in a session, or were in one that was closed, so {name} cannot use them: read them with "
        "session.state_dict(), overwrite them with session.load_state_dict(), compute with session.predict()",
        "load_into(module) of the session, or close() of its trainer, brings them back",
    )


def _changes_nothing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether `Tensor.to` would return the tensor itself."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return (device is None or device.type == "cpu") and dtype in (None, tensor.dtype)


class _Away:
    """The behaviour of tensors whose values a session holds."""

    __slots__ = ()
    __torch_function__: ClassVar[Any] = classmethod(_function)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __repr__(self: Any, *, tensor_contents: Any = None) -> str:
        return f"<{'parameter ' if isinstance(self, torch.nn.Parameter) else ''}{tuple(self.shape)} {self.dtype}, in a session>"


class AwayTensor(_Away, torch.Tensor):  # type: ignore[misc]
    """A buffer whose values a session holds."""


class AwayParameter(_Away, torch.nn.Parameter):  # type: ignore[misc]
    """A parameter whose values a session holds."""


def _twin_of(tensor: torch.Tensor, twins: Mapping[int, torch.Tensor]) -> torch.Tensor:
    twin = twins.get(id(tensor))
    if twin is None:
        with torch._C.DisableTorchFunctionSubclass():
            shape = tuple(tensor.shape)
        raise UsageError(
            f"a tensor of shape {shape} belongs to another session, or to one that was closed",
            "train both modules in one session, as parts of one module, or bring the values back with load_into(module)",
        )
    return twin


@contextmanager
def standing_for(twins: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Replace tensors that are away by others inside the block.

    Args:
        twins: id of a tensor that is away -> the tensor that replaces it.
    """
    token = _TWINS.set(twins)
    try:
        yield
    finally:
        _TWINS.reset(token)


def is_away(value: torch.Tensor) -> bool:
    """Return whether a session holds, or held, the values of a tensor."""
    return isinstance(value, AwayParameter | AwayTensor)


def send_away(value: torch.Tensor) -> None:
    """Free the values of a tensor, which keeps its shape and type, over one element; a tensor that is away already is unchanged."""
    if is_away(value):
        return
    if not value.is_meta:
        one = torch.full((1,) * value.dim(), float("nan") if value.is_floating_point() else 0, dtype=value.dtype)
        value.data = one.expand(value.shape)
    value._class_before = type(value)
    value.__class__ = AwayParameter if isinstance(value, torch.nn.Parameter) else AwayTensor


def bring_back(value: torch.Tensor, data: torch.Tensor | None = None) -> None:
    """Turn a tensor that is away into an ordinary one.

    Args:
        data: values of the tensor; None for a tensor without memory (the meta device).
    """
    if is_away(value):
        value.__class__ = value.__dict__.pop("_class_before")
    if data is not None:
        value.data = data
