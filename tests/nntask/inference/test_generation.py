"""Generation with cached keys and values: transformers' tokens, the same ones wherever things lie, memory by tiles, texts that end."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from support import gpt2_oracle, llama_oracle
from support.small_texts import CUT, LLAMA, SMALL, everywhere, prompts_of

from nntask import PRESETS, no_grad
from nntask.errors import UsageError
from nntask.inference.generator import Generator
from nntask.inference.sampling import Sampling
from nntask.models.gpt2 import GPT2
from nntask.models.llama import Llama
from nntask.nn.kv_cache import KVCache
from nntask.tiling.model_tiling import ModelTiling, generation_tiling
from scheduler import InlineRuntime, Runtime

GREEDY = Sampling(temperature=0)
CONTEXT, COUNT = 80, 64


@pytest.mark.parametrize(
    ("prompts", "words"),
    [([], "at least one prompt, got none; give one"), ([[1], [2, 61]], "prompt 2 has the id 61, and the model knows 0 to 60"), ([[-1]], "id -1")],
)
def test_prompts_that_are_none(prompts, words):
    """A refusal, not a kernel that fails."""
    generator = Generator(GPT2(SMALL, CUT, InlineRuntime()), InlineRuntime(), 20)
    with pytest.raises(UsageError, match=words):
        next(generator.stream(prompts, 1, GREEDY))


def texts_of(generator, prompts, count, how=GREEDY, **options):
    """The new tokens of every text."""
    found = [[] for _ in prompts]
    for tokens in generator.stream(prompts, count, how, **options):
        for text, token in zip(found, tokens, strict=True):
            if token is not None:
                text.append(token)
    return found


def oracle(family, seed):
    """(config, transformers' model, greedy tokens of three prompts of unequal length by it, the prompts)."""
    if family == "gpt2":
        config = gpt2_oracle.random_config(seed, n_positions=CONTEXT, n_layer=2)
        theirs = gpt2_oracle.hf_model(config).eval()
    else:
        scaling = llama_oracle.SCALINGS[seed]
        config = llama_oracle.random_config(seed, max_position_embeddings=CONTEXT, num_hidden_layers=2, rope_scaling=scaling)
        theirs = llama_oracle.hf_model(config).eval()
    theirs.generation_config.update(pad_token_id=0, eos_token_id=None)
    prompts = prompts_of(config.vocab_size, 3, 16, 1)
    want = [theirs.generate(torch.tensor([p]), max_new_tokens=COUNT, do_sample=False)[0, len(p) :].tolist() for p in prompts]
    return config, theirs, want, prompts


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        ("gpt2", 1),
        ("llama", 3),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("gpt2", 0), ("llama", 0), ("llama", 1), ("llama", 2), ("llama", 4))),
    ],
)
def test_greedy_tokens_are_those_of_transformers(family, seed):
    """64 tokens, prompts of unequal length side by side, with and without the cache; grouped queries and every rotary scaling."""
    config, theirs, want, prompts = oracle(family, seed)
    group = config.n_head // config.n_kv_head
    ragged, whole = ModelTiling(2, 31, -1, 30, group, 40), ModelTiling()
    our_model = (gpt2_oracle if family == "gpt2" else llama_oracle).our_model
    with Runtime(cpu_workers=2, ram=1 << 28) as runtime:
        cached = Generator(our_model(theirs, config, ragged, runtime), runtime, CONTEXT)
        assert texts_of(cached, prompts, COUNT) == want
        again = Generator(our_model(theirs, config, whole, runtime), runtime, CONTEXT, use_cache=False)
        assert texts_of(again, prompts, COUNT) == want


