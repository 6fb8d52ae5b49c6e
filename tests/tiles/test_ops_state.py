"""Random numbers and optimizer updates."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from scheduler import InlineRuntime
from tiles import TileTensor
from tiles.ops import optimizer, random
from tiles.ops.elementwise import fill


def data(runtime: InlineRuntime, tile: tuple[int, ...], values: np.ndarray) -> TileTensor:
    """A tile tensor with these values."""
    found = TileTensor(runtime, values.shape, tile, values.dtype, name="data")
    found.write(values)
    return found


@pytest.mark.parametrize("tile", [(2, 3, 5), (1, 7, 2), (3, 2, 9)], ids=str)
def test_random_values_do_not_depend_on_tiling(tile: tuple[int, int, int]) -> None:
    """Masks, normals and uniforms are functions of the global position."""
    runtime = InlineRuntime()
    key = data(runtime, (2,), np.array([3, 4], np.uint64))
    x = np.ones((3, 7, 9), np.float32)
    for make in (
        lambda t: random.dropout(t, 0.4, key, 7),
        lambda t: random.random_normal(t, 0.02, 11, 5),
        lambda t: random.random_uniform(t, -1.0, 2.0, 11, 5),
    ):
        whole, cut = make(data(runtime, (-1, -1, -1), x)), make(data(runtime, tile, x))
        np.testing.assert_array_equal(whole.read(), cut.read())


def test_distributions() -> None:
    """Moments and the Kolmogorov distance of large samples; streams and steps do not correlate."""
    runtime = InlineRuntime()
    n = 200_000
    samples = [random.random_normal(TileTensor(runtime, (n // 100, 100), (300, 64), np.float64), 2.0, seed, 1).read().ravel() for seed in (0, 1)]
    for sample in samples:
        assert abs(sample.mean()) < 0.02
        assert abs(sample.std() - 2.0) < 0.02
        ordered = np.sort(sample / 2.0)
        cdf = 0.5 * (1.0 + torch.erf(torch.from_numpy(ordered) / np.sqrt(2.0)).numpy())
        assert np.abs(cdf - np.arange(n) / n).max() < 1.63 / np.sqrt(n) * 1.3
    assert abs(np.corrcoef(samples[0], samples[1])[0, 1]) < 0.01
    ones = TileTensor(runtime, (n // 100, 100), (-1, -1), np.float64)
    fill(ones, 1.0)
    masks = {}
    for step, stream in ((0, 0), (1, 0), (0, 1)):
        key = data(runtime, (2,), np.array([1, step], np.uint64))
        masks[step, stream] = random.dropout(ones, 0.1, key, stream).read().ravel()
        assert abs((masks[step, stream] == 0).mean() - 0.1) < 0.003
        assert set(np.unique(masks[step, stream])) == {0.0, 1.0 / 0.9}
    assert abs(np.corrcoef(masks[0, 0], masks[1, 0])[0, 1]) < 0.01
    assert abs(np.corrcoef(masks[0, 0], masks[0, 1])[0, 1]) < 0.01


def test_indices_beyond_32_bits() -> None:
    """The fast path by rows agrees with the plain function where indices cross 2^32."""
    from tiles.kernels.cpu.random import row_bits
    from tiles.kernels.reference.random import bits

    base = np.array([2**32 - 5, 2**32, 2**40 + 3, 17], np.uint64)
    np.testing.assert_array_equal(row_bits((1, 2), base, 9), bits((1, 2), base[:, None] + np.arange(9, dtype=np.uint64)))
    low = np.array([0, 100, 2**31], np.uint64)
    np.testing.assert_array_equal(row_bits((1, 2), low, 9), bits((1, 2), low[:, None] + np.arange(9, dtype=np.uint64)))


CASES = [
    ("adamw", {"weight_decay": 0.1}),
    ("adamw", {"weight_decay": 0.0}),
    ("adam", {"weight_decay": 0.1}),
    ("sgd", {}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.01}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_optimizers_follow_torch(name: str, options: dict[str, float], clip: float, dtype: type) -> None:
    """Twenty steps, with a changing learning rate and clipping."""
    runtime = InlineRuntime()
    rng = np.random.default_rng(0)
    start = rng.standard_normal((5, 7)).astype(dtype)
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()))
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    options, oracle = dict(options), kinds[name]([weight], lr=1.0, **options)
    param = data(runtime, (2, 3), start)
    m, v = fill(param.like(), 0.0), fill(param.like(), 0.0)
    hyper = TileTensor(runtime, (2, 8), (-1, -1), np.float64)
    decay = options.pop("weight_decay", 0.0)
    momentum = options.pop("momentum", 0.0)
    for step in range(1, 21):
        gradient, lr = rng.standard_normal((5, 7)).astype(dtype), 0.1 / step
        weight.grad = torch.from_numpy(gradient.copy())
        oracle.param_groups[0]["lr"] = lr
        if clip:
            torch.nn.utils.clip_grad_norm_([weight], clip)
        oracle.step()
        rest = (momentum, 0, 0) if name == "sgd" else (0.9, 0.999, 1e-8)
        hyper.write(np.array([[7] * 8, [lr, 1 - 0.9**step, 1 - 0.999**step, *rest, decay, 0]]))
        grad = data(runtime, (2, 3), gradient)
        norm = optimizer.sum_of_squares([grad]) if clip else None
        update = optimizer.Update(param=param, grad=grad, hyper=hyper, row=1, norm=norm, max_norm=clip)
        if name == "sgd":
            optimizer.sgd(update, m if momentum else None, **options)
        else:
            optimizer.adamw(update, m, v, decoupled=name == "adamw")
        np.testing.assert_allclose(
            param.read(), weight.detach().numpy(), rtol=2e-5 if dtype == np.float32 else 1e-11, atol=1e-6 if dtype == np.float32 else 1e-12
        )


def test_masters_carry_what_16_bits_lose() -> None:
    """A bf16 parameter is its fp32 master, rounded; many small steps add up."""
    runtime = InlineRuntime()
    param = data(runtime, (2,), np.ones(3, ml_dtypes.bfloat16))
    master = data(runtime, (2,), np.ones(3, np.float32))
    grad = data(runtime, (2,), np.ones(3, np.float32))
    hyper = data(runtime, (-1, -1), np.array([[1e-4, 1, 1, 0, 0, 0, 0, 0]]))
    for _ in range(100):
        optimizer.sgd(optimizer.Update(param=param, grad=grad, hyper=hyper, master=master), None)
    np.testing.assert_allclose(master.read(), 0.99, rtol=1e-5)
    np.testing.assert_array_equal(param.read(), master.read().astype(ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match="needs an fp32 master"):
        optimizer.sgd(optimizer.Update(param=param, grad=grad, hyper=hyper), None)


def test_sum_of_squares_is_a_tree() -> None:
    """Many tiles of several tensors, summed in fp64."""
    runtime = InlineRuntime()
    values = [np.random.default_rng(i).standard_normal((20, 30)).astype(np.float32) for i in range(3)]
    tensors = [data(runtime, (3, 4), v) for v in values]
    want = sum(float((v.astype(np.float64) ** 2).sum()) for v in values)
    np.testing.assert_allclose(optimizer.sum_of_squares(tensors).read(), [want], rtol=1e-6)
