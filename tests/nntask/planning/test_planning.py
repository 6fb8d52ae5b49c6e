"""Plans: figures from shapes, minimum budgets that are exactly enough, imaginary machines, and changes that would make a step fit."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nntask.config.imaginary import format_devices, imaginary_machine, parse_devices
from nntask.config.machine import devices_of, machine_of
from nntask.config.resolution import resolve
from nntask.config.settings import CheckpointSettings, ModelSettings, ResourceSettings, TilingSettings, TrainSettings
from nntask.errors import DoesNotFit, UsageError
from nntask.hardware import machine_spec
from nntask.hardware.imaginary import LARGEST_SHARE
from nntask.hardware.machine_model import open_store, this_machine
from nntask.hardware.runtimes import open_runtime
from nntask.io.units import format_least, parse_size
from nntask.models.gpt2 import GPT2Config
from nntask.models.mixtures import OlmoeConfig
from nntask.planning import fit_advice, memory_fit, run_candidates, virtual_replay
from nntask.planning import simulate as planning
from scheduler.core.errors import DoesNotFit as NoRoom
from scheduler.core.performance_model import Models
from scheduler.core.records import NodeId
from scheduler.core.shortage import Shortage
from scheduler.core.step_plan import StepPlan
from scheduler.execution.workers import SIM_DEPTH
from scheduler.planning.choice import NEAR, PLAIN
from scheduler.planning.orders import candidates
from scheduler.planning.step_structure import structure_of
from scheduler.simulation import Simulation, simulate
from wrappers.cli.commands import plan as plan_command

CONFIG = GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
WIDE = replace(CONFIG, n_embd=128)
SHALLOW = replace(CONFIG, n_layer=1, vocab_size=64, n_positions=32)
PAGE = 4096


def plan_run(*args: Any, reach: bool = False) -> dict[str, Any]:
    """Without looking for larger models."""
    return planning.plan_run(*args, reach=reach)


def settings(**resources: Any) -> TrainSettings:
    """Four minibatches of one sequence, two CPU workers; nothing is made again unless a test is about that."""
    return TrainSettings(
        model=ModelSettings(config_path="small.json"),
        tiling=TilingSettings(batch=4, minibatch=1),
        resources=ResourceSettings(**{"ncpu": 2, "ram": "1GiB", "recompute": "none", **resources}),
    )


def test_a_step_that_fits_moves_nothing() -> None:
    """Peak between needed and a few percent more, no bytes moved, seconds and speed from virtual time, both workers busy."""
    plan = plan_run(settings(), CONFIG)
    assert plan["feasible"]
    assert (plan["moved_bytes_per_step"], plan["order"], plan["forecast_bytes"], plan["advice"]) == ({}, "submission", {}, [])
    assert plan["needed_bytes"] <= plan["peak_bytes"]["ram"] <= 2 * plan["needed_bytes"]
    assert plan["persistent_bytes"]["ram"] < plan["peak_bytes"]["ram"]
    assert plan["seconds_per_step"] > 0
    assert plan["tokens_per_second"] == pytest.approx(256 / plan["seconds_per_step"])
    assert plan["tasks_per_step"] == sum(plan["tasks_by_name"].values())


def test_the_memory_of_those_who_read_files_is_part_of_the_peak() -> None:
    """As scratch memory of RAM, beside what the step uses."""
    small = resolve(settings(ncpu=1), CONFIG)  # one after another, whatever durations are measured
    target, step = this_machine(small.machine), memory_fit.capture(small)
    order = memory_fit.choose_order(step, small, target)
    needs = memory_fit.least_needs(step.plan, target, small.step.recompute)
    (alone, *_), (beside, *_) = (planning._simulate(order, small, target, replace(needs, reading=nbytes)) for nbytes in (0, 3 * PAGE))
    assert alone is not None
    assert beside is not None
    assert beside.peak_bytes["ram"] == alone.peak_bytes["ram"] + 3 * PAGE
    assert beside.peak_bytes_by_class["ram"]["scratch"] == alone.peak_bytes_by_class["ram"]["scratch"] + 3 * PAGE


def test_plans_of_mixtures_have_the_expected_costs_and_the_worst_case() -> None:
    """Of 16 frozen experts on the disk, a tile of two tokens reads few, and the budget holds all; dense plans have no worst case."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = OlmoeConfig(**sizes, max_position_embeddings=32, num_experts=16, num_experts_per_tok=1)
    tiling = TilingSettings(batch=1, minibatch=1, minibatch_tile=1, seq_tile=2)
    run = replace(settings(ram="600KiB", disk="scratch:1GiB"), tiling=tiling)
    run = replace(run, model=replace(run.model, seq_len=8), optimizer=replace(run.optimizer, train="lora:2"))
    plan = plan_run(run, config)
    moved, worst = sum(plan["moved_bytes_per_step"].values()), plan["worst_case"]
    assert plan["feasible"]
    assert 0 < moved < 0.6 * worst["moved_bytes_per_step"]
    assert plan["seconds_per_step"] < worst["seconds_per_step"]
    lines = "\n".join(plan_command._lines(plan))
    assert f"expected            {moved / 1e9:.2f} GB moved and" in lines
    assert f"worst case          {worst['moved_bytes_per_step'] / 1e9:.2f} GB moved and" in lines
    assert plan_run(settings(), CONFIG)["worst_case"] is None


