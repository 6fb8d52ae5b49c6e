"""Damaged configs of all families: read, or refused with an error of ours, within bounds of time and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import damaged, other_values, random_bytes
from support.untrusted import family_configs, fuzz

CONFIGS = family_configs()


@pytest.mark.long
@settings(max_examples=1300)
@given(st.sampled_from(sorted(CONFIGS)).flatmap(lambda kind: damaged(json.dumps(CONFIGS[kind]).encode())) | random_bytes(b'{"model_type":'))
def test_bytes_of_configs(place: Path, content: bytes) -> None:
    """Bytes of a config of any family."""
    fuzz("config", place, content)


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_values_of_configs(place: Path, kind: str) -> None:
    """Values of each family's config."""

    @settings(max_examples=150)
    @given(other_values(CONFIGS[kind]))
    def search(values: Any) -> None:
        fuzz("config", place, json.dumps(values).encode())

    search()
