"""What a run leaves behind about itself: step lines, metrics.jsonl and summary.json.

One `StepRecord` per optimizer step, made when its replay is over. Counters of the runtime are cumulative; a `Meter` turns them into numbers of one
step. With two steps in flight a few tasks of the next one fall into the window of this one; sums over a run are exact.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from ..checkpoints import write_atomically
from ..sizes import format_count, format_duration


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of metrics.jsonl.

    Args:
        step: from 1.
        loss: as printed, mean or sum over the step's tokens.
        lr: learning rate of the step.
        grad_norm: norm of the whole gradient before clipping.
        tokens: of this step.
        seconds: since the step before ended.
        tokens_per_second: tokens / seconds.
        tflops: 10^12 model flops (6N + 12Ldn per token) per second.
        mfu: tflops over the gemm peak of the workers.
        resident_peak_bytes: most bytes held on each node during the step.
        moved_bytes: over each link during the step.
        evictions: replicas evicted during the step.
        wait_seconds: of all workers together, not in a kernel.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    tokens_per_second: float
    tflops: float
    mfu: float
    resident_peak_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    evictions: int
    wait_seconds: float


class Meter:
    """Differences of the runtime's cumulative counters between one reading and the next.

    Args:
        stats: the runtime's counters now.
    """

    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._last = stats

    def lap(self, stats: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """What happened since the last reading: the fields of `StepRecord` that come from the runtime."""
        last, self._last = self._last, stats
        before = last["moved_bytes"]
        moved = {link: n - before.get(link, 0) for link, n in stats["moved_bytes"].items()}
        busy = sum(stats["busy_seconds"].values()) - sum(last["busy_seconds"].values())
        return {
            "resident_peak_bytes": dict(stats["recent_peak_bytes"]),
            "moved_bytes": {link: n for link, n in moved.items() if n},
            "evictions": stats["evictions"] - last["evictions"],
            "wait_seconds": max(seconds * len(stats["busy_seconds"]) - busy, 0.0),
        }


class Journal:
    """metrics.jsonl of a run, one line per step, on disk as soon as written.

    Args:
        path: the file; lines beyond `keep_steps` (of a run that is resumed from an earlier checkpoint) are dropped.
    """

    def __init__(self, path: Path, keep_steps: int) -> None:
        self.records: list[dict[str, Any]] = []
        if keep_steps and path.is_file():
            self.records = [line for line in read_metrics(path) if line["step"] <= keep_steps]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in self.records))
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)

    def add(self, record: StepRecord) -> None:
        """Append a step; NaN is written as null, which every JSON reader takes."""
        line = {key: None if value != value else value for key, value in asdict(record).items()}
        self.records.append(line)
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last one that a kill cut short is left out."""
    records = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(text))
        except ValueError:
            continue
    return records


def step_line(record: StepRecord, steps: int, eta_seconds: float, budgets: Mapping[str, int]) -> str:
    """The line of a step on stdout.

    Args:
        budgets: bytes of each node.
    """
    nodes = []
    for node, used in record.resident_peak_bytes.items():
        budget = budgets.get(node, 0)
        nodes.append(f"{node} {used / 2**30:.1f}/{budget / 2**30:.1f} GiB")
    moved = sum(record.moved_bytes.values())
    if moved:
        nodes.append(f"moved {moved / 1e9 / record.seconds:.1f} GB/s")
    parts = [
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
    return " | ".join(parts)


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
        self.stream.write(f"\r\x1b[2K{line}" + ("\n" if keep else ""))
        self.stream.flush()
        self._open = not keep

    def say(self, line: str) -> None:
        """Show a line that stays."""
        self.stream.write(("\n" if self._open else "") + line + "\n")
        self.stream.flush()
        self._open = False
