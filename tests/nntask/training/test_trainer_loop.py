"""The training loop over a model of one number: journals, checkpoints, interruptions, divergence."""

import io
import json
import math
import os
import signal
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nntask.checkpoints.store import find_checkpoint, step_directories
from nntask.config.run_config import Saving
from nntask.data import BatchStream, Cursor, TokenFile
from nntask.data.sampler import Windows
from nntask.engine.evaluation import evaluate
from nntask.engine.interface import Outcome
from nntask.errors import Diverged, StorageError
from nntask.telemetry.metrics import Journal, StepPrinter, Totals, around, read_metrics, step_line
from nntask.telemetry.step_record import StepRecord
from nntask.training.loop import Hooks, Loop, LoopPlan, Saver
from nntask.training.run_directory import summary_of, write_summary
from nntask.training.signals import REPETITION_SECONDS, Interrupts
from scheduler import Codelet
from scheduler.api.runtime import Runtime
from tiles import TileTensor

LENGTH, BATCH = 4, 2


def descend(tokens, hyper, weight, out):
    """One step of descent of (mean(tokens) / 50 - w)^2; out = loss, norm."""
    error = weight[0] - np.float32(tokens.mean() / 50)
    with np.errstate(over="ignore", invalid="ignore"):
        out[0], out[1] = error * error, abs(2 * error)
    weight[0] -= np.float32(hyper[0]) * 2 * error


DESCEND = Codelet("descend", cpu=descend)


class ToyEngine:
    """A model of one number on the real runtime, with a recorded step."""

    def __init__(self, runtime: Runtime) -> None:
        self.tokens = TileTensor(runtime, (BATCH, LENGTH), (-1, -1), np.int32, kind="input", name="tokens")
        self.hyper = TileTensor(runtime, (1,), (-1,), np.float64, kind="input", name="hyper")
        self.weight = TileTensor(runtime, (1,), (-1,), np.float32, kind="persistent", name="w")
        self.weight.write(np.zeros(1, np.float32))
        with runtime.record() as self.step:
            self.out = TileTensor(runtime, (2,), (-1,), np.float64)
            accesses = [(self.tokens[0, 0], "R"), (self.hyper[(0,)], "R"), (self.weight[(0,)], "RW"), (self.out[(0,)], "W")]
            runtime.submit(DESCEND, accesses)

    num_tasks = 1

    def start(self, step, lr, batch):
        self.tokens.write(batch.tokens)
        self.hyper.write(np.array([lr]))
        return ToyPending(self, self.step.replay())

    def evaluate(self, batch):
        return float((batch.targets >= 0).sum()) * math.log(2)

    def model_tensors(self):
        return {"w": self.weight}

    def optimizer_tensors(self):
        return {}


class ToyPending:
    def __init__(self, engine, ticket):
        self.engine, self.ticket = engine, ticket

    def result(self):
        loss, norm = self.ticket.read(self.engine.out)
        return Outcome(float(loss), float(norm))


@pytest.fixture
def file(tmp_path):
    """A hundred tokens."""
    path = tmp_path / "train.bin"
    path.write_bytes((np.arange(101) % 50).astype("<u2").tobytes())
    return TokenFile(path, vocab_size=50)


def train(
    run: Path,
    file,
    *,
    steps,
    resume=None,
    interrupts=None,
    lr=0.1,
    on_step=lambda step: None,
    save_every=5,
    sum_loss=False,
    starts_alone=lambda step: False,
):
    """Run the loop and return (loop, weight after)."""
    first, cursor = 0, None
    run.mkdir(exist_ok=True)
    with Runtime(1, ram=1 << 24) as runtime:
        engine = ToyEngine(runtime)
        if resume is not None:
            first, cursor = resume.step, Cursor(*resume.state["cursor"])
            resume.load(engine.model_tensors(), engine.optimizer_tensors())
        stream = BatchStream(Windows(file, LENGTH), BATCH, seed=1, cursor=cursor)
        plan = LoopPlan(steps, first, lambda step: lr, Saving(save_every, True, 2), 0, sum_loss, 1e6, 1e9)
        journal = Journal(run / "metrics.jsonl", first)
        loop = Loop(
            plan,
            engine,
            stream,
            runtime,
            saver=Saver(run, engine, {"model": {}}, keep=2),
            journal=journal,
            printer=StepPrinter(io.StringIO()),
            interrupts=interrupts or Interrupts(),
            hooks=Hooks(on_step, starts_alone),
        )
        try:
            loop.train()
        finally:
            journal.close()
        return loop, float(engine.weight.read()[0])


