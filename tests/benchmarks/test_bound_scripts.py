"""The scripts of `benchmarks/bounds`: bytes, seconds and policies of recorded steps beside lower bounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.bounds import bound, evict, jobs, schedules

from scheduler.planning.orders import candidates
from wrappers.cli import main
from wrappers.cli.bench.kernels import captured

SMALL = {"vocab_size": 257, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SCRIPTS = {
    "evict": (evict.EvictSettings, evict.run),
    "bound": (bound.BoundSettings, bound.run),
    "schedules": (schedules.SchedSettings, schedules.run),
}


@pytest.fixture
def config(folder: Path) -> str:
    """The flag of a small model, in a directory of its own."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **SMALL}))
    return "--config-path=small.json"


def call(argv: list[str]) -> int:
    """Run the script argv[0] with flags; its exit code."""
    before, sys.argv = sys.argv, argv
    try:
        return jobs.main(*SCRIPTS[argv[0]])
    finally:
        sys.argv = before


@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.long)])
def test_evict(batch: int) -> None:
    """Every order of the step moves bytes, and every policy; next-use moves the fewest in submission order; nothing is below the bound."""
    figures, lines = evict.run(evict.EvictSettings(model="tiny", batch=batch, seq_len=32, budgets="4"))
    orders = set(candidates(captured(jobs.named("tiny", batch, seq_len=32))))
    assert {row["order"] for row in figures["rows"] if row["evict"] == "next-use"} == orders > {"submission", "layers"}
    assert ("forward" in orders) == (batch > 1)
    rows = {(row["order"], row["evict"], row["sched"]): row for row in figures["rows"]}
    moved = {evict: rows["submission", evict, "prio"]["moved_bytes"] for evict in ("next-use", "lru", "fifo")}
    assert 0 < moved["next-use"] == min(moved.values())
    assert ("submission", "lru", "eager") in rows
    for row in figures["rows"]:
        if row["lower_bound_bytes"] is not None and row["sched"] == "prio":
            assert row["moved_bytes"] >= 0.999 * row["lower_bound_bytes"]
    assert len(lines) == 2 + len(rows)
    assert any("(planned)" in line for line in lines)


@pytest.mark.long
def test_evict_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bound, and a line says why."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)
    settings = evict.EvictSettings(model="tiny", batch=1, seq_len=16, budgets="2")
    figures, lines = evict.run(settings)
    assert {row["lower_bound_bytes"] for row in figures["rows"]} == {None}
    assert lines[-1] == 'the lower bound needs SciPy: pip install -e ".[bench]", or leave it out with --no-bound'


@pytest.mark.long
def test_evict_without_a_bound() -> None:
    """`--no-bound` leaves it out, and no line speaks of SciPy."""
    figures, lines = evict.run(evict.EvictSettings(model="tiny", batch=1, seq_len=16, budgets="2", bound=False))
    assert {row["lower_bound_bytes"] for row in figures["rows"]} == {None}
    assert "SciPy" not in "".join(lines)


