"""Damaged files of token ids and their sidecars: read, or refused with an error of ours, within bounds of time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import damaged, other_values, random_bytes
from support.untrusted import fuzz, valid_files

WHOLE = valid_files("token ids")["train.bin"]
SIDECAR = valid_files("token ids")["train.bin.json"]


@pytest.mark.long
@settings(max_examples=3000)
@given(st.one_of(damaged(WHOLE), random_bytes(b"\x93NUMPY"), random_bytes((20240520).to_bytes(4, "little"))))
def test_token_ids(place: Path, content: bytes) -> None:
    """Bytes of the ids."""
    fuzz("token ids", place, content)


@pytest.mark.long
@settings(max_examples=2000)
@given(st.one_of(damaged(SIDECAR), other_values({"dtype": "uint32"}).map(lambda values: __import__("json").dumps(values).encode())))
def test_sidecars(place: Path, content: bytes) -> None:
    """Bytes and values of the sidecar."""
    fuzz("token ids", place, content, "train.bin.json")
