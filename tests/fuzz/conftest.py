"""What the fuzzing tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the module."""
    return tmp_path_factory.mktemp("fuzz")
