"""The tasks of a captured pass: a codelet for each segment, and its submission with the handles of a minibatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from nntask import UsageError
from scheduler import RW, SCRATCH, Access, Codelet, Cost, Handle, Mode, R, TaskRuntime, W
from scheduler.machine import kept_here, labelled, next_minibatch
from tiles import TileView
from tiles.kernels import kernel

from .calls import Call, Capture, Ref, Storage, TileKey
from .devices import DTYPES, HOST, as_bytes, as_tensor, compute_on_gpu
from .kernels import Program, draws, generator_of, has_cuda_kernel, tensor_of, torch_nbytes
from .rows import ops
from .rules import num_uniforms, stream_of
from .segments import ALIGNMENT, Segment, scratch_layout, segments_of, storages_of
from .sums import adding_to, only_adds
from .threads import Threads

BYTES = np.dtype(np.uint8)
FLOAT = np.dtype(np.float32)

Contribution = Literal["write", "add"]
"""Contribution of a minibatch to gradients: the first one writes, the others add."""


def numpy_dtype(dtype: torch.dtype, name: str) -> np.dtype[Any]:
    """Return the element type of tiles for one of PyTorch.

    Raises:
        UsageError: tiles do not support the type.
    """
    if dtype not in DTYPES:
        raise UsageError(
            f"{name} is of type {dtype}, and tensors of a session must be real numbers of at most 64 bits", "convert it, or compute it inside"
        )
    return DTYPES[dtype]


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor's tile; a scalar has one element."""
    return tuple(tensor.shape) or (1,)


class _Task(NamedTuple):
    """The codelet of a segment with one kind of contribution, its work, and the bytes of its scratch memory."""

    segment: Segment
    work: _Work
    codelet: Codelet
    scratch_nbytes: int


