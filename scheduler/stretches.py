"""Stretches: tasks of a recorded step that follow each other on a GPU and move no data, run as one task whose kernels start with one call.

The machine spends as long on a task as a GPU computes on a small one, and starting a kernel from Python is not free either. Where a step fits the
memory of its devices nothing has to be decided between its tasks: neighbours of the planned order are joined, data that lives and dies inside a
stretch becomes one piece of scratch memory, and every edge, budget and lifetime of the joined tasks holds as for any others. When a stretch runs the
second time on the same addresses its kernels are recorded as a graph; from then on the graph is started. What it costs: traces show stretches, and
the inner data of one is there from its beginning to its end.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from .codelet import Codelet, Cost
from .core.records import RW, SCRATCH, HandleRecord, Mode, R
from .core.steps import RecordedTask, StepPlan
from .drivers.cuda import captured
from .ordering import PlannedOrder
from .storage.device import DeviceMemory

MOST_TASKS: Final = 32
"""In a stretch."""
MOST_GRAPHS: Final = 16
"""Of one stretch: sets of addresses it has run on, two for each GPU where addresses stay; the oldest is given up."""


class _Member(NamedTuple):
    codelet: Codelet
    places: tuple[int, ...]
    constants: Mapping[str, Any]


class Block:
    """The view of the inner data of a stretch: where it begins."""

    def __call__(self, memory: DeviceMemory, offset: int) -> DeviceMemory:
        """At `offset` bytes of a device's memory."""
        return DeviceMemory(memory.address + offset)


class Stretch:
    """The kernels of a stretch, as one.

    Args:
        members: each with the places of its arguments, among those of the whole and behind them inner data.
        inner: view of each piece of inner data, and where it lies in the last argument.
    """

    def __init__(self, members: Sequence[_Member], inner: Sequence[tuple[Any, int]]) -> None:
        self._members = members
        self._inner = inner
        self._graphs: dict[tuple[int, ...], Any] = {}

    def __call__(self, *views: Any) -> None:
        """Start them: one by one the first time on these addresses, as a graph from the second time on."""
        key = tuple([view.address for view in views])
        start = self._graphs.get(key, self)
        if start is self:  # never seen
            if len(self._graphs) >= MOST_GRAPHS:
                self._graphs = dict(list(self._graphs.items())[1:])
            self._graphs[key] = None
            self._run(views)
            return
        if start is None:
            start = self._graphs[key] = captured(lambda: self._run(views)) or False
        if start:
            try:
                start()
                return
            except RuntimeError:  # nothing has begun: starting its kernels one by one works, or says what is wrong
                self._graphs[key] = False
        self._run(views)

    def cost(self, views: Sequence[Any], constants: Mapping[str, Any]) -> Cost:
        """Of all together."""
        views = [*(views[:-1] if self._inner else views), *(view for view, _ in self._inner)]
        flops = nbytes = 0.0
        for codelet, places, own in self._members:
            if codelet.cost is not None:
                found = codelet.cost([views[place] for place in places], own)
                flops, nbytes = flops + found.flops, nbytes + found.nbytes
        return Cost(flops, nbytes)

    def _run(self, views: Sequence[Any]) -> None:
        if self._inner:
            *views, block = views
            views += [view(block, offset) for view, offset in self._inner]
        for codelet, places, constants in self._members:
            assert codelet.cuda is not None
            codelet.cuda(*[views[place] for place in places], **constants)


