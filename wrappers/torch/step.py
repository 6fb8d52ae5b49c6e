"""A captured pass as tasks: a codelet for each segment, and its submission with the handles of a minibatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import ml_dtypes
import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from nntask import UsageError
from scheduler import RW, SCRATCH, Access, Codelet, Cost, Handle, R, TaskRuntime, W

from .capture import Capture, Ref, Storage, aten
from .chains import ChainCompiler
from .kernels import Program, adds_up, draws, tensor_of, torch_nbytes
from .segments import Segment, scratch_layout, segments_of, storages_of

BYTES = np.dtype(np.uint8)
_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.bool: np.dtype(np.bool_),
}

Contribution = Literal["write", "add"]
"""How a minibatch contributes to gradients: the first one writes, the others add."""


def numpy_dtype(dtype: torch.dtype, name: str) -> np.dtype[Any]:
    """The element type of tiles for one of PyTorch.

    Raises:
        UsageError: tiles have no such type.
    """
    if dtype not in _DTYPES:
        raise UsageError(
            f"{name} is of type {dtype}, and tensors of a session must be real numbers of at most 64 bits; convert it, or compute it inside"
        )
    return _DTYPES[dtype]


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor's tile; a scalar has one element."""
    return tuple(tensor.shape) or (1,)


def as_bytes(view: Any) -> torch.Tensor:
    """The memory of a tile as bytes for PyTorch, without a copy  # any shape -> (nbytes,) uint8."""
    return torch.from_numpy(view.reshape(-1).view(np.uint8))


def as_tensor(array: Any, shape: Sequence[int]) -> torch.Tensor:
    """An array of a tile as a tensor of a shape with as many elements, without a copy."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).view(shape)
    return torch.from_numpy(array).view(shape)


@dataclass(frozen=True, slots=True)
class _Task:
    """A segment with one kind of contribution.

    Attributes:
        segment: the segment.
        draws: whether it draws random numbers.
        codelet: computes it.
        scratch_nbytes: bytes of its scratch memory.
    """

    segment: Segment
    draws: bool
    codelet: Codelet
    scratch_nbytes: int


class Pass:
    """The tasks of a captured pass, which can be submitted for any number of minibatches.

    Args:
        captured: the pass.
        dtypes: element type of each parameter's gradient, by name of the parameter.
        compiler: compiles chains of its calls; None if they stay calls of their own.

    Attributes:
        segments: the calls of each task.
    """

    def __init__(self, captured: Capture, dtypes: Mapping[str, np.dtype[Any]], compiler: ChainCompiler | None = None) -> None:
        self.captured = captured if compiler is None else compiler.chained(captured)
        self._dtypes = dtypes
        self.segments: Sequence[Segment] = segments_of(self.captured)
        self._tasks: dict[Contribution, list[_Task]] = {}

    @property
    def constants(self) -> list[Storage]:
        """Storages of the model's constants."""
        return sorted((s for s in storages_of(self.segments) if s.role == "constant"), key=lambda storage: storage.nbytes)

    @cached_property
    def num_rows(self) -> dict[str, int]:
        """Name of an input that is looked up in a table -> number of rows of the smallest such table."""
        found: dict[str, int] = {}
        for call in self.captured.calls:
            if call.func is aten.embedding.default and call.args[1].storage.role == "input":
                name = call.args[1].storage.name
                found[name] = min(call.args[0].shape[0], found.get(name, call.args[0].shape[0]))
        return found

    def submit(
        self,
        runtime: TaskRuntime,
        handles: Mapping[Storage, Handle],
        gradients: Mapping[str, Handle],
        key: Handle,
        *,
        minibatch: int = 0,
    ) -> dict[Storage, Handle]:
        """Submit the tasks for one minibatch.

        Args:
            handles: of parameters, buffers, constants and this minibatch's inputs.
            gradients: name of a parameter -> handle of its gradient.
            key: (2,) uint64, seed and number of the step.
            minibatch: number of the minibatch within the step. The first one writes gradients, the others add to them.

        Returns:
            The handles of storages that tasks have made; those that the caller drops die at their last use.
        """
        made: dict[Storage, Handle] = {}
        outputs = _storages_in(self.captured.outputs)
        contribution: Contribution = "write" if minibatch == 0 else "add"
        kept: dict[Storage, Handle] = {}
        for task in self._of(contribution):
            segment = task.segment
            for storage in segment.makes:
                made[storage] = _handle(runtime, storage.nbytes, f"{task.codelet.name} result", "activations")
                if storage in outputs:
                    kept[storage] = made[storage]
            accesses: list[Access] = [(handles.get(s) or made[s], R) for s in segment.reads]
            accesses += [(handles.get(s) or made[s], RW) for s in segment.updates]
            accesses += [(made[s], W) for s in segment.makes]
            accesses += [(gradients[name], W if contribution == "write" else RW) for name in segment.gradients]
            constants: dict[str, Any] = {}
            if task.draws:
                accesses.append((key, R))
                constants["minibatch"] = minibatch
            if task.scratch_nbytes:
                accesses.append((_handle(runtime, task.scratch_nbytes, "scratch", "scratch"), SCRATCH))
            runtime.submit(task.codelet, accesses, constants)
        return kept

    def _of(self, contribution: Contribution) -> list[_Task]:
        if contribution not in self._tasks:
            self._tasks[contribution] = [self._task(segment, contribution) for segment in self.segments]
        return self._tasks[contribution]

    def _task(self, segment: Segment, contribution: Contribution) -> _Task:
        direct = {
            ref.storage: name for name in segment.gradients if self._is_direct(segment, name, ref := self.captured.gradients[name], contribution)
        }
        offsets, nbytes = segment.inner, segment.scratch_nbytes
        if direct:
            offsets, placed = scratch_layout({s: at for s, at in segment.lives.items() if s not in direct}, segment.ends)
            nbytes = placed + segment.beside_nbytes
        kernel = _kernel(segment, offsets, nbytes, direct, self.captured.gradients, contribution)
        flops, moved = segment.flops, float(sum(s.nbytes for s in (*segment.reads, *segment.updates, *segment.makes)))
        return _Task(
            segment, any(map(draws, segment.calls)), Codelet(segment.name, cpu=kernel, cost=lambda views, constants: Cost(flops, moved)), nbytes
        )

    def _is_direct(self, segment: Segment, name: str, ref: Ref, contribution: Contribution) -> bool:
        """Whether the memory of a gradient may serve for the storage that it is computed in: to be written, or, by one product, to be added to."""
        others = sum(other.storage is ref.storage for other in self.captured.gradients.values())
        if not ref.is_whole or others > 1 or ref.storage not in segment.inner or numpy_dtype(ref.dtype, name) != self._dtypes[name]:
            return False
        users = [call for call in segment.calls if ref.storage in call.reads | call.writes]
        return contribution == "write" or (len(users) == 1 and adds_up(users[0]))


