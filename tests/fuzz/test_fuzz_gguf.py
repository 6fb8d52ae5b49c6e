"""Damaged GGUF files: read, or refused with an error of ours, within bounds of time and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.damage import damaged, other_values, random_bytes
from support.untrusted import fuzz, gguf_with, valid_files

from nntask.io.gguf_file import GgufFile

WHOLE = valid_files("GGUF")["model.gguf"]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The metadata of the valid file, arrays as lists."""
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    path.write_bytes(WHOLE)
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in GgufFile(path).metadata.items()}


@pytest.mark.long
@settings(max_examples=1000)
@given(st.one_of(damaged(WHOLE), damaged(WHOLE[:9000]).map(lambda head: head + WHOLE[9000:]), random_bytes(WHOLE[:24])))
def test_bytes_of_gguf_files(place: Path, content: bytes) -> None:
    """Bytes of the file, those of the header preferred."""
    fuzz("GGUF", place, content)


@pytest.mark.long
@settings(max_examples=400)
@given(st.data())
def test_metadata_of_gguf_files(place: Path, metadata: dict[str, Any], data: st.DataObject) -> None:
    """Values of keys of any type, keys that are missing, and long lists."""
    fuzz("GGUF", place, gguf_with(data.draw(other_values(metadata))))
