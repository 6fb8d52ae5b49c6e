"""The records of a run directory, read for its report. This module computes and draws nothing.

A run on one machine is one node without a name, whose files lie in the run's directory. A run on a cluster has, besides the metrics.jsonl of the
whole run, one directory per node, named after the node, with the node's own files:

    RUN/metrics.jsonl                 steps of the run: step, loss, lr, grad_norm, tokens, seconds, ...
    RUN/summary.json, machine.json    optional
    RUN/plan.json                     optional: the data that is kept, moved or recomputed, and the reasons
    RUN/trace.json.gz                 of --trace-steps, or the file that it names
    RUN/nodes/<name>/metrics.jsonl    of a cluster: steps of the node, with the fields of the list above that the node has
    RUN/nodes/<name>/machine.json, plan.json, trace.json.gz, trace.json
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nntask import DataError, UsageError
from nntask.config import SUFFIXES
from nntask.io import check_size, read_bytes, read_object, read_text
from nntask.planning import cells, headline
from nntask.telemetry import TRACE, read_metrics
from nntask.training import CONFIG, MACHINE, METRICS, NODES, PLAN, SUMMARY
from scheduler.machine import TRACE_FORMAT

_TRACES: Final = (TRACE, TRACE.removesuffix(".gz"))
_LARGEST_TRACE: Final = 256 << 20
"""Maximum size of an unpacked trace in bytes."""
_UNPACKED_PER_BYTE: Final = 32
_UNPACKED_BESIDES: Final = 4 << 20
"""Maximum size of an unpacked trace, relative to its file and in addition. Traces of nntask have ten to twenty times the size of their files."""
_PER_LETTER: Final = 8
"""Bytes of memory for each character of a trace."""
_PIECE: Final = 1 << 20
_AGAIN: Final = "trace some steps anew, as in nntask train --trace-steps 10:11"

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """An interval of a trace: a task on a worker, or a copy over a link.

    Args:
        track: name of the worker or of the link.
        name: name of the codelet or of the copied data.
        step: step of the task; None for a copy or a task outside steps.
        start, end: nanoseconds since 1970.
        nbytes: bytes of a copy; 0 for a task.
    """

    track: str
    name: str
    step: int | None
    start: int
    end: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """A trace.

    Args:
        path: the file.
        workers: names of the workers, in order.
        tasks: intervals of tasks.
        copies: intervals of copies.
        memory: node -> (nanoseconds since 1970, bytes in use), in order of time.
        about: the description of the steps that `nntask.telemetry.tracing` has written.
    """

    path: Path
    workers: list[str]
    tasks: list[Bar]
    copies: list[Bar]
    memory: Mapping[str, list[tuple[int, int]]]
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One machine of a run.

    Args:
        name: name of the node; "" for a run on one machine.
        lines: lines of its metrics.jsonl.
        machine: contents of its machine.json: budgets, workers, peak; empty without that file.
        trace: trace of some steps; None without one.
        planned: contents of its plan.json: `nntask.planning.order_figures`; empty without that file.
    """

    name: str
    lines: list[Line]
    machine: Mapping[str, Any] = field(default_factory=dict)
    trace: TraceRecord | None = None
    planned: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run.

    Args:
        path: the directory, as it was given.
        lines: lines of its metrics.jsonl, at least one.
        summary: contents of its summary.json; empty while the run goes on, or after a kill.
        nodes: the nodes, at least one.
    """

    path: Path
    lines: list[Line]
    summary: Mapping[str, Any]
    nodes: list[NodeRecord]

    @property
    def name(self) -> str:
        """The last component of the directory's path."""
        return self.path.resolve().name


def read_run(directory: Path, trace: Path | None = None) -> RunRecord:
    """Read a run with all its nodes.

    Args:
        directory: the run directory.
        trace: the run's trace, instead of the one in its directory or configuration.

    Raises:
        UsageError: a trace is given and the run has several nodes.
        DataError: there is no run, it has finished no step, or one of its files is broken.
    """
    if directory.is_file():
        advice = f"that of its run, {directory.parent}" if (directory.parent / METRICS).is_file() else "the directory of a run of nntask train"
        raise DataError(f"{directory} is a file, and nntask report draws the run in a directory", f"give {advice}")
    if not directory.is_dir():
        raise DataError(f"there is no directory {directory}", "give the directory of a run of nntask train")
    metrics = directory / METRICS
    if not metrics.is_file():
        raise DataError(f"{directory} has no metrics.jsonl", "give the directory of a run of nntask train")
    lines: list[Line] = [*_lines(metrics)]
    if not lines:
        raise DataError(f"{metrics} holds no step yet", "wait for the first one")
    summary, machine = _facts(directory / SUMMARY), _facts(directory / MACHINE)
    if not machine:
        machine = {key: summary[key] for key in ("workers", "budget_bytes") if key in summary}
    folders = sorted(each for each in (directory / NODES).glob("*") if (each / METRICS).is_file())
    theirs: list[list[Line]] = [[*_lines(folder / METRICS)] for folder in folders]
    if any(each and each[-1]["step"] >= lines[-1]["step"] for each in theirs):  # otherwise a run on one machine has continued the run of these nodes
        if trace is not None:
            raise UsageError(
                f"--trace {trace} is of one machine and {directory} has {len(folders)} nodes", "put it into the node's folder, or drop it"
            )
        return RunRecord(directory, lines, summary, [_node(folder, each) for folder, each in zip(folders, theirs, strict=True)])
    trace_path = trace or _trace_of(directory)
    node = NodeRecord("", lines, machine, read_trace(trace_path) if trace_path else None, _plan(directory / PLAN))
    return RunRecord(directory, lines, summary, [node])


