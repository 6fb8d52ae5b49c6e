"""What a run tells of its traffic within a tight budget: lines of metrics.jsonl, their sums, the closing report, explained placements."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from nntask.config.resolution import resolve
from nntask.config.run_config import Saving
from nntask.config.settings import TilingSettings, TrainSettings
from nntask.config.tile_sizes import retiled
from nntask.data import BatchStream, TokenFile
from nntask.data.sampler import Windows
from nntask.engine.recorded import RecordedEngine
from nntask.errors import UsageError
from nntask.models.gpt2 import GPT2Config
from nntask.telemetry.explain import PLACEMENTS, Explainer, matching, table
from nntask.telemetry.metrics import Journal, StepPrinter, Totals, read_metrics
from nntask.telemetry.traffic import LINKS, is_worth_telling, traffic_report
from nntask.tiling.model_tiling import ModelTiling
from nntask.training.loop import Hooks, Loop, LoopPlan, Saver
from nntask.training.run_directory import summary_of
from nntask.training.signals import Interrupts
from scheduler import Runtime
from scheduler.core.policies import Candidate, Placement
from scheduler.core.records import NodeId, WorkerId

STEPS = 3
CONFIG = GPT2Config(vocab_size=61, n_positions=32, n_embd=64, n_layer=2, n_head=4)
TILING = ModelTiling(minibatch_tile=1, seq_tile=17, embd_tile=64, inner_tile=64, head_tile=2, vocab_tile=25)
"""Activations of more than a page, so that minibatches are recognised and each has a device of its own."""


class Trained(NamedTuple):
    """A journal, and what the runtime counted meanwhile.

    Attributes:
        moved: bytes by link.
        text: what was printed.
        parts: of each task, the device it belongs on, or -1; empty where the step has no parts.
    """

    journal: Journal
    moved: Counter[str]
    evictions: int
    stalled: float
    text: str
    parts: list[int]


def run(folder: Path, runtime: Runtime, explain: Collection[str] = ()) -> Trained:
    """Train."""
    run = retiled(resolve(TrainSettings(tiling=TilingSettings(batch=2, minibatch=1)), CONFIG), TILING)
    (folder / "train.bin").write_bytes((np.arange(500) % 61).astype("<u2").tobytes())
    stream = BatchStream(Windows(TokenFile(folder / "train.bin", vocab_size=61), CONFIG.n_positions), 2, seed=1)
    engine = RecordedEngine(run, runtime)
    out = io.StringIO()
    printer = StepPrinter(out)
    explainer = Explainer(runtime, explain, ["recomputed instead of kept: none: everything fits"], printer.say)
    runtime.wait()
    journal = Journal(folder / "metrics.jsonl", 0)
    plan = LoopPlan(STEPS, 0, lambda step: 1e-3, Saving(0, False, 2), 0, False, 1e6, 1e9)
    loop = Loop(
        plan,
        engine,
        stream,
        runtime,
        saver=Saver(folder, engine, {}, keep=1),
        journal=journal,
        printer=printer,
        interrupts=Interrupts(),
        hooks=Hooks(lambda step: explainer.tell()),
    )
    before = runtime.stats()
    loop.train()
    after = runtime.stats()
    journal.close()
    moved = Counter(after["moved_bytes"])
    moved.subtract(before["moved_bytes"])
    evictions, stalled = (after[name] - before[name] for name in ("evictions", "stall_seconds"))
    return Trained(journal, +moved, evictions, stalled, out.getvalue(), engine.order.plan.partitions)


@pytest.mark.parametrize("devices", [0, 2])
def test_lines_add_up_to_what_the_runtime_counted(devices: int, tmp_path: Path) -> None:
    """A disk below a small memory, and two devices that are too small: bytes, evictions and stalls of the steps are those of the runtime."""
    small = 512 << 10
    with Runtime(0 if devices else 2, sim_gpus=devices, ram=1 << 26 if devices else small, gpu_memory=small, disk=tmp_path / "tier") as runtime:
        journal, moved, evictions, stalled, _, parts = run(tmp_path, runtime)
        stats = runtime.stats()
    assert set(parts) == ({-1, 0, 1} if devices else set())
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert len(lines) == STEPS
    assert sum((Counter(line["moved_bytes"]) for line in lines), Counter()) == moved == journal.whole.moved_bytes
    assert sum(moved.values()) > 0
    assert sum(line["evictions"] for line in lines) == evictions == journal.whole.evictions > 0
    assert sum(line["stall_seconds"] for line in lines) == pytest.approx(journal.whole.stall_seconds)
    assert journal.whole.stall_seconds == pytest.approx(stalled, rel=0.05, abs=1e-3)
    for line in lines:
        assert 0 < line["hit_rate"] < 1
        assert 0 <= line["stall_seconds"] <= line["wait_seconds"] + 1e-3
        assert all(0 < nbytes <= stats["budget_bytes"][node] for node, nbytes in line["resident_peak_bytes"].items() if node != "disk")
        assert all(nbytes <= stats["peak_bytes"][node] for node, nbytes in line["resident_peak_bytes"].items())
    summary = summary_of(journal.whole, journal.own, stats, 1, {})
    assert (summary["moved_bytes"], summary["evictions"]) == (dict(moved), evictions)
    assert Counter(summary["moved_bytes"]) + Counter(summary["moved_bytes_around_steps"]) == Counter(stats["moved_bytes"])
    assert summary["hit_rate"] == pytest.approx(np.mean([line["hit_rate"] for line in lines]))
    assert is_worth_telling(journal.own, stats)
    report = traffic_report(journal.own, stats)
    assert len(report) == min(len(moved), LINKS) + 2 + (summary["recomputed_tasks"] > 0)
    assert report[0].startswith("moved ")
    assert re.fullmatch(r"peak: ram .* of [^,;]*(, sim:0 .*, sim:1 .*)?; reserved: disk .* of .*", report[-2])
    assert (journal.warm.steps, journal.warm.seconds) == (STEPS - 1, pytest.approx(sum(line["seconds"] for line in lines[1:])))
    assert " of inputs were in place; workers waited for data or room " in report[-1]


def test_a_run_with_room_moves_nothing_and_says_nothing(tmp_path: Path) -> None:
    """One memory that holds everything: all inputs are in place, nobody stalls, no closing report."""
    with Runtime(2, ram=1 << 26) as runtime:
        journal, moved, evictions, stalled, *_ = run(tmp_path, runtime)
        assert not is_worth_telling(journal.own, runtime.stats())
    assert (moved, evictions, stalled, journal.own.hit_rate) == (Counter(), 0, 0.0, 1.0)


def test_many_links_make_few_lines() -> None:
    """The busiest ones by name, the rest in a sum."""
    totals = Totals(1, 1, 2.0, moved_bytes={f"a->{number}": number * 10**9 for number in range(1, 10)})
    report = traffic_report(totals, {"peak_bytes": {}, "budget_bytes": {}, "busy_seconds": {}})
    assert report[0] == "moved a->9: 9.000 GB a step, 4.50 GB/s"
    assert report[LINKS - 1] == "moved over 4 other links: 10.000 GB a step, 5.00 GB/s"
    assert len(report) == LINKS + 2


@pytest.mark.parametrize("sched", ["auto", *(pytest.param(name, marks=pytest.mark.long) for name in ("eager", "dmda"))])
def test_explained_placements(sched: str, tmp_path: Path) -> None:
    """Three tables with a row for each device, seconds that add up, one choice; policies without costs say so; losses are the same."""
    with Runtime(0, sim_gpus=2, ram=1 << 26, gpu_memory=1 << 19, sched=sched) as runtime:
        *_, text, parts = run(tmp_path, runtime, ["matmul"])
    assert set(parts) == (set() if sched == "eager" else {-1, 0, 1})
    losses = [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    with Runtime(2, ram=1 << 26) as runtime:
        run(tmp_path, runtime)
    assert [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")] == losses
    lines = text.splitlines()
    assert lines[0] == "recomputed instead of kept: none: everything fits"
    heads = [at for at, line in enumerate(lines) if line.startswith("placement ")]
    assert len(heads) == PLACEMENTS
    for number, at in enumerate(heads, 1):
        assert lines[at].startswith(f"placement {number} of matmul (task ")
        assert ("weighs no costs" in lines[at]) == (sched == "eager")
        assert ("its part of the step belongs on" in lines[at]) == bool(parts)
        assert lines[at + 1].split() == ["worker", "execution", "transfer", "queueing", "eviction", "total", "missing", "bytes"]
        rows = [line.split(maxsplit=7) for line in lines[at + 2 : at + 4]]
        assert {row[0] for row in rows} == {"sim:0", "sim:1"}
        assert sum(row[7:] == ["<- chosen"] for row in rows) == 1
        for row in rows:
            *seconds, total = map(float, row[1:6])
            assert sum(seconds) == pytest.approx(total, abs=5e-6)
            assert seconds[0] > 0


def test_a_planned_placement_says_that_seconds_did_not_decide() -> None:
    """The device of the task's part is named, and is chosen although another would have been sooner."""
    candidates = [Candidate(WorkerId(at), "sim", NodeId(at + 1), 1.0 + at, 0.0, 0.0, 0.0, 0) for at in range(2)]
    placement = Placement("matmul", 7, candidates, weighs_costs=True, planned_node=NodeId(2), chosen=WorkerId(1))
    lines = table(placement, 1, "reuse", {0: "sim:0", 1: "sim:1"}).splitlines()
    assert lines[0].startswith("placement 1 of matmul (task 7); policy reuse keeps to the plan, and its part of the step belongs on sim:1;")
    assert lines[3].split()[0] == "sim:1"
    assert lines[3].endswith("<- chosen")


def test_names_of_tasks() -> None:
    """The task of that name, else all that contain it; else a sentence with the names."""
    names = {"matmul", "layer_norm", "layer_norm_backward"}
    assert matching("layer_norm", names) == {"layer_norm"}
    assert matching("", names) == set()
    assert matching("norm", names) == {"layer_norm", "layer_norm_backward"}
    with pytest.raises(UsageError, match=r"got 'matmull'; did you mean 'matmul'\?; the tasks are: layer_norm, layer_norm_backward, matmul"):
        matching("matmull", names)
