"""Metrics of a run: step lines, metrics.jsonl and summary.json.

Each optimizer step has one `StepRecord`, written when its replay is over. Counters of the runtime are cumulative; a `Meter` turns them into numbers
of one step. With two steps in flight, a few tasks of the next step are counted in this one; sums over a run are exact. Work of checkpoints and
validation between steps is in no record; `around` reports its amount.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

from ..checkpoints.store import how_to_go_on
from ..errors import StorageError
from ..io.atomic_write import written_aside
from ..io.json_text import check_size
from ..io.regular_file import open_text
from ..io.units import format_count, format_duration
from .step_record import StepRecord
from .tensorboard import EventFile


class Meter:
    """Differences of the runtime's cumulative counters between two readings.

    Args:
        stats: counters of the runtime now.
    """

    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._last = stats

    def skip(self, stats: Mapping[str, Any]) -> None:
        """Leave out the work since the last reading, which belongs to no step."""
        self._last = stats

    def lap(self, stats: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the fields of `StepRecord` that come from the runtime, for the time since the last reading."""
        last, self._last = self._last, stats
        before = last["moved_bytes"]
        moved = {link: n - before.get(link, 0) for link, n in stats["moved_bytes"].items()}
        busy, stalled = ({who: now - last[key][who] for who, now in stats[key].items()} for key in ("busy_seconds", "worker_stall_seconds"))
        hits, misses = stats["hits"] - last["hits"], stats["misses"] - last["misses"]
        return {
            "resident_peak_bytes": dict(stats["recent_peak_bytes"]),
            "moved_bytes": {link: n for link, n in moved.items() if n},
            "evictions": stats["evictions"] - last["evictions"],
            "wait_seconds": max(seconds * len(busy) - sum(busy.values()), 0.0),
            "stall_seconds": stats["stall_seconds"] - last["stall_seconds"],
            "hit_rate": 1 - misses / (misses + hits) if misses else 1.0,
            "busy_seconds": {who: round(each, 6) for who, each in busy.items()},
            "worker_stall_seconds": {who: round(each, 6) for who, each in stalled.items() if each},
            "recomputed_tasks": stats["recomputed_tasks"] - last["recomputed_tasks"],
            "recompute_seconds": round(stats["recompute_seconds"] - last["recompute_seconds"], 6),
            "skipped_tasks": stats["skipped_tasks"] - last["skipped_tasks"],
        }


_SUMMED: Final = ("tokens", "seconds", "wait_seconds", "evictions", "stall_seconds", "recomputed_tasks", "recompute_seconds", "skipped_tasks")


@dataclass(slots=True)
class Totals:
    """Sums over steps, of constant size; losses that were not finite are None."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    mfu_seconds: float = 0.0
    loss_first: float | None = None
    loss_last: float | None = None
    moved_bytes: dict[str, int] = field(default_factory=dict)
    evictions: int = 0
    stall_seconds: float = 0.0
    hit_rates: float = 0.0
    busy_seconds: float = 0.0
    recomputed_tasks: int = 0
    recompute_seconds: float = 0.0
    skipped_tasks: int = 0
    validation_first: float | None = None
    validation_last: float | None = None
    validation_least: float | None = None
    validation_least_step: int | None = None

    @property
    def idle_seconds(self) -> float:
        """Seconds of all workers together that are neither in a kernel nor stalled: in the runtime, or waiting for a task's result or the program."""
        return max(self.wait_seconds - self.stall_seconds, 0.0)

    @property
    def hit_rate(self) -> float:
        """Mean hit rate over the steps, which all have the same inputs."""
        return self.hit_rates / self.steps if self.steps else 1.0

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl."""
        if not self.steps:
            self.loss_first = line.get("loss")
        self.loss_last = line.get("loss")
        self.steps += 1
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + (line.get(name) or 0))
        self.mfu_seconds += (line.get("mfu") or 0.0) * (line.get("seconds") or 0.0)
        for link, nbytes in (line.get("moved_bytes") or {}).items():
            self.moved_bytes[link] = self.moved_bytes.get(link, 0) + nbytes
        self.hit_rates += line.get("hit_rate", 1.0)
        self.busy_seconds += sum((line.get("busy_seconds") or {}).values())
        self.add_validation(line)

    def add_validation(self, line: Mapping[str, Any]) -> None:
        """Add the validation in a line of metrics.jsonl, if there is one and it is finite."""
        loss = line.get("validation_loss")
        if loss is None:
            return
        self.validation_first = loss if self.validation_first is None else self.validation_first
        self.validation_last = loss
        if self.validation_least is None or loss < self.validation_least:
            self.validation_least, self.validation_least_step = loss, line["step"]


def around(own: Totals, stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return counters for the work of a process outside its steps: first weights, passes before training, validation, checkpoints.

    Args:
        own: sums over its steps.
        stats: counters of its runtime.
    """
    moved = {link: nbytes - own.moved_bytes.get(link, 0) for link, nbytes in stats["moved_bytes"].items()}
    return {
        "moved_bytes": {link: nbytes for link, nbytes in moved.items() if nbytes},
        "evictions": stats["evictions"] - own.evictions,
        "stall_seconds": max(stats["stall_seconds"] - own.stall_seconds, 0.0),
    }