def _node(folder: Path, lines: list[Line]) -> NodeRecord:
    trace = _trace_of(folder)
    return NodeRecord(folder.name, lines, _facts(folder / MACHINE), read_trace(trace) if trace else None, _plan(folder / PLAN))


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return read_metrics(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give a run that this user may read") from None


def _facts(path: Path) -> Mapping[str, Any]:
    """Return the object in a small file of the run; empty without the file."""
    return read_object(path, "the file", "let this user read it") if path.is_file() else {}


def _plan(path: Path) -> Mapping[str, Any]:
    """Return the figures in a plan.json that can be said in words; empty without the file."""
    figures = _facts(path)
    try:
        if figures:
            figures["order"], headline(figures), cells(figures)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        raise DataError(f"{path} has figures that nntask did not write", "remove it, or restore it") from None
    return figures


def _trace_of(directory: Path) -> Path | None:
    """Return the trace of a run or node, in its directory or at the path that --trace-steps named; None without one."""
    import tomllib

    named = ""
    try:
        observe = tomllib.loads(read_text(directory / CONFIG)).get("observe", {})
        own = observe.get("trace")  # of earlier versions
        named = str(own or str(observe.get("trace_steps", "")).partition(SUFFIXES["trace"].separator)[2])
    except (OSError, ValueError, AttributeError, RecursionError):  # a report needs no configuration, and does not check it
        pass
    candidates = [*([Path(named)] if named else []), *(directory / name for name in _TRACES)]
    return next((path for path in candidates if os.path.isfile(path)), None)  # the path in config.toml may be of any kind


def read_trace(path: Path) -> TraceRecord:
    """Read a trace that `scheduler.execution.trace` has written for a run.

    Raises:
        DataError: the file cannot be read, was cut short, or is of another format.
    """
    try:
        text = _unpacked(path).decode()
        check_size(text, _PER_LETTER)
        document = json.loads(text)
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError, RecursionError):
        raise DataError(f"the trace {path} is not whole", _AGAIN) from None
    except OSError as error:
        raise DataError(f"the trace {path} cannot be read: {error.strerror}", "name another one with --trace") from None
    try:
        about = document["otherData"]["nntask"]
        trace_format = about["format"]
    except (KeyError, TypeError, IndexError):
        raise DataError(f"{path} is no trace of this version of nntask: it does not name its format, {TRACE_FORMAT}", _AGAIN) from None
    if trace_format != TRACE_FORMAT:
        raise DataError(
            f"the trace {path} must have format {TRACE_FORMAT}, got {str(trace_format)[:40]}, which another version of nntask wrote", f"{_AGAIN}"
        )
    try:
        return _parsed(path, document["traceEvents"], about)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
        raise DataError(f"the trace {path} has events that nntask did not write", _AGAIN) from None


def _unpacked(path: Path) -> bytes:
    """Return the content of a trace, whether it is compressed or not.

    Raises:
        OSError: the file cannot be read, or holds more than `_LARGEST_TRACE`, or far more than its size.
    """
    packed = read_bytes(path, _LARGEST_TRACE)
    if packed[:2] != b"\x1f\x8b":
        return packed
    most, content = min(_LARGEST_TRACE, _UNPACKED_PER_BYTE * len(packed) + _UNPACKED_BESIDES), bytearray()
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as file:
        while len(content) <= most and (piece := file.read(_PIECE)):  # read() reserves the requested size
            content += piece
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it holds more than {most >> 20} MiB, so trace fewer steps")
    return bytes(content)


def _parsed(path: Path, events: list[dict[str, Any]], about: Mapping[str, Any]) -> TraceRecord:
    tracks = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["ph"] == "M" and each["name"] == "thread_name"}
    tasks, copies = list[Bar](), list[Bar]()
    memory: dict[str, list[tuple[int, int]]] = {}
    zero = int(about["unix_ns"])
    if about.get("steps"):
        float(about["seconds_per_step"])
        dict(about["bounds_seconds"])
        for row in about["codelets"].values():
            float(row["tasks"] + row["flops"] + row["bytes"])
    for each in events:
        if each["ph"] == "X":
            start, args = zero + round(each["ts"] * 1e3), each["args"]
            bar = Bar(tracks[each["pid"], each["tid"]], each["name"], args.get("step"), start, start + round(each["dur"] * 1e3), args.get("bytes", 0))
            (tasks if each["pid"] == 1 else copies).append(bar)
        elif each["ph"] == "C" and "bytes" in each["args"]:
            memory.setdefault(each["name"].removeprefix("bytes "), []).append((zero + round(each["ts"] * 1e3), each["args"]["bytes"]))
    for counts in memory.values():
        counts.sort()
    return TraceRecord(path, [name for (pid, _), name in tracks.items() if pid == 1], tasks, copies, memory, about)
