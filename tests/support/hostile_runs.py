"""Hostile files of runs: states of checkpoints, and the records that a report is made of. See `hostile_inputs`."""

from __future__ import annotations

import gzip
import json
from typing import Any, Final

from support.untrusted import valid_files

from nntask.io.sealed_json import SEAL, sealed

MIB: Final = 1 << 20
RAW: Final = valid_files("state")["state.json"]
STATE: Final = {key: value for key, value in json.loads(RAW).items() if key != SEAL}


def state(**changes: Any) -> bytes:
    """The valid state with changes, and a checksum that fits; None leaves a key out."""
    return sealed({key: value for key, value in {**STATE, **changes}.items() if value is not None}).encode()


def group(name: str, **changes: Any) -> bytes:
    """The valid state with other settings in one group."""
    return state(settings={**STATE["settings"], name: {**STATE["settings"].get(name, {}), **changes}})


def sums(**changes: Any) -> bytes:
    """The valid state with other checksums, by file; double lines are dots."""
    return state(checksums={**STATE["checksums"], **{name.replace("__", "."): value for name, value in changes.items()}})


STATES: Final = {
    "empty": b"",
    "NUL bytes": bytes(len(RAW)),
    "half of it": RAW[: len(RAW) // 2],
    "the same twice": RAW + RAW,
    "without its checksum": json.dumps(STATE).encode(),
    "a checksum that is text": json.dumps({**STATE, SEAL: "1"}).encode(),
    "a checksum that is a list": json.dumps({**STATE, SEAL: [1]}).encode(),
    "one letter of another case": RAW.replace(b'"step"', b'"Step"', 1),
    "a format of -1": state(format=-1),
    "a format that is true": state(format=True),
    "a format that is a list": state(format=[2]),
    "a format of 10^400": state(format=10**400),
    "a step that is true": state(step=True),
    "a step of 2^63": state(step=1 << 63),
    "a step that is a fraction": state(step=1.5),
    "no step": state(step=None),
    "a cursor of three": state(cursor=[0, 0, 0]),
    "a cursor of nulls": state(cursor=[None, None]),
    "a model that is a list": state(model=["gpt2"]),
    "a model of no known family": state(model={**STATE["model"], "model_type": "\x1b[2J"}),
    "a model of a family that is a list": state(model={**STATE["model"], "model_type": ["gpt2"]}),
    "a model of 2^30 blocks": state(model={**STATE["model"], "n_layer": 1 << 30}),
    "a model of heads of no width": state(model={**STATE["model"], "n_head": 12, "n_embd": 6}),
    "settings that are a list": state(settings=[1]),
    "a group that is null": state(settings={"optim": None}),
    "a rate that is text": group("optim", lr="1"),
    "a rate that is a list": group("optim", lr=[1e-3]),
    "a seed that is a fraction": group("data", batch=1.5),
    "a path of a MiB": lambda: group("data", dataset_path="a" * MIB),
    "a path that is a number": group("data", dataset_path=7),
    "checksums that are a list": state(checksums=[1]),
    "a checksum of a file above": state(checksums={**STATE["checksums"], "../state.json": 0}),
    "a checksum of a device": state(checksums={**STATE["checksums"], "/dev/zero": 0}),
    "a checksum of the directory": state(checksums={**STATE["checksums"], "..": 0}),
    "a checksum without a name": state(checksums={**STATE["checksums"], "": 0}),
    "a checksum of a name of 5,000 letters": state(checksums={**STATE["checksums"], "a" * 5000: 0}),
    "a checksum of a NUL": state(checksums={**STATE["checksums"], "a\0": 0}),
    "a checksum that is below zero": sums(tokenizer__json=-1),
    "a checksum of a file that is not there": sums(more__json=1),
    "two million empty lists": lambda: RAW.rstrip()[:-1] + b', "a": [' + b"[]," * (2 * MIB) + b"0]}",
    "brackets without end": lambda: b'{"format": 2, "a": ' + b"[" * 500_000,
    "half a pair of UTF-16": RAW.rstrip()[:-1] + b', "a": "\\ud800"}',
}
RECORDS: Final = valid_files("report")
LINE: Final = json.loads(RECORDS["metrics.jsonl"].splitlines()[0])
TRACE: Final = json.loads(gzip.decompress(RECORDS["trace.json.gz"]))


def line(**changes: Any) -> bytes:
    """The valid metrics, with one more line that has changes."""
    return RECORDS["metrics.jsonl"] + json.dumps({**LINE, "step": 5, **changes}).encode() + b"\n"


def small(name: str, values: Any) -> dict[str, bytes]:
    """Another small file of the run."""
    return {name: values if isinstance(values, bytes) else json.dumps(values).encode()}


def changed(name: str, **changes: Any) -> dict[str, bytes]:
    """A small file of the run with changes."""
    return small(name, {**json.loads(RECORDS[name]), **changes})


def trace(content: Any) -> dict[str, bytes]:
    """Another trace of the run."""
    return {"trace.json.gz": content if isinstance(content, bytes) else gzip.compress(json.dumps(content).encode(), 6)}


def events(**changes: Any) -> dict[str, bytes]:
    """The trace, whose bars have changes."""
    return trace({**TRACE, "traceEvents": [{**each, **changes} if each["ph"] == "X" else each for each in TRACE["traceEvents"]]})


def about(**changes: Any) -> dict[str, bytes]:
    """The trace with another description."""
    return trace({**TRACE, "otherData": {"nntask": {**TRACE["otherData"]["nntask"], **changes}}})


REPORTS: Final = {
    "no line": b"",
    "NUL bytes": bytes(100_000),
    "no UTF-8": b"\xff\xfe\n" * 1000 + RECORDS["metrics.jsonl"],
    "a line that is a list": RECORDS["metrics.jsonl"] + b"[1, 2]\n",
    "a step that is true": line(step=True),
    "a step that is a fraction": line(step=1.5),
    "a step below zero": line(step=-5),
    "a step of 10^400": line(step=10**400),
    "a loss that is text": line(loss="low"),
    "a loss of infinity": line(loss=float("inf")),
    "a loss of 10^400": line(loss=10**400),
    "seconds of 0": line(seconds=0),
    "seconds that are a list": line(seconds=[1]),
    "memory that is a list": line(resident_peak_bytes=[1]),
    "memory of a node of escapes": line(resident_peak_bytes={"\x1b[2J<script>": 1}),
    "moved bytes that are texts": line(moved_bytes={"ram->disk": "1"}),
    "a hundred thousand nodes": lambda: line(resident_peak_bytes={f"n{number}": number for number in range(30_000)}),
    "a million empty lists in a line": lambda: RECORDS["metrics.jsonl"] + b'{"step": 5, "a": [' + b"[]," * (300_000) + b"0]}\n",
    "lines of empty lists, 8 MiB": lambda: RECORDS["metrics.jsonl"] + (b'{"step": 5, "a": [' + b"[]," * 5000 + b"0]}\n") * 550,
    "the same step a hundred thousand times": lambda: b'{"step": 1, "loss": 1.0, "seconds": 1.0}\n' * 100_000,
    "brackets without end": lambda: RECORDS["metrics.jsonl"] + b'{"step": ' + b"[" * 900_000 + b"\n",
    "a machine that is a list": small("machine.json", [1]),
    "workers that are numbers": changed("machine.json", workers=[1, 2]),
    "workers that are null": changed("machine.json", workers=None),
    "a peak that is text": changed("machine.json", peak_flops="fast"),
    "budgets that are a list": changed("machine.json", budget_bytes=[1]),
    "a summary of brackets": lambda: small("summary.json", b"[" * 500_000),
    "a summary of empty lists": lambda: small("summary.json", b'{"a":[' + b"[]," * (2 * MIB) + b"0]}"),
    "a plan that is a text": small("plan.json", "plan"),
    "a plan of seconds of 10^400": changed("plan.json", seconds_without_recompute=10**400),
    "a plan of values that are numbers": changed("plan.json", values=[1, 2]),
    "a plan of values without names": changed("plan.json", values=[{}]),
    "a plan of infinite bytes": changed("plan.json", forecast_bytes={"layers": float("inf")}),
    "a trace that is empty": trace(b""),
    "a trace of two bytes": trace(b"\x1f\x8b"),
    "a trace of null": trace(None),
    "a trace of a list": trace([1]),
    "a trace of 200 MiB of spaces": lambda: trace(gzip.compress(b" " * (200 * MIB))),
    "a trace of empty objects": lambda: trace(gzip.compress(b'{"traceEvents": [' + b"{}," * (4 * MIB) + b"0]}")),
    "a trace of no events": trace({**TRACE, "traceEvents": []}),
    "a trace of events that are numbers": trace({**TRACE, "traceEvents": [1, 2]}),
    "bars at infinity": events(ts=float("inf")),
    "bars of 10^400": events(dur=10**400),
    "bars without a track": events(tid=77),
    "bars of a track that is a list": events(tid=[1]),
    "bars with a step that is text": events(args={"step": "three"}),
    "a trace that begins at 10^400": about(unix_ns=10**400),
    "a trace that begins at NaN": about(unix_ns=float("nan")),
    "codelets that are a list": about(codelets=[1]),
    "bounds of texts": about(bounds_seconds={"area": "long"}),
    "a config.toml of brackets": lambda: small("config.toml", b"a = " + b"[" * 100_000),
    "a config.toml with a device as trace": small("config.toml", b'[observe]\ntrace = "/dev/zero"\n'),
    "a config.toml whose groups are numbers": small("config.toml", b"observe = 7\n"),
}
