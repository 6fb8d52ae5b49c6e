"""Attention on the tape: a bias that layers share, documents, another sequence; and plain attention emits what it always has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nntask.errors import UsageError
from nntask.models.gpt2 import GPT2Config
from nntask.nn import functional as F
from nntask.nn.autograd import ParameterEdge, Tensor, no_grad
from nntask.nn.kv_cache import EncoderPast, KVCache, kept, source_documents
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime, Runtime
from tiles import TileTensor

B, T, S, H, D = 2, 7, 5, 2, 4


def parameter(runtime: InlineRuntime, tile: tuple[int, ...], values: np.ndarray) -> Tensor:
    """What is learnt, with these values."""
    found = TileTensor(runtime, values.shape, tile, values.dtype, kind="persistent", name="parameter")
    found.write(values)
    return Tensor(found, ParameterEdge(found))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Reproducible values that want a gradient."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def copy(x: Tensor) -> Tensor:
    """The same in tiles of its own: a task gets no tile twice."""
    zeros = x.data.like()
    zeros.write(np.zeros(x.shape))
    return x + Tensor(zeros)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("flash", [True, False])
def test_layers_share_a_bias(flash: bool, lanes: int) -> None:
    """Two layers in a row, the second over another sequence's padding: gradients of both meet in the table, and of one query alone nothing comes."""
    runtime = InlineRuntime(lanes=lanes)
    x, other, table = random(B, T, H * D), random(B, S, H * D, seed=1), random(6, H, seed=2)
    ids = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    ones = np.ones((B, T), np.int32)
    ones[1, 2] = 4
    tall = lambda y: y.view(B, -1, H, D).transpose(1, 2)  # noqa: E731
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(T)[None, :] - torch.arange(T)[:, None]
    added = table[T5Attention._relative_position_bucket(distances, False, 6, 5)].permute(2, 0, 1)

    def layer(y: torch.Tensor) -> torch.Tensor:
        s = (tall(y) @ tall(y).mT + added).masked_fill(distances > 0, -torch.inf)
        return (s.softmax(-1) @ tall(y)).transpose(1, 2).reshape(B, T, H * D)

    hidden = torch.from_numpy(ones[:, :, None] != ids[:, None, :])[:, None]
    weights = (tall(layer(layer(x))) @ tall(other).mT).masked_fill(hidden, -1e300).softmax(-1).masked_fill(hidden, 0)
    want = (weights @ tall(other)).transpose(1, 2).reshape(B, T, H * D)
    do = random(B, T, H * D, seed=3).detach()
    want.backward(do)

    px, po = (parameter(runtime, (1, tile, D), y.detach().numpy()) for y, tile in ((x, 3), (other, 2)))
    pt = parameter(runtime, (-1, 1), table.detach().numpy())
    bias = F.RelativeBias(pt, False, 5)
    documents = []
    for values, tile in ((ones, 3), (ids, 2)):
        documents.append(TileTensor(runtime, values.shape, (1, tile), np.int32, kind="input"))
        documents[-1].write(values)

    def attend(y: Tensor, z: Tensor, **more: Any) -> Tensor:
        return F.attention(y, copy(z), copy(z), head_size=D, scale=1.0, flash=flash, **more)

    y = attend(px, px, bias=bias)
    y = attend(attend(y, y, bias=bias), po, causal=False, documents=(documents[0], documents[1]))
    np.testing.assert_allclose(y.read(), want.detach().numpy(), atol=1e-12)
    assert not y.read()[1, 2].any()
    gradient = y.data.like()
    gradient.write(do.numpy())
    y.backward(gradient)
    for found, right in ((px, x), (po, other), (pt, table)):
        assert found.gradient is not None
        np.testing.assert_allclose(found.gradient.read(), right.grad.numpy(), atol=1e-11)


