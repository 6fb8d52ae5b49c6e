"""Performance models between runs: one JSON file per machine, under ``$XDG_CACHE_HOME/nntask/perf`` or ``~/.cache/nntask/perf``.

A machine is what makes durations comparable: processor, cores, BLAS threads, devices, versions of Python and of the libraries whose kernels run. Its
file is named by a hash of these and holds them in plain text, the latest samples of every series, and those of every link by the names of its ends.

Guarantees: a file is replaced as a whole (written aside, then renamed), so a reader never sees half of one, whatever is killed when; of two writers
the last wins, and keeps what only the other knew. What cannot be read or does not make sense is ignored: models are a cache, and a broken cache
must not stop a run. For the same reason `save` never raises on a full or read-only disk; it says whether it has written.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ..core.perf import KEPT, KEPT_COPIES, Key, LinkModel, Models, Series
from ..core.records import FILE, FILE_NAME, NodeId

VERSION: Final = 2
"""Of the format; files of another version are ignored."""

LONGEST_SECONDS: Final = 1e6
"""Samples beyond are nonsense."""

MOST_BYTES: Final = 1 << 50
"""Copies beyond, too."""


def default_directory() -> Path:
    """Where models are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nntask" / "perf"


def machine_fingerprint(*, blas_threads: int, devices: Sequence[str] = (), versions: Mapping[str, str] | None = None) -> dict[str, str]:
    """What durations depend on besides the task.

    Args:
        blas_threads: per worker.
        devices: names of the devices, in order.
        versions: of libraries whose kernels run, besides Python.
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
    """The processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class PerfStore:
    """The file of one machine.

    Args:
        machine: what `machine_fingerprint` says.
        names: of the memory nodes, by id; links are stored under them, since ids differ from run to run.
        directory: where; `default_directory()` unless given.
    """

    def __init__(self, machine: Mapping[str, str], names: Sequence[str], directory: Path | None = None) -> None:
        self.machine = dict(machine)
        self.names = {**{NodeId(at): name for at, name in enumerate(names)}, FILE: FILE_NAME}
        canonical = json.dumps(self.machine, sort_keys=True).encode()
        self.path = (directory or default_directory()) / f"{zlib.crc32(canonical):08x}.json"

    def load(self, models: Models) -> int:
        """Give models the samples of earlier runs; what they measure themselves comes on top.

        Returns:
            Number of series and links read; 0 without a file or with one that makes no sense.
        """
        tasks, links = self._read()
        for key, samples in tasks.items():
            models.history.series[key] = Series(samples)
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
        """Replace the file by what the models know, and what only the file knew.

        Returns:
            Whether it was written.
        """
        tasks, links = self._read()
        for key, series in models.history.series.items():
            if series.samples:
                tasks[key] = list(series.samples)
        for (source, target), link in models.links.items():
            if link.samples and source in self.names and target in self.names:
                links[self.names[source], self.names[target]] = link.samples
        content = {
            "version": VERSION,
            "machine": self.machine,
            "tasks": [[*key, samples] for key, samples in sorted(tasks.items())],
            "links": [[*link, copies] for link, copies in sorted(links.items())],
        }
        return self._write(json.dumps(content))

    def _write(self, text: str) -> bool:
        """Write aside, then rename."""
        aside = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, aside = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem, suffix=".tmp")
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            os.replace(aside, self.path)
        except OSError:
            if aside is not None:
                with suppress(OSError):
                    os.unlink(aside)
            return False
        return True

    def _read(self) -> tuple[dict[Key, list[float]], dict[tuple[str, str], list[tuple[int, float]]]]:
        """What the file says; nothing if it is absent, of another version or machine, or not what `save` writes."""
        try:
            content = json.loads(self.path.read_text())
            if content["version"] != VERSION or content["machine"] != self.machine:
                return {}, {}
            tasks = {(str(name), int(number), str(kind)): _seconds(samples) for name, number, kind, samples in content["tasks"]}
            links = {(str(source), str(target)): _copies(copies) for source, target, copies in content["links"]}
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return {}, {}
        return tasks, links


def _seconds(samples: Any) -> list[float]:
    """Durations of one series.

    Raises:
        ValueError: they make no sense.
    """
    found = [float(seconds) for seconds in samples][-KEPT:]
    if not found or not all(math.isfinite(seconds) and 0.0 <= seconds <= LONGEST_SECONDS for seconds in found):
        raise ValueError(f"durations must be 0 to {LONGEST_SECONDS:g} s, got {found[:3]}")
    return found


def _copies(samples: Any) -> list[tuple[int, float]]:
    """(bytes, seconds) of the copies over one link.

    Raises:
        ValueError: they make no sense.
    """
    found = [(int(nbytes), float(seconds)) for nbytes, seconds in samples][-2 * KEPT_COPIES :]
    if not found or not all(0 < nbytes <= MOST_BYTES and 0.0 < seconds <= LONGEST_SECONDS for nbytes, seconds in found):
        raise ValueError(f"copies must have up to 2**50 bytes and take up to {LONGEST_SECONDS:g} s, got {found[:3]}")
    return found
