"""The training loop over a model of one number: journals, checkpoints, interruptions, divergence."""

import io
import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from nntask.checkpoints import find_checkpoint, step_directories
from nntask.data import BatchStream, Cursor, TokenFile
from nntask.errors import Diverged
from nntask.trainer.engine import Outcome
from nntask.trainer.evaluation import evaluate
from nntask.trainer.loop import Loop, Plan
from nntask.trainer.metrics import Journal, StepPrinter, StepRecord, read_metrics, step_line
from nntask.trainer.signals import Interrupts
from scheduler import Codelet
from scheduler.runtime import Runtime
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


def train(run: Path, file, *, steps, resume=None, interrupts=None, lr=0.1, on_step=lambda step: None, save_every=5, sum_loss=False):
    """Run the loop and return (loop, weight after)."""
    first, cursor = 0, None
    run.mkdir(exist_ok=True)
    with Runtime(1, ram=1 << 24) as runtime:
        engine = ToyEngine(runtime)
        if resume is not None:
            first, cursor = resume.step, Cursor(*resume.state["cursor"])
            resume.load(engine.model_tensors(), engine.optimizer_tensors())
        stream = BatchStream(file, LENGTH, BATCH, seed=1, cursor=cursor)
        plan = Plan(steps, first, lambda step: lr, save_every, True, 0, 2, sum_loss, 1e6, 1e9)
        journal = Journal(run / "metrics.jsonl", first)
        loop = Loop(
            plan,
            engine,
            stream,
            runtime,
            run=run,
            state={"model": {}},
            journal=journal,
            printer=StepPrinter(io.StringIO()),
            interrupts=interrupts or Interrupts(),
            on_step=on_step,
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
    for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines():
        assert list(json.loads(line)) == wanted.split()
    first = read_metrics(tmp_path / "a" / "metrics.jsonl")[0]
    assert first["tokens"] == BATCH * LENGTH
    assert first["resident_peak_bytes"]["ram"] > 0


def test_the_printed_loss_can_be_the_sum(tmp_path, file):
    """--loss-reduction sum multiplies what is printed by the tokens of a step."""
    train(tmp_path / "mean", file, steps=2)
    train(tmp_path / "sum", file, steps=2, sum_loss=True)
    mean, total = (read_metrics(tmp_path / name / "metrics.jsonl")[0]["loss"] for name in ("mean", "sum"))
    assert total == pytest.approx(8 * mean)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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


def test_the_step_line_is_as_documented():
    """Scripts may parse it."""
    record = StepRecord(12, 6.1234, 2.9e-4, 1.02, 1024, 0.512, 2000.0, 0.1, 0.81, {"ram": 1288490188}, {}, 0, 0.0)
    line = step_line(record, 200, 96, {"ram": 2 << 30})
    assert line == "step 12/200 | loss 6.1234 | norm 1.02 | lr 2.9e-04 | 512 ms | 2.0k tok/s | 81% of gemm peak | ram 1.2/2.0 GiB | eta 1m36s"


def test_bits_per_byte_count_bytes_not_tokens(tmp_path, file):
    """A loss of one bit per token over tokens of two bytes is half a bit per byte."""
    from nntask.data import in_order

    batches = in_order(file, LENGTH, BATCH, 3)
    with Runtime(1, ram=1 << 24) as runtime:
        result = evaluate(ToyEngine(runtime), batches, np.full(50, 2))
    assert result.tokens == 24
    assert result.perplexity == pytest.approx(2)
    assert result.bits_per_byte == pytest.approx(0.5)
