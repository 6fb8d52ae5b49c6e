"""Muon over tiles against torch.optim.Muon, and the situations in which it goes wrong elsewhere.

Reports: Newton-Schulz on row shards or flattened shards (Megatron-LM 5961, Moonlight 27), never run at all (DeepSpeed 8441), infinities for gradients
of zeros (Moonlight 27), rates for the transposed shape (pytorch 160213).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.muon_oracle import in_fp32

from scheduler import InlineRuntime
from tiles import TileTensor
from tiles.ops import optimizer
from tiles.ops.elementwise import fill
from tiles.ops.muon import NewtonSchulz, muon

RATE, DECAY = 0.02, 0.1
TILINGS = [(-1, -1), (10, 9), (-1, 4), (5, -1), (16, 16)]


def data(runtime: InlineRuntime, tile: tuple[int, ...], values: np.ndarray) -> TileTensor:
    """A tile tensor with these values."""
    result = TileTensor(runtime, values.shape, tile, values.dtype, name="data")
    result.write(values)
    return result


class Pair:
    """A matrix in tiles, and the same one with torch.optim.Muon."""

    def __init__(self, shape: tuple[int, int], tile: tuple[int, int], dtype: Any = np.float32, max_norm: float = 0.0, **options: Any) -> None:
        self.runtime, self.tile, self.max_norm, self.options = InlineRuntime(), tile, max_norm, NewtonSchulz(**options)
        start = (np.random.default_rng(0).standard_normal(shape) * 0.05).astype(dtype)
        self.weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
        self.oracle = torch.optim.Muon([self.weight], lr=RATE, weight_decay=DECAY, **options)
        self.param = data(self.runtime, tile, start)
        self.buffer = fill(self.param.like(), 0.0)
        self.hyper = data(self.runtime, (-1, -1), np.array([[9.0] * 8, [RATE, 0, 0, 0.95, 0, 1e-7, DECAY, 0]]))

    def step(self, gradient: np.ndarray) -> None:
        """Take a step of ours."""
        grad = data(self.runtime, self.tile, gradient)
        norm = optimizer.sum_of_squares([grad]) if self.max_norm else None
        update = optimizer.Update(param=self.param, grad=grad, hyper=self.hyper, row=1, norm=norm, max_norm=self.max_norm)
        muon([update], [self.buffer], self.options)

    def steps(self, count: int) -> None:
        """Take steps of both."""
        rng = np.random.default_rng(1)
        for _ in range(count):
            gradient = rng.standard_normal(self.param.shape).astype(self.param.dtype)
            self.step(gradient)
            self.weight.grad = torch.from_numpy(gradient.copy())
            if self.max_norm:
                torch.nn.utils.clip_grad_norm_([self.weight], self.max_norm)
            self.oracle.step()

    def away(self) -> float:
        """The largest difference of the two."""
        return float(np.abs(self.param.read() - self.weight.detach().numpy()).max())


@pytest.mark.parametrize("tile", TILINGS, ids=str)
@pytest.mark.parametrize("shape", [(37, 53), (53, 37), (40, 40), (1, 20), (20, 1)], ids=str)
def test_ten_steps_are_those_of_torch(shape: tuple[int, int], tile: tuple[int, int]) -> None:
    """Whatever the tiles, the update is that of the whole matrix: wide, tall, square, a row, a column."""
    tile = tuple(-1 if size > extent else size for size, extent in zip(tile, shape, strict=True))
    pair = Pair(shape, tile)
    with in_fp32():
        pair.steps(10)
    assert pair.away() < 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False},
        {"ns_steps": 3},
        {"ns_coefficients": (2.0, -1.5, 0.5)},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"max_norm": 0.5},
        {"dtype": np.float64},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(37, 53), (53, 37)], ids=str)
def test_options_are_those_of_torch(shape: tuple[int, int], options: dict[str, Any]) -> None:
    """Momentum, iterations, coefficients, the rate's factor for tall and wide matrices, clipping, fp64."""
    pair = Pair(shape, (16, 16), **options)
    with in_fp32():
        pair.steps(5)
    assert pair.away() < (1e-13 if pair.param.dtype == np.float64 else 1e-6)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("extents", [(9, 9, 9), (20, 7, 7), (3, 4, 2)], ids=str)
def test_parts_of_a_fused_matrix_are_one_matrix(extents: tuple[int, ...], axis: int) -> None:
    """Queries, keys and values stored apart take the steps of torch on their concatenation, tall, wide or short."""
    shape = [16, 16]
    shape[axis] = sum(extents)
    whole = Pair((shape[0], shape[1]), (7, 7))
    ends = np.cumsum(extents)[:-1]
    parts = [data(whole.runtime, (3, 3), part) for part in np.split(whole.param.read(), ends, axis)]
    buffers = [fill(part.like(), 0.0) for part in parts]
    rng = np.random.default_rng(1)
    for _ in range(5):
        gradient = rng.standard_normal(whole.param.shape).astype(np.float32)
        grads = [data(whole.runtime, (3, 3), np.ascontiguousarray(part)) for part in np.split(gradient, ends, axis)]
        updates = [optimizer.Update(param=param, grad=grad, hyper=whole.hyper, row=1) for param, grad in zip(parts, grads, strict=True)]
        muon(updates, buffers, whole.options, axis)
    with in_fp32():
        whole.steps(5)
    want = whole.weight.detach().numpy()
    assert np.abs(np.concatenate([part.read() for part in parts], axis) - want).max() < 1e-6