@pytest.mark.long
def test_minimum_budgets_are_enough_and_one_page_less_is_not() -> None:
    """With a disk, the hungriest task in RAM and all that lives on the disk; without, all that lives in RAM."""
    with_disk = plan_run(settings(disk="scratch:1GiB"), CONFIG)["minimum_budget_bytes"]
    alone = plan_run(settings(), CONFIG)["minimum_budget_bytes"]
    assert alone["ram"] >= with_disk["disk"] > with_disk["ram"]
    for budgets, changes in ((with_disk, {"disk": f"scratch:{with_disk['disk']}"}), (alone, {})):
        assert plan_run(settings(ram=str(budgets["ram"]), **changes), CONFIG)["feasible"]
        refused = plan_run(settings(ram=str(budgets["ram"] - PAGE), **changes), CONFIG)
        assert not refused["feasible"]
        assert any("--ram" in change for change in refused["advice"])
    refused = plan_run(settings(ram=str(with_disk["ram"]), disk=f"scratch:{with_disk['disk'] - PAGE}"), CONFIG)
    assert "of disk" in refused["refusal"]
    assert "--disk DIR:" in refused["advice"][0]


def test_short_memory_moves_what_the_order_is_expected_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of what is needed: of the orders forecast about as fast as the fastest, the one that virtual time finds fastest, whose seconds are
    those that are printed; the budget is respected. No plan is replayed twice."""
    replayed: list[StepPlan] = []

    def watch(plan: StepPlan, **how: Any) -> Simulation:
        replayed.append(plan)
        return simulate(plan, **how)

    monkeypatch.setattr(virtual_replay, "simulate", watch)
    needed = plan_run(settings(), CONFIG)["needed_bytes"]
    plan = plan_run(settings(ram=str(needed // 4), disk="scratch:1GiB", recompute="auto"), CONFIG)
    assert plan["feasible"]
    assert set(plan["moved_bytes_per_step"]) == {"ram->disk", "disk->ram"}
    seconds = plan["forecast_seconds"]  # this machine's, as busy as it is now
    assert seconds[plan["order"]] <= NEAR * PLAIN * min(seconds.values())
    assert plan["judged_seconds"] == plan["seconds_per_step"] > 0
    assert len({id(each) for each in replayed}) == len(replayed) > 2
    assert plan["peak_bytes"]["ram"] <= needed // 4


@pytest.mark.long
def test_short_memory_in_an_order_that_is_asked_for() -> None:
    """Orders by name, groups larger than the step, and a step of one minibatch, which has fewer orders."""
    needed = plan_run(settings(), CONFIG)["needed_bytes"]
    nbytes = plan_run(settings(ram=str(needed // 4), disk="scratch:1GiB"), CONFIG)["forecast_bytes"]
    asked = plan_run(settings(ram=str(needed // 4), disk="scratch:1GiB", order="submission"), CONFIG)
    assert asked["order"] == "submission"
    all_at_once = plan_run(settings(ram=str(needed // 4), disk="scratch:1GiB", order="layers:2000"), CONFIG)  # more minibatches than there are
    assert all_at_once["forecast_bytes"]["layers:2000"] == nbytes["layers"]
    one = {
        name: replace(settings(ram=str(needed // 4), disk="scratch:1GiB", order=name), tiling=TilingSettings(batch=4, minibatch=4))
        for name in ("layers", "layers:2", "forward")
    }
    assert plan_run(one["layers:2"], CONFIG)["forecast_bytes"]["layers:2"] == plan_run(one["layers"], CONFIG)["forecast_bytes"]["layers"]
    with pytest.raises(UsageError, match=r"--order forward: this step has no order .*--minibatch below --batch"):
        plan_run(one["forward"], CONFIG)


def test_a_tile_too_large_is_named_with_a_size_that_fits() -> None:
    """The flag that is advised makes the step fit."""
    roomy = replace(settings(disk="scratch:1GiB"), tiling=TilingSettings(batch=2, minibatch=1))
    minimum = plan_run(roomy, WIDE)["minimum_budget_bytes"]["ram"]
    tight = replace(roomy, resources=replace(roomy.resources, ram=str(minimum // 2)))
    refused = plan_run(tight, WIDE)
    assert "at once" in refused["refusal"]
    words = refused["advice"][-1].split()
    tiles = {flag.removeprefix("--").replace("-", "_"): int(size) for flag, size in zip(words[::2], words[1::2], strict=True)}
    smaller = replace(tight, tiling=replace(tight.tiling, **tiles))
    assert plan_run(smaller, WIDE)["feasible"], refused["advice"]


def test_the_largest_model_and_minibatch() -> None:
    """What is said to fit does, and much more does not; no preset fits into so little."""
    asked = settings(ram="12MiB")
    plan = plan_run(asked, CONFIG, reach=True)
    assert plan["largest_model"] is None
    number = plan["largest_minibatch"]
    assert number > 2

    def fits(count: int) -> bool:
        tiling = replace(asked.tiling, batch=count, minibatch=count, **plan["tiles"])
        return bool(plan_run(replace(asked, tiling=tiling), CONFIG)["feasible"])

    assert fits(number)
    assert not fits(number + 2)


@pytest.mark.long
@pytest.mark.parametrize("ram", ["8MiB", "13MiB"])
def test_the_largest_minibatch_is_the_largest_in_tiles_of_one(ram: str) -> None:
    """What is found fits, and one sequence more does not."""
    asked = replace(settings(ram=ram), tiling=TilingSettings(batch=4, minibatch=1, minibatch_tile=1))
    plan = plan_run(asked, CONFIG, reach=True)
    number = plan["largest_minibatch"]
    sizes = [replace(asked.tiling, batch=size, minibatch=size, **plan["tiles"]) for size in (number, number + 1)]
    found = [plan_run(replace(asked, tiling=tiling), CONFIG)["feasible"] for tiling in sizes]
    assert found == [True, False]


def test_the_largest_minibatch_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the gradients of a small minibatch hide what larger ones add, and where many tasks forbid to look; bound by the tasks of a step."""
    asked = replace(settings(ram="12MiB"), tiling=TilingSettings(batch=2, minibatch=2, minibatch_tile=2))

    def fits(number: int) -> bool:
        return bool(plan_run(replace(asked, tiling=replace(asked.tiling, batch=number, minibatch=number)), CONFIG)["feasible"])

    largest = plan_run(asked, CONFIG, reach=True)["largest_minibatch"]
    assert (fits(largest), fits(largest + 2)) == (True, False)
    monkeypatch.setattr(planning, "MANY_TASKS", 1200)
    plan = plan_run(asked, CONFIG, reach=True)
    assert plan["largest_minibatch"] <= largest
    assert not plan["largest_minibatch_is_of_tasks"]
    monkeypatch.setattr(memory_fit, "MOST_TASKS", 600)
    plan = plan_run(asked, CONFIG, reach=True)
    assert (plan["largest_minibatch_is_of_tasks"], fits(plan["largest_minibatch"])) == (True, True)
    with pytest.raises(UsageError, match="a step must have at most 600 tasks"):
        fits(plan["largest_minibatch"] + 2)