def test_ten_steps_equal_five_and_a_continuation(tmp_path, file):
    """A run that is continued from its checkpoint has the same losses and the same weight, bit by bit."""
    _, straight = train(tmp_path / "a", file, steps=10)
    train(tmp_path / "b", file, steps=7)  # its checkpoints are of steps 5 and 7
    _, continued = train(tmp_path / "b", file, steps=10, resume=find_checkpoint(tmp_path / "b"))
    assert continued == straight
    losses = [[r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl")] for name in "ab"]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10
    assert [p.name for p in step_directories(tmp_path / "a")] == ["step-000005", "step-000010"]


def test_a_line_has_every_field_and_no_other(tmp_path, file):
    """metrics.jsonl is an interface."""
    train(tmp_path / "a", file, steps=3)
    wanted = "step loss lr grad_norm tokens seconds tokens_per_second tflops mfu resident_peak_bytes moved_bytes evictions wait_seconds"
    wanted += " stall_seconds hit_rate busy_seconds worker_stall_seconds recomputed_tasks recompute_seconds skipped_tasks"
    for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines():
        assert list(json.loads(line)) == wanted.split()
    first = read_metrics(tmp_path / "a" / "metrics.jsonl")[0]
    assert first["tokens"] == BATCH * LENGTH
    assert first["resident_peak_bytes"]["ram"] > 0


def test_the_printed_loss_can_be_the_sum(tmp_path, file):
    """The sum is the mean times the tokens of a step."""
    train(tmp_path / "mean", file, steps=2)
    train(tmp_path / "sum", file, steps=2, sum_loss=True)
    mean, total = (read_metrics(tmp_path / name / "metrics.jsonl")[0]["loss"] for name in ("mean", "sum"))
    assert total == pytest.approx(8 * mean)


@pytest.fixture
def terminal():
    """SIGHUP is not ignored, as it is if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_the_step_and_saves(tmp_path, file, number):
    """After a signal in step 4 the run ends with a checkpoint of step 4, and its continuation equals a straight run."""
    with Interrupts() as interrupts:
        loop, _ = train(
            tmp_path / "a", file, steps=10, interrupts=interrupts, on_step=lambda step: os.kill(os.getpid(), number) if step == 4 else None
        )
    assert interrupts.exit_code == 128 + number
    assert loop.step == 4
    found = find_checkpoint(tmp_path / "a")
    assert found.step == 4
    _, continued = train(tmp_path / "a", file, steps=10, resume=found)
    assert continued == train(tmp_path / "b", file, steps=10)[1]


def test_what_counts_as_a_second_signal():
    """The same one again at once is the first, as often as it comes; the same later, or another one at any time, is the second.

    A terminal that closes is neither: its shell, and the end of its session, send more signals."""
    term, ctrl_c, hang_up = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    interrupts = Interrupts()
    arrivals = [(term, 7.0), (term, 7.0), (term, 7.0 + 0.9 * REPETITION_SECONDS), (term, 7.0 + REPETITION_SECONDS), (ctrl_c, 7.0), (term, 60.0)]
    assert [interrupts.is_second(number, now) for number, now in arrivals] == [False, False, False, True, True, True]
    interrupts = Interrupts()
    assert [interrupts.is_second(*arrival) for arrival in [(hang_up, 1.0), (hang_up, 9.0), (term, 10.0), (hang_up, 11.0)]] == [False] * 4
    assert interrupts.is_second(ctrl_c, 12.0)


def test_a_run_without_its_terminal(tmp_path, file):
    """Under nohup the end of the terminal is ignored, and the run completes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            loop, _ = train(tmp_path, file, steps=4, interrupts=interrupts, on_step=lambda step: os.kill(os.getpid(), signal.SIGHUP))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (loop.step, interrupts.exit_code) == (4, 0)


def test_a_signal_before_the_first_step_saves_nothing(tmp_path, file):
    """There is nothing to save, and nothing is."""
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        loop, _ = train(tmp_path / "a", file, steps=10, interrupts=interrupts)
    assert loop.step == 0
    assert step_directories(tmp_path / "a") == []


class Flights:
    """An engine of no numbers that notes which steps are in flight when one begins."""

    num_tasks = 1

    def __init__(self):
        self.flying: set[int] = set()
        self.beside: dict[int, list[int]] = {}

    def start(self, step, lr, batch):
        self.beside[step] = sorted(self.flying)
        self.flying.add(step)
        return Flight(self, step)

    def evaluate(self, batch):
        return 0.0

    def model_tensors(self):
        return {}

    def optimizer_tensors(self):
        return {}


class Flight:
    def __init__(self, engine, step):
        self.engine, self.step = engine, step

    def result(self):
        self.engine.flying.discard(self.step)
        return Outcome(1.0, 1.0)


class NoCounters:
    def check_stop(self):
        pass

    def stats(self, *, forget_recent_peak=False):
        nothing = {
            "moved_bytes": {},
            "busy_seconds": {},
            "recent_peak_bytes": {},
            "budget_bytes": {},
            "evictions": 0,
            "hits": 0,
            "misses": 0,
            "stall_seconds": 0.0,
            "worker_stall_seconds": {},
            "recomputed_tasks": 0,
            "recompute_seconds": 0.0,
            "skipped_tasks": 0,
        }
        return nothing


class Traffic(Flights):
    """An engine and its counters: a step moves a byte and evicts a replica, whoever looks at the weights moves a hundred and computes for an hour."""

    def __init__(self):
        super().__init__()
        self.moved, self.evictions, self.busy, self.peak = 0, 0, 0.0, 0

    def start(self, step, lr, batch):
        self.happen(1, 0.0)
        return super().start(step, lr, batch)

    def happen(self, nbytes, seconds):
        self.moved, self.evictions, self.busy, self.peak = self.moved + nbytes, self.evictions + nbytes, self.busy + seconds, max(self.peak, nbytes)

    def model_tensors(self):
        self.happen(100, 3600.0)
        return {}

    def check_stop(self):
        pass

    def stats(self, *, forget_recent_peak=False):
        found = {
            "moved_bytes": {"ram->disk": self.moved},
            "busy_seconds": {"cpu:0": self.busy},
            "recent_peak_bytes": {"ram": self.peak},
            "budget_bytes": {},
            "evictions": self.evictions,
            "hits": 10 * self.moved,
            "misses": self.evictions,
            "stall_seconds": float(self.moved),
            "worker_stall_seconds": {"cpu:0": float(self.moved)},
            "recomputed_tasks": 3 * self.moved,
            "recompute_seconds": self.moved / 4,
            "skipped_tasks": 2 * self.moved,
        }
        self.peak = 0 if forget_recent_peak else self.peak
        return found


def test_what_happens_between_steps_is_in_no_line(tmp_path, file):
    """Neither copies, evictions, peak and stalls of checkpoints and validation, nor their kernels; their sums are known all the same."""
    engine = Traffic()
    engine.happen(50, 0.0)  # the first weights
    loop = Loop(
        LoopPlan(6, 0, lambda step: 0.1, Saving(2, True, 2), 3, False, 1.0, 1.0),
        engine,
        BatchStream(Windows(file, LENGTH), BATCH, seed=1),
        engine,
        saver=Saver(tmp_path, engine, {"model": {}}, keep=9),
        journal=Journal(tmp_path / "metrics.jsonl", 0),
        printer=StepPrinter(io.StringIO()),
        interrupts=Interrupts(),
        hooks=Hooks(starts_alone=lambda step: True, validate=lambda step: engine.happen(100, 3600.0)),
    )
    loop.train()
    loop.journal.close()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert len(lines) == 6
    for line in lines:
        assert (line["moved_bytes"], line["evictions"], line["stall_seconds"], line["resident_peak_bytes"]) == ({"ram->disk": 1}, 1, 1.0, {"ram": 1})
        assert (line["busy_seconds"], line["worker_stall_seconds"]) == ({"cpu:0": 0.0}, {"cpu:0": 1.0})
        assert (line["recomputed_tasks"], line["recompute_seconds"], line["skipped_tasks"]) == (3, 0.25, 2)
        assert line["wait_seconds"] == pytest.approx(line["seconds"])
        assert line["hit_rate"] == pytest.approx(10 / 11)
    assert around(loop.journal.own, engine.stats()) == {"moved_bytes": {"ram->disk": 550}, "evictions": 550, "stall_seconds": 550.0}


def test_steps_that_start_alone_have_no_neighbour(tmp_path, file):
    """The step before lands first, and the hooks see steps and the pauses between them."""
    engine, seen = Flights(), []

    def on_step(step):
        seen.append((step, sorted(engine.flying)))

    loop = Loop(
        LoopPlan(8, 0, lambda step: 0.1, Saving(0, False, 2), 0, False, 1.0, 1.0),
        engine,
        BatchStream(Windows(file, LENGTH), BATCH, seed=1),
        NoCounters(),
        saver=Saver(tmp_path, engine, {}, keep=1),
        journal=Journal(tmp_path / "metrics.jsonl", 0),
        printer=StepPrinter(io.StringIO()),
        interrupts=Interrupts(),
        hooks=Hooks(on_step, lambda step: step in (3, 6)),
    )
    loop.train()
    loop.journal.close()
    assert engine.beside == {1: [], 2: [1], 3: [], 4: [3], 5: [4], 6: [], 7: [6], 8: [7]}
    assert [step for step, _ in seen] == [*range(1, 9), None, None]
    assert all(not flying for step, flying in seen if step in (None, 3, 6))


def test_a_loss_that_is_not_finite_stops_before_saving(tmp_path, file):
    """With an absurd learning rate the run diverges and says so; only checkpoints with finite losses exist."""
    with pytest.raises(Diverged, match=r"step \d+ has .*lower --lr") as error:
        train(tmp_path / "a", file, steps=400, lr=1e6, save_every=2)
    assert error.value.exit_code == 5
    found = find_checkpoint(tmp_path / "a")
    assert found.step < 400
    last = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert found.step < last[-1]["step"]


def test_a_journal_of_a_resumed_run_drops_what_lies_behind_its_checkpoint(tmp_path):
    """Steps that were done after the checkpoint are done again, not doubled; a torn last line is no obstacle."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": i}) + "\n" for i in range(1, 9)) + '{"step": 9, "lo')
    journal = Journal(path, 5)
    journal.close()
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5]


RECORD = StepRecord(12, 6.1234, 2.9e-4, 1.02, 1024, 0.512, 2000.0, 0.1, 0.81, {"ram": 1288490188}, {}, 0, 0.25, 0.125, 0.5)


def test_a_journal_keeps_sums_only(tmp_path):
    """The second half of five thousand steps takes no memory; the sums are those of the lines."""
    journal = Journal(tmp_path / "metrics.jsonl", 0, timed_after=10)
    for step in range(1, 2501):
        journal.add(replace(RECORD, step=step))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for step in range(2501, 5001):
        journal.add(replace(RECORD, step=step, loss=float(step)))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    journal.close()
    assert grown < 20_000
    assert (journal.whole.steps, journal.whole.loss_first, journal.whole.loss_last) == (5000, 6.1234, 5000.0)
    assert (journal.timed.steps, journal.timed.tokens) == (4990, 4990 * 1024)
    assert journal.own.wait_seconds == pytest.approx(1250)
    again = Journal(tmp_path / "metrics.jsonl", 4000, timed_after=4000)
    again.add(replace(RECORD, step=4001))
    again.close()
    assert (again.whole.steps, again.own.steps, again.timed.steps) == (4001, 1, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_holds_no_number_that_json_does_not_know(tmp_path, value):
    """NaN and infinity become null in metrics.jsonl and summary.json."""

    def refuse(word):
        raise AssertionError(word)

    journal = Journal(tmp_path / "metrics.jsonl", 0)
    journal.add(replace(RECORD, loss=value, grad_norm=value, tflops=value))
    journal.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert [line[key] for key in ("loss", "grad_norm", "tflops", "tokens")] == [None, None, None, 1024]
    stats = {key: {"ram": value} for key in ("peak_bytes", "budget_bytes", "moved_bytes")}
    stats |= {"tasks": 1, "busy_seconds": {}, "evictions": 0, "stall_seconds": 0.0}
    write_summary(tmp_path, summary_of(Totals(1, 1, 1.0, loss_last=value), Totals(1, wait_seconds=value), stats, 1, {}))
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert (summary["loss_last"], summary["peak_bytes"]) == (None, {"ram": None})


def test_stalls_are_not_what_a_task_costs():
    """summary.json says how long workers idle per task; waiting for data or room has a figure of its own, and no step is no time."""
    stats = {key: {} for key in ("peak_bytes", "budget_bytes", "moved_bytes", "busy_seconds")} | {"tasks": 200, "evictions": 0, "stall_seconds": 0.75}
    own = Totals(2, wait_seconds=1.0, stall_seconds=0.75)
    assert summary_of(own, own, stats, 100, {})["task_overhead_us"] == pytest.approx(1250)
    assert summary_of(Totals(), Totals(), stats, 100, {})["task_overhead_us"] == 0.0


def test_a_journal_that_cannot_be_written_is_a_storage_error(tmp_path):
    """Exit code 6, with the file, the reason and what is safe."""
    journal = Journal(tmp_path / "metrics.jsonl", 0)
    with open("/dev/full", "w", buffering=1) as full:
        journal._file.close()
        journal._file = full
        with pytest.raises(StorageError, match=r"cannot write .*metrics\.jsonl: No space left on device; there is no earlier checkpoint") as error:
            journal.add(RECORD)
        with pytest.raises(StorageError, match="No space left"):
            journal.close()
    assert error.value.exit_code == 6
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        Journal(tmp_path / "file" / "metrics.jsonl", 0)


def test_the_step_line_is_as_documented():
    """Scripts may parse it."""
    record = StepRecord(12, 6.1234, 2.9e-4, 1.02, 1024, 0.512, 2000.0, 0.1, 0.81, {"ram": 1288490188}, {}, 0, 0.0, 0.0, 1.0)
    line = step_line(record, 200, 96, {"ram": 2 << 30})
    assert line == "step 12/200 | loss 6.1234 | norm 1.02 | lr 2.9e-04 | 512 ms | 2.0k tok/s | 81% of gemm peak | ram 1.2/2.0 GiB | eta 1m36s"
    assert "| ram 29/30 MiB |" in step_line(replace(record, resident_peak_bytes={"ram": 30_000_000}), 200, 96, {"ram": 31_457_280})


def test_bits_per_byte_count_bytes_not_tokens(tmp_path, file):
    """A loss of one bit per token over tokens of two bytes is half a bit per byte."""
    from nntask.data.sampler import in_order

    batches = in_order(Windows(file, LENGTH), BATCH, 3)
    with Runtime(1, ram=1 << 24) as runtime:
        result = evaluate(ToyEngine(runtime), batches, np.full(50, 2))
    assert result.tokens == 24
    assert result.perplexity == pytest.approx(2)
    assert result.bits_per_byte == pytest.approx(0.5)


def test_an_evaluation_that_is_stopped_has_no_result(tmp_path, file):
    """It is asked before each batch."""
    from nntask.data.sampler import in_order

    answers = iter([False, False, True])
    assert evaluate(Flights(), in_order(Windows(file, LENGTH), BATCH, 5), None, lambda: next(answers)) is None
    assert list(answers) == []
