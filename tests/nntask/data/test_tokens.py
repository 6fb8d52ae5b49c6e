"""First and mean tokens, swapped axes, and layers over inputs that are no tokens: values and gradients beside torch, over ragged tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from nntask.nn import functional
from nntask.nn.autograd import Tensor
from nntask.nn.initializers import constant
from nntask.nn.module import Parameter
from scheduler import InlineRuntime, TaskRuntime
from tiles import TileTensor
from tiles.ops import tokens as token_ops

B, T, C = 3, 7, 10
BF16 = np.dtype(ml_dtypes.bfloat16)
TILES = [(-1, -1, -1), (2, 3, 4), (1, 7, 3), (2, 1, 10)]
OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "first": (functional.first_token, lambda x: x[:, :1]),
    "mean": (functional.mean_tokens, lambda x: x.mean(1, keepdim=True)),
    "swapped": (functional.swapped, lambda x: x.mT),
}


def parameter(runtime: TaskRuntime, values: np.ndarray, tile: tuple[int, ...], dtype: Any) -> Parameter:
    """A parameter with these values."""
    found = Parameter(values.shape, tile, constant(0.0))
    found.allocate(runtime, "p", dtype, None)
    found.data.write(values.astype(dtype))
    return found


def like(result: Tensor, values: np.ndarray) -> TileTensor:
    """Values cut as a result is."""
    found = result.data.like(name="dy")
    found.write(values.astype(result.dtype))
    return found


@pytest.mark.parametrize("dtype", [np.float64, np.float32, BF16])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("op", OPERATIONS)
def test_values_and_gradients_are_those_of_torch(op: str, tile: tuple[int, int, int], dtype: Any) -> None:
    """Where the input goes another way besides, its gradients are summed."""
    ours, theirs = OPERATIONS[op]
    rng = np.random.default_rng(0)
    values, past = (rng.standard_normal((B, T, C)).astype(dtype).astype(np.float64) for _ in range(2))
    x, want_x = parameter(InlineRuntime(), values, tile, dtype), torch.tensor(values, requires_grad=True)
    y, want = ours(x), theirs(want_x)
    dy = rng.standard_normal(want.shape).astype(dtype).astype(np.float64)
    rtol = {8: 1e-12, 4: 1e-5, 2: 2**-7}[np.dtype(dtype).itemsize]
    assert y.shape == tuple(want.shape)
    np.testing.assert_allclose(y.read().astype(np.float64), want.detach().numpy(), rtol=rtol, atol=rtol)
    y.backward(like(y, dy))
    other = parameter(x.data.runtime, values, tile, dtype)
    (x + other).backward(like(x, past))
    want.backward(torch.tensor(dy))
    (want_x + want_x.detach()).backward(torch.tensor(past))
    np.testing.assert_allclose(x.gradient.read(), want_x.grad.numpy(), rtol=2 * rtol, atol=2 * rtol)


def test_swapping_twice_changes_nothing() -> None:
    """Shape, tiles and bits."""
    values = np.random.default_rng(0).standard_normal((B, T, C))
    x = parameter(InlineRuntime(), values, (2, 3, 4), np.float32)
    back = functional.swapped(functional.swapped(x))
    assert (back.shape, back.data.tile) == (x.shape, x.data.tile)
    assert np.array_equal(back.read(), x.read())


@pytest.mark.parametrize("tiles", [(-1, -1, -1, -1), (2, 3, 4, 5)], ids=str)
def test_a_layer_that_mixes_tokens(tiles: tuple[int, int, int, int]) -> None:
    """Swapped, linear, activation, linear, swapped: MLP-Mixer's, with every gradient."""
    b, t, c, s = tiles
    runtime, rng = InlineRuntime(), np.random.default_rng(0)
    shapes = {"x": (B, T, C), "up": (T, 11), "up_bias": (11,), "down": (11, T), "down_bias": (T,)}
    cuts = {"x": (b, t, c), "up": (t, s), "up_bias": (s,), "down": (s, t), "down_bias": (t,)}
    values = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    ours = {name: parameter(runtime, value, cuts[name], np.float64) for name, value in values.items()}
    theirs = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}
    mixed = functional.linear_activation(functional.swapped(ours["x"]), ours["up"], ours["up_bias"], "gelu")
    y = functional.swapped(functional.linear(mixed, ours["down"], ours["down_bias"]))
    hidden = torch.nn.functional.gelu(theirs["x"].mT @ theirs["up"] + theirs["up_bias"])
    want = (hidden @ theirs["down"] + theirs["down_bias"]).mT
    np.testing.assert_allclose(y.read(), want.detach().numpy(), atol=1e-12)
    dy = rng.standard_normal((B, T, C))
    y.backward(like(y, dy))
    want.backward(torch.tensor(dy))
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name].gradient.read(), value.grad.numpy(), atol=1e-11, err_msg=name)


