"""Virtual time: the scheduler's machine without threads or data, with given durations instead of kernels.

`nntask plan` and experiments use it for imaginary machines. Time is a number that jumps to the next end of a task or copy. Ties are broken by the
order in which tasks and copies began, so a simulation always gives the same result. Copies over one link follow one another. Copies from and to the
disk tier share a few channels, as the concurrent requests of the real tier do, and reads precede writes.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final
from zlib import crc32

from ..core.actions import carry_out
from ..core.errors import SchedulerError
from ..core.events import (
    CopyFinished,
    CopyTile,
    DiscardExtent,
    Event,
    MoveTile,
    ReportFailure,
    ReportStepDone,
    RunTask,
    SourceAttached,
    StepStarted,
    TaskFinished,
    TaskSubmitted,
    WorkerJoined,
)
from ..core.machine import Machine
from ..core.memory.eviction_policies import DEFAULT_EVICTION
from ..core.memory.memory_node import MemoryNode
from ..core.performance_model import Estimates
from ..core.policies import POLICIES
from ..core.records import FILE, HandleId, HandleRecord, NodeId, Replay, Task, TaskId, TaskSpec, W, Worker, WorkerId, WorkerKind
from ..core.step_plan import RecordedTask, StepPlan

GOLDEN_RATIO: Final = 0.6180339887
"""Step between the flags of a task, by which their turns spread evenly in virtual time (Weyl's sequence)."""

Duration = Callable[[Task, WorkerKind], float]
"""Function that returns the seconds of a task on a kind of worker, given `task.codelet`, `task.constants` and the views of its handles."""

HostEnd = Callable[[Task, float], float]
"""Function that returns the end of a task of kind "host" that starts now, given `task.codelet`, `task.constants` and the handles."""

Transfer = Callable[[NodeId, NodeId, int], float]
"""Function (source, target, bytes) -> seconds of a copy over an idle link."""


@dataclass(slots=True)
class Simulation:
    """The cost of a simulated step.

    Attributes:
        seconds: time from the end of the previous replay to the end of the last one.
        busy_seconds: seconds in kernels of each worker, in that time.
        peak_bytes: largest number of bytes in use on each node since the start.
        peak_bytes_by_class: bytes in use at that moment, by data class.
        moved_bytes: bytes moved over each link "a->b", in the last replay.
        num_tasks: number of tasks of one replay.
        num_evictions: number of replicas evicted in the last replay.
    """

    seconds: float
    busy_seconds: list[float]
    peak_bytes: dict[str, int]
    peak_bytes_by_class: dict[str, dict[str, int]]
    moved_bytes: dict[str, int]
    num_tasks: int
    num_evictions: int


class VirtualDriver:
    """A driver that executes a machine's actions in virtual time.

    Args:
        machine: a machine without workers.
        workers: (kind, node, depth) of each worker.
        duration: function that returns the seconds of a task on a kind of worker.
        transfer: function that returns the seconds of a copy; None for copies that take no time.
        channels: number of copies from and to the disk tier at a time.
        host: function that returns the end of a task without a worker; None for tasks that end at once.
        aside: whether CPU workers run only codelets that devices may not.
        shares: for tasks that write flags, the share of replays in which each flag is set, and the fraction of a turn at which it begins.

    Attributes:
        now: seconds since the start.
        busy_seconds: seconds in kernels of each worker.
    """

    def __init__(
        self,
        machine: Machine,
        workers: Sequence[tuple[WorkerKind, int, int]],
        duration: Duration,
        *,
        transfer: Transfer | None = None,
        channels: int = 1,
        host: HostEnd | None = None,
        aside: bool = False,
        shares: Mapping[TaskSpec, Sequence[tuple[float, float]]] = MappingProxyType({}),
    ) -> None:
        self.machine = machine
        self.shares = shares
        self.host = host
        self.duration = duration
        self.transfer = transfer
        self.now = 0.0
        self.busy_seconds = [0.0 for _ in workers]
        self._kinds = [kind for kind, _, _ in workers]
        self._events: list[tuple[float, int, Event]] = []
        self._links: dict[tuple[NodeId, NodeId], float] = {}
        self._tier = machine.memory.tier
        self._num_channels = channels  # of the tier, those that are free
        self._reads: deque[CopyTile] = deque()
        self._writes: deque[CopyTile] = deque()
        self._num_begun = 0
        for number, (kind, node, depth) in enumerate(workers):
            self.bring(WorkerJoined(Worker(WorkerId(number), kind, NodeId(node), depth, aside and kind == "cpu")))

    def bring(self, event: Event) -> None:
        """Handle an event that happens now.

        Raises:
            DoesNotFit: a task cannot run within the budgets.
        """
        for action in self.machine.handle(event):
            carry_out(action, self)

    def run(self, until: Replay | None = None) -> None:
        """Advance time until the tasks of a replay have ended; without one, until no task or copy is in progress."""
        while self._events and (until is None or until.num_unfinished):
            self.now, _, event = heapq.heappop(self._events)
            self.bring(event)
            if isinstance(event, CopyFinished) and self._takes_channel(event.source.node, event.target.node):
                self._num_channels += 1
                self._use_channels()

    def move_tile(self, action: MoveTile) -> None:
        """Do nothing: virtual time has no bytes, and a move within a node takes no time."""

    def discard_extent(self, action: DiscardExtent) -> None:
        """Do nothing: virtual time has no files."""

    def report_step_done(self, action: ReportStepDone) -> None:
        """Do nothing: `run` looks at the replay itself."""

    def report_failure(self, action: ReportFailure) -> None:
        """Raise the error: a simulation ends with the first failure."""
        raise action.error

    def run_task(self, action: RunTask) -> None:
        """Schedule the end of the task."""
        task = action.task
        seconds = 0.0
        if task.worker >= 0:  # the program itself takes no time
            seconds = self.duration(task, self._kinds[task.worker])
            self.busy_seconds[task.worker] += seconds
        elif task.spec.codelet is not None and self.host is not None:
            seconds = self.host(task, self.now) - self.now
        self._enter(self.now + seconds, TaskFinished(task, self._flags_of(task)))

    def _flags_of(self, task: Task) -> bytes | None:
        """Return flags that are each set in their share of replays, spread evenly; a task that is recomputed writes the same ones again."""
        shares, number = self.shares.get(task.spec), 0 if task.step is None else task.step.number
        if shares is None:
            return None
        starts = [(number * share + begin, share) for share, begin in shares]
        return bytes(int(start + share) > int(start) for start, share in starts)

    def copy_tile(self, action: CopyTile) -> None:
        """Schedule the end of the copy, or queue it for a channel of the tier."""
        link = (action.source.node, action.target.node)
        if self._takes_channel(*link):
            (self._writes if link[1] == self._tier else self._reads).append(action)
            self._use_channels()
            return
        end = self._links[link] = max(self.now, self._links.get(link, 0.0)) + self._seconds(action)
        self._enter(end, CopyFinished(action.source, action.target))

    def _takes_channel(self, source: NodeId, target: NodeId) -> bool:
        """Return whether a copy reads or writes a file."""
        return source == FILE or (self._tier is not None and self._tier in (source, target))

    def _use_channels(self) -> None:
        """Start queued copies from and to the tier while channels are free."""
        while self._num_channels and (self._reads or self._writes):
            self._num_channels -= 1
            copy = (self._reads or self._writes).popleft()
            self._enter(self.now + self._seconds(copy), CopyFinished(copy.source, copy.target))

    def _seconds(self, copy: CopyTile) -> float:
        return 0.0 if self.transfer is None else self.transfer(copy.source.node, copy.target.node, copy.source.handle.spec.nbytes)

    def _enter(self, at: float, event: Event) -> None:
        self._num_begun += 1
        heapq.heappush(self._events, (at, self._num_begun, event))


def simulate(
    plan: StepPlan,
    *,
    workers: Sequence[tuple[WorkerKind, int, int]],
    nodes: Sequence[tuple[str, int]],
    policy: str,
    duration: Duration,
    transfer: Transfer | None = None,
    storage: bool = False,
    channels: int = 1,
    eviction: str = DEFAULT_EVICTION,
    prefetch: bool = True,
    replays: int = 2,
    ahead: bool = False,
    host: HostEnd | None = None,
    aside: bool = False,
    worst: bool = False,
) -> Simulation:
    """Run a recorded step in virtual time on an imaginary machine; the records of `plan` do not change.

    At the start, the inputs of the step lie in host memory or below it, and so do the outputs of two earlier replays. Data that is used first is
    loaded last. Data in a file that is only read lies there alone.

    Args:
        plan: step to run.
        workers: (kind, node, depth) of each worker.
        nodes: (name, budget in bytes) of each memory node, host memory first.
        policy: name of a scheduling policy.
        duration: function that returns the seconds of a task on a kind of worker.
        transfer: function that returns the seconds of a copy between two nodes; None for copies that take no time.
        storage: whether the last node is a disk tier.
        channels: number of copies from and to files at a time, each as long as `transfer` returns.
        eviction, prefetch: options of `Machine`.
        replays: number of times that the step runs; the last one is reported, when devices hold the data that fits.
        ahead: whether the next replay has begun when one ends, even after the last one, as in training; else each begins when nothing moves.
        host: function that returns the end of a task without a worker; None for tasks that end at once.
        aside: whether CPU workers run only codelets that devices may not.
        worst: whether all conditional tasks run; else each runs in its share of replays.

    Raises:
        DoesNotFit: a task or the persistent data exceeds the budgets.
        ValueError: the policy is unknown, or `replays` or `channels` is not positive.
    """
    _check(policy, replays, channels)
    machine = _machine(nodes, policy, Estimates(duration, transfer), storage=storage, eviction=eviction, prefetch=prefetch)
    twin = _detached(plan)
    shares = {} if worst else _shares_of(twin.tasks)
    driver = VirtualDriver(machine, workers, duration, transfer=transfer, channels=channels, host=host, aside=aside, shares=shares)
    return _replayed(driver, _loaded(driver, plan, twin), replays, ahead=ahead)


def _check(policy: str, replays: int, channels: int) -> None:
    if policy not in POLICIES or replays < 1 or channels < 1:
        raise ValueError(
            f"policy must be one of {', '.join(POLICIES)}, replays and channels at least 1, got {policy!r}, {replays} and {channels}; change them"
        )


def _machine(nodes: Sequence[tuple[str, int]], policy: str, estimates: Estimates, *, storage: bool, eviction: str, prefetch: bool) -> Machine:
    last = len(nodes) - 1
    memories = [MemoryNode(name, budget, is_storage=storage and node == last) for node, (name, budget) in enumerate(nodes)]
    machine = Machine(memories, POLICIES[policy](estimates), eviction=eviction, prefetch=prefetch)
    estimates.memory = machine.memory
    return machine


def _replayed(driver: VirtualDriver, instances: Sequence[Replay], replays: int, *, ahead: bool) -> Simulation:
    """Run the replays of a step by turns on its two instances; return the cost of the last one."""
    num_tasks = len(instances[0].tasks)

    def start(number: int) -> None:
        replay = instances[number % 2]
        replay.number, replay.first_order = number, num_tasks * (3 + number)
        driver.bring(StepStarted(replay))

    for number in range(replays):
        replay = instances[number % 2]
        before = _measure(driver, num_tasks)
        if not ahead or number == 0:
            start(number)
        if ahead:
            start(number + 1)
        driver.run(replay if ahead else None)
        if replay.num_unfinished:
            raise SchedulerError(f"{replay.num_unfinished} tasks of the simulated step never ran\n{driver.machine.story()}")
    return _difference(before, _measure(driver, num_tasks))


def _measure(driver: VirtualDriver, num_tasks: int) -> Simulation:
    """Return the counters since the start."""
    memory = driver.machine.memory
    nodes = memory.usage()
    return Simulation(
        seconds=driver.now,
        busy_seconds=list(driver.busy_seconds),
        peak_bytes={node.name: node.peak for node in nodes},
        peak_bytes_by_class={node.name: {str(name): size for name, size in node.peak_by_class.items()} for node in nodes},
        moved_bytes=memory.moved_by_name(),
        num_tasks=num_tasks,
        num_evictions=memory.num_evictions,
    )


def _difference(before: Simulation, after: Simulation) -> Simulation:
    """Return the counters between two measurements; peaks count from the start."""
    after.seconds -= before.seconds
    after.busy_seconds = [now - then for then, now in zip(before.busy_seconds, after.busy_seconds, strict=True)]
    after.moved_bytes = {link: nbytes - before.moved_bytes.get(link, 0) for link, nbytes in after.moved_bytes.items()}
    after.num_evictions -= before.num_evictions
    return after


def _loaded(driver: VirtualDriver, plan: StepPlan, twin: StepPlan) -> list[Replay]:
    """Return two instances of `twin`, the same step over new records, after loading its inputs and their outputs."""
    last = driver.machine.computes_on_last
    for handle, own in zip(plan.uses, twin.uses, strict=True):
        if plan.stays_in_file(handle):
            driver.bring(SourceAttached(own, None))
    instances = [twin.instantiate(_clone, len(twin.tasks) * (1 + which), computes_on_last=last) for which in range(2)]
    outputs = [record for _, twins in instances for record in twins.values() if not record.released]
    inputs = [handle for handle, use in reversed(twin.uses.items()) if use.needs_data and handle not in twin.owned and not twin.stays_in_file(handle)]
    _load(driver, [*outputs, *inputs])
    return [replay for replay, _ in instances]


def _load(driver: VirtualDriver, handles: Sequence[HandleRecord]) -> None:
    """Let the program write data, so that memory holds about the data that an earlier replay would leave."""
    for number, handle in enumerate(handles):
        spec = TaskSpec(None, "load", ("host",), ((handle, W),), {})
        task = Task(TaskId(-1 - number), spec, spec.accesses, order=number - len(handles))
        driver.bring(TaskSubmitted(task))
        driver.run()
        assert task.state == "done"  # a task that does not fit has raised


def _shares_of(tasks: Sequence[RecordedTask]) -> dict[TaskSpec, list[tuple[float, float]]]:
    """Return `VirtualDriver.shares`; flags that no task reads are always set.

    Flags of one task take turns evenly. Those of different tasks are independent, so the turns begin at a fraction that follows from the place of the
    task in the program, which a task that is recomputed shares with its clone.
    """
    shares: dict[TaskSpec, list[tuple[float, float]]] = {}
    writers: dict[HandleRecord, list[tuple[float, float]]] = {}
    counts = Counter[tuple[str, int, bool]]()
    for task in tasks:
        condition = task.condition
        if condition is not None and condition.flags >= 0:
            flags, key = task.accesses[condition.flags][0], (task.label.path, task.label.minibatch, task.num_clones > 0)
            offset = crc32(f"{key[:2]} {counts[key]}".encode()) / (1 << 32)
            counts[key] += 1
            writers[flags] = shares[task] = [(1.0, (offset + flag * GOLDEN_RATIO) % 1.0) for flag in range(flags.spec.nbytes)]
        if condition is not None and condition.guard >= 0:
            guard, _ = task.accesses[condition.guard]
            if guard in writers:
                writers[guard][condition.number] = condition.share, writers[guard][condition.number][1]
    return shares


def _detached(plan: StepPlan) -> StepPlan:
    """Return the same plan over new records."""
    twins = {handle: _clone(handle) for handle in plan.uses}
    tasks = [replace(task, accesses=tuple((twins[handle], mode) for handle, mode in task.accesses)) for task in plan.tasks]
    owned = {twins[handle]: is_output for handle, is_output in plan.owned.items() if handle in twins}
    detached = StepPlan(tasks, owned, window=plan.window, partitions=plan.partitions)
    detached.foresee({twins[handle]: use.leaves for handle, use in plan.uses.items()}, plan.returns)
    return detached


def _clone(handle: HandleRecord) -> HandleRecord:
    return HandleRecord(HandleId(handle.id), handle.spec)
