"""LLaMA keeps GPT-2's promise: one tiling and lane count give one sequence of losses, bit for bit, whatever runs the tasks and wherever data lie."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from llama_oracle import SCALINGS

from nntask.models.llama import Llama
from nntask.models.llama_config import LlamaConfig
from nntask.optim import AdamW, decay_groups
from nntask.tiling import ModelTiling
from scheduler import InlineRuntime, Runtime, TaskRuntime
from scheduler.core.steps import StepPlan

STEPS, BATCH, LENGTH = 4, 4, 16
CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=8,
    max_position_embeddings=LENGTH,
    rope_scaling=SCALINGS[-1],
    attention_dropout=0.1,
)
TILING = ModelTiling(minibatch_tile=1, seq_tile=9, embd_tile=16, inner_tile=30, head_tile=4, vocab_tile=25)


class Job:
    """A clipped step of two minibatches with dropout, recorded where the runtime records."""

    def __init__(self, runtime: TaskRuntime, order: str = "auto") -> None:
        self.runtime = runtime
        self.model = Llama(CONFIG, TILING, runtime, seed=3)
        self.optimizer = AdamW(decay_groups(self.model, 0.1), 3e-3, max_norm=1.0)
        self.inputs = [self.model.input_tensors(BATCH // 2) for _ in range(2)]
        self.step = None
        if isinstance(runtime, Runtime):
            with runtime.record(order) as self.step:
                self.outputs = self.emit()

    def emit(self) -> list:
        """Tensors of the losses and of the gradient norm."""
        self.model.train()
        losses = [self.model(*pair, scale=0.5, minibatch=number) for number, pair in enumerate(self.inputs)]
        for loss in losses:
            loss.backward()
        self.optimizer.step()
        return [*losses, self.optimizer.grad_norm]

    def run(self) -> list[bytes]:
        """Bits of losses and norms of every step."""
        rng, found = np.random.default_rng(7), []
        for number in range(STEPS):
            ids = rng.integers(0, CONFIG.vocab_size, (BATCH, LENGTH + 1)).astype(np.int32)
            for (tokens, targets), part in zip(self.inputs, np.split(ids, 2), strict=True):
                tokens.write(part[:, :-1])
                targets.write(part[:, 1:])
            self.model.dropout_key.write(np.array([3, number], np.uint64))
            self.optimizer.prepare(number + 1, 3e-3)
            if self.step is None:
                found.append(b"".join(output.read().tobytes() for output in self.emit()))
            else:
                ticket = self.step.replay()
                found.append(b"".join(ticket.read(output).tobytes() for output in self.outputs))
        return found


@cache
def truth(lanes: int) -> list[bytes]:
    """What running every task at once, in order, gives."""
    return Job(InlineRuntime(lanes)).run()


@cache
def plan() -> StepPlan:
    """The step in submission order."""
    with Runtime(1, ram=1 << 28) as runtime:
        step = Job(runtime).step
        assert step is not None
        assert step.plan is not None
        return step.plan


@pytest.mark.parametrize(("workers", "sched", "sim_gpus"), [(1, "prio", 0), (4, "eager", 0), (2, "lws", 1), (4, "dmdas", 2), (2, "reuse", 2)])
def test_losses_are_bit_identical(workers: int, sched: str, sim_gpus: int) -> None:
    """Workers, policies and simulated devices, with four lanes."""
    with Runtime(workers, sim_gpus=sim_gpus, ram=1 << 28, sched=sched, lanes=4) as runtime:
        assert Job(runtime).run() == truth(4)


@pytest.mark.parametrize(("share", "options"), [(0.5, {}), (0.25, {"sched": "dmda", "evict": "lru"}), (0.0, {"order": "layers", "prefetch": False})])
def test_losses_are_the_same_bits_with_a_disk_below(share: float, options: dict, tmp_path: Path) -> None:
    """RAM at a half and a quarter of what the step needs, and at what its hungriest task touches."""
    ram = int(plan().needed_bytes() * share) or plan().largest_task()
    options = dict(options)
    order = options.pop("order", "auto")
    with Runtime(2, ram=ram, disk=tmp_path, **options) as runtime:
        assert Job(runtime, order).run() == truth(1)
        stats = runtime.stats()
    assert stats["peak_bytes"]["ram"] <= ram
    assert stats["evictions"] > 0


def test_losses_are_the_same_bits_on_small_devices() -> None:
    """Two simulated devices at a quarter of what the step needs, and no CPU worker."""
    with Runtime(0, sim_gpus=2, ram=1 << 28, gpu_memory=plan().needed_bytes() // 4) as runtime:
        assert Job(runtime).run() == truth(1)
        assert runtime.stats()["evictions"] > 0


def test_the_losses_learn_something() -> None:
    """The runs compared are real: every step differs."""
    assert len(set(truth(4))) == STEPS
    assert truth(4) != truth(1)
