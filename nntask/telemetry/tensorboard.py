"""TensorBoard files: ``--report-to tensorboard`` writes an event file with every step into the directory ``tensorboard`` of the run.

The package ``tensorboard`` of the viewer writes the format, without torch or TensorFlow. It writes in the calling thread, so a full disk is reported
at once. A resumed run writes a new file, which begins by removing the steps that are repeated.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import UsageError
from .step_record import StepRecord

FOLDER: Final = "tensorboard"
_VERSION: Final = "brain.Event:2"


def check_installed() -> None:
    """Check that event files can be written.

    Raises:
        UsageError: the package is missing.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "needs the tensorboard package, which is not installed",
            "pip install -e '.[tensorboard]', or drop it",
            flag="--report-to",
            value="tensorboard",
        )


class EventFile:
    """Event file with one scalar per figure for each step and each validation; the first step creates it.

    Args:
        directory: directory of the run.
        first: number of steps that the resumed run had done before.
    """

    def __init__(self, directory: Path, first: int) -> None:
        self._directory, self._first = directory / FOLDER, first
        self._writer: Any = None

    def add(self, record: StepRecord) -> None:
        """Write a step; it is in the file when this returns.

        Raises:
            OSError: the disk is full or failed.
        """
        self._add(record.step, scalars_of(record))

    def add_validation(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Write the result of a validation after a step; it is in the file when this returns.

        Raises:
            OSError: the disk is full or failed.
        """
        self._add(step, {name.replace("_", "/", 1): value for name, value in figures.items() if value is not None})

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _add(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self._open()
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _open(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._directory.mkdir(exist_ok=True)
        now = time.time()
        path = self._directory / f"events.out.tfevents.{int(now):010d}.{os.getpid()}.{self._first}"
        self._writer = RecordWriter(path.open("wb"))
        self._write(Event(wall_time=now, file_version=_VERSION))
        if self._first:
            self._write(Event(wall_time=now, step=self._first + 1, session_log=SessionLog(status=SessionLog.START)))

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def scalars_of(record: StepRecord) -> dict[str, float]:
    """Return tag -> value, the scalars of a step; the first part of a tag is its group in TensorBoard. Bytes are in GB."""
    return {
        "train/loss": record.loss,
        "train/learning_rate": record.lr,
        "train/gradient_norm": record.grad_norm,
        "speed/tokens_per_second": record.tokens_per_second,
        "speed/seconds": record.seconds,
        "speed/mfu": record.mfu,
        "waits/stall_seconds": record.stall_seconds,
        **{f"memory_gb/{node}": nbytes / 1e9 for node, nbytes in record.resident_peak_bytes.items()},
        **{f"moved_gb/{link.replace('->', '_to_')}": nbytes / 1e9 for link, nbytes in record.moved_bytes.items()},
    }
