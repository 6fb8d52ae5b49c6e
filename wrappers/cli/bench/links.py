"""``nntask bench links``: copies between RAM and a simulated device, and writes and reads of the disk tier, through the real arenas and file.

Every link is measured with one copy at a time, for latency and bandwidth, and the disk also with as many requests in flight as in runs. The samples
that a run would have measured go into the performance models, which plans and policies read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

SIZES: Final = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the measured copies."""

Copy = Callable[[int, int], None]
"""(offset, bytes) -> None: copies that many bytes at that offset of both ends."""


@dataclass(frozen=True, slots=True)
class LinksSettings:
    """Measure links between memories, and the disk tier; the rates are kept for plans and policies."""

    json: bool = False
    """print JSON"""
    disk: str = ""
    """directory of the disk tier, made if missing (default: the system's directory for temporary files)"""
    repeats: int = 5
    """copies per size"""
    size: str = "256MiB"
    """disk space to use, at least 64MiB; twice this in memory"""


def run(settings: LinksSettings) -> tuple[dict[str, Any], list[str]]:
    """Return the figures, and the same figures as lines of text.

    Raises:
        UsageError: a flag is wrong.
        DoesNotFit: memory or the disk has too few free bytes.
        StorageError: the directory cannot be written, or the disk is full.
    """
    from nntask import DoesNotFit, StorageError, UsageError
    from nntask.hardware import DISK, RAM, free_bytes
    from nntask.io import parse_size
    from nntask.training import check_tier_directory
    from scheduler import Shortage
    from scheduler.storage import memory_limit

    if settings.repeats < 1:
        raise UsageError(f"must be at least 1, got {settings.repeats}", "use --repeats 5", flag="--repeats")
    nbytes = parse_size(settings.size, "--size")
    if nbytes < 4 * max(SIZES):
        raise UsageError(f"must be at least 64MiB, got {settings.size}", "use --size 256MiB", flag="--size")
    chosen = _directory_of(settings.disk)
    if chosen is not None:
        check_tier_directory(chosen)
    directory = tempfile.gettempdir() if chosen is None else settings.disk
    limit, free = memory_limit(), free_bytes(Path(directory))
    if 2 * nbytes > limit:
        clause = f"{settings.size} takes twice that in memory, {2 * nbytes:,} B, and this process may use {limit:,} B"
        raise DoesNotFit(clause, "lower it", flag="--size", shortage=Shortage("reserve", RAM, 2 * nbytes, limit))
    if nbytes > free:
        clause = f"{settings.size} is {nbytes:,} B, and {free:,} B are free in {directory}"
        raise DoesNotFit(clause, "lower it, or name another --disk", flag="--size", shortage=Shortage("reserve", DISK, nbytes, free))
    try:
        figures = measure(directory, nbytes, settings.repeats)
    except OSError as error:
        raise StorageError(f"{directory}: {error.strerror or error}", "name a directory that can be written", flag="--disk") from error
    return figures, list(_lines(figures))


def _directory_of(text: str) -> Path | None:
    """Return the directory of --disk, which must have no size in `nntask bench links`; None without the flag.

    Raises:
        UsageError: it has a size, or is only a size.
    """
    from nntask import UsageError
    from nntask.config import disk_of
    from nntask.io import is_size

    try:
        disk = disk_of(text)
    except UsageError:
        first = text.partition(":")[0]
        disk = Path("scratch" if is_size(first) else first or "scratch"), 0
    if disk is not None and disk[1] is not None:
        raise UsageError(f"must be a directory here, got {text!r}", f"use --disk {disk[0]}, and --size for the space to use", flag="--disk")
    return None if disk is None else disk[0]


def measure(directory: str, nbytes: int, repeats: int) -> dict[str, Any]:
    """Measure the rates of every link, and store the samples.

    Args:
        directory: directory of the disk tier.
        nbytes: bytes of each arena, and of the file.
        repeats: number of copies per size.

    Raises:
        OSError: the disk is full or failed.
    """
    from nntask.hardware import open_store
    from scheduler.drivers import THREADS
    from scheduler.machine import LinkModel, Models, NodeId
    from scheduler.storage import DiskTier, HostArena

    ram, device, tier = HostArena(nbytes), HostArena(nbytes), DiskTier(directory)
    try:
        copies: dict[tuple[int, int], Copy] = {
            (0, 1): lambda offset, size: device.copy_from(ram, offset, offset, size),
            (1, 0): lambda offset, size: ram.copy_from(device, offset, offset, size),
            (0, 2): lambda offset, size: tier.write(ram, offset, offset, size),
            (2, 0): lambda offset, size: tier.read(ram, offset, offset, size),
        }
        store, models = open_store(["ram", "sim:0", "disk"]), Models()
        links = {}
        for (source, target), copy in copies.items():
            _together(copy, nbytes, 1, [max(SIZES)] * (nbytes // max(SIZES)))  # later copies then neither fault pages nor allocate extents
            alone = [sample for size in SIZES for sample in _together(copy, nbytes, 1, [size] * repeats)[0]]
            model = LinkModel()
            model.remember(alone)
            model.fit()
            figures = {"latency_seconds": model.latency, "bytes_per_second": model.bandwidth}
            samples = alone
            if 2 in (source, target):
                samples = [sample for size in SIZES for sample in _together(copy, nbytes, THREADS, [size] * max(repeats, THREADS))[0]]
                sizes = [max(SIZES)] * (nbytes // max(SIZES))
                seconds = _together(copy, nbytes, THREADS, sizes)[1]
                figures["requests_in_flight"] = THREADS
                figures["bytes_per_second_together"] = sum(sizes) / seconds
            for size, seconds in _spread(samples):
                models.record_copy(NodeId(source), NodeId(target), size, seconds)
            links["->".join(("ram", "sim", "disk")[end] for end in (source, target))] = figures
        return {"links": links, "disk": str(directory), "direct_io": tier.is_direct, "recorded": store.save(models), "file": str(store.path)}
    finally:
        tier.close()


def _together(copy: Copy, nbytes: int, threads: int, sizes: Sequence[int]) -> tuple[list[tuple[int, float]], float]:
    """Carry out copies over different bytes, `threads` at a time; return (bytes, seconds) of each copy, and the seconds of all."""

    def timed(number: int) -> tuple[int, float]:
        size = sizes[number]
        begin = perf_counter()
        copy(number * size % (nbytes - size + 1) // 4096 * 4096, size)
        return size, perf_counter() - begin

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: None, range(threads)))  # starts the threads
        begin = perf_counter()
        samples = list(pool.map(timed, range(len(sizes))))
        return samples, perf_counter() - begin


def _spread(samples: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return a few samples of every size, together the number that a link model keeps; the choice does not depend on their times."""
    from scheduler.machine import KEPT_COPIES

    each = max(1, KEPT_COPIES // len(SIZES))
    return [sample for size in SIZES for sample in [sample for sample in samples if sample[0] == size][-each:]]


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    for name, link in figures["links"].items():
        line = f"{name:10} {link['latency_seconds'] * 1e6:8.1f} us + {link['bytes_per_second'] / 1e9:6.2f} GB/s"
        if "bytes_per_second_together" in link:
            line += f"; {link['bytes_per_second_together'] / 1e9:.2f} GB/s with {link['requests_in_flight']} requests in flight"
        yield line
    yield f"disk tier in {figures['disk']}, {'direct' if figures['direct_io'] else 'buffered'} I/O"
    yield f"recorded in {figures['file']}" if figures["recorded"] else f"{figures['file']} could not be written: nothing recorded"
