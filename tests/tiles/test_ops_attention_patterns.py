"""Attention with windows, documents, biases and caps, of a sequence with itself and with another, over ragged tilings against torch in double."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from scheduler import InlineRuntime
from tiles import TileTensor
from tiles.kernels.reference.attention import Pair, survivors
from tiles.kernels.reference.buckets import Buckets
from tiles.ops import attention

B, T, S, H, G, D = 3, 11, 8, 4, 2, 4
FLOATS = {np.float64: 1e-12, np.float32: 2e-5, ml_dtypes.bfloat16: 6e-2}


def data(runtime: InlineRuntime, tile: tuple[int, ...], values: np.ndarray, dtype: type | None = None) -> TileTensor:
    """A tile tensor with these values."""
    found = TileTensor(runtime, values.shape, tile, dtype or values.dtype, name="data")
    found.write(values.astype(found.dtype))
    return found


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Reproducible values, the same in bf16, that want a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16().double().requires_grad_()


def expected(q, k, v, table, buckets, *, causal, cap, window, documents, mask):  # type: ignore[no-untyped-def]
    """The attention of torch's parts, in which a row without keys gives 0."""
    tall = [x.view(B, x.shape[1], -1, D).transpose(1, 2) for x in (q, k, v)]
    k, v = (x.repeat_interleave(H // G, 1) for x in tall[1:])
    s = 0.5 * tall[0] @ k.mT
    if cap:
        s = cap * torch.tanh(s / cap)
    distances = torch.arange(k.shape[2])[None, :] - torch.arange(q.shape[1])[:, None]
    if table is not None:
        found = T5Attention._relative_position_bucket(distances, buckets.bidirectional, buckets.count, buckets.max_distance)
        s = s + table[found].permute(2, 0, 1)
    hidden = torch.zeros(B, 1, *distances.shape, dtype=torch.bool)
    if causal:
        hidden |= distances > 0
    if window:
        hidden |= distances <= -window
    if documents is not None:
        hidden |= (documents[0][:, :, None] != documents[1][:, None, :])[:, None]
    weights = torch.softmax(s.masked_fill(hidden, -1e300), -1).masked_fill(hidden, 0.0)
    return ((weights * mask) @ v).transpose(1, 2).reshape(B, -1, H * D)


CASES = {
    "itself": {},
    "cross": {"causal": False, "other": True},
    "packed": {"documents": "packed"},
    "padded": {"causal": False, "documents": "padded"},
    "cross, padded": {"causal": False, "other": True, "documents": "blind"},
    "window of 1": {"window": 1},
    "window of 3": {"window": 3},
    "window of 6 in documents": {"window": 6, "documents": "packed"},
    "bias": {"causal": False, "buckets": Buckets(8, True, 6)},
    "bias of a decoder": {"buckets": Buckets(6, False, 9)},
    "bias of padded": {"causal": False, "buckets": Buckets(8, True, 6), "documents": "padded"},
    "cap": {"cap": 0.7},
    "cap and window": {"cap": 0.7, "window": 4},
    "all": {"cap": 0.7, "window": 5, "buckets": Buckets(6, False, 5), "documents": "packed"},
}


def numbers(kind: str, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents of queries and keys."""
    if kind == "packed":
        found = np.sort(np.random.default_rng(3).integers(0, 3, (B, T)), axis=1).astype(np.int32)
        return found, found
    lengths = np.array([[num_keys], [5], [2]])
    of_keys = (np.arange(num_keys)[None] < lengths).astype(np.int32)
    of_queries = of_keys if kind == "padded" else np.ones((B, T), np.int32)
    if kind == "blind":
        of_queries = of_queries * np.where(np.arange(T) % 4 == 1, 7, 1).astype(np.int32)
    return of_queries, of_keys


@pytest.mark.parametrize("stored", [False, True], ids=["flash", "stored"])
@pytest.mark.parametrize(
    ("dtype", "p"),
    [pytest.param(dtype, p, id=f"{np.dtype(dtype).name}-{p}") for dtype in FLOATS for p in (0.0, 0.3) if not (p and dtype == ml_dtypes.bfloat16)],
)
@pytest.mark.parametrize("tile", [(-1, -1, -1, -1), (2, 3, 5, 1), (1, 4, 3, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, tile: tuple[int, int, int, int], dtype: type, stored: bool, p: float) -> None:
    """Flash and stored, with and without dropout; two heads of queries share each of keys."""
    case = {"causal": True, "cap": None, "window": None, "documents": None, "buckets": None, "other": False, **CASES[name]}
    runtime, (b, t, s, g) = InlineRuntime(), tile
    num_keys, s = (S, s) if case["other"] else (T, t)
    q, k, v, do = (random(B, n, heads * D, seed=i) for i, (n, heads) in enumerate(((T, H), (num_keys, G), (num_keys, G), (T, H))))
    buckets: Buckets | None = case["buckets"]
    table = random(buckets.count, H, seed=9) if buckets else None
    ids = numbers(case["documents"], num_keys) if case["documents"] else None
    key = data(runtime, (2,), np.array([5, 9], np.uint64))
    mask = torch.ones(B, H, T, num_keys, dtype=torch.float64)
    if p:
        mask = torch.from_numpy(survivors(key.read(), tuple(mask.shape), Pair(D, 0.5, True, 0, 0, 0, 0, H, T, p, 3, num_keys=num_keys)))
    documents = None if ids is None else tuple(map(torch.from_numpy, ids))
    rules = {"causal": case["causal"], "cap": case["cap"], "window": case["window"]}
    want = expected(q, k, v, table, buckets, **rules, documents=documents, mask=mask)
    want.backward(do.detach())

    wide, narrow = (2 * g * D if g > 0 else -1), (g * D if g > 0 else -1)
    cuts = ((b, t, wide), (b, s, narrow), (b, s, narrow), (b, t, wide))
    tq, tk, tv, tdo = (data(runtime, cut, x.detach().numpy(), dtype) for cut, x in zip(cuts, (q, k, v, do), strict=True))
    tiled = None
    if ids is not None:
        first = data(runtime, (b, t), ids[0])
        tiled = (first, first if ids[0] is ids[1] else data(runtime, (b, s), ids[1]))
    bias = None if table is None else attention.Bias(data(runtime, (-1, 2 * g if g > 0 else -1), table.detach().numpy(), dtype), buckets)
    scoring = attention.Scoring(case["cap"], bias, case["window"], tiled)
    options = {"head_size": D, "scale": 0.5, "causal": case["causal"], "scoring": scoring, "dropout": attention.Dropout(p, key, stream=3)}
    o, kept = (attention.stored_attention if stored else attention.attention)(tq, tk, tv, **options)
    dtable = None if bias is None else bias.table.like(dtype=np.float64 if dtype == np.float64 else np.float32)
    backward = attention.stored_attention_backward if stored else attention.attention_backward
    found = [o, *backward(tq, tk, tv, o, kept, tdo, **options, dtable=dtable), *([] if dtable is None else [dtable])]
    truth = [want, q.grad, k.grad, v.grad, *([] if table is None else [table.grad])]
    for got, right in zip(found, truth, strict=True):
        scale = 1.0 + float(right.detach().abs().max())
        np.testing.assert_allclose(got.read().astype(np.float64), right.detach().numpy(), atol=FLOATS[dtype] * scale, rtol=0)


def test_tiles_outside_the_window_emit_no_tasks() -> None:
    """Of 4 x 4 pairs of tiles of two, a window of three positions leaves each query tile its own and the one before, and of two positions, too."""
    seen: list[str] = []

    class Counting(InlineRuntime):
        def _submit(self, codelet, accesses, constants, priority, terms):  # type: ignore[no-untyped-def]
            seen.append(codelet.name)
            super()._submit(codelet, accesses, constants, priority, terms)

    for window, pairs in ((1, 4), (2, 7), (3, 7), (4, 9), (8, 10)):
        runtime = Counting()
        q, k, v, do = (data(runtime, (1, 2, 4), random(1, 8, 4, seed=i).detach().numpy()) for i in range(4))
        seen.clear()
        scoring = attention.Scoring(window=window)
        o, lse = attention.attention(q, k, v, head_size=4, scale=1.0, scoring=scoring)
        attention.attention_backward(q, k, v, o, lse, do, head_size=4, scale=1.0, scoring=scoring)
        assert seen.count("attention") == seen.count("attention_backward") == pairs


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("count", "most"), [(32, 128), (32, 100), (16, 40), (8, 20), (64, 256), (6, 5)])
def test_buckets_are_those_of_t5(count: int, most: int, bidirectional: bool) -> None:
    """Every distance within 600, rounding included; the runs say the same."""
    buckets, distances = Buckets(count, bidirectional, most), np.arange(-600, 601)
    want = T5Attention._relative_position_bucket(torch.from_numpy(distances), bidirectional, count, most).numpy()
    assert np.array_equal(buckets.of(distances), want)
    for first, end, bucket in buckets.runs():
        assert (want[(distances >= first) & (distances < end)] == bucket).all()


def test_rules_that_do_not_fit_are_refused() -> None:
    """Windows without an order, caps and buckets of no size, documents and tables of other shapes."""
    runtime = InlineRuntime()
    x, k, v = (data(runtime, (1, 2, 4), np.zeros((1, 8, 8))) for _ in range(3))

    def attend(causal: bool = True, **rules: object) -> None:
        attention.attention(x, k, v, head_size=4, scale=1.0, causal=causal, scoring=attention.Scoring(**rules))  # type: ignore[arg-type]

    for window, causal in ((0, True), (3, False)):
        with pytest.raises(ValueError, match="a window needs causal attention and at least one position"):
            attend(causal, window=window)
    with pytest.raises(ValueError, match="a cap of scores must be positive"):
        attend(cap=0.0)
    with pytest.raises(ValueError, match="must have the same extent and tile"):
        attend(documents=(data(runtime, (1, 4), np.zeros((1, 8), np.int32)),) * 2)
    with pytest.raises(ValueError, match="documents must be int32 numbers"):
        attend(documents=(data(runtime, (1, 2), np.zeros((1, 8))),) * 2)
    with pytest.raises(ValueError, match="the table of a bias must have a row per bucket"):
        attend(bias=attention.Bias(data(runtime, (-1, -1), np.zeros((8, 2))), Buckets(8, False, 20)))
    with pytest.raises(ValueError, match="max_distance must exceed these distances"):
        Buckets(8, False, 4)
