"""Estimates of how long tasks and copies take: measured durations, or guesses from operations and bytes.

Tasks. There is one series of durations per (codelet, footprint, worker kind). A footprint is a stable number that tasks of equal cost share
(`footprint`). A process drops the first duration it measures of a series (cold caches, lazy set-up). The estimate is the mean of the latest durations
without spikes, those beyond twice the median. The mean, not the median, because copies slow kernels down: many durations lie above the median and few
below, and a step takes their sum. Without durations, the estimate is the codelet's cost function divided by the rates of the worker kind.

Links. There is a `LinkModel` per (source, target).

Durations are arguments; this module does not know clocks, tasks in progress or files (`storage.performance_store` keeps models between runs). It has
no locks: threads record under the machine's lock.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any, Final, NamedTuple, Protocol

from .link_model import DISK_LINK, MEMORY_LINK, LinkModel, median
from .records import FILE, NodeId, Task, TaskSpec, WorkerKind

KEPT: Final = 32
"""Number of durations remembered per series."""

SPIKE: Final = 2.0
"""Multiple of the median beyond which a duration is a spike, caused by something other than the task."""

CALIBRATED: Final = 3
"""Number of durations from which on a task's duration on a kind of worker counts as known."""

UNKNOWN_SECONDS: Final = 1e-4
"""Estimate for a task without measurements and cost function, seconds."""

Key = tuple[str, int, str]
"""(codelet name, footprint, worker kind)."""


class Rate(NamedTuple):
    """Largest rates of a kind of worker: floating-point operations, and bytes read plus written, per second."""

    flops: float
    nbytes: float


RATES: Final[Mapping[WorkerKind, Rate]] = {"cpu": Rate(5e10, 1e10), "sim": Rate(5e10, 1e10), "cuda": Rate(2e13, 1.5e12)}
"""Rough rates of one worker, used until rates are measured."""


class MemoryView(Protocol):
    """The present state of the memory nodes, for estimates; implemented by `MemoryStatus`."""

    def free_bytes(self, node: NodeId) -> int:
        """Return the unused bytes of the node's budget."""

    def queued_bytes(self, source: NodeId, target: NodeId) -> int:
        """Return the bytes on their way over a link, including the copy in progress."""

    def below(self, node: NodeId) -> NodeId:
        """Return the node to which `node` evicts; `node` itself if no tier lies below it."""


class Boundless:
    """Memory without limits or traffic."""

    def free_bytes(self, node: NodeId) -> int:
        """Return a number beyond any need."""
        return 1 << 62

    def queued_bytes(self, source: NodeId, target: NodeId) -> int:
        """Return 0: no copy is in progress."""
        return 0

    def below(self, node: NodeId) -> NodeId:
        """Return `node`: nothing is evicted."""
        return node


class Estimates:
    """Estimates for cost-based policies: from given functions, as in virtual time, or measured (`Models`).

    Args:
        duration: function that returns the seconds of a task on a kind of worker.
        transfer: function that returns the seconds of a copy, given source, target and bytes; None for copies that take no time.

    Attributes:
        memory: state of the memory nodes; `Machine.memory`, once there is a machine.
    """

    def __init__(self, duration: Callable[[Task, WorkerKind], float], transfer: Callable[[NodeId, NodeId, int], float] | None = None) -> None:
        self.memory: MemoryView = Boundless()
        self._duration = duration
        self._transfer = transfer

    def task_seconds(self, task: Task, kind: WorkerKind) -> float:
        """Return the seconds that the task will run on a worker of that kind."""
        return self._duration(task, kind)

    def is_known(self, task: Task, kind: WorkerKind) -> bool:
        """Return whether `task_seconds` is more than a guess."""
        return True

    def transfer_seconds(self, source: NodeId, target: NodeId, nbytes: int) -> float:
        """Return the seconds to move `nbytes` over an idle link; 0 from a node to itself."""
        return 0.0 if self._transfer is None or source == target else self._transfer(source, target, nbytes)


NO_ESTIMATES: Final = Estimates(lambda task, kind: 1.0)
"""Estimates for policies created without models: every task takes a second, and copies take no time."""


_dtypes: dict[object, str] = {}
"""Names of dtypes, cached because NumPy takes microseconds to build one."""


def footprint(task: TaskSpec) -> int:
    """Return a number that tasks of equal cost share: the CRC-32 of everything that may affect the cost, the same in every process.

    It covers each access's mode, shape and dtype (or size, if the view has no shape), the constants of type bool or str, and the result of the cost
    function. Numeric constants are included only if the codelet has no cost function: seeds and offsets are numbers too, and do not affect the cost.
    """
    terms: list[str] = []
    for handle, mode in task.accesses:
        view: Any = handle.spec.view
        if hasattr(view, "shape") and hasattr(view, "dtype"):
            dtype = _dtypes.get(view.dtype)
            if dtype is None:
                dtype = _dtypes[view.dtype] = str(view.dtype)
            terms.append(f"{mode} {view.shape} {dtype}")
        else:
            terms.append(f"{mode} {handle.spec.nbytes}")
    cost = _cost(task)
    types = (bool, str) if cost is not None else (bool, str, int, float)
    terms += [f"{name}={value!r}" for name, value in sorted(task.constants.items()) if isinstance(value, types)]
    if cost is not None:
        terms.append(f"{cost[0]:.6g} {cost[1]:.6g}")
    return zlib.crc32(";".join(terms).encode())


def key_of(task: TaskSpec) -> tuple[str, int]:
    """Return the codelet name and footprint of a task; they are cached in `TaskSpec.model_key`."""
    if task.model_key is None:
        task.model_key = (task.name, footprint(task))
    return task.model_key


