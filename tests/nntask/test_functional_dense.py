"""Differentiable elementwise operations and norms beside torch in double precision: odd sizes, ragged tiles, gradients of inputs and weights."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from nntask.nn import functional
from nntask.nn.autograd import Tensor
from nntask.nn.initializers import constant
from nntask.nn.module import Parameter
from scheduler import InlineRuntime
from tiles import TileTensor
from tiles.ops import elementwise

B, T, H, D = 3, 5, 3, 6
TILINGS = [(-1, -1, -1), (2, 3, 2), (1, 4, 1), (3, 2, 3)]
"""Sequences, tokens and heads of a tile."""

tilings = pytest.mark.parametrize("tile", TILINGS, ids=str)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Reproducible values that want a gradient."""
    return torch.tensor(np.random.default_rng([seed, *shape]).normal(size=shape), requires_grad=True)


def leaf(runtime: InlineRuntime, values: torch.Tensor, tile: Sequence[int], dtype: type = np.float64) -> Parameter:
    """A parameter with these values, so that its gradient stays."""
    parameter = Parameter(tuple(values.shape), tuple(tile), constant(0.0))
    parameter.allocate(runtime, "x", dtype, 0)
    parameter.data.write(values.detach().numpy().astype(dtype))
    return parameter


def data(runtime: InlineRuntime, values: np.ndarray, tile: Sequence[int]) -> TileTensor:
    """Values that want no gradient."""
    found = TileTensor(runtime, values.shape, tuple(tile), values.dtype, name="data")
    found.write(values)
    return found


def agree(ours: Callable[..., Tensor], theirs: Callable[..., torch.Tensor], *given: tuple[torch.Tensor, Sequence[int]], lanes: int = 2) -> None:
    """Values and all gradients of `ours` over tiles are those of `theirs`."""
    runtime = InlineRuntime(lanes=lanes)
    leaves = [leaf(runtime, values, tile) for values, tile in given]
    y = ours(*leaves)
    want = theirs(*(values for values, _ in given))
    np.testing.assert_allclose(y.read(), want.detach().numpy(), atol=1e-12)
    dy = random(*want.shape, seed=9).detach()
    y.backward(data(runtime, dy.numpy(), y.data.tile))
    grads = torch.autograd.grad(want, [values for values, _ in given], dy)
    for parameter, grad in zip(leaves, grads, strict=True):
        assert parameter.gradient is not None
        np.testing.assert_allclose(parameter.gradient.read(), grad.numpy(), atol=1e-11)


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """As transformers' GPT-NeoX does it: the first features of each head turn, rotate-half within them, and the others pass."""
    size = 2 * angles.shape[-1]
    heads = x.reshape(B, T, H, D)
    rot, rest = heads[..., :size], heads[..., size:]
    both = torch.cat([angles, angles], dim=-1)[..., None, :]
    half = torch.cat([-rot[..., size // 2 :], rot[..., : size // 2]], dim=-1)
    return torch.cat([rot * both.cos() + half * both.sin(), rest], dim=-1).reshape(B, T, H * D)


@tilings
@pytest.mark.parametrize("rotary_size", [None, 2, 4])
@pytest.mark.parametrize("cached", [False, True])
def test_partial_rotary(tile: tuple[int, int, int], rotary_size: int | None, cached: bool) -> None:
    """The first features of each head turn by the angles of their positions, which may be each sequence's own, and gradients turn back."""
    b, t, h = tile
    frequencies = np.array([1.0, 0.3, 0.1])[: (rotary_size or D) // 2]
    positions = np.arange(T) + (np.array([[0], [7], [3]]) if cached else 0)  # (T,) or (B, T)

    def ours(x: Tensor) -> Tensor:
        runtime = x.data.runtime
        numbers = data(runtime, frequencies, (-1,))
        if cached:
            angles = elementwise.rotary_angles_at(numbers, data(runtime, positions.astype(np.int32), (b, t)))
        else:
            angles = elementwise.rotary_angles(numbers, T, t)
        return functional.rotary(x, *angles, D, rotary_size)

    angles = torch.tensor(positions[..., None] * frequencies)
    agree(ours, lambda x: turned(x, angles), (random(B, T, H * D), (b, t, h * D if h > 0 else h)))


@pytest.mark.parametrize("rotary_size", [0, 3, 8])
def test_features_that_turn_are_an_even_part_of_a_head(rotary_size: int) -> None:
    """Other numbers are refused, with the numbers."""
    runtime = InlineRuntime()
    x, angles = data(runtime, np.zeros((B, T, H * D)), (-1, -1, -1)), data(runtime, np.zeros((T, 3)), (-1, -1))
    with pytest.raises(ValueError, match=f"an even number of features of a head turn, 2 to its size {D}; got {rotary_size}"):
        elementwise.rotary(x, angles, angles, D, rotary_size)