def test_what_are_no_tokens_of_sequences_is_refused() -> None:
    """Two axes, and the gradient of several tokens."""
    runtime = InlineRuntime()
    flat, several = (TileTensor(runtime, shape, (-1,) * len(shape), np.float32, name="x") for shape in ((B, C), (B, T, C)))
    for refused in (token_ops.first_token, token_ops.mean_tokens, token_ops.swapped):
        with pytest.raises(ValueError, match="three axes"):
            refused(flat)
    with pytest.raises(ValueError, match="of one token"):
        token_ops.first_token_backward(several, T, T)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, BF16])
@pytest.mark.parametrize("tile", [(-1, -1, -1), (2, 3, 4)], ids=str)
def test_a_layer_over_given_numbers(tile: tuple[int, int, int], dtype: Any) -> None:
    """Patches of images, fp32 whatever the model's type, need no gradient, and the layer over them is learnt."""
    runtime, rng = InlineRuntime(), np.random.default_rng(0)
    values = {name: rng.standard_normal(shape) for name, shape in {"patches": (B, T, C), "w": (C, 5), "bias": (5,), "dy": (B, T, 5)}.items()}
    rounded = {name: torch.tensor(value.astype(dtype).astype(np.float64)) for name, value in values.items()}
    patches = TileTensor(runtime, (B, T, C), tile, np.float32, kind="input", name="patches")
    patches.write(values["patches"])
    w, bias = (parameter(runtime, values[name], cut, dtype) for name, cut in (("w", (tile[2], 2)), ("bias", (2,))))
    x = functional.cast(Tensor(patches), dtype)
    y = functional.linear(x, w, bias)
    assert (x.edge, x.dtype, y.dtype) == (None, dtype, dtype)
    y.backward(like(y, values["dy"]))
    rtol = {8: 1e-5, 4: 1e-5, 2: 2**-6}[np.dtype(dtype).itemsize]
    want = rounded["patches"] @ rounded["w"] + rounded["bias"]
    np.testing.assert_allclose(y.read().astype(np.float64), want.numpy(), rtol=rtol, atol=2 * rtol)
    dw = torch.einsum("btc,btn->cn", rounded["patches"], rounded["dy"])
    np.testing.assert_allclose(w.gradient.read(), dw.numpy(), rtol=rtol, atol=2 * rtol)
    np.testing.assert_allclose(bias.gradient.read(), rounded["dy"].sum((0, 1)).numpy(), rtol=rtol, atol=2 * rtol)


def test_a_cast_to_the_same_type_is_no_task() -> None:
    """And to another one it has a gradient of the first."""
    x = parameter(InlineRuntime(), np.ones((B, T, C)), (2, 3, 4), np.float32)
    assert functional.cast(x, np.float32) is x
    y = functional.cast(x, BF16)
    y.backward(like(y, np.full((B, T, C), 0.5)))
    assert y.dtype == BF16
    assert x.gradient.dtype == np.float32
    assert np.array_equal(x.gradient.read(), np.full((B, T, C), 0.5, np.float32))
