"""Layouts of data directories against the resolution of `datasets` itself, on directories that are drawn at random."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from support.data_layouts import PATHS

from nntask.data.layout import splits_of
from nntask.data.splits import Listing, splits_in
from nntask.errors import DataError

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
@example(["data/train-00000-of-00001.jsonl", "data/random-00000-of-00001.jsonl", "x.txt"])
@example(["train.jsonl", "notes.txt"])
def test_splits_are_those_of_datasets(files: list[str]) -> None:
    """Equal wherever `datasets` has a training split and no file is of two; without one, no file of its other splits trains."""
    assume(not any(other.startswith(f"{name}/") for name in files for other in files))
    theirs = by_datasets(files)
    shared = {name for split, names in theirs.items() for other, more in theirs.items() if split != other for name in names & more}
    try:
        ours = splits_of(Listing("--dataset-path d", "d", tuple(files)), lambda name: True, lambda name: name.endswith(".jsonl"))
    except DataError:
        words = [frozenset(split for part in name.split("/") for split in splits_in(part)) for name in files]
        assert shared or any("train" in each and len(each) > 1 for each in words) or len(files) >= 2 * len(set().union(*theirs.values()))
        return
    kept_apart = theirs.get("validation", set()) | theirs.get("test", set())
    if "train" not in theirs:
        assert not set(ours.train) & kept_apart
        return
    if ours.layout:
        assert set(ours.train) == theirs["train"]
        assert set(ours.test) | set(ours.validation) >= kept_apart - theirs["train"]
        assert set(ours.validation) == theirs.get("validation", set()) - theirs.get("test", set())
    else:
        assert not kept_apart  # a plain tree, in which a name has the word by chance
        assert set(ours.train) | set(ours.metadata) == set(files)
