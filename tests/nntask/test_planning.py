"""Plans: figures from shapes, minimum budgets that are exactly enough, imaginary machines, and changes that would make a step fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nntask.errors import UsageError
from nntask.models.config import GPT2Config
from nntask.sizes import format_least, parse_size
from nntask.trainer import fitting, planning
from nntask.trainer.machine import open_runtime
from nntask.trainer.places import imaginary, open_store, parse_devices, parse_rate, this_machine
from nntask.trainer.prepare import with_tiles
from nntask.trainer.rules import resolve
from nntask.trainer.settings import ModelSettings, ResourceSettings, TilingSettings, TrainSettings
from scheduler.core.orders import candidates, repetition
from scheduler.core.perf import Models
from scheduler.crew import SIM_DEPTH
from scheduler.ordering import EQUAL

CONFIG = GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
WIDE = replace(CONFIG, n_embd=128)
PAGE = 4096


def plan_run(*args: Any, reach: bool = False) -> dict[str, Any]:
    """Without looking for larger models."""
    return planning.plan_run(*args, reach=reach)


def settings(**resources: Any) -> TrainSettings:
    """Four minibatches of one sequence, two CPU workers."""
    return TrainSettings(
        model=ModelSettings(config_path="small.json"),
        tiling=TilingSettings(batch=4, minibatch=1),
        resources=ResourceSettings(**{"ncpu": 2, "ram": "1GiB", **resources}),
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
    small, tiling = with_tiles(small, CONFIG)
    target, plan = this_machine(small), fitting.capture(small, CONFIG, tiling)
    order = fitting.choose_order(plan, small, target)
    needs = fitting.least_needs(plan, small, target, order)
    (alone, _), (beside, _) = (planning._simulate(order, small, target, replace(needs, reading=nbytes)) for nbytes in (0, 3 * PAGE))
    assert alone is not None
    assert beside is not None
    assert beside.peak_bytes["ram"] == alone.peak_bytes["ram"] + 3 * PAGE
    assert beside.peak_bytes_by_class["ram"]["scratch"] == alone.peak_bytes_by_class["ram"]["scratch"] + 3 * PAGE


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


def test_short_memory_moves_what_the_order_is_expected_to_move() -> None:
    """A quarter of what is needed: of the orders forecast about as fast as the fastest, the one that moves least; the budget is respected."""
    needed = plan_run(settings(), CONFIG)["needed_bytes"]
    plan = plan_run(settings(ram=str(needed // 4), disk="scratch:1GiB"), CONFIG)
    assert plan["feasible"]
    assert set(plan["moved_bytes_per_step"]) == {"ram->disk", "disk->ram"}
    seconds, nbytes = plan["forecast_seconds"], plan["forecast_bytes"]  # seconds are this machine's, as busy as it is now
    assert plan["order"] == min((name for name in seconds if seconds[name] <= EQUAL * min(seconds.values())), key=nbytes.__getitem__)
    assert plan["peak_bytes"]["ram"] <= needed // 4
    asked = plan_run(settings(ram=str(needed // 4), disk="scratch:1GiB", order="submission"), CONFIG)
    assert asked["order"] == "submission"
    all_at_once = plan_run(settings(ram=str(needed // 4), disk="scratch:1GiB", order="layers:2000"), CONFIG)  # more minibatches than there are
    assert all_at_once["forecast_bytes"]["layers:2000"] == nbytes["layers"]
    one = replace(settings(ram=str(needed // 4), disk="scratch:1GiB", order="layers:2"), tiling=TilingSettings(batch=4, minibatch=4))
    with pytest.raises(UsageError, match=r"--order layers:2: this step has no order .*--minibatch below --batch"):
        plan_run(one, CONFIG)


def test_a_tile_too_large_is_named_with_a_size_that_fits() -> None:
    """The flag that is advised makes the step fit."""
    minimum = plan_run(settings(disk="scratch:1GiB"), WIDE)["minimum_budget_bytes"]["ram"]
    tight = settings(ram=str(minimum // 2), disk="scratch:1GiB")
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
    assert not fits(number + 2 + number // 2)
    assert plan_run(settings(), CONFIG, reach=True)["largest_model"] == "llama-tiny"


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
    asked, tiling = with_tiles(resolve(replace(asked, tiling=replace(asked.tiling, embd_tile=embd_tile)), CONFIG), CONFIG)
    plan = fitting.capture(asked, CONFIG, tiling)
    found = repetition(plan)
    assert found.num_minibatches == 4
    assert all(found.updates[after] for at, is_update in enumerate(found.updates) if is_update for after in plan.successors[at])
    for order in candidates(plan).values():
        assert sorted(order) == list(range(len(plan.tasks)))


def test_imaginary_machines() -> None:
    """Devices with memory and flop/s; twice the flop/s is faster, and tiles are coarse."""
    asked = settings(ncpu=None, ram="")
    slow, fast = (plan_run(asked, CONFIG, imaginary(f"2x64MiB@{flops}", asked, "1GB/s")) for flops in ("1GF", "2GF"))
    assert slow["feasible"]
    assert slow["budget_bytes"]["gpu:1"] == 64 << 20
    assert fast["seconds_per_step"] < slow["seconds_per_step"]
    assert slow["tiles"]["inner_tile"] == CONFIG.inner_size
    assert slow["tiles"]["vocab_tile"] == CONFIG.vocab_size // 8
    tight = replace(asked, resources=replace(asked.resources, ram="1MiB"))
    assert not plan_run(tight, CONFIG, imaginary("2x64MiB", tight))["feasible"]


def test_devices_far_too_small_are_told_what_they_need() -> None:
    """Tiles cut for so little memory would be more tasks than a step may have: larger ones say how much memory would do."""
    wide = replace(CONFIG, n_embd=512, vocab_size=10_000)
    asked = settings(ncpu=None, ram="")
    asked = replace(asked, tiling=replace(asked.tiling, batch=1))
    plan = plan_run(asked, wide, imaginary("2x16KiB", asked))
    assert not plan["feasible"]
    assert plan["tasks_per_step"] < 4 * planning.MANY_TASKS
    least = plan["advice"][0].removeprefix("--devices of ").removesuffix(" each")
    asked = replace(asked, tiling=replace(asked.tiling, **plan["tiles"]))
    assert plan_run(asked, wide, imaginary(f"2x{least}", asked))["feasible"]


def test_a_smaller_minibatch_is_advised_where_it_helps() -> None:
    """Where an imaginary RAM is too small for the activations of the whole batch."""
    asked = settings(ncpu=None, ram="")
    asked = replace(asked, tiling=replace(asked.tiling, minibatch=4, minibatch_tile=4))
    least = [
        plan_run(replace(asked, tiling=replace(asked.tiling, minibatch=size, minibatch_tile=size)), CONFIG, imaginary("1x4MiB", asked))
        for size in (1, 4)
    ]
    needs = [plan["minimum_budget_bytes"]["ram"] for plan in least]
    assert needs[0] < needs[1]
    asked = replace(asked, resources=replace(asked.resources, ram=str(needs[0])))
    refused = plan_run(asked, CONFIG, imaginary("1x4MiB", asked))
    assert "--minibatch 1" in refused["advice"]


@pytest.mark.parametrize("devices", ["1x24MiB@1TF", "2x24MiB@1TF"])
def test_the_order_is_chosen_by_the_disk_where_ram_is_short(devices: str) -> None:
    """Imaginary devices over a RAM that cannot hold what lives: the forecast is of the disk, too, near virtual time; with room, of links."""
    large = replace(CONFIG, n_embd=512)

    def plan(ram: str, disk: str) -> dict[str, Any]:
        asked = settings(ncpu=None, ram=ram, disk=disk)
        asked = replace(asked, tiling=replace(asked.tiling, embd_tile=512, inner_tile=1024, head_tile=4, vocab_tile=512))
        return plan_run(asked, large, imaginary(devices, asked))

    alone, roomy, short = plan("1GiB", ""), plan("1GiB", "scratch:1GiB"), plan("32MiB", "scratch:1GiB")
    for key in ("order", "forecast_seconds", "forecast_bytes"):
        assert roomy[key] == alone[key]
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


@given(st.integers(1, 1 << 50))
def test_least_sizes_as_text(nbytes: int) -> None:
    """What is printed is read as no less, and as hardly more."""
    assert nbytes <= parse_size(format_least(nbytes), "--ram") <= 1.02 * nbytes + 1
    assert format_least(8 << 20) == "8 MiB"
    assert format_least(8_392_704) == "8.01 MiB"


def test_rates_as_text() -> None:
    """Bytes per second, with or without the /s."""
    assert parse_rate("55GB/s", "--link") == parse_rate("55 GB", "--link") == 55e9
    with pytest.raises(UsageError, match="--link must be bytes per second"):
        parse_rate("fast", "--link")


def test_the_machine_is_the_one_that_a_run_would_use() -> None:
    """Workers, budgets, policy and the file of measurements are the runtime's."""
    asked = settings(sim_gpu=2, gpu_memory="8MiB", ram="16MiB")
    target = this_machine(asked)
    with open_runtime(asked) as runtime:
        crew = [(worker.kind, worker.node, worker.depth) for worker in runtime._engine.machine.dispatch.crew]
        assert list(target.workers) == crew
        assert dict(target.nodes) == runtime.stats()["budget_bytes"]
        assert target.policy("auto") == runtime.policy_name
        assert open_store(runtime.node_names).path == runtime._engine._store.path
    assert target.workers[-1][2] == SIM_DEPTH


def test_measured_durations_are_used() -> None:
    """What a run has measured replaces what operations and rates say."""
    before = plan_run(settings(ncpu=1), CONFIG)["seconds_per_step"]
    from nntask.trainer.fitting import capture
    from nntask.trainer.places import durations
    from nntask.trainer.prepare import with_tiles
    from nntask.trainer.rules import resolve
    from scheduler.core.perf import Series, footprint

    resolved, tiling = with_tiles(resolve(settings(ncpu=1), CONFIG), CONFIG)
    plan = capture(resolved, CONFIG, tiling)
    models = Models()
    for task in plan.tasks:
        models.history.series[task.name, footprint(task), "cpu"] = Series([1.0, 1.0])  # type: ignore[arg-type]
    target = replace(this_machine(resolved), models=models)
    known = durations(plan, target)
    assert known.num_measured == known.num_kinds
    assert set(known.seconds["cpu"]) == {1.0}
    store = open_store(["ram"])
    store.save(models)
    try:
        assert plan_run(settings(ncpu=1), CONFIG)["seconds_per_step"] == len(plan.tasks) > before
    finally:
        store.path.unlink()
