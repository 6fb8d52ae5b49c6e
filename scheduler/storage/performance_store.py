"""Performance models between runs: one JSON file per machine, in ``$XDG_CACHE_HOME/nntask/perf`` or ``~/.cache/nntask/perf``.

A machine is identified by the facts that durations depend on: processor, cores, BLAS threads, devices, versions of Python and of the libraries whose
kernels run. The file is named by a hash of these facts. It has the facts in plain text, and the latest samples of each series of kernel durations and
of each link, by the names of its ends.

A file is replaced as a whole (temporary file, then rename), so a reader never sees a part of one, even after a kill. Of two writers the last wins,
and keeps the series that only the file had. An unreadable or implausible file is ignored, because models are a cache and a broken cache must not stop
a run. For the same reason `save` never raises on a full or read-only disk; it returns whether it has written.
"""

from __future__ import annotations

import json
import math
import os
import platform
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ..core.link_model import KEPT_COPIES, LinkModel
from ..core.performance_model import KEPT, Key, Models, Series
from ..core.records import FILE, FILE_NAME, NodeId
from .cache_folder import replace_file, user_cache

VERSION: Final = 2
"""Version of the file format; files of another version are ignored."""

LONGEST_SECONDS: Final = 1e6
"""Longest plausible sample; seconds."""

MOST_BYTES: Final = 1 << 50
"""Largest plausible copy; bytes."""

MOST_SERIES: Final = 4096
"""Largest number of series of durations in a file, which every program reads as a whole: 3 MB of text, and some 10 MB of memory."""

Stored = tuple[dict[Key, list[float]], dict[tuple[str, str], list[tuple[int, float]]]]
"""Series and links of a file."""


def default_directory() -> Path:
    """Return the directory of the stored models."""
    return user_cache() / "perf"


def machine_fingerprint(*, blas_threads: int, devices: Sequence[str] = (), versions: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the facts that durations depend on, other than the task, by name.

    Args:
        blas_threads: number of BLAS threads per worker.
        devices: names of the devices, in order.
        versions: version of each library whose kernels run, except Python.
    """
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count() or 1),
        "blas_threads": str(blas_threads),
        "devices": ", ".join(devices),
        "python": platform.python_version(),
        **{f"version of {name}": version for name, version in sorted((versions or {}).items())},
    }


def _processor() -> str:
    """Return the name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class PerfStore:
    """The stored models of one machine.

    Args:
        machine: facts of the machine, from `machine_fingerprint`.
        names: names of the memory nodes, by id. Links are stored by names, since ids differ from run to run.
        directory: directory of the file; `default_directory()` unless given.
    """

    def __init__(self, machine: Mapping[str, str], names: Sequence[str], directory: Path | None = None) -> None:
        self.machine = dict(machine)
        self.names = {**{NodeId(at): name for at, name in enumerate(names)}, FILE: FILE_NAME}
        canonical = json.dumps(self.machine, sort_keys=True).encode()
        self.path = (directory or default_directory()) / f"{zlib.crc32(canonical):08x}.json"

    def load(self, models: Models) -> int:
        """Add the samples of earlier runs to the models; this run adds its measurements to them.

        Returns:
            Number of series and links read; 0 if the file is absent or implausible.
        """
        tasks, links = self._read()
        for key, samples in tasks.items():
            models.series[key] = Series(samples)
        num_links = 0
        ids = {name: node for node, name in self.names.items()}
        for (source, target), copies in links.items():
            if source in ids and target in ids:
                link = LinkModel()
                link.remember(copies)
                link.fit()
                models.links[ids[source], ids[target]] = link
                num_links += 1
        return len(tasks) + num_links

    def save(self, models: Models) -> bool:
        """Replace the file with the models' samples, merged with the series that only the file has.

        Series that this run measured come last. Beyond `MOST_SERIES`, the first ones are left out, which were measured longest ago.

        Returns:
            Whether the file was written.
        """
        tasks, links = self._read()
        known = {key: list(series.samples) for key, series in models.series.items() if series.samples}
        measured = {key: samples for key, samples in known.items() if tasks.get(key) != samples}
        tasks = {key: samples for key, samples in tasks.items() if key not in measured} | measured
        for (source, target), link in models.links.items():
            if link.samples and source in self.names and target in self.names:
                links[self.names[source], self.names[target]] = link.samples
        content = {
            "version": VERSION,
            "machine": self.machine,
            "tasks": [[*key, samples] for key, samples in list(tasks.items())[-MOST_SERIES:]],
            "links": [[*link, copies] for link, copies in sorted(links.items())],
        }
        return replace_file(self.path, json.dumps(content).encode())

    def _read(self) -> Stored:
        """Return the series and links of the file; empty if it is absent, of another version or machine, or not in the format of `save`."""
        try:
            state = self.path.stat()
            machine, (tasks, links) = _content_of(self.path, (state.st_ino, state.st_mtime_ns, state.st_size))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return {}, {}
        return (dict(tasks), dict(links)) if machine == self.machine else ({}, {})


@lru_cache(maxsize=2)
def _content_of(path: Path, state: tuple[int, int, int]) -> tuple[Any, Stored]:
    """Return the machine, series and links of a file, cached so that a process with many runtimes reads it once.

    Args:
        path: path of the file.
        state: inode, modification time and size; a replaced file has another state, so it is read again.

    Raises:
        OSError: the file cannot be read.
        ValueError, KeyError, TypeError, OverflowError, RecursionError: the file is not in the format of `save`.
    """
    content = json.loads(path.read_text())
    if content["version"] != VERSION:
        raise ValueError(f"the version must be {VERSION}, got {content['version']}")
    tasks = {(str(name), int(number), str(kind)): _seconds(samples) for name, number, kind, samples in content["tasks"]}
    links = {(str(source), str(target)): _copies(copies) for source, target, copies in content["links"]}
    return content["machine"], (tasks, links)


def _seconds(samples: Any) -> list[float]:
    """Return the durations of one series, in seconds.

    Raises:
        ValueError: a duration is not plausible.
    """
    durations = list(map(float, samples))[-KEPT:]
    if not durations or not (math.isfinite(sum(durations)) and min(durations) >= 0.0 and max(durations) <= LONGEST_SECONDS):
        raise ValueError(f"durations must be 0 to {LONGEST_SECONDS:g} s, got {durations[:3]}")
    return durations


def _copies(samples: Any) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of the copies over one link.

    Raises:
        ValueError: a sample is not plausible.
    """
    copies = [(int(nbytes), float(seconds)) for nbytes, seconds in samples][-2 * KEPT_COPIES :]
    if not copies or not all(0 < nbytes <= MOST_BYTES and 0.0 < seconds <= LONGEST_SECONDS for nbytes, seconds in copies):
        raise ValueError(f"copies must have up to 2**50 bytes and take up to {LONGEST_SECONDS:g} s, got {copies[:3]}")
    return copies
