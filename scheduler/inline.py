"""The simplest runtime there is: every task runs inside `submit`, on the caller's thread.

It is the oracle the real runtime is tested against: by construction it is sequentially consistent. It has no budgets and no workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from .codelet import Codelet
from .core.records import DataClass, Kind, Mode
from .drivers.disk import Source
from .frontend import Access, Handle, TaskRuntime, Terms, View, lent


class InlineRuntime(TaskRuntime):
    """Runs tasks at once, in submission order."""

    def handle(
        self,
        nbytes: int,
        view: View,
        *,
        name: str = "",
        kind: Kind = "temporary",
        data_class: DataClass = "activations",
        combine: Codelet | None = None,
    ) -> Handle:
        """Register data; the memory is taken here and given back with the last reference."""
        memory = bytearray(max(nbytes, 1))
        return Handle(memory, nbytes, view, name=name, kind=kind, data_class=data_class, combine=combine, inbox=None)

    def acquire(self, handle: Handle, mode: Mode) -> AbstractContextManager[Any]:
        """Lend the data; there is nothing to wait for."""
        self._make_whole(handle, mode)
        return lent(handle.view(handle.record, 0))

    def _attach(self, handle: Handle, source: Source) -> None:
        # at once, like everything here
        source.read(handle.view(handle.record, 0), memoryview(bytearray(source.scratch_nbytes)))

    def wait(self) -> None:
        """Return: nothing is ever pending."""

    @property
    def recording(self) -> bool:
        """Always False: this runtime does not record."""
        return False

    def _examine(self, codelet: Codelet, accesses: Sequence[Access], *, combines: bool = False) -> Terms:
        if codelet.cpu is None:
            raise ValueError(f"{codelet!r} has no CPU implementation; register one or use a runtime with its device")
        return ("cpu",), None

    def _submit(self, codelet: Codelet, accesses: Sequence[Access], constants: Mapping[str, Any], priority: int, terms: Terms) -> None:
        assert codelet.cpu is not None  # _examine() has looked
        codelet.cpu(*[handle.view(handle.record, 0) for handle, _ in accesses], **constants)
