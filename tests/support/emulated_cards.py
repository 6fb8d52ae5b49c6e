"""Two cards whose devices are emulated, in place of those that CUDA shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from support.cuda_emulator import Emulator

from scheduler.drivers.cuda_cupy import GpuFacts, choose_gpus

GIB: Final = 1 << 30
CARDS: Final = [GpuFacts(0, "Emulated", 90, 8 * GIB, 6 * GIB), GpuFacts(1, "Emulated", 90, 8 * GIB, 7 * GIB)]


class EmulatedCards:
    """Cards of a machine; all of them means the first one.

    Attributes:
        opened: the devices of the last run.
        fails_after: what the last device is to be told.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[Emulator] = []
        self.fails_after: int | None = None

    def choose(self, count: int | None) -> list[GpuFacts]:
        return CARDS[:1] if count is None else choose_gpus(count, lambda: CARDS)

    def open(self, facts: Sequence[tuple[GpuFacts, int | None]], *, tf32: bool, dtype: str) -> list[Any]:
        self.opened = []
        for number, _ in enumerate(facts):
            self.opened.append(Emulator(self.folder, peer=self.opened[0] if number else None))
        self.opened[-1].fails_after = self.fails_after
        return list(self.opened)
