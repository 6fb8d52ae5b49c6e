"""The simplest runtime: every task runs inside `submit`, on the caller's thread.

It is sequentially consistent by construction, and therefore the oracle in the tests of the real runtime. It has no budgets and no workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..core.codelet import Codelet
from ..core.records import HandleSpec, Mode
from ..drivers.disk import Source
from .lanes import Access, Eligible, Handle, Terms
from .task_runtime import TaskRuntime


class InlineRuntime(TaskRuntime):
    """A runtime that runs each task when it is submitted."""

    def _record(self, spec: HandleSpec) -> Any:
        return bytearray(max(spec.nbytes, 1))  # freed with the last reference to the handle

    def acquire(self, handle: Handle, mode: Mode, *, is_shared: bool = False) -> AbstractContextManager[Any]:
        """Return a context manager with the view of the data, without waiting."""
        self._make_whole(handle, mode)
        return nullcontext(handle.view(handle.record, 0))

    def _attach(self, handle: Handle, source: Source) -> None:
        # the source is read immediately, as tasks run immediately
        source.read(handle.view(handle.record, 0), memoryview(bytearray(source.scratch_nbytes)))

    def wait(self) -> None:
        """Return at once: no task is ever pending."""

    @property
    def recording(self) -> bool:
        """Always False: this runtime does not record."""
        return False

    def _examine(self, codelet: Codelet, accesses: Sequence[Access], *, combines: bool = False) -> Eligible:
        if codelet.cpu is None:
            raise ValueError(f"{codelet!r} has no CPU implementation; register one or use a runtime with its device")
        return ("cpu",), None

    def _submit(self, codelet: Codelet, accesses: Sequence[Access], constants: Mapping[str, Any], priority: int, terms: Terms) -> None:
        assert codelet.cpu is not None  # checked by _examine()
        condition = terms[2]
        if condition is not None and condition.guard >= 0:
            guard, _ = accesses[condition.guard]
            if not bytes(guard.view(guard.record, 0))[condition.number]:
                return
        codelet.cpu(*[handle.view(handle.record, 0) for handle, _ in accesses], **constants)
