"""Fused tasks: kernels of several tasks of a step as those of one, and the memory of what lives inside it.

Data that lives and dies inside a fused task becomes one piece of scratch memory; edges, budgets and lifetimes hold for fused tasks as for any others.
The price: inner data is allocated for the whole duration of a fused task, and nobody can look between its tasks. Which tasks are fused is decided in
`task_fusion` and `group_fusion`.

On a GPU the kernels of a fused task are recorded as a CUDA graph when it runs the second time on the same addresses; later runs start the graph.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import mul
from typing import Any, Final, NamedTuple

from ..core.codelet import Codelet, Cost
from ..core.records import RW, SCRATCH, DataClass, HandleRecord, Mode, R
from ..core.step_plan import RecordedTask, StepPlan
from ..drivers.cuda import captured
from ..drivers.gpu import NUM_STARTED
from ..storage.device import DeviceMemory

MOST_GRAPHS: Final = 16
"""Most graphs of one fused task: one for each set of addresses, two sets for each GPU where addresses stay; the oldest graph is dropped."""
FEWEST_GRAPHS: Final = 4
MOST_NODES: Final = 1 << 16
"""Of a large fused task as many graphs as have so many tasks in all, but at least `FEWEST_GRAPHS`: they take memory that no budget counts."""


class Member(NamedTuple):
    """One of the fused tasks: its codelet, and which of the arguments are its own."""

    codelet: Codelet
    arguments: tuple[int, ...]
    constants: Mapping[str, Any]


class HeldData(NamedTuple):
    """Data inside a larger piece of memory that a fused task has among its arguments.

    Args:
        view: of the data.
        argument: position of the memory.
        offset: where in it the data lies, bytes.
    """

    view: Any
    argument: int
    offset: int


Make = Callable[[int, "ScratchView", DataClass], HandleRecord]
"""Creates the record of data that lives within a step, from its bytes, its view and its class."""


@dataclass(frozen=True, slots=True)
class HostScratch:
    """Where inner data begins in host memory."""

    memory: Any
    offset: int


class ScratchView:
    """The view of memory that holds the data of several handles: the place where it begins."""

    def __call__(self, memory: Any, offset: int) -> DeviceMemory | HostScratch:
        """The memory at `offset` bytes from the beginning of a node's memory."""
        return DeviceMemory(memory.address + offset) if isinstance(memory, DeviceMemory) else HostScratch(memory, offset)


