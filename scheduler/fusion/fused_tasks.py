"""Fused tasks: several tasks of a recorded step that the scheduler runs as one task.

Data that is created and last used inside a fused task becomes its scratch memory (`ScratchLayout`). To the scheduler a fused task is a task
like any other. The cost: its inner data is allocated for its whole duration, and its members cannot be traced one by one. `task_fusion` and
`group_fusion` decide which tasks are fused.

On a GPU, the second run of a fused task on the same addresses captures its kernels as a CUDA graph; later runs launch the graph.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby
from operator import mul
from typing import Any, Final, NamedTuple

from ..core.codelet import Codelet, Cost, Many
from ..core.records import RW, SCRATCH, Condition, DataClass, HandleRecord, Mode, R, WorkerKind
from ..core.step_plan import RecordedTask, StepPlan
from ..drivers.cuda import captured
from ..drivers.gpu import NUM_STARTED
from ..storage.device import DeviceMemory

MOST_GRAPHS: Final = 16
"""Largest number of graphs of one fused task; beyond it the oldest graph is dropped. There is one graph for each set of addresses, hence two for each
GPU if addresses do not change."""
FEWEST_GRAPHS: Final = 4
"""Number of graphs that even the largest fused task may have."""
MOST_NODES: Final = 1 << 16
"""Largest number of tasks in all graphs of one fused task, because no budget counts the memory of graphs; `FEWEST_GRAPHS` takes precedence."""


class Member(NamedTuple):
    """One member of a fused task.

    Attributes:
        codelet: codelet of the member.
        arguments: positions of its data among the arguments and sections of the fused task.
        constants: its constants.
        flag: position, among the same, of the flags on which it depends, and the number of its flag; None for a member that always runs.
    """

    codelet: Codelet
    arguments: tuple[int, ...]
    constants: Mapping[str, Any]
    flag: tuple[int, int] | None = None


class PlannedLaunch(NamedTuple):
    """Tasks of a step that one call launches.

    Attributes:
        positions: their positions, in order.
        run: kernel for several tasks; None for a single task, which its codelet's kernel computes.
    """

    positions: Sequence[int]
    run: Many | None = None


class Launch(NamedTuple):
    """Members of a fused task that one call launches, and the kernel for several of them, as in `PlannedLaunch`."""

    members: Sequence[Member]
    run: Many | None


class HeldData(NamedTuple):
    """Data inside a larger piece of memory that is an argument of a fused task.

    Args:
        view: view of the data.
        argument: position of the argument that contains it.
        offset: bytes before the data in that argument.
    """

    view: Any
    argument: int
    offset: int


class ScratchLayout(NamedTuple):
    """Inner data in the scratch memory of a fused task.

    Attributes:
        positions: for each piece of data, the index of the scratch memory that contains it and its offset there in bytes.
        sizes: bytes of each scratch memory.
    """

    positions: list[tuple[int, int]]
    sizes: list[int]


Arrange = Callable[[Sequence[tuple[int, int, int]]], ScratchLayout]
"""Arranges inner data, given (size in bytes, first use, last use) of each piece, such that pieces with intersecting live ranges do not overlap."""

Make = Callable[[int, "ScratchView", DataClass], HandleRecord]
"""Creates the record of a handle that the step owns, from its size in bytes, its view and its data class."""


@dataclass(frozen=True, slots=True)
class HostScratch:
    """Start of inner data in host memory.

    Attributes:
        memory: memory of the node.
        offset: bytes before the data in that memory.
    """

    memory: Any
    offset: int


class ScratchView:
    """View of a piece of memory that holds the data of several handles; it is the address of its first byte."""

    def __call__(self, memory: Any, offset: int) -> DeviceMemory | HostScratch:
        """Return the address `offset` bytes after the beginning of a node's memory."""
        return DeviceMemory(memory.address + offset) if isinstance(memory, DeviceMemory) else HostScratch(memory, offset)


