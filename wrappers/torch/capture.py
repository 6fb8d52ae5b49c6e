"""From a module and a batch to the calls of aten operations that its forward and backward pass make.

The module runs once under a fake tensor mode (shapes only: no arithmetic, no memory), autograd included, and every operation that reaches the
dispatcher below autograd is noted. So the calls are the ones that eager PyTorch makes, in their order, and computing them again gives eager's bits.
Python control flow simply runs; a decision that needs a value, or a shape that depends on one, is refused with the line of the model.

Memory is modelled by storages. A tensor is a reference: a storage with element type, shape, strides and offset. Views make references and no calls.
In-place operations write a storage. A storage that some call makes is temporary; parameters, buffers, inputs and constants exist before.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from nntask import UsageError

from .modules import unchanged
from .recomputation import makes_again

Role = Literal["parameter", "buffer", "input", "constant", "temporary"]

TileKey = tuple[str, int]
"""A parameter's name, and the number of one of its pieces: 0 of one that is not cut."""

Function = Callable[[torch.nn.Module, Mapping[str, Any]], Any]
"""From a module and a batch to the result of a pass."""

aten: Final = torch.ops.aten

_OF_ONEDNN: Final = frozenset({aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default})
_TORCH: Final = os.path.dirname(torch.__file__)
_HERE: Final = os.path.dirname(__file__)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Storage:
    """A piece of memory that tensors refer to.

    Attributes:
        nbytes: its size.
        role: what it holds; a temporary one is made by a call.
        name: name of the parameter, buffer or input; "" for others.
        constant: the values of a constant.
        piece: of a parameter that is cut along its first axis (`cuts`), the number of this piece.
        is_again: whether what is made there was made before, in a forward pass that a backward pass repeats.
    """

    nbytes: int
    role: Role
    name: str = ""
    constant: torch.Tensor | None = None
    piece: int = 0
    is_again: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor: part of a storage. Strides and offset count elements.

    Attributes:
        is_conj, is_neg: whether its values are the conjugates, or the negatives, of those in memory.
    """

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is its storage, in the order of the memory."""
        numel = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != numel:
                return False
            numel *= length
        return not self.is_conj and not self.is_neg and self.offset == 0 and numel * self.dtype.itemsize == self.storage.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One operation.

    Attributes:
        func: the overload.
        args, kwargs: its arguments, with references in place of tensors.
        results: a reference for each tensor among its results, None for anything else, flattened.
        reads: storages of its arguments.
        writes: storages that it makes or changes.
        made: those that it makes.
        draw: of a random call, the number of its draw: a recomputation that has set the generator back draws the same numbers again.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Ref | None, ...]
    reads: frozenset[Storage]
    writes: frozenset[Storage]
    made: frozenset[Storage]
    draw: int = 0

    @classmethod
    def of(
        cls, func: Any, args: Sequence[Any], results: Sequence[Ref | None], *, kwargs: Mapping[str, Any] | None = None, made: Collection[Storage] = ()
    ) -> Call:
        """A call of an operation; what it reads follows from its arguments, and what it changes from its schema.

        Args:
            kwargs: further arguments, by name.
            made: storages of the results that are made by it.
        """
        kwargs = kwargs or {}
        reads = frozenset(ref.storage for ref in tree_leaves((args, kwargs)) if isinstance(ref, Ref))
        writes = frozenset((*made, *_written(func, args, kwargs)))
        return cls(func, tuple(args), kwargs, tuple(results), reads, writes, frozenset(made))

    @property
    def is_random(self) -> bool:
        """Whether the results are random numbers."""
        return torch.Tag.nondeterministic_seeded in self.func.tags


@dataclass(frozen=True, slots=True)
class Capture:
    """The calls of one pass over one batch.

    Attributes:
        calls: in the order of eager PyTorch.
        outputs: what the pass returns, references in place of tensors: the loss for training. Objects, such as a cache of keys, are None.
        gradients: the gradient of each parameter that has one.
        storages: those that exist before the pass; constants are not among them.
    """

    calls: Sequence[Call]
    outputs: Any
    gradients: Mapping[TileKey, Ref]
    storages: Sequence[Storage]


def capture(
    module: torch.nn.Module, batch: Mapping[str, Any], function: Function, *, backward: bool, divisor: int = 1, on_gpus: bool = False
) -> Capture:
    """Capture a forward pass, and the backward pass too if it is wanted. The module stays as it is; its values are not used.

    Recurrent layers of oneDNN are captured once more with oneDNN switched off, for the whole process, so that they are products: the workspace of its
    own ones has a size that only oneDNN knows. Nothing else should compute meanwhile.

    Args:
        module: the module, in training or evaluation mode, on the CPU or on the meta device.
        batch: what the function is given; tensors count as inputs, other values are fixed.
        function: from the module and the batch to what is kept; a scalar, the loss, with a backward pass.
        backward: whether there is a backward pass.
        divisor: the gradient is that of the loss divided by this number of minibatches.
        on_gpus: whether GPUs are to compute it: attention is then captured as products and a softmax, since PyTorch's fused one is of the CPU alone.

    Raises:
        UsageError: the pass cannot be captured; the message names the line of the model.
    """
    with ExitStack() as terms:
        if on_gpus:
            terms.enter_context(sdpa_kernel(SDPBackend.MATH))
        found = _capture(module, batch, function, backward=backward, divisor=divisor, copies=False)
        if any(call.func in _OF_ONEDNN for call in found.calls):
            terms.enter_context(_without_onednn())
            found = _capture(module, batch, function, backward=backward, divisor=divisor, copies=False)
        if any(storage.role == "input" for call in found.calls for storage in call.writes):  # the model changes them, which stay the program's
            found = _capture(module, batch, function, backward=backward, divisor=divisor, copies=True)
    return found