@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_pieces_of_a_text_have_the_scores_of_the_whole(config, dtype):
    """Pieces that cross tiles of the cache, sequences at places of their own: the scores of one pass over everything."""
    model = (GPT2 if config is SMALL else Llama)(config, CUT, InlineRuntime(), dtype=dtype, seed=4)
    ids = np.random.default_rng(2).integers(0, config.vocab_size, (3, 20)).astype(np.int32)
    whole, _ = model.input_tensors(3, 20)
    whole.write(ids)
    with no_grad():
        model.eval()
        want = model.logits(whole).read().astype(np.float64)
        cache = KVCache(config, CUT, model.runtime, 3, 23, dtype)
        found = np.full_like(want, np.nan)
        cache.grow(20)
        for width, begins in ((4, (0, 0, 0)), (3, (4, 4, 4)), (1, (7, 6, 7)), (7, (8, 7, 8)), (1, (15, 14, 14)), (4, (16, 14, 15))):
            tokens, positions = cache.inputs(width)
            at = np.array(begins)[:, None] + np.arange(width)
            tokens.write(np.take_along_axis(ids, at, axis=1))
            positions.write(at.astype(np.int32))
            tiles = range(int(at.min()) // 5, int(at.max()) // 5 + 1)
            np.put_along_axis(found, at[..., None], model.continued_logits(tokens, cache.past(positions, tiles)).read(), axis=1)
    seen = ~np.isnan(found[..., 0])
    assert seen.sum(axis=1).tolist() == [20, 18, 19]
    tolerance = {np.float64: 1e-11, np.float32: 1e-4, ml_dtypes.bfloat16: 0.15}[dtype]
    assert np.abs(found - want)[seen].max() < tolerance * np.abs(want).max()


@pytest.mark.parametrize("config", [pytest.param(SMALL, id="gpt2", marks=pytest.mark.long), pytest.param(LLAMA, id="llama")])
def test_tokens_are_the_same_everywhere(config, tmp_path):
    """Drawn tokens of unequal prompts on one and two workers, devices, and with RAM that holds a part of weights and cache, whatever leaves first."""
    prompts, how = prompts_of(61, 2, 13, 5), Sampling(temperature=1.5, seed=9)
    found = everywhere(config, 140 << 10, 80 << 10, tmp_path, lambda generator: texts_of(generator, prompts, 12, how))
    assert all(len(text) == 12 for text in found["plain"])
    assert len(set(map(str, found.values()))) == 1


def test_the_cache_takes_memory_by_tiles():
    """Not before a text reaches a tile; given back with the text."""
    with Runtime(cpu_workers=1, ram=1 << 26) as runtime:
        model = GPT2(SMALL, ModelTiling(seq_tile=16), runtime)
        runtime.wait()
        weights = runtime.stats()["resident_bytes"]["ram"]
        cache = KVCache(SMALL, ModelTiling(seq_tile=16), runtime, 4, 48, np.float32)
        sizes = []
        for length in (0, 1, 16, 17, 48):
            cache.grow(length)
            runtime.wait()
            sizes.append(runtime.stats()["resident_bytes"]["ram"] - weights)
        tile = 2 * 2 * 4 * 16 * 24 * 4  # keys and values, layers, sequences, positions, features, bytes
        pages = -(-tile // 4 // 4096) * 4096 * 4
        assert sizes == [0, pages, pages, 2 * pages, 3 * pages]
        del cache
        texts_of(Generator(model, runtime, 48), prompts_of(61, 3), 40)
        model.lm_head.read()  # what nobody refers to any more goes with the next event
        assert runtime.stats()["resident_bytes"]["ram"] < weights + pages


@pytest.mark.parametrize("use_cache", [True, False])
def test_texts_end(use_cache):
    """At a stop token, after the last token asked for, and when the context is full; the others go on."""
    with Runtime(cpu_workers=2, ram=1 << 26) as runtime:
        generator = Generator(GPT2(SMALL, ModelTiling(seq_tile=16), runtime, seed=4), runtime, 48, use_cache=use_cache)
        prompts = prompts_of(61, 40, 48, 1)
        free = texts_of(generator, prompts, 60)
        assert [len(text) for text in free] == [9, 1, 48]  # the last token is chosen with a full context behind it
        assert [len(text) for text in texts_of(generator, prompts, 3)] == [3, 1, 3]
        stop = free[2][5]
        ends = [text.index(stop) if stop in text else len(text) for text in free]
        assert texts_of(generator, prompts, 60, stop=[stop]) == [text[:end] for text, end in zip(free, ends, strict=True)]
        assert max(token for text in texts_of(generator, prompts, 60, Sampling(), vocab_size=7) for token in text) < 7


def test_a_text_does_not_depend_on_its_neighbours_numbers():
    """The second half of a file draws what it would draw in the whole."""
    prompts, how = prompts_of(61, 4, 4, 4, 4), Sampling(seed=2)
    with Runtime(cpu_workers=2, ram=1 << 26) as runtime:
        generator = Generator(GPT2(SMALL, ModelTiling(minibatch_tile=2), runtime, seed=4), runtime, 48)
        whole = texts_of(generator, prompts, 20, how)
        assert whole[2:] == texts_of(generator, prompts[2:], 20, how, first=2)
        assert whole[:2] != texts_of(generator, prompts[:2], 20, how, first=2)


def test_prompts_that_cannot_be_continued_are_refused():
    """Empty ones and those beyond the context: which, and the lengths."""
    with Runtime(cpu_workers=1, ram=1 << 26) as runtime:
        generator = Generator(GPT2(SMALL, CUT, runtime), runtime, 20)
        with pytest.raises(UsageError, match="the prompt has 21 tokens, more than the model's context of 20; shorten it"):
            next(generator.stream(prompts_of(61, 21), 1, GREEDY))
        with pytest.raises(UsageError, match="prompt 2 must have at least one token"):
            next(generator.stream([[1], []], 1, GREEDY))


@pytest.mark.parametrize("config", [SMALL, LLAMA, gpt2_oracle.random_config(3), llama_oracle.random_config(4)], ids=str)
def test_generation_tiles_cut_any_model(config):
    """Whole groups of heads, and an even number of tiles where there is more than one thing to cut."""
    cut = generation_tiling(config).resolve(config, 3, config.n_positions)
    assert -(-config.inner_size // cut.inner_tile) % 2 == 0
    assert -(-config.vocab_size // cut.vocab_tile) % 2 == 0
    assert cut.embd_tile == config.n_embd


def test_heads_of_narrow_quantised_models_are_one_tile():
    """GPT-2 up to medium; wider ones, and weights that are not quantised, are shared."""
    for name, num_tiles in (("gpt2", 1), ("gpt2-medium", 1), ("gpt2-large", 2)):
        config = PRESETS[name]
        assert config.n_head // generation_tiling(config, is_quantised=True).head_tile == num_tiles
        assert config.n_head // generation_tiling(config).head_tile == 2
