"""Attention, head and embedding over ragged tilings against torch in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scheduler import InlineRuntime, TaskRuntime
from tiles import TileTensor
from tiles.kernels.reference.attention import Pair, survivors
from tiles.ops import attention, elementwise, embedding, loss

B, T, H, D, V, C = 3, 7, 3, 4, 11, 6
TILINGS = [(-1, -1, -1), (2, 3, 2), (1, 2, 1), (3, 4, 2), (2, 6, 3)]


def data(runtime: TaskRuntime, tile: tuple[int, ...], values: np.ndarray) -> TileTensor:
    """A tile tensor with these values."""
    found = TileTensor(runtime, values.shape, tile, values.dtype, name="data")
    found.write(values)
    return found


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Reproducible values that want a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)


@pytest.fixture(params=[1, 3])
def runtime(request: pytest.FixtureRequest) -> TaskRuntime:
    """A runtime with one or three lanes."""
    return InlineRuntime(lanes=request.param)


def heads(x: torch.Tensor) -> torch.Tensor:
    """(B, T, H * D) -> (B, H, T, D)."""
    return x.view(B, T, H, D).transpose(1, 2)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("tile", TILINGS, ids=str)
def test_attention(runtime: TaskRuntime, tile: tuple[int, int, int], p: float, causal: bool, stored: bool) -> None:
    """Values and gradients of flash and stored attention, with the dropout mask the counter implies."""
    b, t, h = tile
    q, k, v, do = (random(B, T, H * D, seed=i) for i in range(4))
    key = data(runtime, (2,), np.array([5, 9], np.uint64))
    drop = attention.Dropout(p, key, stream=3)
    mask = torch.ones(B, H, T, T, dtype=torch.float64)
    if p:
        mask = torch.from_numpy(survivors(key.read(), (B, H, T, T), Pair(D, 0.5, causal, 0, 0, 0, 0, H, T, p, 3)))
    s = 0.5 * heads(q) @ heads(k).mT
    if causal:
        s = s.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    want = ((torch.softmax(s, -1) * mask) @ heads(v)).transpose(1, 2).reshape(B, T, H * D)
    want.backward(do)
    cut = (b, t, h * D if h > 0 else -1)
    tq, tk, tv, tdo = (data(runtime, cut, x.detach().numpy()) for x in (q, k, v, do))
    options = {"head_size": D, "scale": 0.5, "causal": causal, "dropout": drop}
    forward = attention.stored_attention if stored else attention.attention
    backward = attention.stored_attention_backward if stored else attention.attention_backward
    o, kept_state = forward(tq, tk, tv, **options)
    np.testing.assert_allclose(o.read(), want.detach().numpy(), atol=1e-12)
    for found, expected in zip(backward(tq, tk, tv, o, kept_state, tdo, **options), (q, k, v), strict=True):
        np.testing.assert_allclose(found.read(), expected.grad.numpy(), atol=1e-12)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("shared", "tile"), [(1, (-1, -1, -1)), (2, (2, 3, 1)), (2, (1, 4, 2)), (3, (2, 6, 2)), (3, (3, 2, 3))], ids=str)
def test_attention_with_grouped_queries(runtime: TaskRuntime, shared: int, tile: tuple[int, int, int], p: float, stored: bool) -> None:
    """Six heads of queries share one, two or three of keys, in ragged tiles of so many heads of keys; gradients sum over each group."""
    b, t, g = tile
    group = 6 // shared
    q, k, v, do = (random(B, T, n * D, seed=i) for i, n in enumerate((6, shared, shared, 6)))
    key = data(runtime, (2,), np.array([5, 9], np.uint64))
    mask = torch.ones(B, 6, T, T, dtype=torch.float64)
    if p:
        mask = torch.from_numpy(survivors(key.read(), (B, 6, T, T), Pair(D, 0.5, True, 0, 0, 0, 0, 6, T, p, 3)))
    tall = [x.view(B, T, -1, D).transpose(1, 2) for x in (q, k, v)]
    many = [tall[0], *(x.repeat_interleave(group, 1) for x in tall[1:])]
    s = (0.5 * many[0] @ many[1].mT).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    want = ((torch.softmax(s, -1) * mask) @ many[2]).transpose(1, 2).reshape(B, T, 6 * D)
    want.backward(do)
    cuts = ((b, t, group * g * D if g > 0 else -1), (b, t, g * D if g > 0 else -1))
    tq, tk, tv, tdo = (data(runtime, cuts[i in (1, 2)], x.detach().numpy()) for i, x in enumerate((q, k, v, do)))
    options = {"head_size": D, "scale": 0.5, "dropout": attention.Dropout(p, key, stream=3)}
    o, kept = (attention.stored_attention if stored else attention.attention)(tq, tk, tv, **options)
    np.testing.assert_allclose(o.read(), want.detach().numpy(), atol=1e-12)
    backward = attention.stored_attention_backward if stored else attention.attention_backward
    for found, expected in zip(backward(tq, tk, tv, o, kept, tdo, **options), (q, k, v), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found.read(), expected.grad.numpy(), atol=1e-12)


@pytest.mark.parametrize(("keys", "tile_q", "tile_k"), [(2, 8, 8), (4, 4, 4), (4, -1, 8)])
def test_tiles_that_split_a_group_are_refused(keys: int, tile_q: int, tile_k: int) -> None:
    """A tile of queries and its tile of keys hold the same groups."""
    runtime = InlineRuntime()
    q, k = (data(runtime, (-1, -1, tile), np.zeros((1, 4, n * D))) for n, tile in ((8, tile_q), (keys, tile_k)))
    with pytest.raises(ValueError, match="must hold"):
        attention.attention(q, k, k, head_size=D, scale=1.0)


def test_masked_tiles_emit_no_tasks() -> None:
    """Of 4 x 4 pairs of tiles only the 10 on and below the diagonal become tasks."""
    seen: list[str] = []

    class Counting(InlineRuntime):
        def _submit(self, codelet, accesses, constants, priority, terms):  # type: ignore[no-untyped-def]
            seen.append(codelet.name)
            super()._submit(codelet, accesses, constants, priority, terms)

    runtime = Counting()
    q, k, v = (data(runtime, (1, 2, 4), random(1, 8, 4, seed=i).detach().numpy()) for i in range(3))
    attention.attention(q, k, v, head_size=4, scale=1.0)
    assert seen.count("attention") == 10


@pytest.mark.parametrize("tile", [(-1, -1, -1, -1), (2, 3, 4, 4), (1, 7, 5, 2), (2, 2, 11, 5), (3, 4, 3, 6)], ids=str)
def test_linear_cross_entropy(runtime: TaskRuntime, tile: tuple[int, int, int, int]) -> None:
    """Loss, dx and dw with and without vocabulary tiles, with ignored targets."""
    b, t, v, c = tile
    x, w = random(B, T, C), random(V, C, seed=1)
    ids = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
    ids[1, 2] = -1
    want = torch.nn.functional.cross_entropy((x @ w.T).view(-1, V), torch.from_numpy(ids.astype(np.int64)).view(-1), ignore_index=-1, reduction="sum")
    (want * 0.125).backward()
    tx, tw = data(runtime, (b, t, c), x.detach().numpy()), data(runtime, (v, c), w.detach().numpy())
    targets = data(runtime, (b, t), ids)
    value, lse = loss.linear_cross_entropy(tx, tw, targets, scale=0.125)
    np.testing.assert_allclose(value.read(), [want.item() * 0.125], rtol=1e-13)
    dw = tw.like()
    dx = loss.linear_cross_entropy_backward(tx, tw, targets, lse, dw, scale=0.125)
    np.testing.assert_allclose(dx.read(), x.grad.numpy(), atol=1e-13)
    np.testing.assert_allclose(dw.read(), w.grad.numpy(), atol=1e-13)
    alone = loss.linear_cross_entropy_backward(tx, tw, targets, lse, None, scale=0.125)
    assert np.array_equal(alone.read(), dx.read())  # where nobody wants the head's gradient


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize(("tile", "given"), [((-1, -1, -1, -1), "bf"), ((2, 3, 4, 4), "b"), ((1, 7, 5, 2), "f"), ((2, 2, 11, 5), "bf")], ids=str)
def test_linear_cross_entropy_with_bias_factor_and_cap(runtime: TaskRuntime, tile: tuple[int, int, int, int], given: str, cap: float | None) -> None:
    """Loss and all gradients; those of bias and head are sums over tasks, of which some of the head's come from elsewhere before."""
    b, t, v, c = tile
    x, w, bias, times = random(B, T, C), random(V, C, seed=1), random(V, seed=2), 0.375
    ids = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
    ids[1, 2] = -1
    logits = (x @ w.T + (bias if "b" in given else 0)).view(-1, V)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    want = torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids.astype(np.int64)).view(-1), ignore_index=-1, reduction="sum")
    want = want * 0.125 * (times if "f" in given else 1)
    want.backward()
    tx, tw, tb = (data(runtime, cut, value.detach().numpy()) for cut, value in (((b, t, c), x), ((v, c), w), ((v,), bias)))
    how = {"bias": tb if "b" in given else None, "factor": data(runtime, (1,), np.array([times], np.float32)) if "f" in given else None, "cap": cap}
    targets = data(runtime, (b, t), ids)
    value, lse = loss.linear_cross_entropy(tx, tw, targets, scale=0.125, **how)
    np.testing.assert_allclose(value.read(), [want.item()], rtol=1e-13)
    dw, dbias = tw.like(), tb.like() if "b" in given else None
    elementwise.accumulate(elementwise.fill(tw.like(), 2.0), dw)
    dx = loss.linear_cross_entropy_backward(tx, tw, targets, lse, dw, scale=0.125, dbias=dbias, **how)
    np.testing.assert_allclose(dx.read(), x.grad.numpy(), atol=1e-13)
    np.testing.assert_allclose(dw.read(), 2 + w.grad.numpy(), atol=1e-13)
    if dbias is not None:
        np.testing.assert_allclose(dbias.read(), bias.grad.numpy(), atol=1e-13)
    alone = loss.linear_cross_entropy_backward(tx, tw, targets, lse, None, scale=0.125, **how)
    assert np.array_equal(alone.read(), dx.read())


