"""Dense operations over ragged tilings against torch in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from scheduler import CapturingRuntime, Handle, InlineRuntime, TaskRuntime
from tiles import TileTensor
from tiles.ops import elementwise, matmul, norm

B, T, K, N = 3, 5, 12, 14
TILINGS = [(-1, -1, -1, -1), (2, 3, 5, 6), (1, 2, 4, 14), (3, 1, 12, 4), (2, 5, 7, 3)]


def tensor(runtime: TaskRuntime, shape: tuple[int, ...], tile: tuple[int, ...], values: np.ndarray) -> TileTensor:
    """A tile tensor with these values."""
    found = TileTensor(runtime, shape, tile, np.float64, name="data")
    found.write(values)
    return found


@pytest.fixture(params=TILINGS, ids=str)
def tile(request: pytest.FixtureRequest) -> tuple[int, int, int, int]:
    """Tile extents (b, t, k, n)."""
    return request.param


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("k", [-1, 5, 3])
def test_products_side_by_side(k: int, transpose: bool) -> None:
    """Into one tile the products of a chain are tasks that wait for none of the others, and are added in its order. Several tiles keep chains."""
    step, rng = CapturingRuntime(), np.random.default_rng(0)
    x, w, bias = rng.standard_normal((B, 1, K)), rng.standard_normal((N, K) if transpose else (K, N)), rng.standard_normal(N)

    def given(runtime: TaskRuntime, n: int) -> list[TileTensor]:
        matrix = tensor(runtime, w.shape, (n, k) if transpose else (k, n), w)
        return [tensor(runtime, (B, 1, K), (-1, -1, k), x), matrix, tensor(runtime, (N,), (n,), bias)]

    for n in (-1, 5):
        y = matmul.linear(*given(InlineRuntime(), n), transpose_w=transpose, in_parallel=True)
        np.testing.assert_allclose(y.read(), x @ (w.T if transpose else w) + bias, atol=1e-12)
    operands = given(step, -1)
    with step.record():
        matmul.linear(*operands, transpose_w=transpose, in_parallel=True)
    plan = step.plan
    products = [at for at, task in enumerate(plan.tasks) if task.name in ("linear_bias", "matmul")]
    count = -(-K // k) if k > 0 else 1
    assert len(products) == count
    assert all(set(products).isdisjoint(plan.predecessors[at]) for at in products)
    assert [task.name for task in plan.tasks].count("add") == count - 1


@pytest.fixture(params=[1, 3])
def runtime(request: pytest.FixtureRequest) -> TaskRuntime:
    """A runtime with one or three lanes."""
    return InlineRuntime(lanes=request.param)


def random(*shape: int) -> torch.Tensor:
    """Reproducible values that want a gradient."""
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("kind", [None, "gelu_new", "gelu", "relu", "silu", "tanh"])
def test_linear(runtime: TaskRuntime, tile: tuple[int, int, int, int], transpose: bool, kind: str | None) -> None:
    """Linear layers, with and without a fused activation, and their three gradients."""
    b, t, k, n = tile
    x, w, bias, dy = random(B, T, K), random(N, K) if transpose else random(K, N), random(N), random(B, T, N)
    want = x @ (w.T if transpose else w) + bias
    acts = {"gelu_new": lambda z: torch.nn.functional.gelu(z, approximate="tanh"), "gelu": torch.nn.functional.gelu}
    acts |= {"relu": torch.relu, "silu": torch.nn.functional.silu, "tanh": torch.tanh}
    if kind is not None:
        want = acts[kind](want)
    want.backward(dy)
    tx = tensor(runtime, (B, T, K), (b, t, k), x.detach().numpy())
    tw = tensor(runtime, (N, K) if transpose else (K, N), (n, k) if transpose else (k, n), w.detach().numpy())
    tb = tensor(runtime, (N,), (n,), bias.detach().numpy())
    tdy = tensor(runtime, (B, T, N), (b, t, n), dy.detach().numpy())
    if kind is None:
        y = matmul.linear(tx, tw, tb, transpose_w=transpose)
        dpre = tdy
    else:
        pre, y = matmul.linear_gelu(tx, tw, tb, kind, transpose_w=transpose)
        dpre = elementwise.activation_backward(pre, tdy, kind)
    np.testing.assert_allclose(y.read(), want.detach().numpy(), atol=1e-12)
    matmul.add_linear(tx, tw, y, transpose_w=transpose)
    np.testing.assert_allclose(y.read(), (want + x @ (w.T if transpose else w)).detach().numpy(), atol=1e-12)
    dw, db = tw.like(), tb.like()
    dx = matmul.linear_backward_input(dpre, tw, transpose_w=transpose)
    matmul.linear_backward_weight(tx, dpre, dw, transpose_w=transpose)
    matmul.linear_backward_bias(dpre, db)
    for found, expected in ((dx, x), (dw, w), (db, bias)):
        np.testing.assert_allclose(found.read(), expected.grad.numpy(), atol=1e-12)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_norms(runtime: TaskRuntime, tile: tuple[int, int, int, int], rms: bool, residual: bool) -> None:
    """Layer and RMS norm, with a residual branch, over whole and cut widths."""
    b, t, k, _ = tile
    x, r, gamma, beta, dy = random(B, T, K), random(B, T, K), random(K), random(K), random(B, T, K)
    s = x + r if residual else x
    s.retain_grad()
    if rms:
        want = torch.nn.functional.rms_norm(s, (K,), gamma, 1e-5)
    else:
        want = torch.nn.functional.layer_norm(s, (K,), gamma, beta, 1e-5)
    (want * dy).sum().backward()
    shape, cut = (B, T, K), (b, t, k)
    tx, tr, tdy = (tensor(runtime, shape, cut, v.detach().numpy()) for v in (x, r, dy))
    tg, tbeta = (tensor(runtime, (K,), (k,), v.detach().numpy()) for v in (gamma, beta))
    dgamma, dbeta = tg.like(), tg.like()
    extra = tensor(runtime, shape, cut, dy.detach().numpy()) if residual else None
    if rms:
        ts = elementwise.add(tx, tr) if residual else tx
        y, rstd = norm.rms_norm(ts, tg, 1e-5)
        dx = norm.rms_norm_backward(ts, tg, rstd, tdy, dgamma, dresidual=extra)
        alone = norm.rms_norm_backward(ts, tg, rstd, tdy, None, dresidual=extra)
    else:
        ts, y, mean, rstd = norm.residual_layer_norm(tx, tr, tg, tbeta, 1e-5) if residual else (tx, *norm.layer_norm(tx, tg, tbeta, 1e-5))
        dx = norm.layer_norm_backward(ts, tg, mean, rstd, tdy, dgamma, dbeta, dresidual=extra)
        alone = norm.layer_norm_backward(ts, tg, mean, rstd, tdy, None, None, dresidual=extra)
        np.testing.assert_allclose(dbeta.read(), beta.grad.numpy(), atol=1e-12)
    np.testing.assert_allclose(y.read(), want.detach().numpy(), atol=1e-12)
    np.testing.assert_allclose(dgamma.read(), gamma.grad.numpy(), atol=1e-12)
    np.testing.assert_allclose(dx.read(), s.grad.numpy() + (dy.detach().numpy() if residual else 0), atol=1e-12)
    assert np.array_equal(alone.read(), dx.read())  # where nobody wants the vectors' gradients


@pytest.mark.parametrize(("ta", "tb"), [(False, False), (True, False), (False, True), (True, True)])
def test_batched_matmul(runtime: TaskRuntime, tile: tuple[int, int, int, int], ta: bool, tb: bool) -> None:
    """Products of stacks of matrices in all four orientations, accumulated twice."""
    b, t, k, n = tile
    a, c = random(B, K, T) if ta else random(B, T, K), random(B, N, K) if tb else random(B, K, N)
    want = (2 * 0.5 * (a.mT if ta else a) @ (c.mT if tb else c)).detach().numpy()
    left = tensor(runtime, tuple(a.shape), (b, k, t) if ta else (b, t, k), a.detach().numpy())
    right = tensor(runtime, tuple(c.shape), (b, n, k) if tb else (b, k, n), c.detach().numpy())
    out = matmul.matmul(left, right, transpose_a=ta, transpose_b=tb, alpha=0.5)
    matmul.matmul(left, right, transpose_a=ta, transpose_b=tb, alpha=0.5, out=out)
    np.testing.assert_allclose(out.read(), want, atol=1e-12)


def test_elementwise(runtime: TaskRuntime, tile: tuple[int, int, int, int]) -> None:
    """Sums, scaling, positions, gates and rotations."""
    b, t, k, _ = tile
    k = max(4, k // 4 * 4) if k > 0 else k
    x, y, p, dy = random(B, T, K), random(B, T, K), random(T + 2, K), random(B, T, K)
    shape, cut = (B, T, K), (b, t, k)
    tx, ty, tdy = (tensor(runtime, shape, cut, v.detach().numpy()) for v in (x, y, dy))
    nx, ny, nd = (v.detach().numpy() for v in (x, y, dy))
    np.testing.assert_allclose(elementwise.add(tx, ty).read(), nx + ny)
    np.testing.assert_allclose(elementwise.scale(tx, 0.25).read(), nx * 0.25)
    np.testing.assert_array_equal(elementwise.cast(tx, np.float32).read(), nx.astype(np.float32))
    tp = tensor(runtime, (T + 2, K), (T if t == -1 else t, k), p.detach().numpy())
    np.testing.assert_allclose(elementwise.add_rows(tx, tp).read(), nx + p.detach().numpy()[:T])
    dp = elementwise.fill(tp.like(), 0.0)
    elementwise.add_rows_backward(tdy, dp)
    np.testing.assert_allclose(dp.read()[:T], nd.sum(axis=0), atol=1e-12)
    want = torch.nn.functional.silu(x) * y
    want.backward(dy)
    np.testing.assert_allclose(elementwise.gated(tx, ty, "silu").read(), want.detach().numpy(), atol=1e-12)
    dgate, dup = elementwise.gated_backward(tx, ty, tdy, "silu")
    np.testing.assert_allclose(dgate.read(), x.grad.numpy(), atol=1e-12)
    np.testing.assert_allclose(dup.read(), y.grad.numpy(), atol=1e-12)


def test_rotary(runtime: TaskRuntime) -> None:
    """Rotation by angles and back; pairs keep their length."""
    angles = np.outer(np.arange(T), [1.0, 0.1])
    cos, sin = (tensor(runtime, (T, 2), (2, 2), f(angles)) for f in (np.cos, np.sin))
    x = tensor(runtime, (B, T, K), (2, 2, 8), random(B, T, K).detach().numpy())
    y = elementwise.rotary(x, cos, sin, 4)
    first, second = x.read().reshape(B, T, 3, 2, 2)[..., 0, :], x.read().reshape(B, T, 3, 2, 2)[..., 1, :]
    c, s = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    want = np.stack([first * c - second * s, second * c + first * s], axis=-2).reshape(B, T, K)
    np.testing.assert_allclose(y.read(), want, atol=1e-12)
    np.testing.assert_allclose(elementwise.rotary(y, cos, sin, 4, inverse=True).read(), x.read(), atol=1e-12)


def test_tilings_that_do_not_fit_are_refused(runtime: TaskRuntime) -> None:
    """Both tensors are named when a shared axis is cut differently."""
    x = TileTensor(runtime, (4, 6), (2, 3), np.float32, name="x")
    w = TileTensor(runtime, (6, 5), (2, 5), np.float32, name="w")
    with pytest.raises(ValueError, match=r"'x'.*'w'.*same extent and tile"):
        matmul.linear(x, w)


class Counting(InlineRuntime):
    """Counts what is registered."""

    num_handles = 0

    def handle(self, *args: Any, **options: Any) -> Handle:
        """Register data."""
        self.num_handles += 1
        return super().handle(*args, **options)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_cut_norms_register_a_few_tiles_for_each_row(kind: str) -> None:
    """Not a whole tensor of statistics for each row of tiles, which took a time that grew with the square of the rows."""

    def count(rows: int) -> int:
        runtime = Counting()
        x, dy = (tensor(runtime, (rows, 8), (1, 4), np.ones((rows, 8))) for _ in range(2))
        gamma, beta, dgamma, dbeta = (tensor(runtime, (8,), (4,), np.ones(8)) for _ in range(4))
        if kind == "rms":
            _, rstd = norm.rms_norm(x, gamma, 1e-5)
            norm.rms_norm_backward(x, gamma, rstd, dy, dgamma)
        else:
            _, mean, rstd = norm.layer_norm(x, gamma, beta, 1e-5)
            norm.layer_norm_backward(x, gamma, mean, rstd, dy, dgamma, dbeta)
        return runtime.num_handles

    assert count(40) - count(20) == 2 * (count(30) - count(20))
    assert count(40) < 40 * 25
