"""What a loss of power leaves of a run: the entry of its directory, and the lines of the steps that its checkpoints have."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nntask.io.atomic_write import make_directories
from wrappers.cli import main

CONFIG = {"vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 1, "n_head": 3}
TRAIN = [
    "train",
    "--config-path=small.json",
    "--dataset=text",
    "--dataset-path=text",
    "--tokenizer=bytes",
    "--batch=2",
    "--ncpu=1",
    "--sample-tokens=0",
]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Path and number of lines of all that is forced to disk, in order."""
    found: list[tuple[str, int]] = []
    fsync = os.fsync

    def recorded(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        found.append((path, Path(path).read_bytes().count(b"\n") if path.endswith(".jsonl") else 0))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recorded)
    return found


@pytest.mark.parametrize("flags", [["--run-dir=deep/er/run"], []], ids=["named", "unnamed"])
def test_directories_and_lines_are_forced_to_disk(flags: list[str], folder: Path, text: Path, synced: list[tuple[str, int]]) -> None:
    """The parent of each new directory, and before the checkpoint of a step the lines up to it."""
    (folder / "small.json").write_text(json.dumps(CONFIG))
    assert main([*TRAIN, "--steps=4", "--save-every=2", *flags]) == 0
    (run,) = [path.parent for path in folder.rglob("latest")]
    paths = [path for path, _ in synced]
    assert {str(run.parent), str(folder)} <= set(paths[: paths.index(str(run / "metrics.jsonl"))] or paths)
    lines = [(at, number) for at, (path, number) in enumerate(synced) if path == str(run / "metrics.jsonl") and number]
    saved = [at for at, path in enumerate(paths) if path == str(run / "checkpoints")]
    assert [number for _, number in lines] == [2, 4]
    assert lines[0][0] < saved[0] < lines[1][0] < saved[-1]


def test_new_directories_have_their_entries_forced_to_disk(tmp_path: Path, synced: list[tuple[str, int]]) -> None:
    """Each new one's, and none of those that are there."""
    make_directories(tmp_path / "a" / "b")
    assert sorted(path for path, _ in synced) == [str(tmp_path), str(tmp_path / "a")]
    synced.clear()
    make_directories(tmp_path / "a" / "b")
    assert not synced
