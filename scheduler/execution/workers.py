"""The workers of the runtime: the memory of its nodes, and the threads that compute and copy there.

The machine decides their work. They report results to the machine through the `executor`, whose lock guards both.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from ..core.events import CopyTile, DiscardExtent, MoveTile
from ..core.records import RAM, NodeId, Replica, Task, Worker, WorkerId, WorkerKind
from ..drivers.cpu import WorkerRuntime, WorkerThread, cores_for
from ..drivers.cuda import CudaCopier, CudaThread
from ..drivers.disk import DiskEngine
from ..drivers.gpu import Gpu
from ..drivers.sim import CopyEngine
from ..storage.arena import HostArena
from ..storage.device import Arena, DeviceArena, PinnedRange
from ..storage.tier import DiskTier
from .watchdog import Watchdog, Watched, watchdog_seconds

SWITCH_SECONDS: Final = 5e-4
"""Longest time in seconds that a thread waits for the interpreter when it needs it for microseconds, to hand out the next task, while another thread
computes in Python."""
SWITCH_WORKERS: Final = 8
"""Number of workers from which that time grows in proportion: every waiting thread wakes up when it has passed, so a long queue of them would spend
its processor time on waking up."""

SIM_DEPTH: Final = 3
"""Number of tasks admitted to a device at a time: one runs while the data of the next ones arrives."""
ASIDE_DEPTH: Final = 2
"""Number of tasks admitted to a CPU worker that stands aside: one runs while the input of the next one arrives from a device."""


class PoolRuntime(WorkerRuntime, Watched, Protocol):
    """The part of the runtime that the threads of a pool use."""

    def copied(self, action: CopyTile, start_ns: int, end_ns: int) -> None:
        """Report a finished copy."""

    def not_copied(self, action: CopyTile, error: BaseException) -> None:
        """Report a copy that failed: a file could not be read, or the disk tier could not be written."""


class WorkerPool:
    """The memory of the nodes, and the threads that compute and copy there.

    Args:
        executor: receiver of the events.
        budgets: (name, bytes) of each memory node except the disk, host memory first.
        tier: the disk tier; None for none.
        gpus: the GPUs, to which the last entries of `budgets` belong.
        watchdog: seconds without an ended task after which a standstill is reported; None for the value of the environment variable, if it is set.

    Attributes:
        arenas: memory of each node except the disk.
        workers: threads that compute.

    Raises:
        ValueError: the environment variable is not a positive number.
    """

    def __init__(
        self, executor: PoolRuntime, budgets: Sequence[tuple[str, int]], tier: DiskTier | None, gpus: Sequence[Gpu], watchdog: float | None
    ) -> None:
        patience = watchdog_seconds(os.environ) if watchdog is None else watchdog
        self._watchdog = None if patience is None else Watchdog(executor, patience)
        self.gpus = list(gpus)
        num_host = len(budgets) - len(gpus)
        hosts = [HostArena(budget) for _, budget in budgets[:num_host]]
        self.arenas: list[Arena] = [*hosts]
        self._pinned = PinnedRange(self.gpus[0], hosts[RAM], budgets[RAM][1]) if self.gpus else None
        self.arenas += [DeviceArena(gpu, budget, self._pinned) for gpu, (_, budget) in zip(self.gpus, budgets[num_host:], strict=True)]
        self.workers: dict[WorkerId, WorkerThread] = {}
        self._executor = executor
        self._copiers: dict[tuple[NodeId, NodeId], CopyEngine | CudaCopier] = {}
        self._tier = tier
        self._files: DiskEngine | None = None
        if tier is not None:
            self.open_files()

    @property
    def pinned_nbytes(self) -> int:
        """Number of page-locked bytes of host memory."""
        return 0 if self._pinned is None else self._pinned.nbytes

    def start(self, cpu_workers: int, sim_gpus: int, bandwidth: float | None, *, aside: bool) -> Iterator[Worker]:
        """Start the threads, one worker after another; yield each worker once it runs.

        Args:
            cpu_workers: number of threads that run CPU kernels.
            sim_gpus: number of simulated devices.
            bandwidth: bytes per second of each simulated link; None for the speed of memory copies.
            aside: whether CPU workers stand aside, see `Worker`.
        """
        if self._watchdog is not None:
            self._watchdog.start()
        num_devices = sim_gpus + len(self.gpus)
        kind: WorkerKind = "cuda" if self.gpus else "sim"
        nodes = [RAM, *(NodeId(1 + i) for i in range(num_devices))]
        for source, target in itertools.permutations(nodes, 2):
            copier = self._copiers[source, target] = self._copier(source, target, bandwidth)
            copier.start()
        workers = [Worker(WorkerId(i), "cpu", RAM, ASIDE_DEPTH if aside else 1, aside) for i in range(cpu_workers)]
        workers += [Worker(WorkerId(cpu_workers + i), kind, NodeId(1 + i), depth=SIM_DEPTH) for i in range(num_devices)]
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS * max(1, len(workers) / SWITCH_WORKERS)))
        for worker, core in zip(workers, cores_for(len(workers)), strict=True):
            arena = self.arenas[worker.node]
            about = (self._executor, worker, arena.memory, worker_name(worker), core)
            thread = CudaThread(arena, *about) if isinstance(arena, DeviceArena) else WorkerThread(*about)
            self.workers[worker.id] = thread
            thread.start()
            yield worker

    def _copier(self, source: NodeId, target: NodeId, bandwidth: float | None) -> CopyEngine | CudaCopier:
        """Create the thread that copies from one memory to another."""
        name, executor = f"copy {source}->{target}", self._executor
        for node in (target, source):
            arena = self.arenas[node]
            if isinstance(arena, DeviceArena):
                return CudaCopier(self.arenas, arena.gpu, executor.copied, executor.fail, name)
        hosts = [arena for arena in self.arenas if isinstance(arena, HostArena)]
        return CopyEngine(hosts, executor.copied, executor.fail, bandwidth, name)

    def open_files(self) -> None:
        """Start the threads that read and write files, unless they already run."""
        if self._files is None:
            executor = self._executor
            self._files = DiskEngine(self.arenas, self._tier, NodeId(len(self.arenas)), executor.copied, executor.not_copied, executor.fail)
            self._files.start()

    def run(self, task: Task) -> None:
        """Post a task to its worker."""
        self.workers[task.worker].mailbox.put(task)

    def copy(self, action: CopyTile) -> None:
        """Post a copy to the thread of its link."""
        copier = self._copiers.get((action.source.node, action.target.node)) or self._files
        assert copier is not None  # only links from and to files have no engine of their own
        copier.put(action)

    def move(self, action: MoveTile) -> None:
        """Move data within a node before any other action there."""
        arena = self.arenas[action.node]
        if isinstance(arena, DeviceArena):
            arena.flow.move(arena.address + action.offset, arena.address + action.source_offset, action.nbytes)
        else:
            arena.copy_from(arena, action.source_offset, action.offset, action.nbytes)

    def discard(self, action: DiscardExtent) -> None:
        """Return an extent of the disk tier, which no replica occupies any more, to the file system."""
        assert self._tier is not None
        self._tier.discard(action.offset, action.nbytes)

    def view_of(self, replica: Replica) -> Any:
        """Return the program's view of data in host memory."""
        if replica.view is None:
            replica.view = replica.handle.spec.view(self.arenas[RAM].memory, replica.offset)  # type: ignore[operator]
        return replica.view

    def wait_for_gpus(self) -> None:
        """Wait until the GPUs have ended all submitted work.

        Raises:
            DeviceFailed: a GPU has failed.
        """
        for thread in self.workers.values():
            if isinstance(thread, CudaThread):
                thread.drain()

    def stop(self) -> None:
        """Stop the threads after their present kernels and copies."""
        if self._watchdog is not None:
            self._watchdog.close()
        threads: list[WorkerThread | CopyEngine | CudaCopier | DiskEngine] = [*self.workers.values(), *self._copiers.values()]
        if self._files is not None:
            threads.append(self._files)
        for thread in threads:
            thread.stop()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Release the memory of the GPUs, whose threads have ended."""
        owners = [self._pinned, *(arena for arena in self.arenas if isinstance(arena, DeviceArena)), *self.gpus]
        for owner in owners:
            with contextlib.suppress(RuntimeError):  # a GPU that has failed cannot release memory
                if owner is not None:
                    owner.close()


def worker_name(worker: Worker) -> str:
    """Return the name of a worker in reports, such as "cpu:0" or "sim:1"."""
    return f"cpu:{worker.id}" if worker.kind == "cpu" else f"{worker.kind}:{worker.node - 1}"