class Pass:
    """The tasks of a captured pass, which can be submitted for any number of minibatches.

    Args:
        captured: the pass.
        dtypes: element type of each parameter's gradient, by name of the parameter.
        num_rows: name of an input that is looked up in a table -> number of rows of the smallest such table.
        on_gpus: whether GPUs take part; each task then has a CUDA kernel, or consists of calls without one.

    Attributes:
        segments: the calls of each task.
    """

    def __init__(self, captured: Capture, dtypes: Mapping[str, np.dtype[Any]], num_rows: Mapping[str, int], *, on_gpus: bool = False) -> None:
        self.captured, self.num_rows = captured, num_rows
        self._dtypes = dtypes
        self._on_gpus = on_gpus
        self.segments: Sequence[Segment] = segments_of(
            captured, lambda call: (call.func is ops.add_rows_gradient.default, not on_gpus or has_cuda_kernel(call))
        )
        self._tasks: dict[Contribution, list[_Task]] = {}

    @property
    def constants(self) -> list[Storage]:
        """Storages of the model's constants."""
        return sorted((s for s in storages_of(self.segments) if s.role == "constant"), key=lambda storage: storage.nbytes)

    def submit(
        self, runtime: TaskRuntime, handles: Mapping[Storage, Handle], gradients: Mapping[TileKey, Handle], key: Handle, *, minibatch: int = 0
    ) -> tuple[dict[Storage, Handle], list[Callable[[], None]]]:
        """Submit the tasks for one minibatch.

        Args:
            handles: handles of parameters, buffers, constants and this minibatch's inputs.
            gradients: handle of each gradient.
            key: (2,) uint64, seed and number of the step.
            minibatch: number of the minibatch within the step. The first one writes gradients, the others add to them.

        Returns:
            The handles of output storages that tasks write, which are freed at their last use unless the caller keeps them; and functions that submit
            the tasks that only add rows to gradients, to be called after all minibatches. If they were submitted in order, the next minibatch, whose
            product adds to the same gradient much earlier than its rows do, would wait for the end of this one.
        """
        produced: dict[Storage, Handle] = {}
        outputs = _storages_in(self.captured.outputs)
        contribution: Contribution = "write" if minibatch == 0 else "add"
        output_handles: dict[Storage, Handle] = {}
        late: list[Callable[[], None]] = []
        contributes: Mode = W if contribution == "write" else RW
        borrowed = {storage: gradients[tile] for storage, tile in self._borrowed[contribution].items()}
        path = ""  # of the module whose parameters were used last
        for task in self._of(contribution):
            segment = task.segment
            for storage in segment.makes:
                produced[storage] = borrowed.get(storage) or _handle(runtime, storage.nbytes, f"{task.codelet.name} result", "activations")
                if storage in outputs:
                    output_handles[storage] = produced[storage]
            accesses: list[Access] = [(handles.get(s) or produced[s], R) for s in segment.reads]
            accesses += [(handles.get(s) or produced[s], RW) for s in segment.updates]
            accesses += [(produced[s], contributes if s in borrowed else W) for s in segment.makes]
            accesses += [(borrowed[s], contributes) for s in task.work.borrowed]
            accesses += [(gradients[tile], contributes) for tile in task.work.targets]
            constants: dict[str, Any] = {}
            if any(map(draws, segment.calls)):
                accesses.append((key, R))
                constants["minibatch"] = minibatch
            if task.scratch_nbytes:
                accesses.append((_handle(runtime, task.scratch_nbytes, "scratch", "scratch"), SCRATCH))
            path = segment.module or path
            with labelled(phase=segment.phase, path=path):
                submit = partial(runtime.submit, task.codelet, accesses, constants)
                if segment in self._late and all(storage in borrowed for storage in segment.updates):
                    late.append(kept_here(submit))
                else:
                    submit()
        next_minibatch()
        return output_handles, late

    def _of(self, contribution: Contribution) -> list[_Task]:
        if contribution not in self._tasks:
            self._tasks[contribution] = [self._task(segment, contribution) for segment in self.segments]
        return self._tasks[contribution]

    def _task(self, segment: Segment, contribution: Contribution) -> _Task:
        bound = self._borrowed[contribution]
        borrowed = [storage for storage in segment.inner if storage in bound]
        offsets, nbytes = segment.inner, segment.scratch_nbytes
        if borrowed:
            offsets, placed = scratch_layout({s: at for s, at in segment.lives.items() if s not in bound}, segment.ends)
            nbytes = placed + segment.beside_nbytes
        targets = {tile: self.captured.gradients[tile] for tile in segment.gradients if tile not in bound.values()}
        calls = segment.calls
        if contribution == "add":
            calls = [adding_to(call) or call if not bound.keys().isdisjoint(call.made) else call for call in calls]
        work = _Work(replace(segment, calls=calls), offsets, nbytes > 0, borrowed, targets, contribution)
        cuda = None
        if self._on_gpus and all(map(has_cuda_kernel, calls)):
            uniforms, nbytes = _uniforms_layout(calls, nbytes)
            cuda = _cuda_kernel(work, uniforms)
        flops, moved = segment.flops, float(sum(s.nbytes for s in (*segment.reads, *segment.updates, *segment.makes)))
        codelet = Codelet(segment.name, cpu=_cpu_kernel(work), cuda=cuda, cost=lambda views, constants: Cost(flops, moved), again=segment.share_again)
        return _Task(segment, work, codelet, nbytes)

    @cached_property
    def _late(self) -> set[Segment]:
        """Segments that only add rows to storages that later segments of other kinds do not use."""
        late: set[Segment] = set()
        used: set[Storage] = set()
        for segment in reversed(self.segments):
            if all(call.func is ops.add_rows_gradient.default for call in segment.calls) and used.isdisjoint(segment.updates):
                late.add(segment)
            else:
                used |= {*segment.reads, *segment.updates, *segment.makes}
        return late

    @cached_property
    def _borrowed(self) -> Mapping[Contribution, Mapping[Storage, TileKey]]:
        """Storages of gradients that can be the memory of the gradients' handles from the start, for each contribution.

        The first minibatch may compute a gradient there in any way; the others may only add to it.
        """
        users: dict[Storage, list[Call]] = {ref.storage: [] for ref in self.captured.gradients.values()}
        for call in self.captured.calls:
            for storage in (call.reads | call.writes) & users.keys():
                users[storage].append(call)
        counts = Counter(ref.storage for ref in self.captured.gradients.values())
        outputs = _storages_in(self.captured.outputs)
        writing = {
            ref.storage: tile
            for tile, ref in self.captured.gradients.items()
            if ref.is_whole and counts[ref.storage] == 1 and ref.storage not in outputs and numpy_dtype(ref.dtype, tile[0]) == self._dtypes[tile[0]]
        }
        adding = {
            storage: tile
            for storage, tile in writing.items()
            if all(adding_to(call) is not None if storage in call.made else only_adds(call, storage) for call in users[storage])
        }
        return {"write": writing, "add": adding}


def _storages_in(outputs: Any) -> set[Storage]:
    return {leaf.storage for leaf in tree_leaves(outputs) if isinstance(leaf, Ref)}


def _handle(runtime: TaskRuntime, nbytes: int, name: str, data_class: Literal["activations", "scratch"]) -> Handle:
    return runtime.handle(nbytes, TileView((nbytes,), BYTES), name=name, data_class=data_class)