def _cost(task: TaskSpec) -> tuple[float, float] | None:
    """Return (flops, bytes) of a task, or None if its codelet has no cost function."""
    cost = getattr(task.codelet, "cost", None)
    return None if cost is None else cost([handle.spec.view for handle, _ in task.accesses], task.constants)


class Series:
    """The latest durations of one kind of task, and their typical value.

    Attributes:
        samples: seconds, oldest first.
        is_warm: whether this process has dropped the first duration that it measured.
    """

    __slots__ = ("_typical", "is_warm", "samples")

    def __init__(self, samples: Sequence[float] = ()) -> None:
        self.samples = deque(samples, KEPT)
        self._typical: float | None = None  # of the present samples, computed on demand
        self.is_warm = False

    def add(self, seconds: float) -> None:
        """Record a duration; the first one is dropped."""
        if self.is_warm:
            self.samples.append(seconds)
            self._typical = None
        else:
            self.is_warm = True

    @property
    def typical(self) -> float | None:
        """Mean duration without spikes, seconds; None without samples."""
        if self._typical is None and self.samples:
            limit = SPIKE * median(self.samples)
            kept = [seconds for seconds in self.samples if seconds <= limit]
            self._typical = sum(kept) / len(kept)
        return self._typical


class Models(Estimates):
    """Estimates from measurements.

    Attributes:
        series: durations of tasks; `storage.performance_store` reads and fills it.
        links: models of links by (source, target); `declare_links` sets them before any copy.
    """

    def __init__(self) -> None:
        self.memory: MemoryView = Boundless()
        self.series: dict[Key, Series] = {}
        self.links: dict[tuple[NodeId, NodeId], LinkModel] = {}
        self._guesses: dict[Key, float] = {}

    def record(self, task: Task, kind: WorkerKind, seconds: float) -> None:
        """Record how long a task ran. Takes less than a microsecond if the task's `model_key` is set, as in every replay after the first."""
        name, number = task.spec.model_key or key_of(task.spec)
        series = self.series.get((name, number, kind))
        if series is None:
            series = self.series[name, number, kind] = Series()
        series.add(seconds)

    def record_copy(self, source: NodeId, target: NodeId, nbytes: int, seconds: float) -> None:
        """Record how long a copy took, from the moment when it had the link to itself."""
        self._link(source, target).add(nbytes, seconds)

    def declare_links(
        self, num_nodes: int, *, storage: bool, given: tuple[float, float] | None = None, disk: tuple[float, float] | None = None
    ) -> None:
        """Set the models of the links between nodes before any copy; a link that has measured copies keeps them.

        Args:
            num_nodes: number of memory nodes.
            storage: whether the last node is a disk tier.
            given: latency in seconds and bandwidth in bytes per second of every link between memories, if they are simulated or imaginary.
            disk: latency and bandwidth of each concurrent request of the disk tier, if it is imaginary.
        """
        for source, target in permutations(range(num_nodes), 2):
            ends = NodeId(source), NodeId(target)
            is_disk = storage and num_nodes - 1 in ends
            known = disk if is_disk else given
            if known is not None:
                self.links[ends] = LinkModel(*known, is_given=True)
            else:
                self._declare(ends, DISK_LINK if is_disk else MEMORY_LINK)
        for target in range(num_nodes):
            self._declare((FILE, NodeId(target)), DISK_LINK)

    def _declare(self, ends: tuple[NodeId, NodeId], rough: tuple[float, float]) -> None:
        """Create the model of a link with a rough latency and bandwidth, and with the copies measured so far."""
        known = self.links.get(ends)
        link = self.links[ends] = LinkModel(*rough)
        if known is not None and not known.is_given:
            link.remember(known.samples)
            link.fit()

    def measured(self, key: Key) -> float | None:
        """Return the mean duration of a series without spikes in seconds; None without samples."""
        series = self.series.get(key)
        return None if series is None else series.typical

    def task_seconds(self, task: Task, kind: WorkerKind) -> float:
        """Return the measured duration, or else a guess."""
        return self.spec_seconds(task.spec, kind)

    def spec_seconds(self, task: TaskSpec, kind: WorkerKind) -> float:
        """Return the same for a task that is only recorded."""
        key = (*key_of(task), kind)
        seconds = self.measured(key)
        if seconds is None:
            seconds = self._guesses.get(key)
            if seconds is None:
                seconds = self._guesses[key] = self._guess(task, kind)
        return seconds

    def is_known(self, task: Task, kind: WorkerKind) -> bool:
        """Return whether enough durations have been measured."""
        series = self.series.get((*key_of(task.spec), kind))
        return series is not None and len(series.samples) >= CALIBRATED

    def _guess(self, task: TaskSpec, kind: WorkerKind) -> float:
        """Return the cost divided by the rates of the worker: the larger of the times for operations and for bytes."""
        cost, rate = _cost(task), RATES.get(kind)
        if cost is None or rate is None:
            return UNKNOWN_SECONDS
        return max(cost[0] / rate.flops, cost[1] / rate.nbytes)

    def transfer_seconds(self, source: NodeId, target: NodeId, nbytes: int) -> float:
        """Return latency + bytes / bandwidth."""
        return 0.0 if source == target else self._link(source, target).seconds(nbytes)

    def _link(self, source: NodeId, target: NodeId) -> LinkModel:
        link = self.links.get((source, target))
        if link is None:
            link = self.links[source, target] = LinkModel()
        return link
