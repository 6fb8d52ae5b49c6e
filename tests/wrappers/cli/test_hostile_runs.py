"""Run directories that come from somebody else: nothing in them chooses where a command writes."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from pathlib import Path

import pytest
from support.commands import rewrite_state

from nntask.errors import UsageError
from nntask.io import written_aside
from nntask.training.run_lock import check_unlocked
from wrappers.cli import main

CONFIG = {"vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 1, "n_head": 3}
TRAIN = [
    "train",
    "--config-path=small.json",
    "--dataset=text",
    "--dataset-path=text",
    "--tokenizer=bytes",
    "--batch=2",
    "--minibatch=2",
    "--ncpu=1",
    "--sample-tokens=0",
    "--steps=2",
    "--save-every=1",
    "--run-dir=run",
]
ON = ["train", "--resume=run", "--steps=3"]


@pytest.fixture
def here(folder: Path, text: Path) -> Path:
    """A directory with a run of two steps, and a file of the user that nobody may change."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **CONFIG}))
    (folder / "victim").write_text("mine")
    assert main(TRAIN) == 0
    return folder


def test_the_disk_of_a_run_is_named_and_not_used(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run says which flag it leaves out, and writes nothing there; with the flag it does."""
    state = (here / "run" / "latest").resolve() / "state.json"
    rewrite_state(state, lambda state: state["settings"]["resources"].__setitem__("disk", "elsewhere/new file"))
    assert main(ON) == 0
    assert "add: --disk 'elsewhere/new file'" in capsys.readouterr().err
    assert not (here / "elsewhere").exists()
    (here / "elsewhere").mkdir()
    assert main(["train", "--resume=run", "--steps=4", "--disk=elsewhere/new file"]) == 0
    assert "add:" not in capsys.readouterr().err
    assert (here / "elsewhere" / "new file").exists()


@pytest.mark.parametrize(("key", "words"), [("save_checkpoint", "with nntask export"), ("save_optimizer", "--format optimizer")])
def test_files_that_an_old_run_wrote_are_not_written(key: str, words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run says that the old setting has no effect, and how to get the file."""
    state = (here / "run" / "latest").resolve() / "state.json"
    rewrite_state(state, lambda state: state["settings"]["checkpoints"].__setitem__(key, "elsewhere.safetensors"))
    assert main(ON) == 0
    err = capsys.readouterr().err
    assert f"{key} in " in err
    assert words in err
    assert not (here / "elsewhere.safetensors").exists()


@pytest.mark.parametrize("name", ["report.html", "trace.json.gz"])
@pytest.mark.parametrize("leads_to_nothing", [False, True])
def test_links_in_a_run_are_replaced(name: str, leads_to_nothing: bool, here: Path) -> None:
    """A page or a trace takes the place of the link, and what the link leads to stays as it is."""
    target = here / ("nothing" if leads_to_nothing else "victim")
    (here / "run" / name).symlink_to(target)
    assert main([*ON, "--trace-steps=3:3"]) == 0
    assert main(["report", "run"]) == 0
    assert (here / "run" / name).is_file()
    assert not (here / "run" / name).is_symlink()
    assert (here / "victim").read_text() == "mine"
    assert not (here / "nothing").exists()


@pytest.mark.parametrize("name", ["tensorboard", "nodes", "nodes/0", "checkpoints"])
def test_directories_of_a_run_are_no_links(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose directories lead elsewhere is not continued."""
    place = here / "run" / name
    (here / "other").mkdir()
    if name == "checkpoints":
        place.rename(here / "other" / "checkpoints")
        (here / "run" / "latest").unlink()
        (here / "run" / "latest").symlink_to("checkpoints/step-000002")
        place.symlink_to(here / "other" / "checkpoints")
    else:
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(here / "other")
    before = sorted(str(path) for path in (here / "other").rglob("*"))
    assert main([*ON, "--report-to=tensorboard"]) == (4 if name == "checkpoints" else 2)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert ("got a link to" if name == "checkpoints" else "is a link to") in err
    assert sorted(str(path) for path in (here / "other").rglob("*")) == before


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "directory"])
def test_a_lock_that_is_none(kind: str, folder: Path) -> None:
    """A lock that is a link or a pipe is refused at once; what it leads to keeps its content."""
    run, lock = folder / "run", folder / "run" / ".lock"
    run.mkdir()
    (folder / "victim").write_text("mine")
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "directory":
        lock.mkdir()
    else:
        lock.symlink_to(folder / ("victim" if kind == "link" else "nothing"))
    with pytest.raises(UsageError, match="must be a regular file"):
        check_unlocked(run, "--run-dir")
    assert main(["train", "--model=tiny", "--steps=1", "--run-dir=run"]) == 2
    assert (folder / "victim").read_text() == "mine"
    assert not (folder / "nothing").exists()


def test_words_of_a_lock_are_shown_only_as_a_process_and_a_machine(folder: Path) -> None:
    """The text of a lock is somebody's: no escape codes and no commands in it reach the terminal."""
    (folder / ".lock").write_text("\x1b]0;owned\x07\x1b[31m1;rm -rf ~ host\n")
    with (folder / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UsageError) as caught:
            check_unlocked(folder, "--run-dir")
    assert "another process is training" in str(caught.value)
    assert str(caught.value).isprintable()


def test_what_is_no_file_is_never_replaced(folder: Path) -> None:
    """A pipe, or a link to a device, stays what it is."""
    os.mkfifo(folder / "pipe")
    (folder / "device").symlink_to("/dev/null")
    for name in ("pipe", "device"):
        with pytest.raises(OSError, match="is a device, a pipe or a socket"), written_aside(folder / name) as new:
            new.write_text("text")
    assert stat.S_ISFIFO((folder / "pipe").stat().st_mode)
    assert (folder / "device").is_symlink()
    assert sorted(path.name for path in folder.iterdir()) == ["device", "pipe"]


@pytest.mark.parametrize("name", [b"run-\xff\xfe", "run-größer".encode()])
def test_a_run_may_have_any_name_that_the_file_system_allows(name: bytes, folder: Path, text: Path) -> None:
    """A directory whose name is not UTF-8 is trained in, saved to, continued and reported."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **CONFIG, "vocab_size": 300}))
    run = os.fsdecode(name)
    assert main([each for each in TRAIN if "tokenizer" not in each and "run-dir" not in each] + [f"--run-dir={run}"]) == 0
    assert main(["train", f"--resume={run}", "--steps=3"]) == 0
    assert main(["generate", run, "--prompt=line", "--max-new-tokens=2"]) == 0
    assert main(["report", run]) == 0
    assert sorted(path.name for path in Path(run, "checkpoints").iterdir()) == ["step-000001", "step-000002", "step-000003"]