def _uniforms_layout(calls: Sequence[Call], nbytes: int) -> tuple[dict[Call, tuple[int, int]], int]:
    """Return (offset, count) of the uniform numbers of each random call in scratch memory, after its first `nbytes` bytes; and the total size."""
    layout = {}
    for call in filter(draws, calls):
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        layout[call] = nbytes, num_uniforms(call)
        nbytes += layout[call][1] * FLOAT.itemsize
    return layout, nbytes


@dataclass(frozen=True, slots=True)
class _Work:
    """Description of a task's computation.

    Attributes:
        segment: calls of the task; those that would overwrite the results of earlier minibatches add to them.
        offsets: inner storage -> offset in scratch memory.
        has_scratch: whether the CPU's kernel has scratch memory.
        borrowed: storages that only this task uses, and that share memory with gradients.
        targets: gradients that are written by copying, or adding, values computed elsewhere.
        contribution: contribution to the gradients.
    """

    segment: Segment
    offsets: Mapping[Storage, int]
    has_scratch: bool
    borrowed: Sequence[Storage]
    targets: Mapping[TileKey, Ref]
    contribution: Contribution

    @property
    def num_before_key(self) -> int:
        """Number of views before those of the key and of scratch memory."""
        segment = self.segment
        return len(segment.reads) + len(segment.updates) + len(segment.makes) + len(self.borrowed) + len(self.targets)


_Compute = Callable[[Sequence[Any], bool, Callable[[Call], Mapping[str, Any]], torch.device], None]
"""Function that computes a task: (views, whether the last one is scratch memory, source of random numbers for a call, device)."""


def _compute(work: _Work, *, on_gpu: bool) -> tuple[Program, _Compute]:
    """Return the program of a task, and the function that runs it on views (reads, updates, makes, borrowed, targets, key if it draws, scratch)."""
    segment = work.segment
    by_torch = {storage for call in segment.calls if torch_nbytes(call) for storage in call.made}  # in memory that PyTorch allocates
    ends = {storage: segment.ends[storage] for storage in by_torch if storage in work.offsets}
    program = Program(segment.calls, range(segment.first, segment.first + len(segment.calls)), ends, on_gpu=on_gpu)
    outside = (*segment.reads, *segment.updates, *segment.makes, *work.borrowed)
    inner = [(storage, offset) for storage, offset in work.offsets.items() if storage not in by_torch]
    refs, num_outside = tuple(work.targets.values()), len(outside)

    def compute(views: Sequence[Any], has_scratch: bool, random: Callable[[Call], Mapping[str, Any]], where: torch.device) -> None:
        memory = {storage: as_bytes(view, where)[: storage.nbytes] for storage, view in zip(outside, views, strict=False)}
        if has_scratch:
            scratch = as_bytes(views[-1], where)
            memory.update({storage: scratch[offset : offset + storage.nbytes] for storage, offset in inner})
        program.run(memory, random, where)
        for ref, view in zip(refs, views[num_outside:], strict=False):
            value, target = tensor_of(memory[ref.storage], ref), as_tensor(view, ref.shape, where)
            if work.contribution == "write":
                target.copy_(value)
            else:
                target.add_(value)

    return program, compute


def _cpu_kernel(work: _Work) -> Callable[..., None]:
    """Return the function of a task on CPU workers; each random call draws from its own generator."""
    program, compute = _compute(work, on_gpu=False)
    key_position, has_scratch = work.num_before_key, work.has_scratch

    def run(*views: Any, minibatch: int = 0) -> None:
        Threads.hold()
        seed = (int(views[key_position][0]), int(views[key_position][1]), minibatch) if program.draws else ()
        with torch.inference_mode():
            compute(views, has_scratch, lambda call: {"generator": generator_of((*seed, call.draw))}, HOST)

    return run


def _cuda_kernel(work: _Work, uniforms: Mapping[Call, tuple[int, int]]) -> Callable[..., None]:
    """Return the function of a task on GPUs, which first draws numbers for random calls to scratch memory.

    Args:
        uniforms: random call -> (offset in scratch memory, count of numbers).
    """
    _, compute = _compute(work, on_gpu=True)
    key_position, has_scratch = work.num_before_key, work.has_scratch or bool(uniforms)
    draw = kernel("keyed_uniform", "cuda")

    def run(*views: Any, minibatch: int = 0) -> None:
        drawn = {}
        for call, (offset, count) in uniforms.items():
            drawn[call] = views[-1][offset : offset + count * FLOAT.itemsize].at(FLOAT, count)
            draw(views[key_position], drawn[call], stream=stream_of(call, minibatch))
        compute_on_gpu(lambda where: compute(views, has_scratch, lambda call: {"uniforms": as_tensor(drawn[call], (-1,), where)}, where))

    return run
