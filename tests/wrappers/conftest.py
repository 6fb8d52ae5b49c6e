"""What tests of the command share: a working directory of their own, an environment that says nothing, some text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nntask.planning import simulate


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; the cache goes there as well. Plans look for larger models and minibatches only as far as takes no time."""
    monkeypatch.setattr(simulate, "MANY_TASKS", 2000)
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("NNTASK_", "STARPU_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NNTASK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.fixture
def text(folder: Path) -> Path:
    """Files of text in the directory's folder `text`."""
    path = folder / "text"
    path.mkdir()
    for i in range(25):
        (path / f"{i}.txt").write_text(f"line {i} of a text about the number {i * i}\n" * 20)
    return path


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flag of a file with the key of served models."""
    from support.served import KEY

    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    return f"--api-key-file={file}"