@pytest.mark.long
def test_presets_in_a_usual_memory() -> None:
    """The largest that fits."""
    assert plan_run(settings(), CONFIG, reach=True)["largest_model"] == "tiny"


def test_simulated_devices_have_their_own_budgets() -> None:
    """Tasks run where the devices are; RAM takes what they evict."""
    plan = plan_run(settings(ncpu=0, sim_gpu=2, gpu_memory="1MiB"), CONFIG)
    assert plan["feasible"]
    assert plan["workers"] == {"sim@sim:0": 1, "sim@sim:1": 1}
    assert plan["peak_bytes"]["sim:0"] <= 1 << 20
    assert any(link.endswith("->ram") for link in plan["moved_bytes_per_step"])


@pytest.mark.parametrize("embd_tile", [32, 16])
def test_orders_where_activations_are_as_small_as_scalars(embd_tile: int) -> None:
    """A sum of tiles of a page creates nothing large, but is no update, for the backward pass follows it."""
    asked = settings()
    plan = memory_fit.capture(resolve(replace(asked, tiling=replace(asked.tiling, embd_tile=embd_tile)), CONFIG)).plan
    found = structure_of(plan)
    assert found.num_minibatches == 4
    assert all(found.updates[after] for at, is_update in enumerate(found.updates) if is_update for after in plan.successors[at])
    for order in candidates(plan).values():
        assert sorted(order) == list(range(len(plan.tasks)))


