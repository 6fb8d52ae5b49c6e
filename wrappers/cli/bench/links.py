"""``nntask bench links``: copies between RAM and a simulated device, and writes and reads of the disk tier, through the real arenas and file.

Every link is measured with copies one after another, for latency and bandwidth, and the disk once more with as many requests in flight as runs
have. The latter, and the copies, are what a run would have measured; they go into the performance models that plans and policies read.
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
"""Bytes of a copy."""

Copy = Callable[[int, int], None]
"""Copies so many bytes from and to an offset."""


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
    """Figures, and the same as lines of text.

    Raises:
        UsageError: a flag is wrong.
        DoesNotFit: there is less memory, or less room on the disk.
        StorageError: the directory cannot be written, or the disk is full.
    """
    from nntask.errors import DoesNotFit, StorageError, UsageError
    from nntask.sizes import parse_size
    from nntask.trainer.places import free_bytes
    from nntask.trainer.prepare import check_disk
    from scheduler.storage.limits import memory_limit

    if settings.repeats < 1:
        raise UsageError(f"--repeats must be at least 1, got {settings.repeats}; use --repeats 5")
    nbytes = parse_size(settings.size, "--size")
    if nbytes < 4 * max(SIZES):
        raise UsageError(f"--size must be at least 64MiB, got {settings.size}; use --size 256MiB")
    _check_is_directory(settings.disk)
    check_disk(settings.disk)
    directory = settings.disk or tempfile.gettempdir()
    limit, free = memory_limit(), free_bytes(Path(directory))
    if 2 * nbytes > limit:
        raise DoesNotFit(f"--size {settings.size} takes twice that in memory, {2 * nbytes:,} B, and this process may use {limit:,} B; lower it")
    if nbytes > free:
        raise DoesNotFit(f"--size {settings.size} is {nbytes:,} B, and {free:,} B are free in {directory}; lower it, or name another --disk")
    try:
        figures = measure(directory, nbytes, settings.repeats)
    except OSError as error:
        raise StorageError(f"--disk {directory}: {error.strerror or error}; name a directory that can be written") from error
    return figures, list(_lines(figures))


def _check_is_directory(text: str) -> None:
    """Check that --disk says a directory and no more.

    Raises:
        UsageError: it says a size as well, or instead, or what should be one.
    """
    from nntask.errors import UsageError
    from nntask.sizes import is_size
    from nntask.trainer.disks import disk_of

    try:
        disk = disk_of(text)
    except UsageError:
        first = text.partition(":")[0]
        disk = Path("scratch" if is_size(first) else first or "scratch"), 0
    if disk is not None and disk[1] is not None:
        raise UsageError(f"--disk must be a directory here, got {text!r}; use --disk {disk[0]}, and --size for the space to use")


def measure(directory: str, nbytes: int, repeats: int) -> dict[str, Any]:
    """Rates of every link; records them.

    Args:
        nbytes: of each arena, and of the file.
        repeats: copies per size.

    Raises:
        OSError: the disk is full or failed.
    """
    from nntask.trainer.places import open_store
    from scheduler.core.perf import LinkModel, Models
    from scheduler.core.records import NodeId
    from scheduler.drivers.disk import THREADS
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
            _together(copy, nbytes, 1, [max(SIZES)] * (nbytes // max(SIZES)))  # pages and file extents are taken now
            alone = [sample for size in SIZES for sample in _together(copy, nbytes, 1, [size] * repeats)[0]]
            model = LinkModel()
            model.remember(alone)
            model.fit()
            figures = {"latency_seconds": model.latency, "bytes_per_second": model.bandwidth}
            kept = alone
            if 2 in (source, target):
                kept = [sample for size in SIZES for sample in _together(copy, nbytes, THREADS, [size] * max(repeats, THREADS))[0]]
                sizes = [max(SIZES)] * (nbytes // max(SIZES))
                seconds = _together(copy, nbytes, THREADS, sizes)[1]
                figures["requests_in_flight"] = THREADS
                figures["bytes_per_second_together"] = sum(sizes) / seconds
            for size, seconds in _spread(kept):
                models.record_copy(NodeId(source), NodeId(target), size, seconds)
            links["->".join(("ram", "sim", "disk")[end] for end in (source, target))] = figures
        return {"links": links, "disk": str(directory), "direct_io": tier.is_direct, "recorded": store.save(models), "file": str(store.path)}
    finally:
        tier.close()


def _together(copy: Copy, nbytes: int, threads: int, sizes: Sequence[int]) -> tuple[list[tuple[int, float]], float]:
    """Carry out copies over different bytes, so many at a time: (bytes, seconds) of each, and the seconds of all."""

    def timed(number: int) -> tuple[int, float]:
        size = sizes[number]
        begin = perf_counter()
        copy(number * size % (nbytes - size + 1) // 4096 * 4096, size)
        return size, perf_counter() - begin

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: None, range(threads)))  # the threads are there
        begin = perf_counter()
        found = list(pool.map(timed, range(len(sizes))))
        return found, perf_counter() - begin


def _spread(samples: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """A few samples of every size, as many as a link model keeps; which ones does not depend on their times."""
    from scheduler.core.perf import KEPT_COPIES

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
