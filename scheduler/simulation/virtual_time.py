"""Virtual time: the same machine without threads or data, with durations instead of kernels.

Drives `nntask plan` and experiments on imaginary machines. Time is a number that jumps to the next end of a task or copy; ties are broken by the
order in which things began, so a simulation always gives the same result. Copies over one link follow one another; those from and to the disk
tier share a few channels, as the requests in flight of the real one do, and reads go before writes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.actions import carry_out
from ..core.errors import DoesNotFit, SchedulerError
from ..core.events import (
    CopyFinished,
    CopyTile,
    DiscardExtent,
    Event,
    ForgetObject,
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
from ..core.memory.extents import MemoryNode
from ..core.performance_model import Given
from ..core.policies import POLICIES
from ..core.records import FILE, HandleId, HandleRecord, NodeId, Replay, Task, TaskId, W, Worker, WorkerId, WorkerKind
from ..core.step_plan import RecordedTask, StepPlan

Duration = Callable[[Task, WorkerKind], float]
"""Seconds a task takes on a kind of worker; `task.codelet`, `task.constants` and the views of its handles say what it is."""

HostEnd = Callable[[Task, float], float]
"""When a task of kind host that begins now ends; `task.codelet`, `task.constants` and the handles say what it is."""

Transfer = Callable[[NodeId, NodeId, int], float]
"""Seconds it takes to move so many bytes from one node to another over an idle link."""


@dataclass(slots=True)
class Simulation:
    """What a simulated step costs.

    Attributes:
        seconds: from the end of the previous replay to the end of the last one.
        busy_seconds: per worker, in that time.
        peak_bytes: most bytes in use on each node, from the start on.
        peak_bytes_by_class: the same at that moment, by data class.
        moved_bytes: over each link "a->b", in the last replay.
        num_tasks: tasks of one replay.
        num_evictions: replicas dropped for others in the last replay.
    """

    seconds: float
    busy_seconds: list[float]
    peak_bytes: dict[str, int]
    peak_bytes_by_class: dict[str, dict[str, int]]
    moved_bytes: dict[str, int]
    num_tasks: int
    num_evictions: int


class VirtualDriver:
    """Carries out a machine's actions in virtual time.

    Args:
        machine: without workers yet.
        workers: (kind, node, depth) of each worker.
        duration: of a task on a kind of worker.
        transfer: seconds of a copy; None for copies that take no time.
        channels: copies from and to the disk tier under way at most.
        host: when tasks without a worker end; None for at once.
        aside: whether CPU workers run only what devices may not.

    Attributes:
        now: seconds since the start.
        busy_seconds: of each worker.
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
    ) -> None:
        self.machine = machine
        self.host = host
        self.duration = duration
        self.transfer = transfer
        self.now = 0.0
        self.busy_seconds = [0.0 for _ in workers]
        self._kinds = [kind for kind, _, _ in workers]
        self._events: list[tuple[float, int, Event]] = []
        self._links: dict[tuple[NodeId, NodeId], float] = {}
        self._tier = machine.memory.tier
        self._num_channels = channels  # of the tier that are free
        self._reads: deque[CopyTile] = deque()
        self._writes: deque[CopyTile] = deque()
        self._num_begun = 0
        for number, (kind, node, depth) in enumerate(workers):
            self.bring(WorkerJoined(Worker(WorkerId(number), kind, NodeId(node), depth, aside and kind == "cpu")))

    def bring(self, event: Event) -> None:
        """Let something happen now.

        Raises:
            DoesNotFit: a task cannot run within the budgets.
        """
        for action in self.machine.handle(event):
            carry_out(action, self)

    def run(self, until: Replay | None = None) -> None:
        """Let time pass until the tasks of a replay have ended; without one, until nothing is under way."""
        while self._events and (until is None or until.num_unfinished):
            self.now, _, event = heapq.heappop(self._events)
            self.bring(event)
            if isinstance(event, CopyFinished) and self._takes_channel(event.source.node, event.target.node):
                self._num_channels += 1
                self._use_channels()

    def move_tile(self, action: MoveTile) -> None:
        """Nothing: no bytes exist in virtual time, and a move within a node is taken to need none."""

    def discard_extent(self, action: DiscardExtent) -> None:
        """Nothing: no file exists in virtual time."""

    def forget_object(self, action: ForgetObject) -> None:
        """Nothing: no buffer exists in virtual time."""

    def report_step_done(self, action: ReportStepDone) -> None:
        """Nothing: `run` looks at the replay itself."""

    def report_failure(self, action: ReportFailure) -> None:
        """A simulation ends with the first failure."""
        raise action.error

    def run_task(self, action: RunTask) -> None:
        """Enter when the task will end."""
        task = action.task
        seconds = 0.0
        if task.worker >= 0:  # else it is the program, which takes no time
            seconds = self.duration(task, self._kinds[task.worker])
            self.busy_seconds[task.worker] += seconds
        elif task.codelet is not None and self.host is not None:
            seconds = self.host(task, self.now) - self.now
        self._enter(self.now + seconds, TaskFinished(task))

    def copy_tile(self, action: CopyTile) -> None:
        """Enter when the copy will end, or let it wait for a channel of the tier."""
        link = (action.source.node, action.target.node)
        if self._takes_channel(*link):
            (self._writes if link[1] == self._tier else self._reads).append(action)
            self._use_channels()
            return
        end = self._links[link] = max(self.now, self._links.get(link, 0.0)) + self._seconds(action)
        self._enter(end, CopyFinished(action.source, action.target))

    def _takes_channel(self, source: NodeId, target: NodeId) -> bool:
        """Whether a copy is one from or to a file."""
        return source == FILE or (self._tier is not None and self._tier in (source, target))

    def _use_channels(self) -> None:
        """Begin copies from and to the tier while it takes any."""
        while self._num_channels and (self._reads or self._writes):
            self._num_channels -= 1
            copy = (self._reads or self._writes).popleft()
            self._enter(self.now + self._seconds(copy), CopyFinished(copy.source, copy.target))

    def _seconds(self, copy: CopyTile) -> float:
        return 0.0 if self.transfer is None else self.transfer(copy.source.node, copy.target.node, copy.source.handle.nbytes)

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
) -> Simulation:
    """Run a recorded step in virtual time on an imaginary machine; the records of `plan` are left alone.

    What the step reads without writing it first lies in host memory, or below it, at the start, and so do the outputs of two earlier replays. What is
    used first is loaded last. What lies in a file and is only read is there, and nowhere else.

    Args:
        workers: (kind, node, depth) of each worker.
        nodes: (name, budget in bytes) of each memory node, host memory first.
        policy: name of a scheduling policy.
        duration: of a task on a kind of worker, seconds.
        transfer: seconds of a copy between two nodes; None for copies that take no time.
        storage: whether the last node is a disk tier.
        channels: copies from and to files under way at most, each as long as `transfer` says.
        eviction, prefetch: as in `Machine`.
        replays: how often the step runs; the last one is reported, when devices hold what fits.
        ahead: whether the next replay, another one after the last, has begun when one ends, as in training; else each begins when nothing moves.
        host: when tasks without a worker end; None for at once.
        aside: whether CPU workers run only what devices may not.

    Raises:
        DoesNotFit: a task or the persistent data exceeds the budgets.
        ValueError: the policy is unknown, or `replays` or `channels` is not positive.
    """
    if policy not in POLICIES or replays < 1 or channels < 1:
        raise ValueError(
            f"policy must be one of {', '.join(POLICIES)}, replays and channels at least 1, got {policy!r}, {replays} and {channels}; change them"
        )
    last = len(nodes) - 1
    memories = [MemoryNode(name, budget, is_storage=storage and at == last) for at, (name, budget) in enumerate(nodes)]
    estimates = Given(duration, transfer)
    machine = Machine(memories, POLICIES[policy](estimates), eviction=eviction, prefetch=prefetch)
    estimates.memory = machine.memory
    driver = VirtualDriver(machine, workers, duration, transfer=transfer, channels=channels, host=host, aside=aside)
    twin = _detached(plan)
    num_tasks = len(twin.tasks)
    for handle, own in zip(plan.uses, twin.uses, strict=True):
        if plan.stays_in_file(handle):
            driver.bring(SourceAttached(own, None))
    instances = [twin.instantiate(_clone, num_tasks * (1 + which), computes_on_last=machine.computes_on_last) for which in range(2)]
    outputs = [record for _, twins in instances for record in twins.values() if not record.released]
    found = [handle for handle, use in reversed(twin.uses.items()) if use.needs_data and handle not in twin.owned and not twin.stays_in_file(handle)]
    _load(driver, [*outputs, *found])

    def start(number: int) -> None:
        replay = instances[number % 2][0]
        replay.number, replay.first_order = number, num_tasks * (3 + number)
        driver.bring(StepStarted(replay))

    for number in range(replays):
        replay = instances[number % 2][0]
        before = _measure(driver, num_tasks)
        if not ahead or number == 0:
            start(number)
        if ahead:
            start(number + 1)
        driver.run(replay if ahead else None)
        if replay.num_unfinished:
            raise SchedulerError(f"{replay.num_unfinished} tasks of the simulated step never ran\n{machine.story()}")
    return _difference(before, _measure(driver, num_tasks))