def test_imaginary_machines() -> None:
    """Devices with memory and flop/s; twice the flop/s is faster, and tiles are coarse."""
    asked = settings(ncpu=None, ram="")
    slow, fast = (plan_run(asked, CONFIG, imaginary_machine(f"2x64MiB@{flops}", asked.resources, "1GB/s")) for flops in ("1GF", "2GF"))
    assert slow["feasible"]
    assert slow["budget_bytes"]["gpu:1"] == 64 << 20
    assert fast["seconds_per_step"] < slow["seconds_per_step"]
    assert slow["tiles"]["inner_tile"] == CONFIG.inner_size
    assert slow["tiles"]["vocab_tile"] == CONFIG.vocab_size // 8
    tight = replace(asked, resources=replace(asked.resources, ram="1MiB"))
    assert not plan_run(tight, CONFIG, imaginary_machine("2x64MiB", tight.resources))["feasible"]


def with_advice(asked: TrainSettings, change: str) -> tuple[TrainSettings, dict[str, str]]:
    """Settings with the flags of a change as they are printed, and those that are none of theirs."""
    others = {}
    for flag, value in re.findall(r"--([a-z-]+) (\S+)", change):
        name = flag.replace("-", "_")
        if hasattr(asked.tiling, name):
            asked = replace(asked, tiling=replace(asked.tiling, **{name: int(value)}))
        elif hasattr(asked.resources, name):
            asked = replace(asked, resources=replace(asked.resources, **{name: value}))
        elif hasattr(asked.model, name):
            asked = replace(asked, model=replace(asked.model, **{name: value}))
        else:
            others[flag] = value
    return asked, others


