"""How long tasks and copies will take: measured where there are measurements, guessed from operations and bytes where there are none.

Tasks. One series of durations per (codelet, footprint, worker kind). The footprint is a stable number for everything that decides a task's cost:
shapes, dtypes and modes of its tiles, and its constants (`footprint` says which). The first duration a process measures of a series is dropped
(cold caches, lazy set-up); the estimate is the mean of the latest ones without spikes, those beyond twice the median: where copies take cycles and
bandwidth from kernels many durations lie above the median and few below, and a step takes their sum. Without any, the codelet's cost function over
what the kind of worker does per second.

Links. A `LinkModel` per (source, target).

Rules: durations come in as arguments, nothing here knows time, tasks in flight or files (`storage.performance_store` keeps models between runs).
Nothing is locked: threads record under the machine's lock.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Final, NamedTuple, Protocol, cast

from .link_model import DISK_LINK, MEMORY_LINK, LinkModel, median
from .records import FILE, NodeId, Task, WorkerKind

KEPT: Final = 32
"""Durations remembered per series."""

SPIKE: Final = 2.0
"""Durations of more than so many times the median are those of something else."""

UNKNOWN_SECONDS: Final = 1e-4
"""What a task without measurements and cost function is taken to last."""

Key = tuple[str, int, str]
"""(codelet name, footprint, worker kind)."""


class Rate(NamedTuple):
    """What a kind of worker does at best: floating-point operations, and bytes read plus written, per second."""

    flops: float
    nbytes: float


RATES: Final[Mapping[WorkerKind, Rate]] = {"cpu": Rate(5e10, 1e10), "sim": Rate(5e10, 1e10), "cuda": Rate(2e13, 1.5e12)}
"""Rough rates of one worker, until they are measured."""


class MemoryView(Protocol):
    """What estimates need to know of the memory nodes at this moment; `MemoryStatus` is one."""

    def free_bytes(self, node: NodeId) -> int:
        """Bytes of the node's budget that nothing uses."""

    def queued_bytes(self, source: NodeId, target: NodeId) -> int:
        """Bytes on their way over a link, the copy under way included."""

    def below(self, node: NodeId) -> NodeId:
        """The node that takes what is evicted from `node`; `node` itself if nothing lies below it."""


class Boundless:
    """Memory without limits or traffic."""

    def free_bytes(self, node: NodeId) -> int:
        """More than anything needs."""
        return 1 << 62

    def queued_bytes(self, source: NodeId, target: NodeId) -> int:
        """Nothing is on its way."""
        return 0

    def below(self, node: NodeId) -> NodeId:
        """Nothing is evicted."""
        return node


class Estimates(Protocol):
    """What cost-based policies ask.

    Attributes:
        memory: the nodes; `Machine.memory`, once there is a machine.
    """

    memory: MemoryView

    def task_seconds(self, task: Task, kind: WorkerKind) -> float:
        """Seconds the task will run on a worker of that kind."""

    def transfer_seconds(self, source: NodeId, target: NodeId, nbytes: int) -> float:
        """Seconds to move so many bytes over an idle link; 0 from a node to itself."""


class NoEstimates:
    """Every task takes a second, copies take no time."""

    def __init__(self) -> None:
        self.memory: MemoryView = Boundless()

    def task_seconds(self, task: Task, kind: WorkerKind) -> float:
        """One second."""
        return 1.0

    def transfer_seconds(self, source: NodeId, target: NodeId, nbytes: int) -> float:
        """No time."""
        return 0.0


NO_ESTIMATES: Final = NoEstimates()
"""For policies made without models."""


class Given:
    """Estimates known beforehand, as in virtual time.

    Args:
        duration: seconds of a task on a kind of worker.
        transfer: seconds of a copy from node to node; None for copies that take no time.
    """

    def __init__(self, duration: Callable[[Task, WorkerKind], float], transfer: Callable[[NodeId, NodeId, int], float] | None = None) -> None:
        self.memory: MemoryView = Boundless()
        self._duration = duration
        self._transfer = transfer

    def task_seconds(self, task: Task, kind: WorkerKind) -> float:
        """As given."""
        return self._duration(task, kind)

    def transfer_seconds(self, source: NodeId, target: NodeId, nbytes: int) -> float:
        """As given."""
        return 0.0 if self._transfer is None or source == target else self._transfer(source, target, nbytes)


class _View(Protocol):
    """What footprints look at in a handle's view, where it is there."""

    shape: tuple[int, ...]
    dtype: object


class _Codelet(Protocol):
    """What is asked of a codelet: its cost is (flops, bytes)."""

    cost: Callable[[Sequence[object], Mapping[str, object]], tuple[float, float]] | None


_dtypes: dict[object, str] = {}
"""Names of dtypes; NumPy takes microseconds to make one."""


def footprint(task: Task) -> int:
    """A number that tasks of equal cost share: the CRC-32 of everything their cost may depend on, the same in every process.

    That is each access's mode, shape and dtype (or size, of views that have no shape), the constants that are bool or str, and the cost function's
    answer. Numeric constants count by themselves only where there is no cost function: seeds and offsets are numbers too, and cost nothing.
    """
    terms: list[str] = []
    for handle, mode in task.accesses:
        view = cast(_View, handle.view)
        if hasattr(view, "shape") and hasattr(view, "dtype"):
            dtype = _dtypes.get(view.dtype)
            if dtype is None:
                dtype = _dtypes[view.dtype] = str(view.dtype)
            terms.append(f"{mode} {view.shape} {dtype}")
        else:
            terms.append(f"{mode} {handle.nbytes}")
    cost = _cost(task)
    types = (bool, str) if cost is not None else (bool, str, int, float)
    terms += [f"{name}={value!r}" for name, value in sorted(task.constants.items()) if isinstance(value, types)]
    if cost is not None:
        terms.append(f"{cost[0]:.6g} {cost[1]:.6g}")
    return zlib.crc32(";".join(terms).encode())


