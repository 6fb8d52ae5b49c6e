"""Damaged JSON lines: read, or refused with an error of ours, within bounds of time and memory."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import damaged, other_values, random_bytes
from support.untrusted import fuzz, valid_files

WHOLE = valid_files("JSON lines")["rows.jsonl"]
ROW = {"text": "line", "messages": [{"role": "user", "content": "a"}], "n": 1, "parts": {"a": None}}
PACKED = (gzip.compress(WHOLE, mtime=0), bz2.compress(WHOLE), lzma.compress(WHOLE))


def repeated(values: object) -> bytes:
    """A file of the same row a few times."""
    return (json.dumps(values) + "\n").encode() * 5


@pytest.mark.long
@settings(max_examples=1300)
@given(st.one_of(damaged(WHOLE), other_values(ROW).map(repeated), random_bytes(b'{"text":'), st.sampled_from(PACKED).flatmap(damaged)))
def test_json_lines(place: Path, content: bytes) -> None:
    """Bytes and values of lines, compressed or not."""
    fuzz("JSON lines", place, content)