def stretched_to_fit(found: PlannedOrder, budgets: Sequence[int], make: Callable[[int, Block], HandleRecord]) -> PlannedOrder:
    """A step in its planned order with its tasks joined, if it fits its devices and leaves enough room; else the same.

    Args:
        budgets: bytes of each device.
        make: see `stretched`.
    """
    budget = min(budgets)
    room = (budget - found.plan.needed_bytes() // len(budgets)) // 4
    if found.forecasts or room <= 0:
        return found
    return PlannedOrder(found.name, stretched(found.plan, room, budget // 4, make), {})


def stretched(plan: StepPlan, room: int, budget: int, make: Callable[[int, Block], HandleRecord]) -> StepPlan:
    """The same step with its tasks joined to stretches.

    Args:
        make: a record of so many bytes of scratch memory.
        room: bytes that the inner data of a stretch may take.
        budget: bytes that all of its data may take.
    """
    tasks: list[RecordedTask] = []
    parts: list[int] = []
    owned = dict(plan.owned)
    first = 0
    while first < len(plan.tasks):
        end = _end_of(plan, first, room, budget)
        tasks.append(plan.tasks[first] if end == first + 1 else _join(plan, first, end, make, owned))
        parts.append(plan.parts[first] if plan.parts else -1)
        first = end
    return StepPlan(tasks, owned, window=plan.window, parts=parts if plan.parts else (), idle=plan.idle)


def _end_of(plan: StepPlan, first: int, room: int, budget: int) -> int:
    """One behind the last task of the stretch that begins at `first`."""
    handles: set[HandleRecord] = set()
    inner = total = 0
    for position in range(first, min(first + MOST_TASKS, len(plan.tasks))):
        task = plan.tasks[position]
        new = [handle for handle, _ in task.accesses if handle not in handles]
        handles.update(new)
        total += sum(handle.size for handle in new)
        inner += sum(handle.size for handle in new if plan.owned.get(handle) is False and plan.uses[handle].positions[0] == position)
        is_alike = task.kinds == ("cuda",) and task.pin is None and (not plan.parts or plan.parts[position] == plan.parts[first])
        if not is_alike or inner > room or total > budget:
            return max(position, first + 1)
    return min(first + MOST_TASKS, len(plan.tasks))


def _join(plan: StepPlan, first: int, end: int, make: Callable[[int, Block], HandleRecord], owned: dict[HandleRecord, bool]) -> RecordedTask:
    """Tasks [first, end) as one; its scratch memory enters `owned`."""
    modes: dict[HandleRecord, Mode] = {}
    inner: dict[HandleRecord, None] = {}
    joined = plan.tasks[first:end]
    for handle, mode in (access for task in joined for access in task.accesses):
        before = modes.get(handle)
        if before is None:
            uses = plan.uses[handle].positions
            if plan.owned.get(handle) is False and uses[0] >= first and uses[-1] < end:
                modes[handle] = SCRATCH
                inner[handle] = None
            else:
                modes[handle] = mode
        elif before == R and mode != R:
            modes[handle] = RW
    accesses: list[tuple[HandleRecord, Mode]] = [(handle, mode) for handle, mode in modes.items() if handle not in inner]
    offsets, nbytes = _packed([(handle.size, plan.uses[handle].positions[0], plan.uses[handle].positions[-1]) for handle in inner])
    places = {handle: place for place, handle in enumerate([*(handle for handle, _ in accesses), *inner])}
    if inner:
        block = make(nbytes, Block())
        owned[block] = False
        accesses.append((block, SCRATCH))
    members = []
    for task in joined:
        assert isinstance(task.codelet, Codelet)
        members.append(_Member(task.codelet, tuple(places[handle] for handle, _ in task.accesses), task.constants))
    whole = Stretch(members, [(handle.view, offset) for handle, offset in zip(inner, offsets, strict=True)])
    name = f"{joined[0].name} and {len(joined) - 1} more"
    return RecordedTask(Codelet(name, cuda=whole, cost=whole.cost), name, ("cuda",), tuple(accesses), {}, joined[0].priority)


def _packed(spans: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Offsets for pieces of (size, first use, last use) such that no two that exist at once overlap, and the bytes of all; by first use."""
    offsets: list[int] = []
    alive: list[tuple[int, int, int]] = []  # (offset, end, last use), sorted
    most = 0
    for size, begin, last in spans:
        alive = [piece for piece in alive if piece[2] >= begin]
        offset = 0
        for start, stop, _ in alive:
            if start - offset >= size:
                break
            offset = stop
        insort(alive, (offset, offset + size, last))
        offsets.append(offset)
        most = max(most, offset + size)
    return offsets, most
