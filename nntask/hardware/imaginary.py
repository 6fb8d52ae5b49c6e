"""Imaginary machines described by flags (``8x80GiB@150TF``): devices that reach their peak, links of the given rate, and host memory without workers;
and tile sizes for them."""

from __future__ import annotations

import re
from typing import Final

from scheduler.drivers import THREADS
from scheduler.machine import SIM_DEPTH, Models, Rate, WorkerKind, policy_of

from ..architecture.family_config import ModelConfig
from ..config.disk import imaginary_disk_of
from ..config.settings import ResourceSettings
from ..config.validation import check_most
from ..errors import UsageError
from ..io.units import flag_size, parse_rate, parse_size
from ..tiling.model_tiling import ModelTiling, divisors, even, whole_groups
from .gpus import check_updaters
from .machine_model import DEVICE_BANDWIDTH, DEVICE_FLOPS, DISK, RAM, MachineModel

DEFAULT_LINK: Final = "25GB/s"
"""Rate between host memory and each imaginary device, in each direction."""
DEFAULT_DISK_RATE: Final = "1.6GB/s"
"""Rate from and to the disk of an imaginary machine, of all requests in flight and both directions together."""
DEFAULT_RAM_RATE: Final = "100GB/s"
"""Rate at which all CPU workers of an imaginary machine together read and write its RAM when they update weights."""
NUM_CPU: Final = 8
"""Default number of CPU workers that update weights."""
LATENCY: Final = 1e-5
"""Seconds of a copy over such a link, or of a request to such a disk, before its first byte."""
BOUNDLESS: Final = 1 << 50
"""Default bytes of an imaginary RAM."""

COARSE_SHARE: Final = 128
"""A weight tile of an imaginary device takes at most this fraction of its memory, or `LARGEST_SHARE` if a step would have too many tasks."""
LARGEST_SHARE: Final = 16
COARSE_VOCAB: Final = 8
"""Smallest number of vocabulary tiles on imaginary devices. Minibatches add to the gradient of each tile in turn, so with one tile they would go
through the head one by one."""
COARSE_TOKENS: Final = 8192
"""Largest number of tokens per tile on imaginary devices."""

_FORMS: Final = {"--devices": ("[COUNTx]MEMORY[@FLOPS]", "8x80GiB@150TF"), "--device": ("MEMORY[@FLOPS]", "80GiB@150TF")}
"""Flag -> form of its description of devices, and an example."""
_DEVICES: Final = re.compile(
    r"\s*(?:(\d+)\s*x\s*)?([\d.]+)\s*([a-wyz]*)\s*(?:@\s*(\d+(?:\.\d+)?)\s*(?:([gtp])(?:f|flops?|flop/s)?)?)?\s*", re.IGNORECASE
)
_SCALE: Final = {"G": 1e9, "T": 1e12, "P": 1e15}


def imaginary_machine(devices: str, resources: ResourceSettings, link: str = "", disk_rate: str = "", ram_rate: str = "") -> MachineModel:
    """Return a machine of devices with links of one rate to host memory and to each other. It has CPU workers only if --ncpu asks for them or
    they update weights.

    Args:
        devices: ``[COUNTx]MEMORY[@FLOPS]``, for example ``8x80GiB@150TF``.
        link: bytes per second of each link, for example ``55GB/s``.
        disk_rate: bytes per second of the disk tier, all requests in flight together.
        ram_rate: bytes per second that all CPU workers together read and write when they update weights.

    Raises:
        UsageError: a text does not have its form, there is no disk for `disk_rate`, or no worker to update weights.
    """
    count, memory, flops = parse_devices(devices)
    check_most("devices", count)
    bandwidth = parse_rate(link or DEFAULT_LINK, "--link")
    of_disk = parse_rate(disk_rate or DEFAULT_DISK_RATE, "--disk-rate")
    if disk_rate and not resources.disk:
        raise UsageError(f"{disk_rate} is about the disk of an imaginary machine and it has none; add --disk 2TB, or drop it", flag="--disk-rate")
    of_ram = parse_rate(ram_rate or DEFAULT_RAM_RATE, "--ram-rate")
    if ram_rate and resources.update_on == "device":
        raise UsageError(
            f"{ram_rate} is about updates by CPU workers, and in this plan devices update; add --update-on auto, or drop it", flag="--ram-rate"
        )
    if resources.update_on == "cpu":
        check_updaters(resources.ncpu)
    ram = parse_size(resources.ram, "--ram") if resources.ram else BOUNDLESS
    nodes = [(RAM, ram), *((f"gpu:{at}", memory) for at in range(count))]
    disk = imaginary_disk_of(resources.disk)
    if disk is not None:
        nodes.append((DISK, disk))
    workers: list[tuple[WorkerKind, int, int]] = [("sim", 1 + at, SIM_DEPTH) for at in range(count)]
    workers += [("cpu", 0, 1)] * (resources.ncpu or 0)
    models, policy = Models(), policy_of(resources.sched, count)
    models.declare_links(len(nodes), storage=disk is not None, given=(LATENCY, bandwidth), disk=(LATENCY, of_disk / THREADS))
    rates: dict[WorkerKind, Rate] = {"sim": Rate(flops, DEVICE_BANDWIDTH)}
    machine = MachineModel(tuple(workers), tuple(nodes), disk is not None, models, policy, rates, ram_rate=of_ram)
    return machine.beside(NUM_CPU if resources.ncpu is None else resources.ncpu) if resources.update_on == "cpu" else machine


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


def parse_devices(text: str, flag: str = "--devices") -> tuple[int, int, float]:
    """Return the number of devices, the bytes of each and the flop/s of each.

    Args:
        flag: one of `_FORMS`.

    Raises:
        UsageError: `text` does not have the form of the flag.
    """
    form, example = _FORMS[flag]
    rule = f"must be {form}, got {text!r}"
    match = _DEVICES.fullmatch(text)
    if match is None or int(match[1] or 1) < 1 or (match[1] and "COUNT" not in form):
        raise UsageError(rule, f"for example {example}", flag=flag)
    count, memory, unit, rate, scale = match.groups()
    for part, has_unit in (("MEMORY", unit), ("FLOPS", scale or not rate)):
        if not has_unit:
            raise UsageError(f"{rule}, whose {part} has no unit", f"for example {example}", flag=flag)
    flops = float(rate) * _SCALE[scale.upper()] if rate else DEVICE_FLOPS
    if flops <= 0:
        raise UsageError(f"must be able to compute, got {text!r}; for example {example}", flag=flag)
    return int(count or 1), parse_size(memory + unit, f"{flag} must be {form}, and MEMORY"), flops


def format_devices(count: int, nbytes: int, flops: float) -> str:
    """Return text that `parse_devices` reads as `count` devices of at least `nbytes` bytes."""
    scale, unit = next(((scale, unit) for unit, scale in reversed(_SCALE.items()) if flops >= scale), (1e9, "G"))
    rate = f"{flops / scale:.9f}".rstrip("0").rstrip(".")
    return f"{count}x{flag_size(nbytes)}" + ("" if flops == DEVICE_FLOPS else f"@{rate}{unit}F")
