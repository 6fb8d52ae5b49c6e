"""Some text for tests of the command."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def text(folder: Path) -> Path:
    """Files of text in the directory's folder `text`."""
    path = folder / "text"
    path.mkdir()
    for i in range(25):
        (path / f"{i}.txt").write_text(f"line {i} of a text about the number {i * i}\n" * 20)
    return path