def all_advice_helps(asked: TrainSettings, config: GPT2Config, devices: str) -> list[str]:
    """Each change that is advised, typed alone as it is printed, makes the step fit."""
    refused = plan_run(asked, config, imaginary_machine(devices, asked.resources) if devices else None)
    assert not refused["feasible"]
    for change in refused["advice"]:
        changed, others = with_advice(asked, change)
        larger = others.get("devices", devices)
        assert plan_run(changed, config, imaginary_machine(larger, changed.resources) if larger else None)["feasible"], change
    return list(refused["advice"])


@pytest.mark.long
def test_devices_far_too_small_are_told_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles cut for so little memory would be more tasks than a step may have: larger ones say how much memory would do, and that is true."""
    monkeypatch.setattr(memory_fit, "MOST_TASKS", 10_000)
    wide = replace(CONFIG, n_embd=256, vocab_size=3_000, n_layer=1)
    asked = settings(ncpu=None, ram="")
    asked = replace(asked, tiling=replace(asked.tiling, batch=1))
    advice = all_advice_helps(asked, wide, "2x128KiB")
    assert advice[0].startswith("--devices 2x")
    with pytest.raises(DoesNotFit, match=r"more than .* tasks of a step; plan for larger ones, such as --devices 2x") as refused:
        plan_run(asked, wide, imaginary_machine("2x1KiB", asked.resources))
    assert refused.value.shortage is not None
    assert (refused.value.shortage.cause, refused.value.shortage.node, refused.value.shortage.budget) == ("step", "gpu:0", 1024)
    _, others = with_advice(asked, str(refused.value))
    plan_run(asked, wide, imaginary_machine(others["devices"].rstrip(","), asked.resources))


def test_tiles_grow_only_where_a_step_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of an imaginary device are those of its memory up to the limit of tasks; beyond it they grow, to a 16th of its memory at most."""
    wide = replace(CONFIG, n_embd=512, vocab_size=10_000)
    flags = settings(ncpu=None, ram="")
    asked = resolve(flags, wide, machine=devices_of(flags.resources, "auto"))
    target = imaginary_machine("1x1MiB", flags.resources)
    coarse = run_candidates._in_coarse_tiles(asked, target)
    num_tasks = 4 * memory_fit.least_tasks(coarse)
    for most, grows in ((num_tasks, False), (num_tasks - 1, True)):
        monkeypatch.setattr(memory_fit, "MOST_TASKS", most)
        found = run_candidates.with_few_tasks(asked, target)
        assert (found != coarse) == grows
    largest = found.model.tiling.inner_tile * found.model.tiling.embd_tile * 4
    assert largest <= (1 << 20) // LARGEST_SHARE


def test_advice_for_devices_can_be_typed() -> None:
    """With --devices in its own form and its flop/s, and with the tiles that larger devices have."""
    asked = settings(ncpu=None, ram="")
    asked = replace(asked, tiling=replace(asked.tiling, batch=1))
    advice = all_advice_helps(asked, SHALLOW, "2x32KiB@3TF")[0]
    assert advice.startswith("--devices 2x")
    assert advice.endswith("@3TF")


@pytest.mark.long
def test_advice_for_several_short_memories_can_be_typed() -> None:
    """RAM and disk below a device, and RAM and devices beside it."""
    tight = settings(ncpu=None, ram="4KiB", disk="4KiB")
    both = all_advice_helps(tight, CONFIG, "1x4MiB")[0]
    assert re.fullmatch(r"--ram \S+ and --disk \S+", both)
    all_advice_helps(settings(ncpu=None, ram="4KiB"), CONFIG, "1x4MiB")
    beside = settings(ncpu=1, ram="5KiB", sim_gpu=2, gpu_memory="60")
    assert all("--gpu-memory" in change for change in all_advice_helps(beside, CONFIG, ""))


@pytest.mark.long
@pytest.mark.parametrize("order", ["auto", "layers"])
def test_advice_for_devices_and_what_is_below_them_can_be_typed(order: str) -> None:
    """Where RAM and devices are short, in the order that is best and in one that is asked for."""
    asked = settings(ncpu=None, ram="4KiB", order=order)
    all_advice_helps(replace(asked, tiling=replace(asked.tiling, batch=2)), SHALLOW, "2x64KiB@3TF")


