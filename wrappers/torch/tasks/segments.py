"""Grouping of calls into tasks: consecutive calls form a segment, and storages that only they use are scratch memory of the task.

A segment has at most one call with matrix products or similar work, and the elementwise calls around it, as long as the task touches no more memory
than the largest single call of the pass. So grouping saves tasks and traffic, and never raises the smallest budget that a step needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from scheduler.machine import Phase

from .calls import Call, Capture, Ref, Storage, TileKey
from .chains import Chain
from .kernels import buffer_nbytes, does_nothing, torch_nbytes

ALIGNMENT: Final = 64
"""Alignment of offsets in scratch memory, in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The calls of one task.

    Attributes:
        first: number of the first call in the pass.
        calls: consecutive calls.
        reads: storages from outside that it only reads.
        updates: storages from outside that it changes.
        makes: storages that it allocates and that are used outside it.
        inner: storages that only it uses -> offset in its scratch memory.
        lives: inner storages -> number of the call that allocates each.
        ends: inner storages -> number of the last call that uses each.
        beside_nbytes: largest number of bytes that PyTorch allocates for one call: results, which are then copied, and the buffers of a chain.
        scratch_nbytes: bytes of scratch memory, including those that PyTorch allocates.
        gradients: gradients that are final after it.
        flops: floating-point operations.
    """

    first: int
    calls: Sequence[Call]
    reads: Sequence[Storage]
    updates: Sequence[Storage]
    makes: Sequence[Storage]
    inner: Mapping[Storage, int]
    lives: Mapping[Storage, int]
    ends: Mapping[Storage, int]
    beside_nbytes: int
    scratch_nbytes: int
    gradients: Sequence[TileKey]
    flops: float

    @property
    def share_again(self) -> float:
        """Fraction of the bytes that it writes that a backward pass recomputes."""
        written = [storage for call in self.calls for storage in call.writes]
        return sum(storage.nbytes for storage in written if storage.is_again) / max(1, sum(storage.nbytes for storage in written))

    @property
    def phase(self) -> Phase:
        """Phase of the pass that computes most of it."""
        written = [storage for call in self.calls for storage in call.writes]
        return "backward" if 2 * sum(storage.is_backward for storage in written) > len(written) else "forward"

    @property
    def module(self) -> str:
        """Path of the module of the first of its parameters, by name; "" if it reads none."""
        names = (storage.name for call in self.calls for storage in call.reads if storage.role == "parameter")
        return min(names, default="").rpartition(".")[0]

    @property
    def name(self) -> str:
        """Name of the longest operation, for traces: the one with most flops, or else with the largest result."""
        work = [(flops_of(call), sum(s.nbytes for s in call.writes), -at) for at, call in enumerate(self.calls)]
        func = self.calls[-max(work)[2]].func
        name: str = func.name if isinstance(func, Chain) else func.overloadpacket._qualified_op_name.partition("::")[2].strip("_")
        return name if len(self.calls) == 1 else f"{name} and {len(self.calls) - 1}"


def segments_of(capture: Capture, kind_of: Callable[[Call], object] | None = None) -> list[Segment]:
    """Group the calls of a pass.

    A gradient is final after the last call that writes its storage.

    Args:
        kind_of: function whose value is the same for all calls of a segment; None for no such restriction.
    """
    calls = capture.calls
    last_use: dict[Storage, int] = {}
    last_write: dict[Storage, int] = {}
    for number, call in enumerate(calls):
        for storage in call.reads | call.writes:
            last_use[storage] = number
        for storage in call.writes:
            last_write[storage] = number
    outputs = {ref.storage for ref in tree_leaves(capture.outputs) if isinstance(ref, Ref)}
    finals: dict[int, list[TileKey]] = {}
    for tile, ref in capture.gradients.items():
        finals.setdefault(last_write[ref.storage], []).append(tile)
    limit = max((_nbytes(call.reads | call.writes) for call in calls), default=0)
    segments: list[Segment] = []
    start, heavy, touched, total = 0, False, set[Storage](), 0
    for number, call in enumerate(calls):
        is_heavy, used = flops_of(call) > 0, call.reads | call.writes
        differs = kind_of is not None and number > start and kind_of(call) != kind_of(calls[number - 1])
        if number > start and (differs or (heavy and is_heavy) or total + _nbytes(used - touched) > limit):
            segments.append(_segment(capture, start, number, last_use, outputs, finals))
            start, heavy, touched, total = number, False, set(), 0
        heavy = heavy or is_heavy
        total += _nbytes(used - touched)
        touched |= used
    if start < len(calls):
        segments.append(_segment(capture, start, len(calls), last_use, outputs, finals))
    return segments


def _segment(
    capture: Capture, start: int, end: int, last_use: Mapping[Storage, int], kept: set[Storage], finals: Mapping[int, Sequence[TileKey]]
) -> Segment:
    calls = capture.calls[start:end]
    produced: dict[Storage, int] = {}
    used: dict[Storage, None] = {}
    written: set[Storage] = set()
    for number, call in enumerate(calls, start):
        for storage in sorted(call.made, key=_size_of):
            produced.setdefault(storage, number)
        used.update(dict.fromkeys(sorted((call.reads | call.writes) - produced.keys(), key=_size_of)))
        written |= call.writes
    gradients = [tile for number in range(start, end) for tile in finals.get(number, ())]
    inner = {storage: first for storage, first in produced.items() if last_use[storage] < end and storage not in kept}
    last = {storage: max(last_use[storage], *_final_at(capture, storage, finals, start, end)) for storage in inner}
    offsets, nbytes = scratch_layout(inner, last)
    beside = max((sum(s.nbytes for s in call.made if s not in inner) if torch_nbytes(call) else buffer_nbytes(call) for call in calls), default=0)
    return Segment(
        start,
        calls,
        [storage for storage in used if storage not in written],
        [storage for storage in used if storage in written],
        [storage for storage in produced if storage not in inner],
        offsets,
        inner,
        last,
        beside,
        nbytes + beside,
        gradients,
        sum(map(flops_of, calls)),
    )


def _size_of(storage: Storage) -> int:
    return storage.nbytes


def _nbytes(storages: Iterable[Storage]) -> int:
    return sum(storage.nbytes for storage in storages)


def _final_at(capture: Capture, storage: Storage, finals: Mapping[int, Sequence[TileKey]], start: int, end: int) -> list[int]:
    """Return [`end`] if a gradient in the storage is copied or added at the end of the segment, else [`start`]."""
    tiles = (tile for number in range(start, end) for tile in finals.get(number, ()))
    return [end] if any(capture.gradients[tile].storage is storage for tile in tiles) else [start]


def scratch_layout(first: Mapping[Storage, int], last: Mapping[Storage, int]) -> tuple[dict[Storage, int], int]:
    """Return offsets in scratch memory for storages that live from one call to another, first fit by size; and the total bytes."""
    placed: list[tuple[int, int, Storage]] = []
    for storage in sorted(first, key=lambda each: (-each.nbytes, first[each])):
        offset = 0
        for low, high, other in sorted(placed, key=lambda each: each[:2]):
            if first[storage] <= last[other] and first[other] <= last[storage] and low < offset + storage.nbytes and offset < high:
                offset = high
        placed.append((offset, offset + -(-storage.nbytes // ALIGNMENT) * ALIGNMENT, storage))
    return {storage: low for low, _, storage in placed}, max((high for _, high, _ in placed), default=0)


def flops_of(call: Call) -> float:
    """Return the floating-point operations of a call according to PyTorch's own table; 0 for a call without products."""
    count = None if isinstance(call.func, Chain) else flop_registry.get(call.func.overloadpacket)
    if count is None or does_nothing(call):
        return 0.0
    args, kwargs = tree_map_only(Ref, _on_meta, (call.args, dict(call.kwargs)))
    results: Any = tuple(None if ref is None else _on_meta(ref) for ref in call.results)
    return float(count(*args, **kwargs, out_val=results[0] if len(results) == 1 else results))


def _on_meta(ref: Ref) -> torch.Tensor:
    return torch.empty_strided(ref.shape, ref.strides, dtype=ref.dtype, device="meta")


def storages_of(segments: Iterable[Segment]) -> set[Storage]:
    """Return all storages that lie outside scratch memory."""
    return {storage for each in segments for storage in (*each.reads, *each.updates, *each.makes)}
