"""Imaginary machines: devices that reach their peak, links of the given rate, and host memory without workers; and tile sizes for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scheduler.drivers import THREADS
from scheduler.machine import SIM_DEPTH, Models, Rate, WorkerKind, policy_of

from ..architecture.family_config import ModelConfig
from ..tiling.model_tiling import ModelTiling, divisors, even, whole_groups
from .machine_model import DEVICE_BANDWIDTH, DISK, RAM, MachineModel

NUM_CPU: Final = 8
"""Default number of CPU workers that update weights or share tasks with devices."""
LATENCY: Final = 1e-5
"""Seconds of a copy over such a link, or of a request to such a disk, before its first byte."""

COARSE_SHARE: Final = 128
"""A weight tile of an imaginary device takes at most this fraction of its memory, or `LARGEST_SHARE` if a step would have too many tasks."""
LARGEST_SHARE: Final = 16
COARSE_VOCAB: Final = 8
"""Smallest number of vocabulary tiles on imaginary devices. Minibatches add to the gradient of each tile in turn, so with one tile they would go
through the head one by one."""
COARSE_TOKENS: Final = 8192
"""Largest number of tokens per tile on imaginary devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImaginaryMachine:
    """An imaginary machine in numbers.

    Args:
        count, nbytes, flops: number of devices, bytes of each, and flop/s of each.
        link_rate: bytes per second of each link.
        ram, disk: bytes of host memory, and of the disk tier; None for no disk tier.
        disk_rate: bytes per second of the disk tier, all requests in flight together.
        ram_rate: bytes per second that all CPU workers together read and write when they update weights.
        num_cpu: number of CPU workers; None for none, or for `NUM_CPU` if they update weights or share tasks.
        sched: name of the scheduling policy, or "auto".
        updates_on_cpu: whether CPU workers update the weights, and do nothing else.
        is_mixed: whether CPU workers and devices share the tasks that both can run.
    """

    count: int
    nbytes: int
    flops: float
    link_rate: float
    ram: int
    disk: int | None
    disk_rate: float
    ram_rate: float
    num_cpu: int | None
    sched: str
    updates_on_cpu: bool
    is_mixed: bool = False

    def model(self) -> MachineModel:
        """Return the machine to plan for, with links of one rate to host memory and between devices."""
        nodes = [(RAM, self.ram), *((f"gpu:{at}", self.nbytes) for at in range(self.count))]
        if self.disk is not None:
            nodes.append((DISK, self.disk))
        workers: list[tuple[WorkerKind, int, int]] = [("sim", 1 + at, SIM_DEPTH) for at in range(self.count)]
        workers += [("cpu", 0, 1)] * (NUM_CPU if self.is_mixed and self.num_cpu is None else self.num_cpu or 0)
        models, policy = Models(), policy_of(self.sched, self.count, is_mixed=self.is_mixed)
        models.declare_links(len(nodes), storage=self.disk is not None, given=(LATENCY, self.link_rate), disk=(LATENCY, self.disk_rate / THREADS))
        rates: dict[WorkerKind, Rate] = {"sim": Rate(self.flops, DEVICE_BANDWIDTH)}
        machine = MachineModel(
            tuple(workers), tuple(nodes), self.disk is not None, models, policy, rates, ram_rate=self.ram_rate, is_mixed=self.is_mixed
        )
        return machine.beside(NUM_CPU if self.num_cpu is None else self.num_cpu) if self.updates_on_cpu else machine


def coarse_tiling(config: ModelConfig, minibatch: int, length: int, target: MachineModel, factor: int = 1) -> ModelTiling:
    """Return large tiles, suited to accelerators and `factor` times the usual size, for `minibatch` sequences of `length` tokens."""
    elements = factor * target.largest_node_nbytes // COARSE_SHARE // 4  # of a tile in fp32
    width = even(config.n_embd, max(1, int(elements**0.5)))
    rows = max(1, elements // width)
    return ModelTiling(
        minibatch_tile=max((n for n in divisors(minibatch) if n * length <= COARSE_TOKENS), default=1),
        seq_tile=length,
        embd_tile=width,
        inner_tile=even(config.inner_size, rows),
        head_tile=whole_groups(config, rows // config.head_size),
        vocab_tile=even(config.vocab_size, min(rows, -(-config.vocab_size // COARSE_VOCAB))),
    )