def _capture(module: torch.nn.Module, batch: Mapping[str, Any], function: Function, *, backward: bool, divisor: int, copies: bool) -> Capture:
    """`capture`; with `copies` the function is given copies of the inputs."""
    recorder = _Recorder()
    with unchanged(module), ExitStack() as after, FakeTensorMode(allow_non_fake_inputs=True):
        after.callback(recorder.restore)
        twins, parameters = _twins_of(module, recorder)
        inputs = {name: _fake(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                recorder.enter(value, "input", name)
        before = list(recorder.named)
        learnt = {name: twin for name, twin in parameters.items() if twin.requires_grad}
        gradients: dict[str, torch.Tensor] = {}

        def differentiate(outputs: Any) -> Any:
            if backward:
                if not outputs.requires_grad:
                    raise UsageError("the loss depends on no parameter that is learnt; unfreeze one, or compute the loss from the module's result")
                found = torch.autograd.grad(outputs if divisor == 1 else outputs / divisor, list(learnt.values()), allow_unused=True)
                gradients.update((name, recorder.own(each)) for name, each in zip(learnt, found, strict=True) if each is not None)
            return outputs

        applied = _Applied(module, function, differentiate)
        with _refusals(), torch.random.fork_rng(devices=[]), recorder, torch.set_grad_enabled(backward):
            if copies:
                inputs = tree_map_only(torch.Tensor, torch.Tensor.clone, inputs)
            outputs = torch.func.functional_call(applied, {f"module.{name}": twin for name, twin in twins.items()}, (inputs,))
            if backward:
                applied.update()
            outputs = tree_map_only(torch.Tensor, recorder.own, outputs)
        for name, gradient in gradients.items():
            if gradient.layout != torch.strided:
                raise UsageError(f"the gradient of {name} is sparse, and gradients must be dense; make its embedding with sparse=False")
        kept = tree_map(lambda leaf: _kept(leaf, recorder), outputs)
        return Capture(recorder.calls, kept, {(name, 0): recorder.ref(gradient) for name, gradient in gradients.items()}, before)


def _kept(leaf: Any, recorder: _Recorder) -> Any:
    """What of a pass's result is kept: references of tensors and plain values, but no objects, which may hold tensors without memory."""
    if isinstance(leaf, torch.Tensor):
        return recorder.ref(leaf)
    return leaf if isinstance(leaf, bool | int | float | str | None) else None


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Notes the calls that make or change memory.

    Attributes:
        calls: the calls so far.
        named: storages that were entered by role and name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.named: list[Storage] = []
        self._storages: dict[int, Storage] = {}
        self._constants: list[tuple[torch.Tensor, torch.Tensor]] = []  # with their values before the pass
        self._draws: dict[bytes, int] = {}  # state of the generator -> number of the draw
        self._alive: list[Any] = []  # a storage that is freed would give its address to another one

    def enter(self, tensor: torch.Tensor, role: Role, name: str) -> None:
        """Note memory that exists before the pass."""
        self.named.append(self._enter(tensor, role, name))

    def restore(self) -> None:
        """Give the model's constants the values that they had before the pass."""
        for tensor, value in self._constants:
            if not torch.equal(tensor, value):
                tensor.detach().copy_(value)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy of one in memory that exists before the pass, such as an input that a module returns."""
        if tensor.layout != torch.strided or self.ref(tensor).storage.role == "temporary":
            return tensor
        return tensor.clone()

    def ref(self, tensor: torch.Tensor) -> Ref:
        """The reference of a tensor; memory that nothing has made is a constant of the model."""
        if tensor.layout != torch.strided:
            raise UsageError(f"tensors must be dense, got one of layout {tensor.layout}; use dense tensors in the model")
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is None:
            storage = self._enter(tensor, "temporary" if isinstance(tensor, FakeTensor) else "constant", "")
        layout = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return Ref(storage, tensor.dtype, *layout, tensor.is_conj(), tensor.is_neg())

    def _enter(self, tensor: torch.Tensor, role: Role, name: str) -> Storage:
        untyped = tensor.untyped_storage()
        self._alive.append(untyped)
        constant = None
        if role == "constant":
            with _disable_current_modes():
                constant = tensor.detach().clone()
            self._constants.append((tensor, constant))
        storage = Storage(untyped.nbytes(), role, name, constant, is_again=makes_again())
        self._storages[untyped._cdata] = storage
        return storage

    def _draw(self) -> int:
        """The number of a draw, from the state of PyTorch's generator, which goes on by one number."""
        with _disable_current_modes():
            state = bytes(torch.random.get_rng_state().numpy())
            torch.rand(())
        return self._draws.setdefault(state, len(self._draws))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, named = tree_map_only(torch.Tensor, self.ref, (args, kwargs))
        result = _run_fake(func, args, kwargs)
        made = set()
        results: list[Ref | None] = []
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                is_new = leaf.layout == torch.strided and leaf.untyped_storage()._cdata not in self._storages
                results.append(self.ref(leaf))
                if is_new:
                    made.add(results[-1].storage)  # type: ignore[union-attr]
            else:
                results.append(None)
        call = Call.of(func, given, results, kwargs=named, made=made)
        if call.writes:
            self.calls.append(replace(call, draw=self._draw()) if call.is_random else call)
        return result


def _run_fake(func: Any, args: Any, kwargs: Any) -> Any:
    """The results of an operation as fake tensors; of one whose shapes PyTorch works out for some element types only, by the rule for all."""
    if func is aten._grouped_mm.default and args[0].dtype not in (torch.bfloat16, torch.float16):
        left, right = args[0], args[1]
        offsets = args[2] if len(args) > 2 else kwargs.get("offs")
        if left.dim() == 2 and right.dim() == 2:  # (M, K) @ (K, N), K in groups -> (G, M, N)
            return left.new_empty((offsets.shape[0], left.shape[0], right.shape[1]))
        return left.new_empty((*left.shape[:-1], right.shape[-1]))  # (M, K) @ (G, K, N), M in groups -> (M, N)
    return func(*args, **kwargs)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Storage]:
    """Storages of the arguments that an operation changes, as its schema says."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (ref.storage for ref in tree_leaves(value) if isinstance(ref, Ref))
    if func is aten.native_batch_norm.default and args[5]:  # its schema does not say that it updates the running statistics
        yield from (ref.storage for ref in args[3:5] if ref is not None)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of a tensor's shape and type in CPU memory, contiguous."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _twins_of(module: torch.nn.Module, recorder: _Recorder) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Fake tensors for the parameters and buffers of a module: by every name, and the parameters by their first names."""
    twins: dict[str, torch.Tensor] = {}
    parameters: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in seen:
            twin = seen[id(parameter)] = parameters[name] = _fake(parameter).requires_grad_(parameter.requires_grad)
            recorder.enter(twin, "parameter", name)
        twins[name] = seen[id(parameter)]
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if id(buffer) not in seen:
            twin = seen[id(buffer)] = _fake(buffer)
            recorder.enter(twin, "buffer", name)
        twins[name] = seen[id(buffer)]
    return twins, parameters


class _Applied(torch.nn.Module):  # type: ignore[misc]
    """A function of a module as a module."""

    def __init__(self, module: torch.nn.Module, function: Function, then: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module, self.function, self.then = module, function, then
        self.replaced: dict[str, tuple[torch.Tensor, Any]] = {}  # buffers that the function has replaced by new tensors: old and new

    def forward(self, batch: Mapping[str, Any]) -> Any:
        before = dict(self.module.named_buffers(remove_duplicate=False))
        found = self.function(self.module, batch)
        after = dict(self.module.named_buffers(remove_duplicate=False))
        self.replaced = {name: (old, after.get(name)) for name, old in before.items() if after.get(name) is not old}
        return self.then(found)  # here, because a backward pass that computes again uses the module's tensors

    def update(self) -> None:
        """Write new values of replaced buffers to the old ones.

        Raises:
            UsageError: a buffer has another shape or type.
        """
        for name, (old, new) in self.replaced.items():
            if not isinstance(new, torch.Tensor) or new.shape != old.shape or new.dtype != old.dtype:
                raise UsageError(f"the module replaces its buffer {name} by something of another shape or type; keep both, or use an attribute")
            with torch.no_grad():
                old.copy_(new)


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Switch oneDNN off, for the whole process."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what cannot be captured into a sentence with the line of the model, which PyTorch's log of fake tensors would bury."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    except UsageError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        kind = "a value" if isinstance(error, DataDependentOutputException) else "a shape that depends on values"
        raise UsageError(
            f"{_line_of(error)} needs {kind} of a tensor while the step is captured ({error.func}), and a step must be the same for every batch; "
            "compute with tensors there (torch.where, masks), or move it out of the model"
        ) from error
    except UnsupportedOperatorException as error:
        raise UsageError(f"{_line_of(error)} calls {error.func}, whose shapes PyTorch cannot work out beforehand; register a fake for it") from error
    except (NotImplementedError, RuntimeError) as error:
        if not isinstance(error, NotImplementedError) and not any(word in str(error) for word in ("FakeTensor", "tensor subclasses")):
            raise  # a mistake in the model
        raise UsageError(f"{_line_of(error)} cannot be captured: {str(error).splitlines()[0]}; run that part outside the model") from error
    finally:
        log.disabled = before


def _line_of(error: BaseException) -> str:
    """The innermost line outside PyTorch that an error passed through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith((_TORCH, _HERE))]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "the module"
