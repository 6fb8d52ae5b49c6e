"""Damaged records of runs: a report is made of them, or they are refused with an error of ours, within bounds of time and memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import damaged, other_values
from support.untrusted import fuzz, valid_files

FILES = valid_files("report")
LINE = json.loads(FILES["metrics.jsonl"].splitlines()[0])
VALUES = {name: json.loads(content) for name, content in FILES.items() if name.endswith(".json")}
TRACE = json.loads(gzip.decompress(FILES["trace.json.gz"]))


def lines(values: Any) -> bytes:
    """A metrics.jsonl whose second line is another one."""
    first, *rest = FILES["metrics.jsonl"].splitlines()
    return b"\n".join([first, json.dumps(values).encode(), *rest[1:]]) + b"\n"


@pytest.mark.long
@settings(max_examples=1000)
@given(damaged(FILES["metrics.jsonl"]) | other_values(LINE).map(lines))
def test_metrics(place: Path, content: bytes) -> None:
    """Bytes and values of metrics.jsonl."""
    fuzz("report", place, content)


@pytest.mark.long
@settings(max_examples=900)
@given(st.sampled_from(sorted(VALUES)), st.data())
def test_small_files_of_runs(place: Path, name: str, data: st.DataObject) -> None:
    """Bytes and values of the other files in JSON."""
    content = data.draw(other_values(VALUES[name]).map(lambda values: json.dumps(values).encode()) | damaged(FILES[name]))
    fuzz("report", place, content, name)


@pytest.mark.long
@settings(max_examples=1000)
@given(other_values(TRACE).map(lambda values: gzip.compress(json.dumps(values).encode(), 1)) | damaged(FILES["trace.json.gz"]))
def test_traces(place: Path, content: bytes) -> None:
    """Bytes and events of a trace."""
    fuzz("report", place, content, "trace.json.gz")