_LONGEST_LINE: Final = 1 << 20
"""Largest length of a line of metrics.jsonl in characters; the line of a step on many nodes has some thousands."""
_PER_LETTER: Final = 16
"""Bytes of memory for each letter of a line; a line of a step takes about five."""


class Journal:
    """metrics.jsonl of a run, one line per step, on disk as soon as written; only sums and the last line stay in memory.

    Args:
        path: path of the file; lines beyond `keep_steps` (of a run that is resumed from an earlier checkpoint) are dropped.
        keep_steps: number of steps whose lines are kept.
        timed_after: last step that does not count in `timed` (warm-up).
        events: event file that receives the same steps.
        run: run directory; None for the directory of the file.

    Attributes:
        whole: sums over all steps of the run, resumed ones included.
        own: sums over the steps that this process has added.
        warm: sums over `own` without its first step, which compiles kernels and does not find data in place.
        timed: sums over the steps of `own` after `timed_after`.

    Raises:
        StorageError: the disk is full or failed; so do `add` and `close`.
    """

    def __init__(self, path: Path, keep_steps: int, timed_after: int = 0, events: EventFile | None = None, run: Path | None = None) -> None:
        self._run = run or path.parent
        self.path, self.timed_after, self._events = path, timed_after, events
        self.whole, self.own, self.warm, self.timed = Totals(), Totals(), Totals(), Totals()
        self._last: dict[str, Any] = {}
        self._last_at = 0
        with self._storage_errors():
            with written_aside(path) as new, new.open("w", encoding="utf-8") as file:
                for line in iter_metrics(path) if keep_steps and path.is_file() else ():
                    if line["step"] <= keep_steps:
                        self.whole.add(line)
                        self._last, self._last_at = line, file.tell()
                        file.write(to_json(line) + "\n")
            self._file: TextIO = path.open("r+", encoding="utf-8", buffering=1)
            self._file.seek(0, os.SEEK_END)

    def add(self, record: StepRecord) -> None:
        """Append a step; numbers that are not finite are written as null, which every JSON reader accepts."""
        self.add_line(asdict(record))
        if self._events is not None:
            with self._storage_errors():
                self._events.add(record)

    def add_line(self, fields: Mapping[str, Any]) -> None:
        """Append the known figures of a step, under names of `StepRecord`; at least `step`."""
        line = finite(fields)
        self.whole.add(line)
        if self.own.steps:
            self.warm.add(line)
        self.own.add(line)
        if line["step"] > self.timed_after:
            self.timed.add(line)
        with self._storage_errors():
            self._last, self._last_at = line, self._file.tell()
            self._file.write(to_json(line) + "\n")

    def add_validation(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Add the result of a validation to the line of the last step.

        The line is written in its place again and only grows, in one write, so a process that is killed leaves a whole line.

        Args:
            step: number of the last step.
            figures: names that begin with "validation_" -> values; None for an unknown one.
        """
        assert self._last.get("step") == step  # nothing is in flight while a run validates
        line = self._last = finite({**self._last, **{name: value for name, value in figures.items() if value is not None}})
        self.whole.add_validation(line)
        with self._storage_errors():
            self._file.seek(self._last_at)
            self._file.write(to_json(line) + "\n")
            if self._events is not None:
                self._events.add_validation(step, figures)

    def sync(self) -> None:
        """Force the lines to disk, so that after a loss of power each surviving checkpoint has the lines of its steps.

        Raises:
            StorageError: the disk is full or failed.
        """
        with self._storage_errors():
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the files."""
        with self._storage_errors():
            self._file.close()
            if self._events is not None:
                self._events.close()

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot write {self.path}: {error.strerror or error}", how_to_go_on(self._run)) from error


def finite(value: Any) -> Any:
    """Return `value` with None for every number that JSON cannot express."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list) else value


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON that every reader accepts: no NaN, no infinity."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def iter_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics.jsonl; a truncated last line and lines that are not of a step are left out."""
    with open_text(path, errors="replace") as file:
        while text := file.readline(_LONGEST_LINE):
            try:
                check_size(text, _PER_LETTER, 0)
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict) and type(line.get("step")) is int:
                yield line


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a metrics.jsonl, as `iter_metrics` yields them."""
    return list(iter_metrics(path))


def step_line(record: StepRecord, steps: int, eta_seconds: float, budgets: Mapping[str, int]) -> str:
    """Return the line of a step on stdout.

    Args:
        budgets: bytes of each node.
    """
    nodes = []
    for node, used in record.resident_peak_bytes.items():
        budget = budgets.get(node, 0)
        large = f"{used / 2**30:.1f}/{budget / 2**30:.1f} GiB"
        nodes.append(f"{node} {large if budget >= 1 << 30 else f'{used / 2**20:.0f}/{budget / 2**20:.0f} MiB'}")
    moved = sum(record.moved_bytes.values())
    if moved:
        nodes.append(f"moved {moved / 1e9 / record.seconds:.1f} GB/s")
    fields = [
        f"step {record.step}/{steps}",
        f"loss {record.loss:.4f}",
        f"norm {record.grad_norm:.2f}",
        f"lr {record.lr:.1e}",
        f"{record.seconds * 1e3:.0f} ms",
        f"{format_count(record.tokens_per_second)} tok/s",
        f"{record.mfu:.0%} of gemm peak",
        ", ".join(nodes),
        f"eta {format_duration(eta_seconds)}",
    ]
    return " | ".join(fields)


def _not_printed(error: OSError) -> StorageError:
    return StorageError(f"cannot write to standard output: {error.strerror or error}", "files saved so far are complete")


class StepPrinter:
    """Prints step lines; on a terminal, a line is overwritten unless it must stay.

    Args:
        stream: destination of the lines; default: standard output.
        live: whether the last line may be overwritten; default: only if the stream is a terminal.
        is_dry: whether nothing is trained, so that a pipe without a reader is no failure.

    Attributes:
        failure: first failed write within `deferring`; None for none.

    Raises:
        StorageError: a write failed outside `deferring`. A pipe without a reader is such a failure, too: a training that it ends is incomplete.
        BrokenPipeError: a pipe has no reader, and nothing is trained.
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None, is_dry: bool = False) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.live = self.stream.isatty() if live is None else live
        self._is_dry = is_dry
        self.failure: StorageError | None = None
        self._open = self._is_deferring = False

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Keep the first failed write in this block as `failure` instead of raising it, and discard what is written after it."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False

    def step(self, line: str, *, keep: bool) -> None:
        """Show a step; on a terminal only lines with `keep` stay."""
        if not self.live:
            self.say(line)
            return
        self._write(f"\r\x1b[2K{line}" + ("\n" if keep else ""))
        self._open = not keep

    def say(self, line: str) -> None:
        """Show a line that stays."""
        self._write(("\n" if self._open else "") + line + "\n")
        self._open = False

    def _write(self, text: str) -> None:
        if self.failure is not None:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, StorageError) as error:
            if self._is_dry and isinstance(error, BrokenPipeError):
                raise
            failure = error if isinstance(error, StorageError) else _not_printed(error)
            if not self._is_deferring:
                raise failure from error
            self.failure = failure
