"""Damaged checkpoints: read, or refused with an error of ours, within bounds of time and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import damaged, other_values, random_bytes
from support.untrusted import fuzz, valid_files

from nntask.io.sealed_json import SEAL, sealed

FILES = valid_files("state")
STATE = {key: value for key, value in json.loads(FILES["state.json"]).items() if key != SEAL}


def sealed_bytes(values: Any) -> bytes:
    """The text of a state, with the checksum that belongs to it."""
    return (sealed(values) if isinstance(values, dict) else json.dumps(values)).encode()


@pytest.mark.long
@settings(max_examples=900)
@given(st.one_of(damaged(FILES["state.json"]), other_values(STATE).map(sealed_bytes), random_bytes(b'{"format": 2')))
def test_states(place: Path, content: bytes) -> None:
    """Bytes of a state.json, and values with a checksum that fits."""
    fuzz("state", place, content)


@pytest.mark.long
@settings(max_examples=300)
@given(st.sampled_from(sorted(set(FILES) - {"state.json"})), st.data())
def test_files_beside_a_state(place: Path, name: str, data: st.DataObject) -> None:
    """Bytes of the other files of a checkpoint: all of them are noticed."""
    content = data.draw(damaged(FILES[name]))
    found = fuzz("state", place, content, name)
    assert found.error is not None or content == FILES[name]
