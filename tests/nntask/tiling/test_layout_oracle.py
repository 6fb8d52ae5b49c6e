"""Layouts of data directories against `datasets` itself, where it is installed, on directories that are drawn at random."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from support.data_layouts import PATHS, by_patterns, check_like

data_files = pytest.importorskip("datasets.data_files")


def by_datasets(files: list[str]) -> dict[str, set[str]]:
    """Split -> files, as `load_dataset` of a directory finds them."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        for name in files:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        patterns = data_files.get_data_patterns(str(root))
        found = data_files.DataFilesDict.from_patterns(patterns, base_path=str(root))
        return {split: {Path(each).relative_to(root).as_posix() for each in paths} for split, paths in found.items()}


@settings(deadline=None, max_examples=150)
@given(PATHS)
@example(["train.jsonl", "notes.txt"])
def test_splits_are_those_of_datasets(files: list[str]) -> None:
    """Ours agree with its resolution of files on a disk, and so do the patterns that other tests compare with."""
    assume(not any(other.startswith(f"{name}/") for name in files for other in files))
    theirs = by_datasets(files)
    assert by_patterns(files) == theirs
    check_like(files, theirs)