def test_a_frozen_bias_has_no_gradient() -> None:
    """Its tasks write no table."""
    runtime = InlineRuntime()
    x = parameter(runtime, (1, 3, D), random(B, T, H * D).detach().numpy())
    table = Tensor(parameter(runtime, (-1, 1), random(6, H).detach().numpy()).data)
    y = F.attention(x, copy(x), copy(x), head_size=D, scale=1.0, bias=F.RelativeBias(table, False, 5))
    gradient = y.data.like()
    gradient.write(np.ones(y.shape))
    y.backward(gradient)
    assert x.gradient is not None
    assert table.gradient is None
    assert np.isfinite(x.gradient.read()).all()


def test_plain_attention_emits_what_it_always_has() -> None:
    """Options that are not used leave no trace in tasks: their names, numbers of tiles and constants."""
    seen: list[tuple[str, int, set[str]]] = []

    class Watching(InlineRuntime):
        def _submit(self, codelet, accesses, constants, priority, terms):  # type: ignore[no-untyped-def]
            seen.append((codelet.name, len(accesses), set(constants or {})))
            super()._submit(codelet, accesses, constants, priority, terms)

    for flash, names in (
        (True, {("attention", 8), ("attention", 7)}),
        (False, {("attention_scores", 3), ("attention_lse", 5), ("attention_apply", 4)}),
    ):
        runtime = Watching()
        x = parameter(runtime, (1, 4, D), random(B, T, H * D).detach().numpy())
        k, v = copy(x), copy(x)
        y = F.attention(x, k, v, head_size=D, scale=1.0, flash=flash)
        gradient = y.data.like()
        gradient.write(np.ones(y.shape))
        y.backward(gradient)
        found = {(name, count) for name, count, _ in seen}
        assert names <= found
        assert ("attention_backward", 10) in found
        assert all("accumulate" not in constants for name, _, constants in seen if name == "attention_backward")
        assert all("may_blind" not in constants for *_, constants in seen)


def test_a_past_has_an_order() -> None:
    """Attention to a growing cache is causal."""
    runtime = InlineRuntime()
    x = parameter(runtime, (1, 3, D), random(B, T, H * D).detach().numpy())
    with pytest.raises(UsageError, match="attention with a past is causal"):
        F.attention(x, x, x, head_size=D, scale=1.0, causal=False, past=object())  # type: ignore[arg-type]


