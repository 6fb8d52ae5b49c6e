"""What a run leaves behind about itself: step lines, metrics.jsonl and summary.json.

One `StepRecord` per optimizer step, made when its replay is over. Counters of the runtime are cumulative; a `Meter` turns them into numbers of one
step. With two steps in flight a few tasks of the next one fall into the window of this one; sums over a run are exact. What checkpoints and
validation do between steps is in no record; `around` says how much it was.
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
from ..config.units import format_count, format_duration
from ..errors import StorageError
from ..io.atomic_write import written_aside
from ..io.json_text import check_size
from ..io.regular_file import open_text
from .step_record import StepRecord
from .tensorboard import EventFile


class Meter:
    """Differences of the runtime's cumulative counters between one reading and the next.

    Args:
        stats: the runtime's counters now.
    """

    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._last = stats

    def skip(self, stats: Mapping[str, Any]) -> None:
        """What happened since the last reading belongs to no step."""
        self._last = stats

    def lap(self, stats: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """What happened since the last reading: the fields of `StepRecord` that come from the runtime."""
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
        }


@dataclass(slots=True)
class Totals:
    """Sums over steps, of constant size however many they are; losses that were not finite are None."""

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
    validation_first: float | None = None
    validation_last: float | None = None
    validation_least: float | None = None
    validation_least_step: int | None = None

    @property
    def idle_seconds(self) -> float:
        """Of all workers together, in no kernel and not stalled: in the runtime, or waiting for the result of a task or for the program."""
        return max(self.wait_seconds - self.stall_seconds, 0.0)

    @property
    def hit_rate(self) -> float:
        """Mean over the steps, which all have the same inputs."""
        return self.hit_rates / self.steps if self.steps else 1.0

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a line of metrics.jsonl."""
        seconds = line.get("seconds") or 0.0
        if not self.steps:
            self.loss_first = line.get("loss")
        self.loss_last = line.get("loss")
        self.steps += 1
        self.tokens += line.get("tokens") or 0
        self.seconds += seconds
        self.wait_seconds += line.get("wait_seconds") or 0.0
        self.mfu_seconds += (line.get("mfu") or 0.0) * seconds
        for link, nbytes in (line.get("moved_bytes") or {}).items():
            self.moved_bytes[link] = self.moved_bytes.get(link, 0) + nbytes
        self.evictions += line.get("evictions") or 0
        self.stall_seconds += line.get("stall_seconds") or 0.0
        self.hit_rates += line.get("hit_rate", 1.0)
        self.busy_seconds += sum((line.get("busy_seconds") or {}).values())
        self.recomputed_tasks += line.get("recomputed_tasks") or 0
        self.recompute_seconds += line.get("recompute_seconds") or 0.0
        self.add_validation(line)

    def add_validation(self, line: Mapping[str, Any]) -> None:
        """Count the validation of a line of metrics.jsonl, if it has one that is finite."""
        loss = line.get("validation_loss")
        if loss is None:
            return
        self.validation_first = loss if self.validation_first is None else self.validation_first
        self.validation_last = loss
        if self.validation_least is None or loss < self.validation_least:
            self.validation_least, self.validation_least_step = loss, line["step"]


def around(own: Totals, stats: Mapping[str, Any]) -> dict[str, Any]:
    """What a process did outside its steps: first weights, timing loops, validation, checkpoints.

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
"""Characters of a line of metrics.jsonl; one of a step on many nodes has some thousands."""
_PER_LETTER: Final = 16
"""Bytes of memory for each letter of a line; a line of a step takes about five."""


class Journal:
    """metrics.jsonl of a run, one line per step, on disk as soon as written; only sums and the last line stay in memory.

    Args:
        path: the file; lines beyond `keep_steps` (of a run that is resumed from an earlier checkpoint) are dropped.
        timed_after: the last step that does not count in `timed` (warm-up).
        events: takes the steps that are added, besides.
        run: the run directory; None for where the file is.

    Attributes:
        whole: sums over all steps of the run, resumed ones included.
        own: over those that this process has added.
        warm: over those of `own` but its first one, which compiles kernels and finds nothing where the steps before leave it.
        timed: over those of `own` after `timed_after`.

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
        """Append a step; what is not finite is written as null, which every JSON reader takes."""
        self.add_line(asdict(record))
        if self._events is not None:
            with self._storage_errors():
                self._events.add(record)

    def add_line(self, fields: Mapping[str, Any]) -> None:
        """Append what is known of a step, under names of `StepRecord`; at least `step`."""
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

        The line is written again in its place and only grows, in one write: a process that is killed leaves a whole line.

        Args:
            step: number of the last step.
            figures: names that begin with "validation_" -> values; None for one that is not known.
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
        """Force the lines to disk, so that a checkpoint that survives a loss of power has those of its steps.

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
            raise StorageError(f"cannot write {self.path}: {error.strerror or error}; {how_to_go_on(self._run)}") from error


def finite(value: Any) -> Any:
    """`value` with None for every number in it that JSON cannot say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list) else value


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: no NaN, no infinity."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def iter_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl one by one; a last one that a kill cut short, and what is no line of a step, are left out."""
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
    """All lines of a metrics.jsonl, see `iter_metrics`."""
    return list(iter_metrics(path))


def step_line(record: StepRecord, steps: int, eta_seconds: float, budgets: Mapping[str, int]) -> str:
    """The line of a step on stdout.

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


class StepPrinter:
    """Prints step lines: plain ones, and on a terminal a line that is overwritten until the next one that must stay.

    Args:
        stream: where to.
        live: whether the last line may be overwritten; default: the stream is a terminal.
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.live = self.stream.isatty() if live is None else live
        self._open = False

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
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise StorageError(f"cannot write to standard output: {error.strerror or error}; what was saved is whole") from error