class FusedKernels:
    """The kernels of fused tasks, as one kernel. Workers of several GPUs may run it at once, for two replays of a step.

    Args:
        groups: the fused tasks, those that start together in one group, each with the positions of its arguments: first those of the fused task,
            behind them the sections.
        sections: data that lies inside arguments of the fused task.
    """

    def __init__(self, groups: Sequence[Sequence[Member]], sections: Sequence[HeldData]) -> None:
        self._groups = groups
        self._sections = sections
        self._calls = [(each.codelet.cpu, each.arguments, each.constants) for group in groups for each in group]
        self._inner: dict[int, tuple[Any, ...]] = {}  # views at places of host memory
        self._graphs: dict[tuple[int, ...], Any] = {}  # by addresses, which are of one GPU: two threads never share an entry
        self._lock = threading.Lock()  # of the dict; never held while a GPU is called
        self._most_graphs = min(MOST_GRAPHS, max(FEWEST_GRAPHS, MOST_NODES // sum(map(len, groups))))

    def __call__(self, *views: Any) -> None:
        """Start the kernels: one by one the first time on these addresses, as a graph from the second time on."""
        key = tuple([view.address for view in views])
        oldest = None
        with self._lock:
            start = self._graphs.get(key, self)
            if start is self:  # the first run on these addresses
                if len(self._graphs) >= self._most_graphs:
                    oldest = self._graphs.pop(next(iter(self._graphs)))
                self._graphs[key] = None
        del oldest  # a graph is given back to the driver outside of the lock
        if start is None:
            start = captured(lambda: self._run(views)) or False
            self._keep(key, start)
        if start and start is not self:
            try:
                start()
                return
            except RuntimeError:  # no kernel has begun: starting them one by one works, or raises the cause
                self._keep(key, False)
        self._run(views)

    def _keep(self, key: tuple[int, ...], start: Any) -> None:
        """Remember a graph, or that there is none, unless another worker has made these addresses the oldest and dropped them."""
        with self._lock:
            if key in self._graphs:
                self._graphs[key] = start

    def on_cpu(self, *views: Any) -> None:
        """Run the kernels one by one on a CPU, where all sections lie in the last argument."""
        if self._sections:
            views = (*views, *self._views_at(views[-1]))
        for kernel, arguments, constants in self._calls:
            kernel(*[views[position] for position in arguments], **constants)  # type: ignore[misc]

    def _views_at(self, scratch: HostScratch) -> tuple[Any, ...]:
        """Views of the sections at a place; replays come back to few places of the one memory."""
        found = self._inner.get(scratch.offset)
        if found is None:
            if len(self._inner) >= MOST_GRAPHS:
                self._inner.clear()
            found = self._inner[scratch.offset] = tuple(view(scratch.memory, scratch.offset + offset) for view, _, offset in self._sections)
        return found

    def cost(self, views: Sequence[Any], constants: Mapping[str, Any]) -> Cost:
        """Floating-point operations and bytes of all fused tasks together."""
        views = [*views, *(section.view for section in self._sections)]
        flops = nbytes = 0.0
        for codelet, arguments, own in (member for group in self._groups for member in group):
            if codelet.cost is not None:
                found = codelet.cost([views[position] for position in arguments], own)
                flops, nbytes = flops + found.flops, nbytes + found.nbytes
        return Cost(flops, nbytes)

    def _run(self, views: Sequence[Any]) -> None:
        views = [*views, *(view(views[argument], offset) for view, argument, offset in self._sections)]
        number = 0
        for group in self._groups:
            codelet, arguments, constants = group[0]
            number += len(group)
            assert codelet.cuda is not None
            try:
                if len(group) == 1:
                    codelet.cuda(*[views[position] for position in arguments], **constants)
                else:
                    assert codelet.cuda_many is not None
                    codelet.cuda_many([([views[position] for position in member.arguments], member.constants) for member in group])
            except BaseException as error:
                lost = ""
                if number > len(group):
                    setattr(error, NUM_STARTED, None)  # the others may have started what no GPU has counted
                    lost = f", {number - len(group)} of which had been started: what any of them writes is lost"
                error.add_note(f"in {codelet.name!r}, task {number} of {sum(map(len, self._groups))} that are fused{lost}")
                raise


def join(
    plan: StepPlan,
    starts: Sequence[Sequence[int]],
    inside: Set[HandleRecord],
    make: Make,
    owned: dict[HandleRecord, bool],
    bundles: Mapping[HandleRecord, tuple[HandleRecord, int]] | None = None,
    again: Set[int] = frozenset(),
) -> RecordedTask:
    """Some tasks of a step as one fused task.

    Args:
        starts: positions of the tasks that start together, in the order of their starts.
        inside: data that only these tasks need; it gets scratch memory.
        make: creates the record of that.
        owned: of the new step; the scratch memory is added.
        bundles: data that lies in that of another handle, and at which offset; bytes.
        again: positions of the tasks that another fused task runs, too.
    """
    numbers = {position: number for number, start in enumerate(starts) for position in start}
    joined = [plan.tasks[position] for position in sorted(numbers)]
    modes: dict[HandleRecord, Mode] = {}
    inner: dict[HandleRecord, list[int]] = {}  # in which starts it is used
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
        offsets, nbytes = packed([(handle.size, min(uses), max(uses)) for handle, uses in inner.items()])
        scratch = make(nbytes, ScratchView(), "scratch")
        owned[scratch] = False
        modes[scratch] = SCRATCH
        held.update((handle, (scratch, offset)) for handle, offset in zip(inner, offsets, strict=True))
    arguments = {handle: number for number, handle in enumerate((*modes, *held))}
    sections = [HeldData(handle.view, arguments[holder], offset) for handle, (holder, offset) in held.items()]
    whole = FusedKernels([[_member(plan.tasks[position], arguments) for position in start] for start in starts], sections)
    name, kinds = f"{joined[0].name} and {len(joined) - 1} more", joined[0].kinds
    codelet = Codelet(name, cuda=whole, cost=whole.cost) if kinds == ("cuda",) else Codelet(name, cpu=whole.on_cpu, cost=whole.cost)
    clones, share = _made_again(plan, sorted(numbers), again)
    return RecordedTask(codelet, name, kinds, tuple(modes.items()), {}, joined[0].priority, num_clones=clones, clone_share=share)


def _made_again(plan: StepPlan, positions: Sequence[int], again: Set[int]) -> tuple[int, float]:
    """How many of some tasks that are fused make again what others have made, and what share of their time that takes.

    Args:
        again: as of `join`: they do nothing else.
    """
    tasks = [plan.tasks[at] for at in positions]
    counts = [1 if at in again else task.num_clones for at, task in zip(positions, tasks, strict=True)]
    shares = [1.0 if at in again else task.clone_share for at, task in zip(positions, tasks, strict=True)]
    nbytes = [_nbytes(task) for task in tasks]
    return sum(counts), sum(map(mul, shares, nbytes)) / max(1, sum(nbytes))


def _nbytes(task: RecordedTask) -> int:
    """Bytes that a task reads and writes, by which the time of fused tasks is shared among them."""
    return sum(handle.size for handle, mode in task.accesses if mode != SCRATCH)


def merged(before: Mode | None, mode: Mode) -> Mode:
    """How a fused task uses data that an earlier one of its tasks, if any, uses as `before`."""
    if before is None:
        return mode
    return RW if before == R and mode != R else before


def _member(task: RecordedTask, arguments: Mapping[HandleRecord, int]) -> Member:
    assert isinstance(task.codelet, Codelet)
    return Member(task.codelet, tuple(arguments[handle] for handle, _ in task.accesses), task.constants)


def packed(spans: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Offsets for pieces of (size, first use, last use) such that no two live pieces overlap; and the bytes of all. First fit, by first use."""
    offsets = [0] * len(spans)
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
        offsets[number] = offset
        most = max(most, offset + size)
    return offsets, most
