"""The minibatch of --minibatch auto: the fastest that fits, kept by resumed runs, and a number in the settings of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nntask.checkpoints.store import find_checkpoint
from nntask.config.imaginary import imaginary_machine
from nntask.config.machine import devices_of
from nntask.config.resolution import resolve
from nntask.config.run_config import RunConfig
from nntask.config.settings import ClusterSettings, DataSettings, ResourceSettings, TilingSettings, TrainSettings
from nntask.errors import DoesNotFit, UsageError
from nntask.hardware.machine_model import MachineModel, this_machine
from nntask.hardware.machine_spec import MachineSpec, with_budgets
from nntask.models.gpt2 import GPT2Config
from nntask.planning import run_candidates
from nntask.planning.run_candidates import best_updater, choose_minibatch
from scheduler.core.step_plan import StepPlan
from scheduler.planning import PlannedOrder
from scheduler.planning.forecast import Forecast
from wrappers.cli import main

NOTHING = StepPlan([], {})
CONFIG = GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=4, n_head=2)


def settings(size: Any = "auto", **resources: Any) -> TrainSettings:
    """Settings of a step of 12 sequences on one CPU worker."""
    tiling = TilingSettings(batch=12, minibatch=size)
    return TrainSettings(data=DataSettings(tokenizer="bytes"), tiling=tiling, resources=ResourceSettings(ncpu=1, **resources))


def machine_of(asked: TrainSettings) -> MachineSpec:
    """This machine, with the budgets of settings."""
    return with_budgets(devices_of(asked.resources, asked.model.dtype))


def fits(size: int, **resources: Any) -> bool:
    """Whether a number of sequences fits this machine."""
    asked = settings(size, **resources)
    run = resolve(asked, CONFIG, machine=machine_of(asked))
    return best_updater(run, this_machine(run.machine)).needs is None


@pytest.mark.parametrize("ram", ["1GiB", "6MB", "3500KB", "2700KB"])
def test_the_choice_fits_and_divides(ram: str) -> None:
    """Whatever the memory: one of the divisors, and one that fits; the reason names it."""
    asked = settings(ram=ram)
    chosen = choose_minibatch(asked, CONFIG, machine_of(asked))
    number = chosen.settings.tiling.num_sequences
    assert number in (1, 2, 3, 4, 6, 12)
    assert fits(number, ram=ram)
    assert chosen.reason.startswith(f"{number}, ")
    assert replace(chosen.settings, tiling=asked.tiling) == asked


@pytest.mark.parametrize(("seconds", "expected"), [((1.0, 0.97, 0.96), 1), ((1.0, 0.94, 0.9), 2), ((1.0, 0.8, 0.7), 3), ((0.9, 0.8, 1.0), 2)])
def test_a_later_candidate_must_be_clearly_faster(seconds: tuple[float, ...], expected: int) -> None:
    """Than the one that is preferred so far: a few percent may be the error of a forecast."""
    candidates = {
        number: run_candidates.PlannedRun(None, None, None, PlannedOrder("layers", NOTHING, {"layers": Forecast(1, 1, each)}))  # type: ignore[arg-type]
        for number, each in enumerate(seconds, 1)
    }
    assert run_candidates._preferred(candidates) == expected


def test_a_number_is_left_alone() -> None:
    """Settings that are not open are returned as they are, without a reason."""
    asked = settings(4)
    assert choose_minibatch(asked, CONFIG, machine_of(asked)) == (asked, "")


def test_if_nothing_fits_the_smallest_is_tried() -> None:
    """The run is then refused with the usual advice, for one sequence at a time."""
    asked = settings(ram="100KB")
    chosen = choose_minibatch(asked, CONFIG, machine_of(asked))
    assert (chosen.settings.tiling.minibatch, chosen.reason) == (1, "")


def test_tiles_that_are_given_divide_the_choice() -> None:
    """With tiles of four sequences, minibatches are multiples of four."""
    asked = settings()
    asked = replace(asked, tiling=replace(asked.tiling, minibatch_tile=4))
    assert choose_minibatch(asked, CONFIG, machine_of(asked)).settings.tiling.minibatch in (4, 12)


def test_an_imaginary_machine() -> None:
    """Devices that hold a part of the activations get a part of the batch."""
    asked = settings()
    target = imaginary_machine("1x2MiB@1TF", asked.resources, "25GB", "", "")
    chosen = choose_minibatch(asked, CONFIG, devices_of(asked.resources, asked.model.dtype, checks=False), target)
    assert chosen.settings.tiling.minibatch in (1, 2, 3, 4, 6, 12)
    assert chosen.reason


def test_minibatches_of_too_many_tasks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is among the larger ones; if none is left, the error is about tasks."""
    asked = settings()
    target = imaginary_machine("1x2GiB@1TF", asked.resources, "25GB", "", "")
    machine = devices_of(asked.resources, asked.model.dtype, checks=False)
    few = run_candidates.with_few_tasks

    def with_few_tasks(run: RunConfig, on: MachineModel) -> RunConfig:
        if run.step.minibatch < least:
            raise DoesNotFit("too many tasks")
        return few(run, on)

    monkeypatch.setattr(run_candidates, "with_few_tasks", with_few_tasks)
    least = 6
    assert choose_minibatch(asked, CONFIG, machine, target).settings.tiling.minibatch in (6, 12)
    least = 13
    with pytest.raises(DoesNotFit, match="too many tasks"):
        choose_minibatch(asked, CONFIG, machine, target)


def test_a_cluster_is_refused() -> None:
    """Each node would choose for itself."""
    asked = replace(settings(), cluster=ClusterSettings(dask="local:2"))
    with pytest.raises(UsageError, match="--minibatch auto plans for one machine, and a cluster of --dask has several; give a number"):
        choose_minibatch(asked, CONFIG, machine_of(settings()))


def test_an_open_minibatch_does_not_reach_a_run() -> None:
    """Programs that resolve settings themselves are told to give a number."""
    with pytest.raises(UsageError, match=r"--minibatch auto is for nntask train and plan, .*; give a number"):
        resolve(settings(), CONFIG)


def test_a_run_keeps_its_choice(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint has the number, which a resumed run keeps; another word is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the same words again and again " * 200)
    (tmp_path / "run.toml").write_text('minibatch = "auto"\nbatch = 2\nseq_len = 32\n')
    data = ["--dataset", "text", "--dataset-path", "text.txt", "--tokenizer", "bytes"]
    assert main(["train", "--config", "run.toml", "--model", "tiny", *data, "--run-dir", "run", "--steps", "1"]) == 0
    number = find_checkpoint("run").state["settings"]["tiling"]["minibatch"]
    assert f"minibatch: {number}, " in capsys.readouterr().out
    assert number in (1, 2)
    assert main(["train", "--resume", "run", "--steps", "2", "--minibatch", "auto"]) == 0
    assert find_checkpoint("run").state["settings"]["tiling"]["minibatch"] == number
    assert main(["plan", "--resume", "run", "--minibatch", "auto"]) == 0
    assert main(["train", "--minibatch", "most"]) == 2
    assert "--minibatch must be a whole number or auto, got 'most'" in capsys.readouterr().err