def _measure(driver: VirtualDriver, num_tasks: int) -> Simulation:
    """Everything counted since the start."""
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
    """What happened in between; peaks count from the start."""
    after.seconds -= before.seconds
    after.busy_seconds = [now - then for then, now in zip(before.busy_seconds, after.busy_seconds, strict=True)]
    after.moved_bytes = {link: nbytes - before.moved_bytes.get(link, 0) for link, nbytes in after.moved_bytes.items()}
    after.num_evictions -= before.num_evictions
    return after


def _load(driver: VirtualDriver, handles: Sequence[HandleRecord]) -> None:
    """The program writes data, so that memory holds about what an earlier replay would leave."""
    for number, handle in enumerate(handles):
        task = Task(TaskId(-1 - number), None, "load", ("host",), ((handle, W),), {}, order=number - len(handles))
        driver.bring(TaskSubmitted(task))
        driver.run()
        if task.state != "done":
            raise DoesNotFit(f"{handle!r} does not fit host memory at the start of the step")


def _detached(plan: StepPlan) -> StepPlan:
    """The same plan over records of its own."""
    twins = {handle: _clone(handle) for handle in plan.uses}
    tasks = [
        RecordedTask(
            task.codelet,
            task.name,
            task.kinds,
            tuple((twins[handle], mode) for handle, mode in task.accesses),
            task.constants,
            task.priority,
            task.pin,
            aside=task.aside,
        )
        for task in plan.tasks
    ]
    owned = {twins[handle]: is_output for handle, is_output in plan.owned.items() if handle in twins}
    found = StepPlan(tasks, owned, window=plan.window, partitions=plan.partitions)
    found.foresee({twins[handle]: use.leaves for handle, use in plan.uses.items()}, plan.returns)
    return found


def _clone(handle: HandleRecord) -> HandleRecord:
    return HandleRecord(HandleId(handle.id), handle.nbytes, handle.size, handle.view, handle.name, handle.kind, handle.data_class)
