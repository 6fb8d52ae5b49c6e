"""Training on CUDA workers, the GPU emulated on the CPU: losses of a CPU run within rounding, whatever the budgets, and the same bits every time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nntask.models.config import GPT2Config
from nntask.models.gpt2 import GPT2
from nntask.optim import AdamW
from nntask.tiling import ModelTiling
from scheduler import Runtime
from scheduler.drivers.disk import staging_nbytes
from tiles.kernels.registry import BF16

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiles"))
from cuda_emulator import COMPILER, Emulator

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")
CONFIG = GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=2)


def losses(runtime: Runtime, dropout: float = 0.0, steps: int = 3, dtype: Any = np.float32) -> list[float]:
    """Of some steps of two minibatches, two in flight."""
    with runtime:
        config = CONFIG.with_dropout(dropout)
        model = GPT2(config, ModelTiling(minibatch_tile=1, seq_tile=16, vocab_tile=40), runtime, seed=3, dtype=dtype)
        optimizer = AdamW(model.parameters(), lr=1e-2, max_norm=1.0)
        inputs = [model.input_tensors(2) for _ in range(2)]
        kept = []
        with runtime.record() as step:
            model.train()
            for number, (tokens, targets) in enumerate(inputs):
                loss = model(tokens, targets, scale=0.5, minibatch=number)
                loss.backward()
                kept.append(loss.data)
            optimizer.step()
        found: list[float] = []
        for number, ids in enumerate(np.random.default_rng(0).integers(0, 96, (steps, 2, 2, 33)).astype(np.int32)):
            for (tokens, targets), part in zip(inputs, ids, strict=True):
                tokens.write(part[:, :-1])
                targets.write(part[:, 1:])
            model.dropout_key.write(np.array([3, number], np.uint64))
            optimizer.prepare(number + 1)
            ticket = step.replay()
            found.append(sum(float(ticket.read(loss)[0]) for loss in kept))
        return found


@pytest.fixture(scope="module")
def gpus(cuda_libraries: Path) -> list[Emulator]:
    """Two devices."""
    first = Emulator(cuda_libraries)
    return [first, Emulator(cuda_libraries, beside=first)]


def on_gpus(gpus: list[Emulator], nbytes: int = 1 << 26, **more: Any) -> Runtime:
    """A runtime that computes on GPUs alone."""
    return Runtime(0, gpus=gpus, gpu_memory=nbytes, ram=1 << 27, **more)


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.long), 0.2])
def test_losses_are_those_of_the_cpu(gpus: list[Emulator], dropout: float) -> None:
    """Within rounding, dropout masks included."""
    np.testing.assert_allclose(losses(on_gpus(gpus[:1]), dropout), losses(Runtime(1, ram=1 << 27), dropout), rtol=1e-4)


@pytest.mark.long
def test_budgets_and_devices_change_no_bit(gpus: list[Emulator], tmp_path: Path) -> None:
    """Without graphs, a tenth of the memory, a disk below, two devices."""
    want = losses(on_gpus(gpus[:1]))
    assert losses(on_gpus(gpus[:1], graphs=False)) == want
    tight = on_gpus(gpus[:1], 1 << 19)
    assert losses(tight) == want
    assert losses(Runtime(0, gpus=gpus[:1], gpu_memory=1 << 19, ram=(1 << 21) + staging_nbytes(1, has_tier=True), disk=tmp_path)) == want
    assert losses(on_gpus(gpus, 1 << 20)) == want


def test_bf16_stays_near_fp32(gpus: list[Emulator]) -> None:
    """bf16 tiles go to the kernels for GPUs as they are (there is nobody else to run anything), with fp32 masters: losses within 1 % of fp32's."""
    np.testing.assert_allclose(losses(on_gpus(gpus[:1]), dtype=BF16), losses(Runtime(1, ram=1 << 27)), rtol=1e-2)
