"""What a training step would need, from emitting its tasks on a runtime that has no memory and runs nothing.

The peak is that of one worker in the order of submission, every tile rounded up to pages: a bound that a machine with prefetching and several
workers may exceed a little, and a tighter order may undercut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from scheduler import SCRATCH, Access, Codelet, DataClass, Handle, Kind, Mode, TaskRuntime, View
from scheduler.core.memory import rounded
from scheduler.frontend import lent
from scheduler.storage.limits import default_ram_budget

from ..models.config import GPT2Config
from ..sizes import parse_size
from .gpt2 import build_model, build_optimizer, emit_training_step
from .prepare import with_tiles
from .rules import resolve
from .settings import TrainSettings

_NODE: Final = "ram"


class _Record:
    """One handle's life: its size and class, and whether it holds memory now."""

    __slots__ = ("data_class", "kind", "live", "size")

    def __init__(self, size: int, data_class: str, kind: str) -> None:
        self.size, self.data_class, self.kind, self.live = size, data_class, kind, False


class ShapesOnly(TaskRuntime):
    """Counts tasks and bytes; a handle holds memory from its first write to its last reference.

    Attributes:
        tasks: number of tasks by name.
        live: bytes held now, by class of data.
        peak: most bytes ever held at once, scratch of the running task included.
        largest_task: most bytes that one task touches.
    """

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        self.tasks: Counter[str] = Counter()
        self.live: Counter[str] = Counter()
        self.peak_by_class: Counter[str] = Counter()
        self.persistent = 0
        self.peak = 0
        self.largest_task = 0

    def append(self, record: _Record) -> None:
        """A handle is gone."""
        if record.live:
            self.live[record.data_class] -= record.size

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
        """Register data."""
        record = _Record(rounded(nbytes), data_class, kind)
        return Handle(record, nbytes, view, name=name, kind=kind, data_class=data_class, combine=combine, inbox=self)

    def acquire(self, handle: Handle, mode: Mode) -> AbstractContextManager[Any]:
        """Lend memory that nobody reads again."""
        self._touch(handle)
        return lent(handle.view(bytearray(max(handle.nbytes, 1)), 0))

    def wait(self) -> None:
        """Nothing is ever pending."""

    @property
    def recording(self) -> bool:
        """Always True: values cannot be asked for."""
        return True

    def _submit(self, codelet: Codelet, accesses: Sequence[Access], constants: Mapping[str, Any], priority: int) -> None:
        self.tasks[codelet.name] += 1
        scratch = touched = 0
        for handle, mode in accesses:
            touched += handle.record.size
            if mode == SCRATCH:
                scratch += handle.record.size
            else:
                self._touch(handle)
        self.largest_task = max(self.largest_task, touched)
        self.peak_by_class[SCRATCH] = max(self.peak_by_class[SCRATCH], scratch)
        self.peak = max(self.peak, sum(self.live.values()) + scratch)

    def _touch(self, handle: Handle) -> None:
        record: _Record = handle.record
        if not record.live:
            record.live = True
            self.live[record.data_class] += record.size
            self.persistent += record.size if record.kind == "persistent" else 0
            self.peak_by_class[record.data_class] = max(self.peak_by_class[record.data_class], self.live[record.data_class])


def plan_run(settings: TrainSettings, config: GPT2Config) -> dict[str, Any]:
    """The figures of ``nntask plan --json``, and some for people.

    Raises:
        UsageError: a rule is broken.
    """
    settings, tiling = with_tiles(resolve(settings, config), config)
    runtime = ShapesOnly(settings.tiling.lanes or 1)
    model = build_model(config, tiling, runtime, settings)
    optimizer = build_optimizer(model, settings)
    count = (settings.tiling.batch or 1) // settings.tiling.minibatch
    inputs = [model.input_tensors(settings.tiling.minibatch, settings.model.seq_len) for _ in range(count)]
    for tensor in (tensor for pair in inputs for tensor in pair):
        for handle in tensor.handles:
            with runtime.acquire(handle, "W"):
                pass
    runtime.tasks.clear()
    runtime.peak = sum(runtime.live.values())
    emit_training_step(model, optimizer, inputs)
    budget = parse_size(settings.resources.ram, "--ram") if settings.resources.ram else default_ram_budget()
    return {
        "feasible": runtime.peak <= budget,
        "peak_bytes": {_NODE: runtime.peak},
        "minimum_budget_bytes": {_NODE: runtime.peak},
        "persistent_bytes": {_NODE: runtime.persistent},
        "moved_bytes_per_step": {},
        "tasks_per_step": runtime.tasks.total(),
        "seconds_per_step": None,
        "parameters": config.num_parameters,
        "budget_bytes": {_NODE: budget},
        "bytes_by_class": {name.lower(): nbytes for name, nbytes in sorted(runtime.peak_by_class.items())},
        "tasks_by_name": dict(runtime.tasks.most_common()),
        "tiles": {name: getattr(tiling, name) for name in tiling.__slots__},
    }
