"""One tiling and lane count give one sequence of losses, bit for bit, whatever runs the tasks."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from nntask.models.config import GPT2Config
from nntask.models.gpt2 import GPT2
from nntask.optim import AdamW, decay_groups
from nntask.tiling import ModelTiling
from nntask.trainer.recorded import emit_training_step
from scheduler import InlineRuntime, Runtime, TaskRuntime, Trace

STEPS, BATCH, LENGTH, VOCAB = 20, 4, 16, 61
CONFIG = GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=24, n_layer=2, n_head=3, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
TILING = ModelTiling(minibatch_tile=1, seq_tile=9, embd_tile=16, inner_tile=50, head_tile=2, vocab_tile=25)


def batches() -> list[np.ndarray]:
    """The same random tokens every time  # (B, T + 1) each."""
    rng = np.random.default_rng(7)
    return [rng.integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32) for _ in range(STEPS)]


def losses(
    runtime: TaskRuntime, steps: int = STEPS, order: str = "auto", minibatches: int = 2, tiling: ModelTiling = TILING
) -> list[tuple[bytes, bytes]]:
    """Bits of the losses and gradient norms of so many clipped steps with dropout, in so many minibatches each."""
    model = GPT2(CONFIG, tiling, runtime, seed=3)
    optimizer = AdamW(decay_groups(model, 0.1), 3e-3, max_norm=1.0)
    inputs = [model.input_tensors(BATCH // minibatches) for _ in range(minibatches)]

    if isinstance(runtime, Runtime):
        with runtime.record(order) as step:
            outputs, norm = emit_training_step(model, optimizer, inputs)
    seen, ticket = [], None
    for number, ids in enumerate(batches()[:steps]):
        for (tokens, targets), part in zip(inputs, np.split(ids, minibatches), strict=True):
            tokens.write(part[:, :-1])
            targets.write(part[:, 1:])
        model.dropout_key.write(np.array([3, number], np.uint64))
        optimizer.prepare(number + 1, 3e-3)
        if not isinstance(runtime, Runtime):
            outputs, norm = emit_training_step(model, optimizer, inputs)
            seen.append((b"".join(loss.read().tobytes() for loss in outputs), norm.read().tobytes()))
            continue
        previous, ticket = ticket, step.replay()
        if previous is not None:
            seen.append((b"".join(previous.read(loss).tobytes() for loss in outputs), previous.read(norm).tobytes()))
    if ticket is not None:
        seen.append((b"".join(ticket.read(loss).tobytes() for loss in outputs), ticket.read(norm).tobytes()))
    return seen


@cache
def truth(lanes: int) -> list[tuple[bytes, bytes]]:
    """What running every task at once, in order, gives."""
    return losses(InlineRuntime(lanes))


@pytest.mark.parametrize("sim_gpus", [0, 1, 2])
@pytest.mark.parametrize("sched", ["eager", "prio", "lws"])
@pytest.mark.parametrize("workers", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_losses_are_bit_identical(workers: int, sched: str, sim_gpus: int) -> None:
    """Workers, policies and simulated devices, with dropout and four lanes, half of the runs traced."""
    trace = Trace() if (workers + sim_gpus) % 2 else None
    with Runtime(workers, sim_gpus=sim_gpus, ram=1 << 28, sched=sched, lanes=4, trace=trace) as runtime:
        assert losses(runtime) == truth(4)


@pytest.mark.long
@pytest.mark.parametrize("gpu_memory", [1 << 18, 1 << 20])
def test_losses_do_not_change_under_eviction(gpu_memory: int) -> None:
    """Two simulated devices too small for the model, and no CPU worker, move tiles all the time."""
    with Runtime(0, sim_gpus=2, ram=1 << 28, gpu_memory=gpu_memory) as runtime:
        assert losses(runtime) == truth(1)
        stats = runtime.stats()
    assert gpu_memory > 1 << 18 or stats["evictions"] > 0
    assert all(stats["peak_bytes"][f"sim:{i}"] <= gpu_memory for i in range(2))


def test_the_losses_learn_something() -> None:
    """The runs compared are real: the loss moves and every step differs."""
    values = [np.frombuffer(bits).sum() for bits, _ in truth(4)]
    assert len(set(values)) == STEPS
    assert abs(values[0] - np.log(VOCAB)) < 0.2