WINDOWS = (None, 3)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_tiles_in_front_of_a_window_are_given_back(num_beams: int) -> None:
    """Two layers, one with a window of three: recorded steps of one token agree with the whole, forked rows included, while tiles go."""
    config, length, tile = GPT2Config(vocab_size=9, n_positions=16, n_embd=H * D, n_layer=2, n_head=H), 13, 2
    runtime = Runtime(cpu_workers=1, ram=1 << 26)
    with runtime:
        cache = KVCache(config, ModelTiling(seq_tile=tile), runtime, B, length, np.float32, num_beams=num_beams, windows=WINDOWS)
        rows = B * num_beams
        x = np.random.default_rng(0).standard_normal((4, rows, length, H * D)).astype(np.float32)
        swap = np.arange(rows, dtype=np.int32).reshape(B, num_beams)[:, ::-1].reshape(-1)
        history = np.arange(rows)[:, None].repeat(length, 1)
        _, positions = cache.inputs(1)
        sources = cache.sources()
        parts = [TileTensor(runtime, (rows, 1, H * D), (num_beams * B, 1, -1), np.float32, kind="input") for _ in range(3)]
        for at in range(length):
            written, forks = range(at // tile, at // tile + 1), num_beams > 1 and at in (3, 8)
            cache.grow(at + 1)
            cache.leave(at)
            positions.write(np.full((rows, 1), at, np.int32))
            if forks:
                sources.write(swap)
                history[:, :at] = history[swap, :at]
            for part, values in zip(parts, x, strict=False):
                part.write(values[:, at : at + 1])
            past = cache.past(positions, written, sources if forks else None)
            q, k, v = (Tensor(part) for part in parts)
            with no_grad(), runtime.record() as step:
                found = [
                    F.attention(q, k, v, head_size=D, scale=1.0, past=layer, window=window).data
                    for layer, window in zip(past.layers, WINDOWS, strict=True)
                ]
            replayed = step.replay()
            for one, window in zip(found, WINDOWS, strict=True):
                keys, values = (x[n][history[:, : at + 1], np.arange(at + 1)] for n in (1, 2))
                s = np.einsum("rhd,rthd->rht", x[0][:, at].reshape(rows, H, D), keys.reshape(rows, -1, H, D))
                s[..., : max(0, at + 1 - window) if window else 0] = -np.inf
                weights = np.exp(s - s.max(-1, keepdims=True))
                want = np.einsum("rht,rthd->rhd", weights / weights.sum(-1, keepdims=True), values.reshape(rows, -1, H, D))
                np.testing.assert_allclose(replayed.read(one).reshape(rows, H, D), want, atol=2e-5)
            del step, replayed, past, found
    assert cache._left == [0, (length - 3) // tile]


def test_windows_are_one_for_each_layer() -> None:
    """Too few are refused, and attention through another window than the cache's."""
    config, runtime = GPT2Config(vocab_size=9, n_positions=16, n_embd=H * D, n_layer=2, n_head=H), InlineRuntime()
    with pytest.raises(UsageError, match="for each of 2 layers"):
        KVCache(config, ModelTiling(seq_tile=2), runtime, B, 8, np.float32, windows=[3])
    cache = KVCache(config, ModelTiling(seq_tile=2), runtime, B, 8, np.float32, windows=[3, None])
    _, positions = cache.inputs(1)
    x = Tensor(TileTensor(runtime, (B, 1, H * D), (B, 1, -1), np.float32))
    with pytest.raises(UsageError, match="window of attention must be that of the layer's cache"):
        F.attention(x, x, x, head_size=D, scale=1.0, past=cache.past(positions, range(1)).layers[0])


@pytest.mark.parametrize("num_beams", [1, 3])
def test_tokens_attend_to_a_padded_source(num_beams: int) -> None:
    """A recorded step of one token, replayed twice, over keys made before it: all rows of a text see its source, and none its padding."""
    is_text = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    k, v = (np.random.default_rng(n).standard_normal((B, S, H * D)).astype(np.float32) for n in range(2))
    queries = np.random.default_rng(2).standard_normal((2, B * num_beams, 1, H * D)).astype(np.float32)
    with Runtime(cpu_workers=1, ram=1 << 26) as runtime:
        tensors = [TileTensor(runtime, x.shape, (1, 2, D), np.float32) for x in (k, v)]
        for tensor, values in zip(tensors, (k, v), strict=True):
            tensor.write(values)
        keys, values = (kept(tensor, num_beams) for tensor in tensors)
        past = EncoderPast(keys, values, source_documents(keys, is_text))
        q = TileTensor(runtime, queries.shape[1:], (num_beams, 1, D), np.float32, kind="input")
        with no_grad(), runtime.record() as step:
            found = past.attend(Tensor(q), head_size=D, scale=0.5).data
        for query in queries:
            q.write(query)
            own, other = np.repeat(k, num_beams, 0).reshape(-1, S, H, D), np.repeat(v, num_beams, 0).reshape(-1, S, H, D)
            s = 0.5 * np.einsum("rhd,rthd->rht", query.reshape(-1, H, D), own)
            s = np.where(np.repeat(is_text, num_beams, 0)[:, None] == 1, s, -np.inf)
            weights = np.exp(s - s.max(-1, keepdims=True))
            want = np.einsum("rht,rthd->rhd", weights / weights.sum(-1, keepdims=True), other)
            np.testing.assert_allclose(step.replay().read(found).reshape(-1, H, D), want, atol=2e-5)