@pytest.mark.long
def test_evict_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 3 and the smallest budget that fits; with that, each line has its bytes."""
    flags = ["evict", "--model=tiny", "--batch=1", "--seq-len=32", "--no-bound"]
    assert call([*flags, "--budgets=900,500"]) == 3
    refusal = capsys.readouterr().err
    assert "--budgets 900,500 are at most " in refusal
    part = int(refusal.split()[-1])
    assert call([*flags, f"--budgets={part},{part + 1}", "--json"]) == 0
    moved = {row["budget"]: row["moved_bytes"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert moved[f"1/{part}"] > 0
    assert moved[f"1/{part + 1}"] is None


BOUND = ["bound", "--batch=2", "--minibatch=1", "--link=100MB/s"]


def test_bound(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is that of `nntask plan`, and not below the bound of its order; each order has one, smaller where values may be made again."""
    figures, lines = bound.run(bound.BoundSettings(config_path="small.json", batch=2, minibatch=1, link="100MB/s", device="200KiB@1GF"))
    assert main(["plan", config, *BOUND[1:], "--devices=1x200KiB@1GF", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    names = ("seconds_per_step", "order", "recompute", "tasks_per_step", "moved_bytes_per_step")
    assert {name: figures[name] for name in names} == {name: plan[name] for name in names}
    bounds = {row["order"]: row for row in figures["bounds"]}
    assert {"submission", "eager-update", "layers"} <= set(bounds)
    assert [row["is_planned"] for row in bounds.values()].count(True) == 1
    for row in bounds.values():
        assert figures["task_seconds"] <= row["seconds"] * (1 + 1e-6)
        assert row["seconds"] <= row["seconds_without_recompute"] * (1 + 1e-6)
    assert figures["bound_seconds"] == min(row["seconds"] for row in bounds.values()) == bounds[figures["bound_order"]]["seconds"]
    assert figures["over_bound"] == figures["seconds_per_step"] / figures["bound_seconds"] >= 1
    assert any(f"the plan takes {figures['over_bound']:.3f} times as long" in line for line in lines)
    assert len(lines) == 4 + len(bounds)


@pytest.mark.parametrize(("flags", "words"), [(["--device=20KiB@1GF"], "enlarge --device"), (["--device=1MiB", "--ram=300KiB"], "or --ram 300KiB")])
def test_bound_where_the_step_does_not_fit(flags: list[str], words: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 3, and what to enlarge."""
    assert call([*BOUND, config, *flags]) == 3
    assert words in capsys.readouterr().err


def test_bound_needs_scipy(config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without it there is nothing to say."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert call([*BOUND, config]) == 2
    assert 'pip install -e ".[bench]"' in capsys.readouterr().err


def test_schedules_takes_a_model_s_length(capsys: pytest.CaptureFixture[str]) -> None:
    """As long sequences as the model takes, unless told otherwise."""
    flags = ["schedules", "--model=tiny", "--batch=2", "--minibatch=1", "--counts=1", "--policies=eager", "--device=256MiB@1TF", "--json"]
    found = []
    for more in ([], ["--seq-len=256"]):
        assert call([*flags, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["machines"][0]["needed_bytes"])
    assert found[0] == found[1]


def test_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    """No policy beats the bounds; auto is one of them."""
    flags = ["schedules", "--model=tiny", "--seq-len=64", "--batch=2", "--minibatch=2", "--counts=1,2", "--device=256MiB@1TF"]
    assert call([*flags, "--json"]) == 0
    machines = json.loads(capsys.readouterr().out)["machines"]
    assert [machine["devices"] for machine in machines] == [1, 2]
    for machine in machines:
        assert set(machine["bounds_seconds"]) == {"area", "critical_path", "link"}
        assert {row["policy"] for row in machine["policies"]} >= {"eager", "dmdas", "reuse", machine["auto"]}
        assert all(row["over_bound"] >= 1 - 1e-9 for row in machine["policies"])
    assert call([*flags, "--policies=eager,dmdas"]) == 0
    assert "x bound" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ("1000", "at most 64, because each device has a memory and links that a plan goes through one by one, got 1000"),
        ("1,65", "one by one, got 65"),
        ("0", "--counts must be whole numbers of 1 or more with commas"),
        ("2,x", "--counts must be whole numbers of 1 or more with commas"),
    ],
)
def test_schedules_refuses_other_counts(counts: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before it captures anything."""
    assert call(["schedules", f"--counts={counts}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["evict", "--budgets=a"], "--budgets must be whole numbers"),
        (["evict", "--model=gpt5"], "--model must be a preset"),
        (["evict", "--batch=0"], "--batch must be at least 1, got 0; the nearest legal value is 1"),
        (["evict", "--seq-len=0"], "--seq-len must be at least 1, got 0; the nearest legal value is 1"),
        (["evict", "--seq-len=5000"], "--seq-len must be at most n_positions = 1024, got 5000; the nearest legal value is 1024"),
        (["bound", "--model=gpt5"], "--model must be a preset that nntask models lists, got 'gpt5'; use --model gpt2"),
        (["bound", "--device=2x80GiB"], "--device must be MEMORY[@FLOPS], got '2x80GiB'; for example 80GiB@150TF"),
        (["bound", "--dtype=bf17"], "--dtype"),
        (["schedules", "--seq-len=0"], "--seq-len must be at least 1, got 0; the nearest legal value is 1"),
        (["schedules", "--device=80"], "--device must be MEMORY[@FLOPS], got '80', whose MEMORY has no unit; for example 80GiB@150TF"),
        (["schedules", "--device=8x80GiB"], "--device must be MEMORY[@FLOPS], got '8x80GiB'; for example 80GiB@150TF"),
        (["schedules", "--model=tiny", "--link=55"], "--link must be bytes per second, got '55', which has no unit; for example 55GB/s"),
        (["schedules", "--counts=0"], "--counts must be whole numbers"),
        (["schedules", "--policies=best"], "--policies must be some of"),
        (
            ["schedules", "--model=tiny", "--seq-len=16", "--batch=1", "--minibatch=1", "--counts=1", "--order=foo"],
            "--order foo: this step has no order 'foo'; it has submission",
        ),
    ],
)
def test_mistakes_end_with_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence names the flag and what would do."""
    assert call(argv) == 2
    assert words in capsys.readouterr().err
