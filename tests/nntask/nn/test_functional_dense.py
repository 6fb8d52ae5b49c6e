"""Differentiable elementwise operations and norms beside torch in double precision: odd sizes, ragged tiles, gradients of inputs and weights."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from nntask.nn import functional
from nntask.nn.autograd import Tensor, no_grad
from nntask.nn.initializers import constant
from nntask.nn.layers import HeadNorm, LayerNorm, Linear, RMSNorm
from nntask.nn.linear import LowRank
from nntask.nn.module import Parameter
from scheduler import Codelet, Handle, InlineRuntime
from tiles import TileTensor
from tiles.kernels.catalog import kernel
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
    with pytest.raises(ValueError, match=f"rotary_size must be even and from 2 to the head size {D}, got {rotary_size}"):
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
def test_scaled_capped_and_clamped(tile: tuple[int, int, int]) -> None:
    """factor * x, cap * tanh(x / cap), and x between limits, with their gradients."""
    agree(lambda x: functional.scaled(x, 2.5), lambda x: 2.5 * x, (random(B, T, 7), tile))
    agree(lambda x: functional.capped(x, 1.5), lambda x: 1.5 * torch.tanh(x / 1.5), (random(B, T, 7), tile))
    agree(lambda x: functional.clamped(x, 0.5), lambda x: x.clamp(-0.5, 0.5), (random(B, T, 7), tile))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_clamps_are_those_of_torch(dtype: str) -> None:
    """Also at a limit that the type rounds, beyond limits for gradients that are infinite or not a number, and for x that is not a number."""
    kind, most = np.dtype(getattr(ml_dtypes, dtype, dtype)), 0.3
    x = torch.tensor([0.3, -0.3, 0.25, 0.5, -0.5, 0.5, float("nan"), float("inf")]).to(getattr(torch, dtype)).requires_grad_()
    slope = torch.tensor([1.0, 2.0, 3.0, float("inf"), float("nan"), 4.0, 5.0, 6.0], dtype=x.dtype)
    expected = x.clamp(-most, most)
    (gradient,) = torch.autograd.grad(expected, x, slope)
    arrays = [tensor.detach().float().numpy().astype(kind) for tensor in (x, slope)]
    runtime = InlineRuntime()
    ours = [data(runtime, array[None], (-1, -1)) for array in arrays]
    for result, theirs in ((elementwise.clamped(ours[0], most), expected), (elementwise.clamped_backward(*ours, most), gradient)):
        np.testing.assert_array_equal(result.read()[0].astype(np.float32), theirs.detach().float().numpy())
    for backend in ("reference", "cpu"):
        out = np.empty(8, kind)
        for op, given, theirs in (("clamp", arrays[:1], expected), ("clamp_backward", arrays, gradient)):
            kernel(op, backend)(*given, out, most=most)
            np.testing.assert_array_equal(out.astype(np.float32), theirs.detach().float().numpy(), err_msg=f"{op} {backend}")


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
    layer = Linear(6, 7, tile, std=0.5, activation=kind, has_bias=has_bias, has_rows_in=not transposed)
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


def rms(x: torch.Tensor, weight: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
    """RMS norm as transformers' Gemma has it."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * (weight + offset)


@tilings
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_with_an_offset(tile: tuple[int, int, int], offset: float) -> None:
    """The plain form and the one after a sum, over whole and cut widths; what is past the norm joins its gradient."""
    given = [(random(B, T, 7), tile), (random(7, seed=1), tile[2:])]
    agree(lambda x, g: functional.rms_norm(x, g, 1e-5, offset), lambda x, g: rms(x, g, offset), *given)
    agree(lambda x, g: x + functional.rms_norm(x, g, 1e-5, offset), lambda x, g: x + rms(x, g, offset), *given)

    def ours(x: Tensor, branch: Tensor, gamma: Tensor) -> Tensor:
        s, y = functional.residual_rms_norm(x, branch, gamma, 1e-5, offset)
        return s + y

    branch = (random(B, T, 7, seed=2), tile)
    agree(ours, lambda x, b, g: x + b + rms(x + b, g, offset), given[0], branch, given[1])


