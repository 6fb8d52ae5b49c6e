"""Differentiable elementwise operations and norms beside torch in double precision: odd sizes, ragged tiles, gradients of inputs and weights."""

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import pytest
import torch

from nntask.nn import functional
from nntask.nn.autograd import Tensor
from nntask.nn.initializers import constant
from nntask.nn.layers import Linear, TransposedLinear
from nntask.nn.module import Parameter
from scheduler import Codelet, InlineRuntime
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


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_new": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
    "tanh": torch.tanh,
}


@tilings
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated(tile: tuple[int, int, int], kind: str) -> None:
    """activation(gate) * up with every activation, and both gradients."""
    agree(lambda a, b: functional.gated(a, b, kind), lambda a, b: ACTIVATIONS[kind](a) * b, (random(B, T, 7), tile), (random(B, T, 7, seed=1), tile))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_in_short_types(kind: str, dtype: type) -> None:
    """Compiled loops, and bf16 through copies, within the rounding of the type; large numbers neither overflow nor become NaN."""
    runtime, error = InlineRuntime(), 2.0 ** (-20 if dtype == np.float32 else -7)
    values = [random(B, T, 700, seed=seed) for seed in range(3)]
    with torch.no_grad():
        values[0][0, 0, :4] = torch.tensor([-90.0, -20.0, 30.0, 100.0])
    given = [leaf(runtime, value, (2, 3, 300), dtype) for value in values]
    exact = [torch.tensor(x.data.read().astype(np.float64), requires_grad=True) for x in given]
    y = functional.gated(given[0], given[1], kind)
    want = ACTIVATIONS[kind](exact[0]) * exact[1]
    y.backward(given[2].data)
    grads = torch.autograd.grad(want, exact[:2], exact[2].detach())
    for found, expected in ((y.data, want), (given[0].gradient, grads[0]), (given[1].gradient, grads[1])):
        assert found is not None
        np.testing.assert_allclose(found.read().astype(np.float64), expected.detach().numpy(), rtol=8 * error, atol=8 * error)


def test_the_silu_gate_keeps_its_tasks() -> None:
    """Models whose gate is SiLU run the kernels that they always had."""
    seen: list[tuple[str, dict[str, object]]] = []

    class Seen(InlineRuntime):
        def _submit(self, codelet: Codelet, accesses, constants, priority, terms) -> None:  # type: ignore[no-untyped-def]
            seen.append((codelet.name, dict(constants)))
            super()._submit(codelet, accesses, constants, priority, terms)

    runtime = Seen()
    gate, up = (leaf(runtime, random(B, T, 7), (-1, -1, 4)) for _ in range(2))
    seen.clear()
    y = functional.gated(gate, up, "silu")
    assert seen == [("silu_gate", {})] * 2
    seen.clear()
    y.backward(y.data)
    assert [op for op in seen if op[0] != "add_into"] == [("silu_gate_backward", {})] * 2


@tilings
def test_scaled_and_capped(tile: tuple[int, int, int]) -> None:
    """factor * x, and cap * tanh(x / cap), with their gradients."""
    agree(lambda x: functional.scaled(x, 2.5), lambda x: 2.5 * x, (random(B, T, 7), tile))
    agree(lambda x: functional.capped(x, 1.5), lambda x: 1.5 * torch.tanh(x / 1.5), (random(B, T, 7), tile))


def test_caps_are_positive() -> None:
    """Others are refused."""
    with pytest.raises(ValueError, match=r"a cap must be above 0, got -1\.0"):
        functional.capped(Tensor(data(InlineRuntime(), np.zeros((2, 2)), (-1, -1))), -1.0)


@pytest.mark.parametrize("kind", [None, *ACTIVATIONS])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tile", [(-1, -1), (4, 3), (6, 2)], ids=str)
def test_linear_layers(tile: tuple[int, int], transposed: bool, has_bias: bool, kind: str | None) -> None:
    """Both layouts of the weight, with and without a bias and an activation in the same pass; all gradients."""
    runtime = InlineRuntime(lanes=2)
    layer = (TransposedLinear if transposed else Linear)(6, 7, tile, std=0.5, activation=kind, has_bias=has_bias)
    layer.allocate(runtime, np.float64, 1)
    names = ["weight", "bias"] if has_bias else ["weight"]
    assert list(layer.named_parameters()) == names
    weights = {name: torch.tensor(p.read() + (name == "bias"), requires_grad=True) for name, p in layer.named_parameters().items()}
    if layer.bias is not None:
        layer.bias.data.write(weights["bias"].detach().numpy())
    x = random(B, T, 6)
    given = leaf(runtime, x, (2, 3, tile[0]))
    y = layer(given)
    want = torch.nn.functional.linear(x, weights["weight"] if transposed else weights["weight"].T, weights.get("bias"))
    want = want if kind is None else ACTIVATIONS[kind](want)
    np.testing.assert_allclose(y.read(), want.detach().numpy(), atol=1e-12)
    dy = random(*want.shape, seed=9).detach()
    y.backward(data(runtime, dy.numpy(), y.data.tile))
    grads = torch.autograd.grad(want, [x, *weights.values()], dy)
    for parameter, grad in zip([given, *layer.parameters()], grads, strict=True):
        assert parameter.gradient is not None
        np.testing.assert_allclose(parameter.gradient.read(), grad.numpy(), atol=1e-11)