def test_a_plain_head_has_plain_tasks() -> None:
    """Without bias, factor and cap, no task has a constant or an access for them, so a planned order and its costs stay."""
    seen: list[tuple[str, int, set[str]]] = []

    class Watching(InlineRuntime):
        def _submit(self, codelet, accesses, constants, priority, terms):  # type: ignore[no-untyped-def]
            seen.append((codelet.name, len(accesses), set(constants)))
            super()._submit(codelet, accesses, constants, priority, terms)

    runtime = Watching()
    x, w = data(runtime, (-1, 4, -1), random(B, T, C).detach().numpy()), data(runtime, (6, -1), random(V, C).detach().numpy())
    targets = data(runtime, (-1, 4), np.zeros((B, T), np.int32))
    _, lse = loss.linear_cross_entropy(x, w, targets, scale=1.0)
    loss.linear_cross_entropy_backward(x, w, targets, lse, w.like(), scale=1.0)
    forward = [("head_forward", 7, {"num_c", "v_start", "vocab", "first"})] * 2 + [("head_finish", 6, {"scale"})]
    backward = [("head_backward", 7, {"num_c", "v_start", "scale", "first", "accumulate"})] * 4
    assert seen == [*forward, *forward, ("sum_scalars", 3, set()), *backward]


@pytest.mark.parametrize(
    ("wrong", "message"), [({"cap": 0.0}, "must be positive, got 0.0"), ({"factor": (2,)}, r"one number.*\(2,\)"), ({"bias": (V,)}, "same extent")]
)
def test_what_a_head_cannot_do_is_refused(wrong: dict[str, object], message: str) -> None:
    """A cap that is not positive, several factors, a bias cut another way."""
    runtime = InlineRuntime()
    more = {name: data(runtime, (-1,), np.ones(value)) if isinstance(value, tuple) else value for name, value in wrong.items()}
    x, w, targets = (
        data(runtime, tile, np.zeros(shape, kind))
        for tile, shape, kind in (((-1, -1, -1), (B, T, C), float), ((4, -1), (V, C), float), ((-1, -1), (B, T), np.int32))
    )
    with pytest.raises(ValueError, match=message):
        loss.linear_cross_entropy(x, w, targets, scale=1.0, **more)


