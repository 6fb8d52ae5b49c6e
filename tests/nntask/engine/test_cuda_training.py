"""Training on CUDA workers, the GPU emulated on the CPU: losses of a CPU run within rounding, whatever the budgets, and the same bits every time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cuda_emulator import COMPILER, Emulator
from support.gpu_training import Training, on_gpus

from nntask.models.gpt2 import GPT2Config
from nntask.optim import adamw8bit
from nntask.tiling.model_tiling import ModelTiling
from scheduler import Runtime
from scheduler.drivers.disk import staging_nbytes
from tiles.kernels.registry import BF16

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")
TRAINING = Training(
    GPT2Config(vocab_size=96, n_positions=16, n_embd=16, n_layer=2, n_head=2), ModelTiling(minibatch_tile=1, seq_tile=8, vocab_tile=40), 3, 1e-2
)
losses = TRAINING.losses
TIGHT = 1 << 18
"""Bytes of a device that does not hold the step."""


@pytest.fixture(scope="module")
def gpus(cuda_libraries: Path) -> list[Emulator]:
    """Two devices."""
    first = Emulator(cuda_libraries)
    return [first, Emulator(cuda_libraries, peer=first)]


def on(gpus: list[Emulator], nbytes: int = 1 << 26, ram: int = 1 << 27, **more: Any) -> Runtime:
    """A runtime that computes on GPUs alone."""
    return on_gpus(gpus, nbytes, ram, **more)


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.long), 0.2])
def test_losses_are_those_of_the_cpu(gpus: list[Emulator], dropout: float) -> None:
    """Within rounding, dropout masks included."""
    np.testing.assert_allclose(losses(on(gpus[:1]), dropout), losses(Runtime(1, ram=1 << 27), dropout), rtol=1e-4)


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [*((name, np.float32) for name in ("muon", "adamw8bit")), *(pytest.param(name, BF16, marks=pytest.mark.long) for name in ("muon", "adamw8bit"))],
)
def test_other_optimizers_are_those_of_the_cpu(gpus: list[Emulator], optimizer: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon and 8-bit moments, in fp32 and with masters; a budget that does not hold the step changes no bit."""
    monkeypatch.setattr(adamw8bit, "LEAST", 256)
    training = replace(TRAINING, optimizer=optimizer)
    want = training.losses(on(gpus[:1]), dtype=dtype)
    np.testing.assert_allclose(want, training.losses(Runtime(1, ram=1 << 27), dtype=dtype), rtol=1e-4 if dtype == np.float32 else 1e-2)
    assert training.losses(on(gpus[:1], TIGHT), dtype=dtype) == want


@pytest.mark.parametrize(
    ("dtype", "count"), [(np.float32, 1), pytest.param(np.float32, 2, marks=pytest.mark.long), pytest.param(BF16, 1, marks=pytest.mark.long)]
)
def test_whole_passes_are_the_bits_of_single_tasks(gpus: list[Emulator], dtype: Any, count: int) -> None:
    """As graphs from the third replay of an instance on, although the numbers of the optimizer and the masks change with every step."""
    training = replace(TRAINING, steps=5)
    single = training.losses(on(gpus[:1], graphs=False), 0.2, dtype=dtype)
    before = gpus[0].num_graphs
    assert training.losses(on(gpus[:count]), 0.2, dtype=dtype) == single
    assert count > 1 or gpus[0].num_graphs - before >= 2  # on two devices tasks may meet other addresses every time


@pytest.mark.long
def test_budgets_and_devices_change_no_bit(gpus: list[Emulator], tmp_path: Path) -> None:
    """Without graphs, a tenth of the memory, a disk below, two devices."""
    want = losses(on(gpus[:1]))
    assert losses(on(gpus[:1], graphs=False)) == want
    for tight in (
        on(gpus[:1], TIGHT),
        on(gpus[:1], TIGHT, (1 << 20) + staging_nbytes(1, has_tier=True), disk=tmp_path),
        on(gpus, TIGHT),
    ):
        assert losses(tight) == want
        assert tight.stats()["evictions"] > 0


@pytest.mark.long
def test_bf16_stays_near_fp32(gpus: list[Emulator]) -> None:
    """bf16 tiles go to the kernels for GPUs as they are (there is nobody else to run anything), with fp32 masters: losses within 1 % of fp32's."""
    np.testing.assert_allclose(losses(on(gpus[:1]), dtype=BF16), losses(Runtime(1, ram=1 << 27)), rtol=1e-2)