class FusedKernels:
    """Kernel of a fused task, which runs the kernels of its members.

    Workers of several GPUs may run it at the same time, for two replays of a step.

    Args:
        groups: members in order of execution. Their argument positions count the arguments of the fused task first, then its sections.
        sections: data inside arguments of the fused task.

    Attributes:
        has_conditions: whether a member depends on a flag.
    """

    def __init__(self, groups: Sequence[Launch], sections: Sequence[HeldData]) -> None:
        self._groups = groups
        self._sections = sections
        self.has_conditions = any(member.flag is not None for group in groups for member in group.members)
        self._members = [member for group in groups for member in group.members]
        self._runs = [(guard, list(members)) for guard, members in groupby(self._members, lambda member: member.flag and member.flag[0])]
        self._section_views: dict[int, tuple[Any, ...]] = {}  # by offset of the scratch in host memory
        self._graphs: dict[tuple[int, ...], Any] = {}  # by addresses, which are of one GPU: two threads never share an entry
        self._lock = threading.Lock()  # guards `_graphs`; never held during a call of a GPU
        self._most_graphs = min(MOST_GRAPHS, max(FEWEST_GRAPHS, MOST_NODES // len(self._members)))

    def codelet(self, name: str, kinds: tuple[WorkerKind, ...]) -> Codelet:
        """Return the codelet of the fused task."""
        if kinds == ("cuda",):
            return Codelet(name, cuda=self, cost=self.cost)
        return Codelet(name, cpu=self.on_cpu, cost=self.cost)  # type: ignore[arg-type]  # workers read the result (`TaskSpec.counts_skips`)

    def __call__(self, *views: Any) -> None:
        """Launch the kernels: one by one in the first run on these addresses, as a graph in all later ones."""
        key = tuple([view.address for view in views])
        oldest = None
        with self._lock:
            start = self._graphs.get(key, self)
            if start is self:  # the first run on these addresses
                if len(self._graphs) >= self._most_graphs:
                    oldest = self._graphs.pop(next(iter(self._graphs)))
                self._graphs[key] = None
        del oldest  # releasing a graph calls the driver, hence outside the lock
        if start is None:
            start = captured(lambda: self._run(views)) or False
            self._keep(key, start)
        if start and start is not self:
            try:
                start()
                return
            except RuntimeError:  # no kernel has begun: launching them one by one works, or raises the cause
                self._keep(key, False)
        self._run(views)

    def _keep(self, key: tuple[int, ...], start: Any) -> None:
        """Store a graph, or False if there is none, unless another worker has dropped the entry of these addresses as the oldest."""
        with self._lock:
            if key in self._graphs:
                self._graphs[key] = start

    def on_cpu(self, *views: Any) -> int:
        """Run the kernels one by one on a CPU, except those of members whose flag is 0; return the number of these. All sections are in the last
        argument."""
        num_skipped = 0
        if self._sections:
            views = (*views, *self._views_in(views[-1]))
        for guard, members in self._runs:
            if guard is not None:  # conditional members only read their flags, so one look suffices for all in a row
                flags = bytes(views[guard])
                num_skipped += len(members)
                members = [member for member in members if flags[member.flag[1]]]  # type: ignore[index]
                num_skipped -= len(members)
            for codelet, arguments, constants, _ in members:
                codelet.cpu(*[views[position] for position in arguments], **constants)  # type: ignore[misc]
        return num_skipped

    def _views_in(self, scratch: HostScratch) -> tuple[Any, ...]:
        """Return views of the sections in a piece of scratch; they are cached, because replays reuse few offsets."""
        views = self._section_views.get(scratch.offset)
        if views is None:
            if len(self._section_views) >= MOST_GRAPHS:
                self._section_views.clear()
            views = tuple(view(scratch.memory, scratch.offset + offset) for view, _, offset in self._sections)
            self._section_views[scratch.offset] = views
        return views

    def cost(self, views: Sequence[Any], constants: Mapping[str, Any]) -> Cost:
        """Return the floating-point operations and bytes of all members together."""
        views = [*views, *(section.view for section in self._sections)]
        flops = nbytes = 0.0
        for codelet, arguments, own, _ in self._members:
            if codelet.cost is not None:
                cost = codelet.cost([views[position] for position in arguments], own)
                flops, nbytes = flops + cost.flops, nbytes + cost.nbytes
        return Cost(flops, nbytes)

    def _run(self, views: Sequence[Any]) -> None:
        """Launch the kernels group by group; an error names the member that raised it."""
        views = [*views, *(view(views[argument], offset) for view, argument, offset in self._sections)]
        number = 0
        for members, run in self._groups:
            codelet, arguments, constants, _ = members[0]
            number += len(members)
            assert codelet.cuda is not None
            try:
                if run is None:
                    codelet.cuda(*[views[position] for position in arguments], **constants)
                else:
                    run([([views[position] for position in member.arguments], member.constants) for member in members])
            except BaseException as error:
                lost = ""
                if number > len(members):
                    setattr(error, NUM_STARTED, None)  # members before it may have launched kernels that no GPU has counted
                    lost = f", {number - len(members)} of which had been started: what any of them writes is lost"
                error.add_note(f"in {codelet.name!r}, task {number} of {len(self._members)} that are fused{lost}")
                raise


def join(
    plan: StepPlan,
    starts: Sequence[PlannedLaunch],
    inside: Set[HandleRecord],
    make: Make,
    owned: dict[HandleRecord, bool],
    bundles: Mapping[HandleRecord, tuple[HandleRecord, int]] | None = None,
    clones: Set[int] = frozenset(),
    arrange: Arrange | None = None,
) -> RecordedTask:
    """Fuse tasks of a step; return the fused task.

    Args:
        plan: the step.
        starts: the tasks in order of execution.
        inside: handles that only these tasks use; their data is placed in scratch memory.
        make: creates the record of that scratch memory.
        owned: `StepPlan.owned` of the new step, to which the scratch memory is added.
        bundles: for each handle whose data is part of another one's, that other handle and the offset in it in bytes.
        clones: positions of the tasks that only recompute results of another fused task.
        arrange: arranges the inner data in scratch memory; `packed` if None.
    """
    numbers = {position: number for number, start in enumerate(starts) for position in start.positions}
    joined = [plan.tasks[position] for position in sorted(numbers)]
    modes: dict[HandleRecord, Mode] = {}
    inner: dict[HandleRecord, list[int]] = {}  # handle -> numbers of the starts that use it
    held: dict[HandleRecord, tuple[HandleRecord, int]] = {}
    for position in sorted(numbers):
        for handle, mode in plan.tasks[position].accesses:
            if bundles and handle in bundles:
                held[handle] = bundle, _ = bundles[handle]
                modes[bundle] = merged(modes.get(bundle), mode)
            elif handle in inside:
                inner.setdefault(handle, []).append(numbers[position])
            else:
                modes[handle] = merged(modes.get(handle), mode)
    if inner:
        scratch, offsets = _in_scratch(inner, arrange or packed, make)
        owned.update(dict.fromkeys(scratch, False))
        modes.update(dict.fromkeys(scratch, SCRATCH))
        held.update(offsets)
    arguments = {handle: number for number, handle in enumerate((*modes, *held))}
    sections = [HeldData(handle.spec.view, arguments[holder], offset) for handle, (holder, offset) in held.items()]
    groups = [Launch([_member(plan.tasks[position], arguments) for position in positions], run) for positions, run in starts]
    whole = FusedKernels(groups, sections)
    name, kinds = f"{joined[0].name} and {len(joined) - 1} more", joined[0].kinds
    accesses, priority, flags = tuple(modes.items()), joined[0].priority, _written_flags(joined, modes, arguments)
    task = RecordedTask(whole.codelet(name, kinds), name, kinds, accesses, {}, priority, condition=flags, counts_skips=whole.has_conditions)
    task.num_clones, task.clone_share = _recomputation(plan, sorted(numbers), clones)
    return task


def _written_flags(members: Sequence[RecordedTask], modes: Collection[HandleRecord], arguments: Mapping[HandleRecord, int]) -> Condition | None:
    """Return the condition of a fused task that writes flags for tasks outside; `task_groups` allows one member that does."""
    written = [task.accesses[task.condition.flags][0] for task in members if task.condition is not None and task.condition.flags >= 0]
    return next((Condition(flags=arguments[flags]) for flags in written if flags in modes), None)


def _in_scratch(
    inner: Mapping[HandleRecord, Sequence[int]], arrange: Arrange, make: Make
) -> tuple[list[HandleRecord], dict[HandleRecord, tuple[HandleRecord, int]]]:
    """Return new scratch memories for inner data, and for each handle of `inner` the one that contains it with the offset in bytes.

    Args:
        inner: for each handle, numbers of the launches that use it.
    """
    positions, sizes = arrange([(handle.spec.size, min(uses), max(uses)) for handle, uses in inner.items()])
    scratch = [make(nbytes, ScratchView(), "scratch") for nbytes in sizes]
    return scratch, {handle: (scratch[number], offset) for handle, (number, offset) in zip(inner, positions, strict=True)}


def _recomputation(plan: StepPlan, positions: Sequence[int], clones: Set[int]) -> tuple[int, float]:
    """Return the number of recomputing tasks among those at `positions`, and the fraction of their total time that recomputation takes.

    Args:
        clones: positions of the tasks that only recompute.
    """
    tasks = [plan.tasks[position] for position in positions]
    counts = [1 if position in clones else task.num_clones for position, task in zip(positions, tasks, strict=True)]
    shares = [1.0 if position in clones else task.clone_share for position, task in zip(positions, tasks, strict=True)]
    nbytes = [_nbytes(task) for task in tasks]
    return sum(counts), sum(map(mul, shares, nbytes)) / max(1, sum(nbytes))


def _nbytes(task: RecordedTask) -> int:
    """Return the bytes that a task reads and writes: its weight in the estimate of its share of a fused task's time."""
    return sum(handle.spec.size for handle, mode in task.accesses if mode != SCRATCH)


def merged(before: Mode | None, mode: Mode) -> Mode:
    """Return the access mode of a fused task for data that a member accesses in `mode`, after earlier members in `before` (None without any)."""
    if before is None:
        return mode
    return RW if before == R and mode != R else before


def _member(task: RecordedTask, arguments: Mapping[HandleRecord, int]) -> Member:
    """Return a task as a member of a fused task, given the position of each handle among the arguments and sections."""
    assert isinstance(task.codelet, Codelet)
    positions, condition = tuple(arguments[handle] for handle, _ in task.accesses), task.condition
    flag = None if condition is None or condition.guard < 0 else (positions[condition.guard], condition.number)
    return Member(task.codelet, positions, task.constants, flag)


def packed(spans: Sequence[tuple[int, int, int]]) -> ScratchLayout:
    """Arrange inner data in one scratch memory (`Arrange`): first fit, in the order of first use. It needs the fewest bytes."""
    positions = [(0, 0)] * len(spans)
    alive: list[tuple[int, int, int]] = []  # (offset, end, last use), sorted
    most = 0
    for number in sorted(range(len(spans)), key=lambda number: spans[number][1]):
        size, begin, last = spans[number]
        alive = [piece for piece in alive if piece[2] >= begin]
        offset = 0
        for start, stop, _ in alive:
            if start - offset >= size:
                break
            offset = stop
        insort(alive, (offset, offset + size, last))
        positions[number] = (0, offset)
        most = max(most, offset + size)
    return ScratchLayout(positions, [most])


def by_size(spans: Sequence[tuple[int, int, int]]) -> ScratchLayout:
    """Arrange inner data in several scratch memories (`Arrange`), each for data of one size. They fit the holes that such data has left elsewhere."""
    positions = [(0, 0)] * len(spans)
    sizes: list[int] = []
    idle: dict[int, list[int]] = {}  # scratch memories without live data, by size
    busy: list[tuple[int, int]] = []  # heap of (last use, scratch memory)
    for number in sorted(range(len(spans)), key=lambda number: spans[number][1]):
        size, begin, last = spans[number]
        while busy and busy[0][0] < begin:
            _, ended = heappop(busy)
            idle.setdefault(sizes[ended], []).append(ended)
        if idle.get(size):
            scratch = idle[size].pop()
        else:
            scratch = len(sizes)
            sizes.append(size)
        heappush(busy, (last, scratch))
        positions[number] = (scratch, 0)
    return ScratchLayout(positions, sizes)