@pytest.mark.parametrize("tile", [(-1, -1, -1, -1), (2, 3, 4, 4), (1, 7, 5, 2), (2, 2, 11, 5)], ids=str)
def test_embedding(runtime: TaskRuntime, tile: tuple[int, int, int, int]) -> None:
    """Lookup and its gradient over vocabulary tiles, with repeated tokens."""
    b, t, v, c = tile
    table, dy = random(V, C), random(B, T, C, seed=2)
    ids = np.random.default_rng(1).integers(0, V, (B, T)).astype(np.int32)
    want = torch.nn.functional.embedding(torch.from_numpy(ids.astype(np.int64)), table)
    want.backward(dy)
    tokens, tt, tdy = data(runtime, (b, t), ids), data(runtime, (v, c), table.detach().numpy()), data(runtime, (b, t, c), dy.detach().numpy())
    np.testing.assert_array_equal(embedding.embedding(tokens, tt).read(), want.detach().numpy())
    dtable = tt.like()
    embedding.embedding_backward(tokens, tdy, dtable)
    np.testing.assert_allclose(dtable.read(), table.grad.numpy(), atol=1e-13)


@pytest.mark.parametrize("op", ["embedding", "loss"])
def test_ids_outside_the_vocabulary_are_named(runtime: TaskRuntime, op: str) -> None:
    """The message holds the id and its position."""
    ids = np.zeros((2, 3), np.int32)
    ids[1, 2] = V
    tokens, table = data(runtime, (-1, -1), ids), data(runtime, (4, -1), random(V, C).detach().numpy())
    x = data(runtime, (-1, -1, -1), random(2, 3, C).detach().numpy())
    runs = {"loss": lambda: loss.linear_cross_entropy(x, table, tokens, scale=1.0), "embedding": lambda: embedding.embedding(tokens, table)}
    with pytest.raises(IndexError, match=r"got 11 at position \(1, 2\)"):
        runs[op]()


def test_bf16_tiles_are_widened(runtime: TaskRuntime) -> None:
    """16-bit activations give the fp32 result of their rounded values, rounded once."""
    import ml_dtypes

    x = data(runtime, (2, 3, 4), random(B, T, C).detach().numpy().astype(ml_dtypes.bfloat16))
    y = elementwise.activation(x, "gelu_new")
    exact = torch.nn.functional.gelu(torch.from_numpy(x.read().astype(np.float32)), approximate="tanh").numpy()
    assert y.dtype == x.dtype
    np.testing.assert_allclose(y.read().astype(np.float32), exact, rtol=2**-8, atol=1e-6)


def test_a_short_last_tile_of_kept_scores_has_room() -> None:
    """More of its rows would fit in a piece than the scratch, which is for tiles of full width, has room for."""
    runtime = InlineRuntime()
    q, k, v = (data(runtime, (1, 200, 8), random(1, 300, 8, seed=i).detach().numpy().astype(np.float32)) for i in range(3))
    options = {"head_size": 4, "scale": 1.0}
    kept, flash = attention.stored_attention(q, k, v, **options)[0], attention.attention(q, k, v, **options)[0]
    np.testing.assert_allclose(kept.read(), flash.read(), atol=1e-5)