def _storages_in(outputs: Any) -> set[Storage]:
    return {leaf.storage for leaf in tree_leaves(outputs) if isinstance(leaf, Ref)}


class BytesView:
    """The view of a handle that holds a storage: its bytes."""

    __slots__ = ("nbytes", "shape")

    dtype = BYTES

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.shape = (nbytes,)

    def __call__(self, memory: Any, offset: int) -> Any:
        """The bytes at an offset of a node's memory  # -> (nbytes,) uint8."""
        return np.ndarray(self.shape, BYTES, buffer=memory, offset=offset)


def _handle(runtime: TaskRuntime, nbytes: int, name: str, data_class: Literal["activations", "scratch"]) -> Handle:
    return runtime.handle(nbytes, BytesView(nbytes), name=name, data_class=data_class)


def _kernel(
    segment: Segment,
    offsets: Mapping[Storage, int],
    scratch_nbytes: int,
    direct: Mapping[Storage, str],
    gradients: Mapping[str, Ref],
    contribution: Contribution,
) -> Callable[..., None]:
    """The function of a task: (reads, updates, makes, gradients, key if numbers are drawn, scratch if there is any) as views."""
    added = direct if contribution == "add" else ()
    by_torch = {storage for call in segment.calls if torch_nbytes(call) for storage in call.made}  # stays where PyTorch has put it
    ends = {storage: segment.ends[storage] for storage in by_torch if storage in offsets}
    program = Program(segment.calls, range(segment.first, segment.first + len(segment.calls)), added, ends)
    outside = (*segment.reads, *segment.updates, *segment.makes)
    inner = [(storage, offset) for storage, offset in offsets.items() if storage not in by_torch]
    names, num_outside = tuple(segment.gradients), len(outside)
    refs = [gradients[name] for name in names]

    def run(*views: Any, minibatch: int = 0) -> None:
        with torch.inference_mode():
            memory = {storage: as_bytes(view)[: storage.nbytes] for storage, view in zip(outside, views, strict=False)}
            targets = dict(zip(names, views[num_outside:], strict=False))
            if scratch_nbytes:
                scratch = torch.from_numpy(views[-1])
                memory.update({storage: scratch[offset : offset + storage.nbytes] for storage, offset in inner})
            for storage, name in direct.items():
                memory[storage] = as_bytes(targets[name])
            seed = None
            if program.draws:
                key = views[num_outside + len(names)]
                seed = (int(key[0]), int(key[1]), minibatch)
            program.run(memory, seed)
            for name, ref in zip(names, refs, strict=True):
                if ref.storage in direct:
                    continue
                value, target = tensor_of(memory[ref.storage], ref), as_tensor(targets[name], ref.shape)
                if contribution == "write":
                    target.copy_(value)
                else:
                    target.add_(value)

    return run
