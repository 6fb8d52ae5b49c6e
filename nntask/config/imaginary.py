"""Imaginary machines described by flags, such as ``--devices 8x80GiB@150TF``."""

from __future__ import annotations

import re
from typing import Final

from ..errors import UsageError
from ..hardware.gpus import check_sharing, check_updaters
from ..hardware.imaginary import ImaginaryMachine
from ..hardware.machine_model import DEVICE_FLOPS, MachineModel
from ..io.units import flag_size, parse_rate, parse_size
from .disk import imaginary_disk_of
from .machine import request_of
from .settings import ResourceSettings
from .validation import check_most

DEFAULT_LINK: Final = "25GB/s"
"""Rate between host memory and each imaginary device, in each direction."""
DEFAULT_DISK_RATE: Final = "1.6GB/s"
"""Rate from and to the disk of an imaginary machine, of all requests in flight and both directions together."""
DEFAULT_RAM_RATE: Final = "100GB/s"
"""Rate at which all CPU workers of an imaginary machine together read and write its RAM when they update weights."""
BOUNDLESS: Final = 1 << 50
"""Default bytes of an imaginary RAM."""
_FORMS: Final = {"--devices": ("[COUNTx]MEMORY[@FLOPS]", "8x80GiB@150TF"), "--device": ("MEMORY[@FLOPS]", "80GiB@150TF")}
"""Flag -> form of its description of devices, and an example."""
_DEVICES: Final = re.compile(
    r"\s*(?:(\d+)\s*x\s*)?([\d.]+)\s*([a-wyz]*)\s*(?:@\s*(\d+(?:\.\d+)?)\s*(?:([gtp])(?:f|flops?|flop/s)?)?)?\s*",
    re.IGNORECASE | re.ASCII,
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
    count, nbytes, flops = parse_devices(devices)
    check_most("devices", count)
    link_rate = parse_rate(link or DEFAULT_LINK, "--link")
    of_disk = parse_rate(disk_rate or DEFAULT_DISK_RATE, "--disk-rate")
    if disk_rate and not resources.disk:
        raise UsageError(
            "is about the disk of an imaginary machine and it has none", "add --disk 2TB, or drop it", flag="--disk-rate", value=disk_rate
        )
    of_ram = parse_rate(ram_rate or DEFAULT_RAM_RATE, "--ram-rate")
    if ram_rate and resources.update_on == "device":
        raise UsageError(
            "is about updates by CPU workers, and in this plan devices update", "add --update-on auto, or drop it", flag="--ram-rate", value=ram_rate
        )
    if resources.update_on == "cpu":
        check_updaters(resources.ncpu)
    request = request_of(resources, has_disk=False)
    check_sharing(request, has_devices=True)
    if request.sharing == "pinned":
        raise UsageError(
            "repeats a run on this machine", f"use --sched {resources.sched}@mixed", flag="--sched", value=f"{resources.sched}@{resources.assignment}"
        )
    return ImaginaryMachine(
        count=count,
        nbytes=nbytes,
        flops=flops,
        link_rate=link_rate,
        ram=parse_size(resources.ram, "--ram") if resources.ram else BOUNDLESS,
        disk=imaginary_disk_of(resources.disk),
        disk_rate=of_disk,
        ram_rate=of_ram,
        num_cpu=resources.ncpu,
        sched=resources.sched,
        updates_on_cpu=resources.update_on == "cpu",
        is_mixed=request.sharing == "mixed",
    ).model()


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
    for name, has_unit in (("MEMORY", unit), ("FLOPS", scale or not rate)):
        if not has_unit:
            raise UsageError(f"{rule}, whose {name} has no unit", f"for example {example}", flag=flag)
    flops = float(rate) * _SCALE[scale.upper()] if rate else DEVICE_FLOPS
    if flops <= 0:
        raise UsageError(f"must be able to compute, got {text!r}", f"for example {example}", flag=flag)
    try:
        nbytes = parse_size(memory + unit, "")
    except UsageError as error:
        raise UsageError(f"must be {form}, and MEMORY {error.fact}", error.remedy, flag=flag) from None
    return int(count or 1), nbytes, flops


def format_devices(count: int, nbytes: int, flops: float) -> str:
    """Return text that `parse_devices` reads as `count` devices of at least `nbytes` bytes."""
    scale, unit = next(((scale, unit) for unit, scale in reversed(_SCALE.items()) if flops >= scale), (1e9, "G"))
    rate = f"{flops / scale:.9f}".rstrip("0").rstrip(".")
    return f"{count}x{flag_size(nbytes)}" + ("" if flops == DEVICE_FLOPS else f"@{rate}{unit}F")
