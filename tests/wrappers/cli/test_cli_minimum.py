"""The minimum budgets that ``nntask plan`` prints are enough for steps, validation, sampling and checkpoints; a page less is refused at once.

More steps each: ``NNTASK_MINIMUM_STEPS=50 pytest -m "long or not long" tests/wrappers/cli/test_cli_minimum.py``.
"""

from __future__ import annotations

import json
import os
import random
import re
from functools import cache
from pathlib import Path

import pytest

from wrappers.cli import main

MODEL = {"vocab_size": 257, "n_positions": 16, "n_embd": 64, "n_layer": 1, "n_head": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
STEPS = int(os.environ.get("NNTASK_MINIMUM_STEPS", "3"))
FLAGS = ["--config-path=model.json", "--batch=2", "--minibatch=1", "--vocab-tile=64", "--inner-tile=64"]
RUN = ["--dataset=text", "--dataset-path=text", "--tokenizer=bytes", f"--steps={STEPS}", "--eval-every=2", "--eval-batches=1", "--save-every=2"]
PAGE = 4096
MACHINES = {
    "RAM alone": ("--ncpu=2", "--ram={ram}"),
    "RAM and disk": ("--ncpu=2", "--ram={ram}", "--disk=scratch:{disk}"),
    "two devices and RAM": ("--ncpu=0", "--sim-gpu=2", "--gpu-memory={sim:0}", "--ram={ram}"),
    "a device, a worker, RAM and disk": ("--ncpu=1", "--sim-gpu=1", "--gpu-memory={sim:0}", "--ram={ram}", "--disk=scratch:{disk}"),
}


USUAL = [name if "disk" in name and "device" in name else pytest.param(name, marks=pytest.mark.long) for name in MACHINES]
"""By default the machine with everything; the others with the long tests."""


@pytest.fixture
def here(folder: Path) -> Path:
    """A directory with a model and some text."""
    (folder / "model.json").write_text(json.dumps({"model_type": "gpt2", **MODEL}))
    (folder / "text").mkdir()
    chance = random.Random(0)
    for at in range(20):
        (folder / "text" / f"{at}.txt").write_text("".join(f"{chance.randrange(10**6)} is a number\n" for _ in range(50)))
    return folder


def flags_of(machine: str, budgets: dict[str, int]) -> list[str]:
    """The machine's flags with these budgets."""
    found = []
    for flag in MACHINES[machine]:
        for name, nbytes in budgets.items():
            flag = flag.replace(f"{{{name}}}", str(nbytes))
        found.append(flag)
    return found


def minimum(machine: str, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    """What the plan says the machine must have."""
    assert main(["plan", *FLAGS, *flags_of(machine, {"ram": 1 << 30, "disk": 1 << 30, "sim:0": 1 << 26}), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["minimum_budget_bytes"]
    assert isinstance(found, dict)
    return found


@cache
def losses_with_plenty() -> list[float]:
    """Of the run in the working directory, which is the same for all tests."""
    assert main(["train", *FLAGS, *RUN, "--ram=1GiB", "--ncpu=1", "--sample-tokens=8", "--run-dir=plenty"]) == 0
    return losses("plenty")


def losses(run: str) -> list[float]:
    """Of every step."""
    return [json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("machine", USUAL)
def test_the_planned_minimum_is_enough_and_a_page_less_is_refused(here: Path, machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    """For everything around the steps too, with the losses of a machine with plenty; exit code 3 with the number, before anything is written."""
    budgets = minimum(machine, capsys)
    assert main(["train", *FLAGS, *RUN, *flags_of(machine, budgets), "--sample-tokens=8", "--run-dir=tight"]) == 0
    assert losses("tight") == losses_with_plenty()
    assert len(losses("tight")) == STEPS
    capsys.readouterr()
    last = "disk" if "disk" in budgets else "ram"
    tasks_run_in = "sim:0" if "sim:0" in budgets else "ram"
    for name in {last, tasks_run_in}:
        if machine == "a device, a worker, RAM and disk" and name == tasks_run_in:
            continue  # the hungriest task may go to RAM
        assert main(["train", *FLAGS, *RUN, *flags_of(machine, {**budgets, name: budgets[name] - PAGE}), "--run-dir=a"]) == 3
        err = capsys.readouterr().err
        assert f"{budgets[name]:,} B" in err
        assert "it would fit with" in err
        assert not Path("a").exists()


def test_the_minimum_is_that_of_the_order_that_needs_least(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where gradients are most of what lives at once, all minibatches through a layer need less than early updates alone, and a run finds that."""
    (here / "deep.json").write_text(json.dumps({"model_type": "gpt2", **MODEL, "n_embd": 128, "n_layer": 4}))
    flags = ["--config-path=deep.json", "--batch=4", "--minibatch=1", "--seq-tile=16", "--recompute=block"]
    found = {}
    for order in ("auto", "layers", "eager-update"):
        assert main(["plan", *flags, f"--order={order}", "--ncpu=1", "--json"]) == 0
        found[order] = json.loads(capsys.readouterr().out)["minimum_budget_bytes"]["ram"]
    assert found["auto"] == found["layers"] < found["eager-update"]
    assert main(["train", *flags, *RUN, "--ncpu=1", f"--ram={found['auto']}", "--sample-tokens=0", "--run-dir=a"]) == 0
    assert main(["train", *flags, *RUN, "--ncpu=1", f"--ram={found['auto'] - PAGE}", "--sample-tokens=0", "--run-dir=b"]) == 3


def test_frozen_rows_that_no_step_reads_count(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Positions behind --seq-len are made from the seed and stay: adapters train at the minimum, and a page less is refused at once."""
    (here / "long.json").write_text(json.dumps({"model_type": "gpt2", **MODEL, "n_positions": 1024}))
    flags = ["--config-path=long.json", "--batch=1", "--seq-len=16", "--train=lora:2", "--ncpu=2"]
    assert main(["plan", *flags, "--ram=1GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ram = found["minimum_budget_bytes"]["ram"]
    assert main(["train", *flags, *RUN, f"--ram={ram}", "--sample-tokens=4", "--run-dir=a"]) == 0
    assert main(["train", *flags, *RUN, f"--ram={ram - PAGE}", "--run-dir=b"]) == 3
    assert f"{ram:,} B of ram at least" in capsys.readouterr().err
    assert not Path("b").exists()


def test_a_run_that_makes_too_little_again_is_offered_more(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where --recompute names operations that do not free enough, the message offers blocks, which do."""
    (here / "model.json").write_text(json.dumps({"model_type": "gpt2", **MODEL, "n_layer": 4}))
    flags = ["plan", *(flag for flag in FLAGS if not flag.startswith("--vocab-tile")), "--ncpu=1"]
    assert main([*flags, "--recompute=layer_norm", "--ram=1MiB"]) == 3
    needed = re.search(r"needs ([\d,]+) B of ram at least", capsys.readouterr().err)
    assert needed is not None
    budget = f"--ram={int(needed[1].replace(',', '')) - PAGE}"
    assert main([*flags, "--recompute=layer_norm", budget]) == 3
    assert "or --recompute block" in capsys.readouterr().err
    assert main([*flags, "--recompute=block", budget]) == 0


def test_a_resumed_run_is_offered_what_it_accepts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tiles, minibatches and recomputation are its checkpoint's: memory alone is offered. What is offered is enough, and so are bytes as printed."""
    (here / "model.json").write_text(json.dumps({"model_type": "gpt2", **MODEL, "n_layer": 2}))
    flags = [flag for flag in FLAGS if not flag.startswith("--vocab-tile")]
    assert main(["train", *flags, *RUN, "--ram=1GiB", "--ncpu=1", "--sample-tokens=0", "--run-dir=a"]) == 0
    begin, resume = ["train", *flags, *RUN, "--run-dir=b", "--ncpu=1", "--recompute=none"], ["train", "--resume=a", "--ncpu=1"]
    assert main([*resume, "--steps=1000", "--ram=1MiB"]) == 3
    needed = re.search(r"needs ([\d,]+ B) of ram at least", capsys.readouterr().err)
    assert needed is not None
    total = [f"--ram={int(needed[1][:-2].replace(',', '')) - PAGE}"]
    task = ["--ram=200KiB", "--disk=scratch:1GiB"]
    assert main([*begin, "--ram=1MiB"]) == 3
    kept = re.search(r"needs ([\d,]+) B of ram at least", capsys.readouterr().err)
    assert kept is not None
    all_kept = [f"--ram={int(kept[1].replace(',', '')) - PAGE}"]
    for budgets, first, smaller in ((total, all_kept, "--recompute block"), (task, task, "--vocab-tile ")):
        assert main([*begin, *first]) == 3
        assert smaller in capsys.readouterr().err
        assert main([*resume, "--steps=1000", *budgets]) == 3
        err = capsys.readouterr().err
        assert "it would fit with --ram " in err
        assert not re.search(r"-tile|--recompute|--minibatch|--batch", err), err
    assert main([*resume, f"--steps={STEPS + 1}", f"--ram={err.rpartition('--ram ')[2].strip()}", task[1]]) == 0
    assert main([*resume, f"--steps={STEPS + 2}", f"--ram={needed[1]}"]) == 0
