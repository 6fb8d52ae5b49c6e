"""Weights updated by CPU workers beside devices: the same bits, hard budgets at their minimum, the forecast's choice, and what a run writes down."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.training import COARSE, Job

from nntask import UsageError
from nntask.config.imaginary import imaginary_machine
from nntask.config.resolution import resolve
from nntask.config.settings import ModelSettings, ResourceSettings, TilingSettings, TrainSettings
from nntask.hardware.machine_model import this_machine
from nntask.models.gpt2 import GPT2Config
from nntask.planning.memory_fit import capture, needs_of
from nntask.planning.run_candidates import expected
from nntask.planning.simulate import plan_run
from scheduler import DoesNotFit, Runtime, Trace
from scheduler.core.step_plan import StepPlan
from scheduler.planning import PlannedOrder
from scheduler.planning.forecast import Forecast
from wrappers.cli import main

STEPS = 3
MIB = 1 << 20
BF16 = np.dtype(ml_dtypes.bfloat16)


@cache
def with_room(family: str = "gpt2", dtype: np.dtype[Any] | None = None) -> list[bytes]:
    """Losses and norms of a run on one CPU worker with room for everything."""
    with Runtime(1, ram=1 << 28) as runtime:
        return Job(runtime, family, minibatches=4, tiling=COARSE, **({} if dtype is None else {"dtype": dtype})).run(STEPS)


@cache
def aside_plan() -> StepPlan:
    """The step whose updates are for CPU workers."""
    with Runtime(1, ram=1 << 28, sim_gpus=1, gpu_memory=1 << 28, aside=True) as runtime:
        step = Job(runtime, order="submission", minibatches=4, tiling=COARSE, on_cpu=True).step
        assert step is not None
        assert step.plan is not None
        return step.plan


FAMILIES: list[tuple[str, np.dtype[Any] | None]] = [("gpt2", None), ("gpt2", BF16), ("llama adapters", None)]
MACHINES = [(1.0, 1), (1.0, 2), (0.5, 1), (0.5, 2)]
"""Shares of what the step needs, and devices. By default the first family is on the first and the last, the others on the last."""


@pytest.mark.parametrize(
    ("family", "dtype", "share", "devices"),
    [
        pytest.param(*model, *machine, marks=[] if machine == MACHINES[-1] or (model, machine) == (FAMILIES[0], MACHINES[0]) else pytest.mark.long)
        for model in FAMILIES
        for machine in MACHINES
    ],
)
def test_bits_are_those_of_one_cpu_worker(family: str, dtype: np.dtype[Any] | None, share: float, devices: int, tmp_path: Path) -> None:
    """Simulated devices compute as CPU workers do, so the updater changes nothing; with a disk below RAM too, and with little memory."""
    nbytes = max(int(share * aside_plan().needed_bytes()), aside_plan().largest_task())
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    for disk in (None, tmp_path):
        ram = 1 << 28 if disk is None else max(int(share * aside_plan().needed_bytes()), aside_plan().largest_task(aside=True))
        with Runtime(2, sim_gpus=devices, gpu_memory=nbytes, ram=ram, disk=disk, aside=True) as runtime:
            job = Job(runtime, family, minibatches=4, tiling=COARSE, on_cpu=True, **options)
            assert job.run(STEPS) == with_room(family, dtype)
            stats = runtime.stats()
        assert all(stats["peak_bytes"][name] <= stats["budget_bytes"][name] for name in stats["peak_bytes"])


@pytest.mark.parametrize("has_disk", [False, True])
def test_at_the_minimum_of_every_memory(has_disk: bool, tmp_path: Path) -> None:
    """The device holds its hungriest task and no update, RAM what lives with the scratch of updates, or beside a disk the hungriest update."""
    plan = aside_plan()
    ram = plan.largest_task(aside=True) if has_disk else plan.minimum_bytes(is_last=True, computes=False)
    disk = (tmp_path, plan.minimum_bytes(is_last=True, computes=False)) if has_disk else None
    device = plan.minimum_bytes(is_last=False, computes=True)
    with Runtime(2, sim_gpus=1, gpu_memory=device, ram=ram, disk=disk, aside=True) as runtime:
        assert Job(runtime, order="submission", minibatches=4, tiling=COARSE, on_cpu=True).run(STEPS) == with_room()
    with pytest.raises(DoesNotFit), Runtime(2, sim_gpus=1, gpu_memory=device - 4096, ram=1 << 28, aside=True) as runtime:
        Job(runtime, order="submission", minibatches=4, tiling=COARSE, on_cpu=True)


def test_updates_run_on_cpu_workers_and_nothing_else_does() -> None:
    """In the trace of a step on two devices; and what only updates touch stays in RAM once it is there."""
    trace = Trace(active=False)
    with Runtime(2, sim_gpus=2, gpu_memory=aside_plan().needed_bytes() // 2, ram=1 << 28, trace=trace, aside=True) as runtime:
        job = Job(runtime, minibatches=4, tiling=COARSE, on_cpu=True)
        job.run(1)
        trace.active = True
        job.run(2)
        kinds = {worker: name.partition(":")[0] for worker, name in runtime.worker_names.items()}
        first = next(iter(job.optimizer.state["m"].values()))
        assert all(list(handle.record.replicas) == [0] for handle in first.handles)
    ran = {(kinds[worker], name) for worker, name, *_ in trace.tasks()}
    assert {name for kind, name in ran if kind == "cpu"} == {"adam"}
    assert ("sim", "adam") not in ran


def settings(**resources: Any) -> TrainSettings:
    """GPT-2 of a size whose optimizer state is most of its data."""
    return TrainSettings(
        model=ModelSettings(model="gpt2", dtype="bf16", seq_len=64),
        tiling=TilingSettings(batch=2, minibatch=1),
        resources=ResourceSettings(ram="64GiB", **{"recompute": "none", **resources}),
    )


CONFIG = GPT2Config(vocab_size=5056, n_positions=128, n_embd=256, n_layer=2, n_head=4)


@cache
def planned(link: str, ram_rate: str, memory: str = "16MiB", **resources: Any) -> dict[str, Any]:
    """The plan of a step on one imaginary device."""
    asked = settings(**resources)
    target = imaginary_machine(f"1x{memory}@150TF", asked.resources, link, ram_rate="" if asked.resources.update_on == "device" else ram_rate)
    return plan_run(asked, CONFIG, target, reach=False)


def test_the_forecast_chooses_the_updater() -> None:
    """Behind slow links CPU workers update; where RAM is slower than the link, or everything fits, devices do; the plan says what it expected."""
    slow = planned("1GB/s", "100GB/s", update_on="auto")
    assert slow["update_on"] == "cpu"
    assert set(slow["seconds_by_update"]) == {"device", "cpu"}
    assert slow["seconds_per_step"] < planned("1GB/s", "100GB/s", update_on="device")["seconds_per_step"]
    assert slow["seconds_per_step"] == planned("1GB/s", "100GB/s", update_on="cpu")["seconds_per_step"]
    assert planned("25GB/s", "1GB/s", update_on="auto")["update_on"] == "device"
    assert planned("1GB/s", "100GB/s", "8GiB", update_on="auto")["seconds_by_update"] == {"device": None}


def test_updaters_are_compared_by_one_measure() -> None:
    """By virtual time where both steps were judged by it, else by forecasts: the two may be half apart."""

    def order(forecast: float, judged: float) -> PlannedOrder:
        return PlannedOrder("layers", aside_plan(), {"layers": Forecast(1, 1, forecast)}, judged_seconds=judged)

    assert expected({"device": order(7.9, 11.4), "cpu": order(8.5, 0.0)}) == {"device": 7.9, "cpu": 8.5}
    assert expected({"device": order(7.9, 11.4), "cpu": order(8.5, 12.0)}) == {"device": 11.4, "cpu": 12.0}
    both = planned("1GB/s", "100GB/s", update_on="auto")["seconds_by_update"]
    device, cpu = (planned("1GB/s", "100GB/s", update_on=updater) for updater in ("device", "cpu"))
    assert device["judged_seconds"]
    assert not cpu["judged_seconds"]  # its gradients fit the device
    assert both == {"device": device["forecast_seconds"][device["order"]], "cpu": cpu["forecast_seconds"][cpu["order"]]}


def test_a_plan_counts_state_in_ram() -> None:
    """Less moves by at least most of master and both moments in each direction; the device needs no room for an update; gradients come down."""
    device, cpu = (planned("1GB/s", "100GB/s", update_on=updater) for updater in ("device", "cpu"))
    state = 12 * CONFIG.num_parameters
    up, down = "ram->gpu:0", "gpu:0->ram"
    assert cpu["moved_bytes_per_step"][up] < device["moved_bytes_per_step"][up] - 0.7 * state
    assert cpu["moved_bytes_per_step"][down] < device["moved_bytes_per_step"][down] - 0.5 * state
    assert cpu["workers"] == {"sim@gpu:0": 1, "cpu@ram": 8}
    assert cpu["needed_bytes"] < device["needed_bytes"]


def test_forecast_and_virtual_time_agree() -> None:
    """Within a third, as for other steps, whether links or RAM decide."""
    for link, rate in (("1GB/s", "100GB/s"), ("1GB/s", "1GB/s"), ("25GB/s", "0.5GB/s")):
        found = planned(link, rate, update_on="cpu", ncpu=1)
        assert found["forecast_seconds"][found["order"]] == pytest.approx(found["seconds_per_step"], rel=0.35)


def test_what_a_run_needs_of_ram_beside_a_disk() -> None:
    """RAM must hold the hungriest update although no task of the devices runs there."""
    run = resolve(settings(sim_gpu=1, ncpu=1, gpu_memory="1GiB", update_on="cpu"), CONFIG)
    target = this_machine(run.machine)
    assert target.compute_nodes == [1]
    needs = needs_of(capture(run).plan)
    other = replace(target, nodes=(*target.nodes, ("disk", 1 << 40)), storage=True)
    assert needs.minimum(other)["ram"] >= needs.aside > needs.tile


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ({"ngpu": 0}, "there is none; use --update-on device, or add --sim-gpu 1"),
        ({"sim_gpu": 1, "ncpu": 0}, "--ncpu 0 leaves none; use --ncpu 1, or --update-on device"),
    ],
)
def test_updates_need_devices_and_workers(resources: dict[str, Any], words: str) -> None:
    """Said before anything else, with what to do."""
    with pytest.raises(UsageError, match=words):
        resolve(settings(update_on="cpu", **resources), CONFIG)


def test_a_choice_is_written_down_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is continued updates where the forecast has chosen at its start, or where a flag says; losses go on with the same bits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 64, "n_layer": 2, "n_head": 2}))
    np.random.default_rng(0).integers(0, 61, 5000).astype(np.uint16).tofile(tmp_path / "train.bin")
    flags = [
        "--config-path=c.json",
        "--dataset=train.bin",
        "--dataset-path=.",
        "--batch=2",
        "--minibatch=1",
        "--sample-tokens=0",
        "--save-every=2",
        "--ram=64MiB",
        "--recompute=none",
    ]
    small = ["--sim-gpu=1@10MB/s", "--ncpu=1", "--gpu-memory=300KiB"]
    assert main(["train", *flags, *small, "--steps=4", "--update-on=cpu", "--run-dir=a"]) == 0
    assert main(["train", *flags, *small, "--steps=2", "--update-on=auto", "--run-dir=b"]) == 0
    assert "weights are updated by CPU workers in RAM (chosen: forecast " in capsys.readouterr().out
    assert 'update-on = "cpu"' in Path("b/config.toml").read_text().replace("_", "-")
    assert main(["train", "--resume=b", "--steps=3"]) == 0
    assert "weights are updated by CPU workers in RAM\n" in capsys.readouterr().out
    assert main(["train", "--resume=b", "--steps=4", "--update-on=device"]) == 0
    losses = [[json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()] for run in ("a", "b")]
    assert losses[0] == losses[1]
