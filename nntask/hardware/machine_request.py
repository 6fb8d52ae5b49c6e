"""Devices and memory that the flags of a process ask for, in numbers and bytes: the input of `machine_spec`.

`nntask.config.machine.request_of` makes it from settings. Texts of flags are only for messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Sharing = Literal["", "mixed", "pinned"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Size of a memory.

    Args:
        nbytes: size to plan with, in bytes; 0 before a default is filled in.
        is_given: whether a flag sets the size; otherwise it is a share of the free memory or disk.
        text: value of the flag, for messages; "" for the default.
    """

    nbytes: int
    is_given: bool
    text: str = ""

    @property
    def given(self) -> int | None:
        """Bytes that a flag sets; None for the default."""
        return self.nbytes if self.is_given else None


NO_BUDGET: Final = Budget(0, is_given=False)


@dataclass(frozen=True, slots=True)
class DeviceSize:
    """Requested budget of each GPU or simulated device.

    Args:
        nbytes: bytes; 0 if a share is requested.
        share: share of a card, above 0 and up to 1; None if bytes are requested.
        text: value of the flag, for messages.
    """

    nbytes: int
    share: float | None
    text: str


@dataclass(frozen=True, slots=True)
class DiskSpec:
    """A disk tier: its directory, and the bytes it may have there."""

    directory: Path
    budget: Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRequest:
    """Devices and memory that flags ask for.

    Args:
        num_cpu: number of CPU workers; None for the default.
        num_gpus: number of GPUs; `gpus.ALL_GPUS` for all, of which there must be one; None for all, if any.
        num_partitions: number of devices that each GPU is divided into.
        num_simulated: number of simulated devices.
        link_rate: bytes per second of each link of a simulated device; None for the speed of memory copies.
        link_text: value from which `link_rate` was read, for messages.
        device: budget of each GPU or simulated device; None for the default.
        ram: budget of host memory.
        disk: disk tier; None without one.
        sched, evict, prefetch, graphs, watchdog: options of the runtime's scheduler, values of the flags of these names.
        update_on: workers that update the weights.
        sharing: whether CPU workers and devices share the tasks that both can run: "" if not, "mixed" by expected end, or "pinned" as recorded.
    """

    num_cpu: int | None
    num_gpus: int | None
    num_partitions: int
    num_simulated: int
    link_rate: float | None
    link_text: str
    device: DeviceSize | None
    ram: Budget
    disk: DiskSpec | None
    sched: str
    evict: str
    prefetch: bool
    graphs: bool
    watchdog: float | None
    update_on: Literal["device", "cpu", "auto"]
    sharing: Sharing = ""
