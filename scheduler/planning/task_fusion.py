"""Task fusion: tasks of a recorded step that move no data become one task.

The machine spends as long on a task as a GPU, or a core that generates text, computes on a small one. Where a step fits the memory where its tasks
run nothing has to be decided between them: some are fused, data that lives and dies inside a fused task becomes one piece of scratch memory, and
edges, budgets and lifetimes hold for fused tasks as for any others. The price: traces show fused tasks, and the inner data of a fused task is
allocated for its whole duration.

On GPUs neighbours in the planned order are fused, since a kernel start from Python has its own overhead. The kernels of a fused task are recorded as
a CUDA graph when it runs the second time on the same addresses; later runs start the graph. On CPUs, where it is asked for, groups are fused that
keep all workers busy (`task_groups`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from ..core.codelet import Codelet, Cost
from ..core.records import ANY, RW, SCRATCH, HandleRecord, Mode, R
from ..core.step_plan import RecordedTask, StepPlan
from ..drivers.cuda import captured
from ..storage.device import DeviceMemory
from .choose_order import PlannedOrder, last_tier_bytes
from .task_groups import TaskGroup, grouped

MOST_TASKS: Final = 32
"""Most tasks that are fused to one."""
MOST_GRAPHS: Final = 16
"""Most graphs of one fused task: one for each set of addresses, two sets for each GPU where addresses stay; the oldest graph is dropped."""


class _Member(NamedTuple):
    codelet: Codelet
    arguments: tuple[int, ...]
    constants: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HostScratch:
    """Where inner data begins in host memory."""

    memory: Any
    offset: int


class ScratchView:
    """The view of a fused task's inner data: the place where that data begins."""

    def __call__(self, memory: Any, offset: int) -> DeviceMemory | HostScratch:
        """The memory at `offset` bytes from the beginning of a node's memory."""
        return DeviceMemory(memory.address + offset) if isinstance(memory, DeviceMemory) else HostScratch(memory, offset)


class FusedKernels:
    """The kernels of fused tasks, as one kernel.

    Args:
        members: the fused tasks, each with the positions of its arguments: first those of the fused task, behind them the inner data.
        inner: view of each piece of inner data, and its offset in the last argument; bytes.
    """

    def __init__(self, members: Sequence[_Member], inner: Sequence[tuple[Any, int]]) -> None:
        self._members = members
        self._inner = inner
        self._calls = [(each.codelet.cpu, each.arguments, each.constants) for each in members]
        self._views: dict[int, tuple[Any, ...]] = {}
        self._graphs: dict[tuple[int, ...], Any] = {}

    def __call__(self, *views: Any) -> None:
        """Start the kernels: one by one the first time on these addresses, as a graph from the second time on."""
        key = tuple([view.address for view in views])
        start = self._graphs.get(key, self)
        if start is self:  # the first run on these addresses
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
            except RuntimeError:  # no kernel has begun: starting them one by one works, or raises the cause
                self._graphs[key] = False
        self._run(views)

    def on_cpu(self, *views: Any) -> None:
        """Run the kernels one by one on a CPU."""
        if self._inner:
            *outer, scratch = views
            views = (*outer, *self._views_at(scratch))
        for kernel, arguments, constants in self._calls:
            kernel(*[views[position] for position in arguments], **constants)  # type: ignore[misc]

    def _views_at(self, scratch: HostScratch) -> tuple[Any, ...]:
        """Views of the inner data at a place; replays come back to few places of the one memory."""
        found = self._views.get(scratch.offset)
        if found is None:
            if len(self._views) >= MOST_GRAPHS:
                self._views.clear()
            found = self._views[scratch.offset] = tuple(view(scratch.memory, scratch.offset + offset) for view, offset in self._inner)
        return found

    def cost(self, views: Sequence[Any], constants: Mapping[str, Any]) -> Cost:
        """Floating-point operations and bytes of all fused tasks together."""
        views = [*(views[:-1] if self._inner else views), *(view for view, _ in self._inner)]
        flops = nbytes = 0.0
        for codelet, arguments, own in self._members:
            if codelet.cost is not None:
                found = codelet.cost([views[position] for position in arguments], own)
                flops, nbytes = flops + found.flops, nbytes + found.nbytes
        return Cost(flops, nbytes)

    def _run(self, views: Sequence[Any]) -> None:
        if self._inner:
            *views, scratch = views
            views += [view(scratch, offset) for view, offset in self._inner]
        for codelet, arguments, constants in self._members:
            assert codelet.cuda is not None
            codelet.cuda(*[views[position] for position in arguments], **constants)


