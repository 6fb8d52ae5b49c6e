"""--report-to tensorboard: the event files hold what metrics.jsonl holds, as TensorBoard itself reads them; nothing of torch is loaded."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.deadline import DEADLINE

from nntask.errors import StorageError
from nntask.telemetry.metrics import Journal, read_metrics
from nntask.telemetry.step_record import StepRecord
from nntask.telemetry.tensorboard import EventFile
from wrappers.cli import main

SMALL = {"vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
FLAGS = "--config-path=small.json --dataset=text --dataset-path=text --tokenizer=bytes --batch=4 --minibatch=2 --ncpu=2 --sample-tokens=0"


@pytest.fixture(autouse=True)
def here(folder: Path, text: Path) -> Path:
    """A directory with a small config and some text."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL}))
    return folder


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag, as TensorBoard has them from the run's directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"), purge_orphaned_data=True)
    found.Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def single(value: float) -> float:
    """In single precision, in which scalars are kept."""
    found: tuple[float] = struct.unpack("f", struct.pack("f", value))
    return found[0]


def test_scalars_are_those_of_the_journal(here: Path) -> None:
    """Every step, of a run and of its continuation from an earlier checkpoint, once; loss, rates, memory and links."""
    flags = "--run-dir=run --report-to=tensorboard --save-every=2 --ram=400KB --disk=tier --recompute=none"
    assert main(["train", *FLAGS.split(), *flags.split(), "--steps=3"]) == 0
    shutil.rmtree(here / "run" / "checkpoints" / "step-000003")
    assert main(["train", "--resume=run/checkpoints/step-000002", "--steps=4", "--disk=tier", "--report-to=tensorboard"]) == 0
    lines = read_metrics(here / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    found = scalars(here / "run")
    for tag, name in (("train/loss", "loss"), ("train/learning_rate", "lr"), ("train/gradient_norm", "grad_norm"), ("speed/mfu", "mfu")):
        assert found[tag] == [(line["step"], single(line[name])) for line in lines], tag
    assert found["memory_gb/disk"] == [(line["step"], single(line["resident_peak_bytes"]["disk"] / 1e9)) for line in lines]
    assert found["moved_gb/ram_to_disk"] == [(line["step"], single(line["moved_bytes"]["ram->disk"] / 1e9)) for line in lines]
    assert len(list((here / "run" / "tensorboard").iterdir())) == 2


def test_nothing_of_torch_is_loaded(here: Path) -> None:
    """Nor of TensorFlow."""
    code = (
        "import sys; from wrappers.cli import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'tensorflow'} & {name.partition('.')[0] for name in sys.modules})); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *FLAGS.split(), "--run-dir=run", "--steps=1", "--report-to=tensorboard"],
        capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert scalars(here / "run")["train/loss"][0][0] == 1


def test_a_missing_package_is_refused_before_anything_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 with the command that installs it."""
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name == "tensorboard" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert main(["train", *FLAGS.split(), "--run-dir=run", "--report-to=tensorboard"]) == 2
    assert "needs the tensorboard package, which is not installed; pip install -e '.[tensorboard]', or drop it" in capsys.readouterr().err
    assert not (here / "run").exists()
    assert main(["train", *FLAGS.split(), "--run-dir=run", "--report-to=wandb"]) == 2
    assert "--report-to must be one of none, tensorboard, got 'wandb'" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_said(here: Path) -> None:
    """A file stands where the folder should be: a `StorageError`, as for the journal itself."""
    (here / "tensorboard").write_text("")
    journal = Journal(here / "metrics.jsonl", 0, events=EventFile(here, 0))
    with pytest.raises(StorageError, match="File exists"):
        journal.add(StepRecord(1, 6.0, 1e-4, 1.0, 1024, 0.5, 2000.0, 0.1, 0.8, {"ram": 1}, {}, 0, 0.0, 0.0, 1.0))
    journal.close()
