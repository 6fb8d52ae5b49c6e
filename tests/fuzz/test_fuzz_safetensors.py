"""Damaged headers of safetensors files and indices of shards: read, or refused with an error of ours, within bounds of time and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import damaged, other_values, random_bytes
from support.untrusted import fuzz, valid_files

WHOLE = valid_files("safetensors")["model.safetensors"]
LENGTH = int.from_bytes(WHOLE[:8], "little")
HEADER = json.loads(WHOLE[8 : 8 + LENGTH])
INDEX = json.loads(valid_files("index")["model.safetensors.index.json"])


def file_of(header: Any) -> bytes:
    """The valid file with another header."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + WHOLE[8 + LENGTH :]


@pytest.mark.long
@settings(max_examples=2000)
@given(st.one_of(damaged(WHOLE), random_bytes(WHOLE[:9]), other_values(HEADER).map(file_of)))
def test_headers_of_safetensors(place: Path, content: bytes) -> None:
    """Bytes of the file, and values of its header."""
    fuzz("safetensors", place, content)


@pytest.mark.long
@settings(max_examples=700)
@given(st.one_of(damaged(json.dumps(INDEX).encode()), other_values(INDEX).map(lambda values: json.dumps(values).encode())))
def test_indices_of_shards(place: Path, content: bytes) -> None:
    """Bytes and values of an index."""
    fuzz("index", place, content)
