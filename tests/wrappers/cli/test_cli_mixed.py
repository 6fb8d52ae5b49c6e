"""CPU workers and devices that share the tasks of a run: what is recorded, repeated and refused, on an emulated card and on simulated devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cuda_emulator import COMPILER
from support.emulated_cards import EmulatedCards

from nntask.hardware import gpus
from wrappers.cli import main

CONFIG = {"vocab_size": 61, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
FLAGS = (
    "--config-path=config.json --dataset=train.bin --dataset-path=. --batch=2 --minibatch=1 --lr=1e-3 --sample-tokens=0 --ram=64MiB --save-every=0"
)
TRAIN = ["train", *FLAGS.split(), "--steps=3"]

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")


@pytest.fixture
def data(folder: Path) -> Path:
    """A directory with what a run needs."""
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **CONFIG}))
    np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 5000).astype(np.uint16).tofile(folder / "train.bin")
    return folder


def losses(run: str) -> list[float]:
    """Of each step."""
    return [json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def summary(run: str) -> dict[str, Any]:
    """What a run says about itself."""
    content: dict[str, Any] = json.loads(Path(run, "summary.json").read_text())
    return content


@needs_compiler
def test_a_card_and_cpu_workers_share_tasks_and_repeat_a_step(
    data: Path, cuda_libraries: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses are within rounding; two runs pinned to the recorded workers have the same bits, whatever their number of CPU workers."""
    monkeypatch.setattr(gpus, "cards", EmulatedCards(cuda_libraries))
    assert main([*TRAIN, "--run-dir=gpu"]) == 0
    assert summary("gpu")["bits_depend_on_schedule"] is False
    assert not Path("gpu/assignment.json").exists()
    assert main([*TRAIN, "--sched=auto@mixed", "--ncpu=2", "--run-dir=mixed"]) == 0
    out = capsys.readouterr().out
    assert "workers: cpu:0, cpu:1, cuda:0; policy dmdas" in out
    assert "losses depend on the schedule; assignment.json repeats its last step" in out
    assert summary("mixed")["bits_depend_on_schedule"] is True
    np.testing.assert_allclose(losses("mixed"), losses("gpu"), rtol=1e-4)
    recorded = json.loads(Path("mixed/assignment.json").read_text())
    assert set(recorded["kinds"]) == {"cpu", "cuda"}
    for number in (1, 2):
        assert main([*TRAIN, "--sched=auto@pinned:mixed/assignment.json", f"--ncpu={number}", f"--run-dir=pinned{number}"]) == 0
    assert "tasks of a step run where mixed/assignment.json says" in capsys.readouterr().out
    assert losses("pinned1") == losses("pinned2")
    assert summary("pinned1")["bits_depend_on_schedule"] is False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content["tasks"].pop(), "is about other tasks: "),
        (lambda content: content["tasks"].reverse(), "is about other tasks: "),
        (lambda content: content.pop("kinds"), "is not for this step: kinds must have one entry for each of the "),
        (
            lambda content: content["kinds"].__setitem__(3, "cuda"),
            "is not for this step: task 3 of the step, copy input, runs on cpu, sim here, got 'cuda'",
        ),
        (
            lambda content: content["kinds"].__setitem__(3, ["cpu"]),
            "is not for this step: task 3 of the step, copy input, runs on cpu, sim here, got ['cpu']",
        ),
    ],
)
def test_a_file_about_another_step_is_refused(change: Any, words: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything runs, with the flags that the file belongs to."""
    sim = [*TRAIN, "--sim-gpu=1", "--ncpu=1"]
    assert main([*sim, "--sched=dmda@mixed", "--run-dir=mixed"]) == 0
    content = json.loads(Path("mixed/assignment.json").read_text())
    change(content)
    Path("other.json").write_text(json.dumps(content))
    capsys.readouterr()
    assert main([*sim, "--sched=dmda@pinned:other.json", "--run-dir=new"]) == 2
    assert f"--sched dmda@pinned:other.json {words}" in (error := capsys.readouterr().err)
    assert "this step has --order submission and --recompute none" in error


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--sched=prio@mixed --sim-gpu=1", 2, "--sched prio@mixed compares no kinds of workers; use --sched auto@mixed, or dm, dmda, dmdas"),
        ("--sched=auto@mixed --ngpu=0", 2, "--sched auto@mixed shares tasks with devices, and there is none; use --sched auto, or add --sim-gpu 1"),
        ("--sched=auto@mixed --sim-gpu=1 --ncpu=0", 2, "--sched auto@mixed needs CPU workers, and --ncpu 0 leaves none"),
        ("--sched=auto@mixed --sim-gpu=1 --update-on=cpu", 2, "lets CPU workers run all tasks, and --update-on cpu only updates"),
        ("--sched=auto@mixed --dask=local:2 --lanes=2", 2, "--sched auto@mixed is for one machine; drop it or --dask local:2"),
        ("--sched=auto@both --sim-gpu=1", 2, "ASSIGNMENT in --sched must be devices, mixed or pinned:FILE, got 'both'"),
        ("--sched=auto@pinned: --sim-gpu=1", 2, "--sched auto@pinned: names no file; add the assignment.json of a run"),
        ("--sched=auto@pinned:none.json --sim-gpu=1", 4, "assignment none.json cannot be read: No such file or directory"),
    ],
)
def test_refusals(flags: str, code: int, words: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rule, the values, and what to change."""
    assert main([*TRAIN, *flags.split(), "--run-dir=new"]) == code
    assert words in capsys.readouterr().err


def test_plans_for_described_machines(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CPU workers make a step of slow devices faster; a file is of a run on this machine."""
    plan = ["plan", "--config-path=config.json", "--batch=4", "--minibatch=2", "--devices=2x1MiB@1GF", "--json"]
    seconds = []
    for flags in ([], ["--sched=auto@mixed", "--ncpu=16"]):
        assert main([*plan, *flags]) == 0
        figures = json.loads(capsys.readouterr().out)
        seconds.append(figures["seconds_per_step"])
    assert seconds[1] < 0.8 * seconds[0]
    assert figures["policy"] == "dmdas"
    assert figures["workers"]["cpu@ram"] == 16
    assert main([*plan, "--sched=auto@pinned:assignment.json"]) == 2
    assert "--sched auto@pinned:assignment.json repeats a run on this machine; use --sched auto@mixed" in capsys.readouterr().err
