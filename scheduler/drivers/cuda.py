"""CUDA workers: what the runtime asks of a GPU, and the thread that runs a GPU's tasks.

Knows no CUDA: a `Gpu` carries everything out, CuPy behind it or, in tests, the CPU. Each thread that uses a GPU has a stream of its own there, so
kernels and both directions of copies overlap. A thread waits for what it started before it reports the end; waiting releases the interpreter.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from ..core.records import Task
from .cpu import WorkerThread


class Gpu(Protocol):
    """One GPU, or a part of one. What a thread starts is carried out in its order, and beside what other threads start."""

    @property
    def name(self) -> str:
        """As reports call it."""

    def reserve(self, nbytes: int) -> int:
        """Take memory for good.

        Returns:
            Its address.

        Raises:
            MemoryError: there is not so much.
        """

    def release(self, address: int) -> None:
        """Give it back."""

    def enter(self) -> None:
        """Kernels that the calling thread runs from now on are for this GPU."""

    def upload(self, target: int, source: int, nbytes: int) -> None:
        """Start a copy from an address of host memory to one of the GPU's."""

    def download(self, target: int, source: int, nbytes: int) -> None:
        """Start a copy from an address of the GPU's memory to one of host memory."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Start a copy within the GPU's memory; the ranges do not overlap."""

    def wait(self) -> None:
        """Until all that the calling thread has started is done.

        Raises:
            Exception: it failed.
        """


_here = threading.local()


def copy_on_gpu(source: Any, target: Any) -> None:
    """Copy one view over another of the same size, on the GPU whose worker runs this."""
    gpu: Gpu = _here.gpu
    gpu.copy(target.address, source.address, target.nbytes)


class CudaThread(WorkerThread):
    """The worker of a GPU.

    Args:
        gpu: whose tasks it runs.
    """

    def __init__(self, gpu: Gpu, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gpu = gpu

    def run(self) -> None:
        """Run tasks until told to stop."""
        self.gpu.enter()
        _here.gpu = self.gpu
        super().run()

    def compute(self, task: Task, views: list[Any]) -> None:
        """Start the task's kernels and wait for them."""
        task.codelet.cuda(*views, **task.constants)  # type: ignore[attr-defined]
        self.gpu.wait()