@pytest.mark.long
def test_advice_counts_all_minibatches() -> None:
    """Each of them keeps something until the step ends; what smaller tiles need besides is enough for all."""
    asked = settings(ram="200KiB")
    advice = all_advice_helps(replace(asked, tiling=replace(asked.tiling, batch=16)), CONFIG, "")
    assert any("-tile " in change and " and --ram " in change for change in advice)


@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_a_long_step_that_is_judged_by_three_minibatches_is_not_said_to_fit_where_it_does_not(
    monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    """In budgets between what two and three minibatches need in submission order, too, where only one of them is made to need less."""
    asked = replace(settings(ncpu=1, recompute=recompute), tiling=TilingSettings(batch=12, minibatch=1))
    run = resolve(asked, CONFIG)
    target = this_machine(run.machine)
    two, three = (memory_fit.needs_of(memory_fit.capture(run, count).plan).last(target) for count in (2, 3))
    least = memory_fit.least_needs(memory_fit.capture(run).plan, target, recompute).last(target)
    monkeypatch.setattr(fit_advice, "MOST_WHOLE", 0)
    for nbytes in (two, (two + three) // 2, three, least - 1):
        assert nbytes < least
        machine = replace(target, nodes=(("ram", nbytes), *target.nodes[1:]))
        assert fit_advice._short(run, machine)


def test_a_memory_that_is_full_in_virtual_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a machine has what a step needs at least and it stops all the same, what is to be larger is the memory that had no room."""

    def full(*_: Any, **__: Any) -> Any:
        raise NoRoom(Shortage("taken", "gpu:0", 5, 4, 4, task="adam"))

    monkeypatch.setattr(planning, "replay", full)
    asked = settings(ncpu=None, ram="")
    refused = plan_run(asked, CONFIG, imaginary_machine("2x4MiB@150TF", asked.resources))
    assert refused["advice"] == ["--devices 2x4.4MiB@150TF"]


@pytest.mark.parametrize(
    "tiling",
    [
        {"minibatch": 4, "minibatch_tile": 4},
        pytest.param({"minibatch": 4, "minibatch_tile": 1}, marks=pytest.mark.long),
        pytest.param({"minibatch": 4}, marks=pytest.mark.long),
    ],
)
def test_a_smaller_minibatch_is_advised_where_it_helps(tiling: dict[str, int]) -> None:
    """With --minibatch-tile where that must change; on an imaginary machine and on this one; not to a run whose checkpoint has its tiling. Smaller
    tiles are long."""
    asked = settings(ncpu=None, ram="")
    asked = replace(asked, tiling=replace(asked.tiling, **tiling))
    one = replace(asked, tiling=replace(asked.tiling, minibatch=1, minibatch_tile=1))
    for devices in ("1x4MiB", ""):
        first, all_of_them = (plan_run(each, CONFIG, *([imaginary_machine(devices, each.resources)] if devices else [])) for each in (one, asked))
        least = first["minimum_budget_bytes"]["ram"]
        assert least < all_of_them["minimum_budget_bytes"]["ram"]
        tight = replace(asked, resources=replace(asked.resources, ram=str(least)))
        refused = plan_run(tight, CONFIG, *([imaginary_machine(devices, tight.resources)] if devices else []))
        (change,) = (change for change in refused["advice"] if "--minibatch" in change)
        tile = all_of_them["tiles"]["minibatch_tile"]
        assert change == ("--minibatch 1" if tile == 1 else "--minibatch 1 --minibatch-tile 1")
        changed, _ = with_advice(tight, change)
        assert plan_run(changed, CONFIG, *([imaginary_machine(devices, changed.resources)] if devices else []))["feasible"]
        needs = memory_fit.needs_of(memory_fit.capture(resolve(tight, CONFIG)).plan)
        kept = resolve(replace(tight, checkpoints=CheckpointSettings(resume="run")), CONFIG)
        assert not any("--minibatch" in change for change in fit_advice.advice(kept, this_machine(kept.machine), needs))


@pytest.mark.parametrize("devices", [pytest.param("1x24MiB@1TF", marks=pytest.mark.long), "2x24MiB@1TF"])
def test_the_forecast_is_of_the_disk_where_ram_is_short(devices: str) -> None:
    """Imaginary devices over a RAM that cannot hold what lives: the forecast is of the disk, too, near virtual time; with room, of links. Two devices
    by default, one is long."""
    large = replace(CONFIG, n_embd=512)

    def plan(ram: str, disk: str) -> dict[str, Any]:
        asked = settings(ncpu=None, ram=ram, disk=disk)
        asked = replace(asked, tiling=replace(asked.tiling, embd_tile=512, inner_tile=1024, head_tile=4, vocab_tile=512))
        return plan_run(asked, large, imaginary_machine(devices, asked.resources))

    alone, roomy, short = plan("1GiB", ""), plan("1GiB", "scratch:1GiB"), plan("32MiB", "scratch:1GiB")
    for key in ("forecast_seconds", "forecast_bytes"):
        assert roomy[key]["submission"] == alone[key]["submission"]
    assert short["moved_bytes_per_step"]["disk->gpu:0"] > 0
    assert short["seconds_per_step"] > 4 * roomy["seconds_per_step"]
    assert short["seconds_per_step"] / 2.5 <= short["forecast_seconds"][short["order"]] <= 1.5 * short["seconds_per_step"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8x80GiB@150TF", (8, 80 << 30, 150e12)),
        ("1GB@1.5PF", (1, 10**9, 1.5e15)),
        ("2 x 4MiB @ 3 GFlops", (2, 4 << 20, 3e9)),
        ("4x1GiB", (4, 1 << 30, 1e14)),
    ],
)
def test_devices_as_text(text: str, found: tuple[int, int, float]) -> None:
    """Count and flop/s may be left out."""
    assert parse_devices(text) == found


@pytest.mark.parametrize("text", ["", "8x", "0x80GiB", "80", "8x80GiB@", "8x80GiB@0TF", "8x80Gigs", "x80GiB"])
def test_devices_that_are_none(text: str) -> None:
    """The flag is named, with an example."""
    with pytest.raises(UsageError, match=r"--devices must.*for example"):
        parse_devices(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8x", "got '8x'; for example 8x80GiB@150TF"),
        ("8x80", "got '8x80', whose MEMORY has no unit; for example 8x80GiB@150TF"),
        ("8x80 @150TF", "got '8x80 @150TF', whose MEMORY has no unit; for"),
        ("8x80GiB@150", "got '8x80GiB@150', whose FLOPS has no unit; for"),
        ("8x80QB", "and MEMORY must be a size in B, KB, KiB, MB, MiB, GB, GiB, TB or TiB, got '80QB'; for example 80GiB"),
    ],
)
def test_what_is_wrong_with_devices(text: str, words: str) -> None:
    """The form, what was typed, and which unit is missing; the same for one device where another flag counts them."""
    with pytest.raises(UsageError) as many:
        parse_devices(text)
    assert str(many.value).startswith("--devices must be [COUNTx]MEMORY[@FLOPS], ")
    assert words in str(many.value)
    with pytest.raises(UsageError) as one:
        parse_devices(text.removeprefix("8x"), "--device")
    assert str(one.value).startswith("--device must be MEMORY[@FLOPS], ")
    assert words.replace("8x", "") in str(one.value)


@given(st.integers(1, 1 << 50))
def test_least_sizes_as_text(nbytes: int) -> None:
    """What is printed is read as no less, and as hardly more."""
    assert nbytes <= parse_size(format_least(nbytes), "--ram") <= 1.02 * nbytes + 1
    assert format_least(8 << 20) == "8 MiB"
    assert format_least(8_392_704) == "8.01 MiB"


@pytest.mark.parametrize("devices", ["1x1.5MiB", "8x80GiB@150TF", "2x4MiB@1.5PF", "3x7B@0.25GF"])
def test_devices_as_they_are_advised(devices: str) -> None:
    """What is printed is read as the same devices."""
    assert format_devices(*parse_devices(devices)).replace(" ", "") == devices


def test_the_rate_of_an_imaginary_disk_is_that_of_large_tiles() -> None:
    """Of tiles of a mebibyte, on a disk of 1.6 and of 100 GB/s, within a quarter."""
    asked = settings(ncpu=None, ram="1GiB", disk="1GiB")
    for rate in ("1.6GB/s", "100GB/s"):
        target = imaginary_machine("1x4MiB", asked.resources, disk_rate=rate)
        seconds = target.models.transfer_seconds(NodeId(0), NodeId(target.last), 1 << 20) / target.channels
        assert 0.75 * target.disk_rate <= (1 << 20) / seconds <= target.disk_rate


def test_what_is_free_on_a_disk_is_said_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIZE that is above what is free is refused with one that is not."""
    monkeypatch.setattr(machine_spec, "free_bytes", lambda _: 123_456_789)
    with pytest.raises(DoesNotFit, match="SIZE is 200,000,000 B, and 123,456,789 B are free there") as refused:
        machine_of(settings(disk=f"{tmp_path}:200MB").resources)
    free = re.search(r"and ([\d,]+ B) are free", str(refused.value))
    assert free is not None
    assert this_machine(machine_of(settings(disk=f"{tmp_path}:{free[1]}").resources)).budgets["disk"] == 123_456_789


def test_the_machine_is_the_one_that_a_run_would_use() -> None:
    """Workers, budgets, policy and the file of measurements are the runtime's."""
    machine = machine_of(settings(sim_gpu=2, gpu_memory="8MiB", ram="16MiB").resources)
    target = this_machine(machine)
    with open_runtime(machine) as runtime:
        workers = [(worker.kind, worker.node, worker.depth) for worker in runtime._executor.machine.workers]
        assert list(target.workers) == workers
        assert dict(target.nodes) == runtime.stats()["budget_bytes"]
        assert target.policy == runtime.policy_name
        assert open_store(runtime.node_names).path == runtime._executor._store.path
    assert target.workers[-1][2] == SIM_DEPTH


def test_measured_durations_are_used() -> None:
    """What a run has measured replaces what operations and rates say."""
    before = plan_run(settings(ncpu=1), CONFIG)["seconds_per_step"]
    from nntask.hardware.machine_model import durations
    from nntask.planning.memory_fit import capture
    from scheduler.core.performance_model import Series, footprint

    run = resolve(settings(ncpu=1), CONFIG)
    plan = capture(run).plan
    models = Models()
    for task in plan.tasks:
        models.series[task.name, footprint(task), "cpu"] = Series([1.0, 1.0])  # type: ignore[arg-type]
    target = replace(this_machine(run.machine), models=models)
    known = durations(plan, target)
    assert known.num_measured == known.num_kinds
    assert set(known.seconds["cpu"]) == {1.0}
    store = open_store(["ram"])
    store.save(models)
    try:
        assert plan_run(settings(ncpu=1), CONFIG)["seconds_per_step"] == len(plan.tasks) > before
    finally:
        store.path.unlink()


def test_a_watchdog_without_a_time_is_the_mistake_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime from settings refuses a wrong variable as the command line refuses a wrong flag."""
    monkeypatch.setenv("NNTASK_WATCHDOG", "soon")
    with pytest.raises(UsageError, match="NNTASK_WATCHDOG must be a positive number of seconds, got 'soon'"):
        open_runtime(machine_of(settings(sim_gpu=2, gpu_memory="8MiB", ram="16MiB").resources))
    with open_runtime(machine_of(settings(ncpu=1, ram="16MiB", watchdog=3600.0).resources)):
        assert [thread.name for thread in threading.enumerate()].count("nntask watchdog") == 1