@tilings
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("past", [False, True])
def test_head_norm(tile: tuple[int, int, int], offset: float, past: bool) -> None:
    """Each head by itself, one weight for all of them, whose gradient is the sum over heads; also where the input goes past the norm."""
    b, t, h = tile
    given = [(random(B, T, H * D), (b, t, h * D if h > 0 else h)), (random(D, seed=1), (-1,))]

    def ours(x: Tensor, gamma: Tensor) -> Tensor:
        x = functional.scaled(x, 1.5)  # x + y has one gradient for both
        y = functional.head_norm(x, gamma, 1e-5, offset)
        return x + y if past else y

    def theirs(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        x = 1.5 * x
        y = rms(x.reshape(B, T, H, D), gamma, offset).reshape(B, T, H * D)
        return x + y if past else y

    agree(ours, theirs, *given)


@pytest.mark.parametrize("layer", [RMSNorm(H * D, 2 * D, 1e-5, 1.0), HeadNorm(D, 1e-5, 1.0)], ids=["rms", "heads"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_norms_with_an_offset_in_short_types(layer: RMSNorm | HeadNorm, dtype: type) -> None:
    """Weights begin at 1 - offset = 0; the sum of weight and offset is not rounded to bf16."""
    runtime, error = InlineRuntime(), 2.0 ** (-20 if dtype == np.float32 else -7)
    layer.allocate(runtime, dtype, 0)
    assert not layer.weight.read().any()
    layer.weight.data.write(np.full(layer.weight.shape, 2.0**-9, dtype))  # 1 + 2^-9 is no bf16
    x = leaf(runtime, random(B, T, H * D), (2, 3, 2 * D), dtype)
    y = layer(x)
    exact, weight = x.read().astype(np.float64), torch.full(layer.weight.shape, 2.0**-9, dtype=torch.float64, requires_grad=True)
    want = rms(torch.tensor(exact).reshape(B, T, -1, len(weight)), weight, 1.0)
    np.testing.assert_allclose(y.read().astype(np.float64), want.detach().numpy().reshape(B, T, H * D), rtol=2 * error, atol=2 * error)
    y.backward(elementwise.copy(x.data))
    (grad,) = torch.autograd.grad(want, [weight], torch.tensor(exact).reshape(want.shape))
    assert layer.weight.gradient is not None
    np.testing.assert_allclose(layer.weight.gradient.read(), grad.numpy(), rtol=32 * error, atol=32 * error)


def test_norms_without_an_offset_keep_their_tasks() -> None:
    """No scratch and no constant more than there was."""
    for offset, count in ((0.0, 4), (1.0, 5)):
        seen: list[tuple[str, int, dict[str, object]]] = []

        class Seen(InlineRuntime):
            def _submit(self, codelet: Codelet, accesses, constants, priority, terms, seen=seen) -> None:  # type: ignore[no-untyped-def]
                seen.append((codelet.name, len(accesses), dict(constants)))
                super()._submit(codelet, accesses, constants, priority, terms)

        runtime = Seen()
        x, gamma = leaf(runtime, random(B, T, 7), (-1, -1, -1)), leaf(runtime, random(7), (-1,))
        seen.clear()
        functional.rms_norm(x, gamma, 1e-5, offset)
        assert seen == [("rms_norm", count, {"eps": 1e-5} | ({"offset": 1.0} if offset else {}))]


def test_heads_fill_tiles() -> None:
    """A head in two tiles is refused."""
    runtime = InlineRuntime()
    with pytest.raises(ValueError, match="tiles must hold whole heads"):
        functional.head_norm(leaf(runtime, random(B, T, H * D), (-1, -1, D + 1)), leaf(runtime, random(D), (-1,)), 1e-5)


@tilings
def test_a_norm_of_a_sum_drops_the_sum(tile: tuple[int, int, int]) -> None:
    """Post-norm blocks: gradients are right; the sum dies at once without a tape, and with one when the norm's gradient has been taken."""
    sums: list[weakref.ref[Handle]] = []

    class Watching(InlineRuntime):
        def handle(self, nbytes: int, view: Any = None, **options: Any) -> Handle:
            found = super().handle(nbytes, view, **options)
            if str(options.get("name", "")).startswith(("residual", "add")):
                sums.append(weakref.ref(found))
            return found

    runtime = Watching()
    layer = LayerNorm(7, tile[2], 1e-5)
    layer.allocate(runtime, np.float64, 0)

    def theirs(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x + b, (7,), eps=1e-5)

    given = [(random(B, T, 7), tile), (random(B, T, 7, seed=1), tile)]
    x, branch = (leaf(runtime, values, cut) for values, cut in given)
    with no_grad():
        layer.after_add(x, branch)[1]
    assert sums
    assert not any(tile() for tile in sums)
    y = layer.after_add(x, branch)[1]
    assert any(tile() for tile in sums)
    want = theirs(*(values for values, _ in given))
    np.testing.assert_allclose(y.read(), want.detach().numpy(), atol=1e-12)
    dy = random(*want.shape, seed=9).detach()
    y.backward(data(runtime, dy.numpy(), y.data.tile))
    assert not any(tile() for tile in sums)
    for parameter, grad in zip((x, branch), torch.autograd.grad(want, [values for values, _ in given], dy), strict=True):
        assert parameter.gradient is not None
        np.testing.assert_allclose(parameter.gradient.read(), grad.numpy(), atol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
def test_activations_of_layers_with_an_adapter(transposed: bool) -> None:
    """Something of low rank is added before the activation, beside weights of either layout."""

    def ours(x: Tensor, w: Tensor, b: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return functional.linear_activation(x, w, b, "tanh", transpose_w=transposed, added=LowRank(down, up, 0.5))

    def theirs(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ (w.T if transposed else w) + b + 0.5 * x @ down.T @ up.T)

    weight = (random(7, 6), (3, 4)) if transposed else (random(6, 7), (4, 3))
    agree(ours, theirs, (random(B, T, 6), (2, 3, 4)), weight, (random(7), (3,)), (random(2, 6), (-1, 4)), (random(7, 2), (3, -1)))