def fuse_if_it_fits(found: PlannedOrder, budgets: Sequence[int], make: Callable[[int, ScratchView], HandleRecord]) -> PlannedOrder:
    """A step in its planned order with its tasks fused, if it fits its devices and leaves bytes for inner data; else the order as it was.

    Args:
        budgets: bytes of each device.
        make: as in `fuse`.
    """
    budget = min(budgets)
    scratch = (budget - found.plan.needed_bytes() // len(budgets)) // 4
    if found.forecasts or scratch <= 0:
        return found
    return replace(found, plan=fuse(found.plan, scratch, budget // 4, make))


def fuse_groups_if_they_fit(found: PlannedOrder, num_workers: int, memory: int, make: Callable[[int, ScratchView], HandleRecord]) -> PlannedOrder:
    """A step for CPU workers alone with its groups fused, if it fits host memory easily before and after; else the order as it was.

    Args:
        memory: bytes of host memory.
        make: as in `fuse`.
    """
    plan = found.plan
    if found.forecasts or plan.window != ANY or plan.partitions:
        return found
    owned, groups = dict(plan.owned), grouped(plan, num_workers)
    own = [_made_again(plan, group) for group in groups]
    users: dict[HandleRecord, set[int]] = {}
    for number, (group, made) in enumerate(zip(groups, own, strict=True)):
        for handle in {handle for at in group.tasks for handle, _ in plan.tasks[at].accesses} - made:
            users.setdefault(handle, set()).add(number)
    tasks = []
    for group, made in zip(groups, own, strict=True):
        if len(group.tasks) == 1:
            tasks.append(plan.tasks[group.tasks[0]])
        else:
            inner = {
                handle for at in group.tasks for handle, _ in plan.tasks[at].accesses if plan.owned.get(handle) is False and len(users[handle]) == 1
            }
            tasks.append(_join(plan, group.tasks, inner | made, make, owned))
    fused = StepPlan(tasks, owned, window=plan.window, idle=plan.idle)
    fits = max(fused.needed_bytes(), last_tier_bytes(fused, computes=True)) <= memory
    return replace(found, plan=fused) if fits else found


def _made_again(plan: StepPlan, group: TaskGroup) -> set[HandleRecord]:
    """What a group makes for itself although another group has made it."""
    return {handle for at in group.again for handle, mode in plan.tasks[at].accesses if mode != R}


def fuse(plan: StepPlan, scratch: int, budget: int, make: Callable[[int, ScratchView], HandleRecord]) -> StepPlan:
    """The same step with neighbouring tasks of GPUs fused.

    Args:
        scratch: most bytes of the inner data of a fused task.
        budget: most bytes of all data of a fused task.
        make: creates the record of a piece of scratch memory from its bytes and its view.
    """
    tasks: list[RecordedTask] = []
    devices: list[int] = []
    owned = dict(plan.owned)
    first = 0
    while first < len(plan.tasks):
        end = _end_of(plan, first, scratch, budget)
        if end == first + 1:
            tasks.append(plan.tasks[first])
        else:
            inner = {handle for task in plan.tasks[first:end] for handle, _ in task.accesses if _is_inner(plan, handle, first, end)}
            tasks.append(_join(plan, range(first, end), inner, make, owned))
        devices.append(plan.partitions[first] if plan.partitions else -1)
        first = end
    return StepPlan(tasks, owned, window=plan.window, partitions=devices if plan.partitions else (), idle=plan.idle)


def _end_of(plan: StepPlan, first: int, scratch: int, budget: int) -> int:
    """One past the last task that is fused with the task at `first`."""
    handles: set[HandleRecord] = set()
    inner = total = 0
    for position in range(first, min(first + MOST_TASKS, len(plan.tasks))):
        task = plan.tasks[position]
        new = [handle for handle, _ in task.accesses if handle not in handles]
        handles.update(new)
        total += sum(handle.size for handle in new)
        inner += sum(handle.size for handle in new if plan.owned.get(handle) is False and plan.uses[handle].positions[0] == position)
        is_alike = task.kinds == ("cuda",) and task.pin is None and (not plan.partitions or plan.partitions[position] == plan.partitions[first])
        if not is_alike or inner > scratch or total > budget:
            return max(position, first + 1)
    return min(first + MOST_TASKS, len(plan.tasks))


def _is_inner(plan: StepPlan, handle: HandleRecord, first: int, end: int) -> bool:
    """Whether data lives and dies in tasks [first, end)."""
    positions = plan.uses[handle].positions
    return plan.owned.get(handle) is False and positions[0] >= first and positions[-1] < end


def _join(
    plan: StepPlan,
    positions: Sequence[int],
    inside: Set[HandleRecord],
    make: Callable[[int, ScratchView], HandleRecord],
    owned: dict[HandleRecord, bool],
) -> RecordedTask:
    """Tasks of a step, in ascending order, as one fused task, with scratch memory for what is inside, which is added to `owned`."""
    modes: dict[HandleRecord, Mode] = {}
    inner: dict[HandleRecord, list[int]] = {}  # where each is used
    joined = [plan.tasks[position] for position in positions]
    for at, (handle, mode) in ((at, access) for at, task in enumerate(joined) for access in task.accesses):
        before = modes.get(handle)
        if handle in inside:
            inner.setdefault(handle, []).append(at)
        elif before is None:
            modes[handle] = mode
        elif before == R and mode != R:
            modes[handle] = RW
    accesses: list[tuple[HandleRecord, Mode]] = list(modes.items())
    offsets, nbytes = _packed([(handle.size, uses[0], uses[-1]) for handle, uses in inner.items()])
    arguments = {handle: position for position, handle in enumerate([*(handle for handle, _ in accesses), *inner])}
    if inner:
        scratch = make(nbytes, ScratchView())
        owned[scratch] = False
        accesses.append((scratch, SCRATCH))
    members = []
    for task in joined:
        assert isinstance(task.codelet, Codelet)
        members.append(_Member(task.codelet, tuple(arguments[handle] for handle, _ in task.accesses), task.constants))
    whole = FusedKernels(members, [(handle.view, offset) for handle, offset in zip(inner, offsets, strict=True)])
    name, kinds = f"{joined[0].name} and {len(joined) - 1} more", joined[0].kinds
    codelet = Codelet(name, cuda=whole, cost=whole.cost) if kinds == ("cuda",) else Codelet(name, cpu=whole.on_cpu, cost=whole.cost)
    return RecordedTask(codelet, name, kinds, tuple(accesses), {}, joined[0].priority)


def _packed(spans: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Offsets for pieces of (size, first use, last use), sorted by first use, such that no two live pieces overlap; and the bytes of all. First
    fit."""
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