@pytest.mark.parametrize("power", [1, 2, 3])
def test_rounding_errors_are_near_those_of_torch(power: int) -> None:
    """At most eight times those of torch in fp32, also for singular values from 1 to 1e-5, whose squares fp32 loses: 90 times in stages of five."""
    rng = np.random.default_rng(0)
    bases = [np.linalg.qr(rng.standard_normal((size, 48)))[0] for size in (48, 120)]
    gradient = (bases[0] * np.arange(1.0, 49) ** -power) @ bases[1].T
    moved = {}
    for dtype in (np.float64, np.float32):
        pair = Pair((48, 120), (20, 20), dtype)
        pair.hyper.write(np.array([[9.0] * 8, [1, 0, 0, 0.95, 0, 1e-7, 0, 0]]))
        pair.oracle.param_groups[0].update(lr=1.0, weight_decay=0.0)
        pair.weight.data.zero_()
        pair.param.write(np.zeros((48, 120), dtype))
        with in_fp32():
            pair.step(gradient.astype(dtype))
            pair.weight.grad = torch.from_numpy(gradient.astype(dtype))
            pair.oracle.step()
        moved[dtype] = pair.param.read(), pair.weight.detach().numpy()
    exact = moved[np.float64][1]
    ours, theirs = (float(np.linalg.norm(x - exact)) for x in moved[np.float32])
    assert ours < 8 * theirs


def test_torch_in_bf16_is_within_its_rounding() -> None:
    """Without the change to fp32, torch's updates of length RATE differ by the rounding of bf16 products."""
    pair = Pair((37, 53), (16, 16))
    pair.steps(1)
    assert 1e-7 < pair.away() < 0.05 * RATE


def test_the_update_has_singular_values_near_one() -> None:
    """Newton-Schulz runs, on the whole matrix: a step of rate 1 without decay moves it by a matrix that is nearly orthogonal."""
    pair = Pair((24, 60), (7, 13))
    pair.hyper.write(np.array([[9.0] * 8, [1, 0, 0, 0, 0, 1e-7, 0, 0]]))
    before = pair.param.read()
    pair.step(np.random.default_rng(2).standard_normal((24, 60)).astype(np.float32))
    values = np.linalg.svd(before - pair.param.read(), compute_uv=False)
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_transposed_matrix_has_the_transposed_update() -> None:
    """A layer that stores its weight transposed (Conv1D) learns the same, with the rate's factor of "match_rms_adamw"."""
    first, second = (Pair(shape, (16, 16), adjust_lr_fn="match_rms_adamw") for shape in ((37, 53), (53, 37)))
    second.param.write(first.param.read().T)
    gradient = np.random.default_rng(3).standard_normal((37, 53)).astype(np.float32)
    first.step(gradient)
    second.step(np.ascontiguousarray(gradient.T))
    assert np.abs(first.param.read() - second.param.read().T).max() < 1e-6


def test_a_gradient_of_zeros_only_decays() -> None:
    """No 0 / 0."""
    pair = Pair((20, 30), (16, 16))
    before = pair.param.read()
    for _ in range(3):
        pair.step(np.zeros((20, 30), np.float32))
    np.testing.assert_allclose(pair.param.read(), before * (1 - RATE * DECAY) ** 3, rtol=1e-6)


def test_nan_spreads_to_the_whole_matrix() -> None:
    """A divergence shows, wherever it begins."""
    pair = Pair((20, 30), (16, 16))
    gradient = np.ones((20, 30), np.float32)
    gradient[19, 29] = np.nan
    pair.step(gradient)
    assert np.isnan(pair.param.read()).all()


def test_masters_carry_what_bf16_loses() -> None:
    """A bf16 parameter is its fp32 master, rounded, and the master is the fp32 parameter of a run in fp32."""
    pair = Pair((20, 30), (16, 16))
    start = pair.param.read()
    param = data(pair.runtime, (16, 16), start.astype(ml_dtypes.bfloat16))
    master, buffer = data(pair.runtime, (16, 16), start), fill(pair.param.like(), 0.0)
    for step in range(5):
        gradient = np.random.default_rng(step).standard_normal((20, 30)).astype(np.float32)
        pair.step(gradient)
        grad = data(pair.runtime, (16, 16), gradient)
        muon([optimizer.Update(param=param, grad=grad, hyper=pair.hyper, row=1, master=master)], [buffer], pair.options)
    np.testing.assert_array_equal(master.read(), pair.param.read())
    np.testing.assert_array_equal(param.read(), master.read().astype(ml_dtypes.bfloat16))


def test_pieces_in_different_tiles_are_refused() -> None:
    """The Gram matrix has the tiles of the axis that the pieces share."""
    runtime, updates, buffers = InlineRuntime(), [], []
    hyper = data(runtime, (-1, -1), np.zeros((1, 8)))
    for tile in ((4, 4), (4, 3)):
        param = data(runtime, tile, np.ones((6, 8), np.float32))
        updates.append(optimizer.Update(param=param, grad=fill(param.like(), 1.0), hyper=hyper))
        buffers.append(fill(param.like(), 0.0))
    with pytest.raises(ValueError, match="must have the same extent and tile, got 8 by 4 and 8 by 3"):
        muon(updates, buffers, NewtonSchulz(), axis=0)


def test_parts_of_a_matrix_are_refused() -> None:
    """An update of some tiles would orthogonalise another matrix; a vector has no singular values."""
    pair = Pair((20, 30), (16, 16))
    with pytest.raises(ValueError, match="whole matrices"):
        muon([optimizer.Update(param=pair.param, grad=pair.param, hyper=pair.hyper, tiles=[0, 1])], [pair.buffer], pair.options)
    vector = data(pair.runtime, (4,), np.ones(9, np.float32))
    with pytest.raises(ValueError, match="whole matrices"):
        muon([optimizer.Update(param=vector, grad=vector, hyper=pair.hyper)], [vector], pair.options)