def key_of(task: Task) -> tuple[str, int]:
    """Codelet name and footprint of a task, which it keeps."""
    if task.model_key is None:
        task.model_key = (task.name, footprint(task))
    return task.model_key


def _cost(task: Task) -> tuple[float, float] | None:
    """(flops, bytes) of a task, if its codelet says."""
    cost = cast(_Codelet, task.codelet).cost if hasattr(task.codelet, "cost") else None
    return None if cost is None else cost([handle.view for handle, _ in task.accesses], task.constants)


class Series:
    """The latest durations of one kind of task, and what the next one will take.

    Attributes:
        samples: seconds, oldest first.
        is_warm: whether this process has dropped its first one.
    """

    __slots__ = ("_typical", "is_warm", "samples")

    def __init__(self, samples: Sequence[float] = ()) -> None:
        self.samples = deque(samples, KEPT)
        self._typical: float | None = None  # of the samples as they are, once asked for
        self.is_warm = False

    def add(self, seconds: float) -> None:
        """Record a duration; the first is dropped."""
        if self.is_warm:
            self.samples.append(seconds)
            self._typical = None
        else:
            self.is_warm = True

    @property
    def typical(self) -> float | None:
        """Mean without spikes, in seconds; None without samples."""
        if self._typical is None and self.samples:
            limit = SPIKE * median(self.samples)
            kept = [seconds for seconds in self.samples if seconds <= limit]
            self._typical = sum(kept) / len(kept)
        return self._typical


class History:
    """Measured durations by key.

    Attributes:
        series: everything known; `storage.performance_store` reads and fills it.
    """

    def __init__(self) -> None:
        self.series: dict[Key, Series] = {}

    def add(self, key: Key, seconds: float) -> None:
        """Record a duration; the first of each key is dropped."""
        series = self.series.get(key)
        if series is None:
            series = self.series[key] = Series()
        series.add(seconds)

    def estimate(self, key: Key) -> float | None:
        """Mean duration in seconds without spikes, or None without samples."""
        series = self.series.get(key)
        return None if series is None else series.typical


class Models:
    """Estimates from measurements.

    Args:
        rates: what a worker of each kind does per second, for tasks that were never measured.

    Attributes:
        history: durations of tasks.
        links: models of links by (source, target); `declare_links` says what is known of them before any copy.
    """

    def __init__(self, rates: Mapping[WorkerKind, Rate] = RATES) -> None:
        self.memory: MemoryView = Boundless()
        self.history = History()
        self.links: dict[tuple[NodeId, NodeId], LinkModel] = {}
        self._rates = {**RATES, **rates}
        self._guesses: dict[Key, float] = {}

    def record(self, task: Task, kind: WorkerKind, seconds: float) -> None:
        """Take note of how long a task ran. Under a microsecond for a task whose `model_key` is known, as in any replay but the first."""
        key = (*key_of(task), kind)
        series = self.history.series.get(key)
        if series is None:
            self.history.add(key, seconds)
        else:
            series.add(seconds)

    def record_copy(self, source: NodeId, target: NodeId, nbytes: int, seconds: float) -> None:
        """Take note of how long a copy took once it had the link to itself."""
        self._link(source, target).add(nbytes, seconds)

    def declare_links(
        self, num_nodes: int, *, storage: bool, given: tuple[float, float] | None = None, disk: tuple[float, float] | None = None
    ) -> None:
        """Say what is known of the links between nodes before any copy; where copies have been measured, they know better.

        Args:
            storage: whether the last node is a disk tier.
            given: latency in seconds and bytes per second of every link between memories, if they are simulated or imaginary.
            disk: the same of each request in flight of the disk tier, if that is imaginary.
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
        """A link with rough latency and bandwidth, and with the samples that there are."""
        known = self.links.get(ends)
        link = self.links[ends] = LinkModel(*rough)
        if known is not None and not known.is_given:
            link.remember(known.samples)
            link.fit()

    def task_seconds(self, task: Task, kind: WorkerKind) -> float:
        """What was measured, else a guess."""
        key = (*key_of(task), kind)
        seconds = self.history.estimate(key)
        if seconds is None:
            seconds = self._guesses.get(key)
            if seconds is None:
                seconds = self._guesses[key] = self._guess(task, kind)
        return seconds

    def _guess(self, task: Task, kind: WorkerKind) -> float:
        """The cost function over the rates of the worker, whichever binds."""
        cost, rate = _cost(task), self._rates.get(kind)
        if cost is None or rate is None:
            return UNKNOWN_SECONDS
        return max(cost[0] / rate.flops, cost[1] / rate.nbytes)

    def transfer_seconds(self, source: NodeId, target: NodeId, nbytes: int) -> float:
        """Latency + bytes / bandwidth."""
        return 0.0 if source == target else self._link(source, target).seconds(nbytes)

    def _link(self, source: NodeId, target: NodeId) -> LinkModel:
        link = self.links.get((source, target))
        if link is None:
            link = self.links[source, target] = LinkModel()
        return link
