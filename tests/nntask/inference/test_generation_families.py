"""Texts of every family, greedy and searched for, are transformers': windows shorter than the texts, encoders, with and without the cache.

By default those of a decoder with windows and of an encoder with a decoder; the other families are `long`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.small_texts import prompts_of
from support.transformers_oracle import CONFIGS, DECODERS, hf_model, our_model, tiles

from nntask.errors import UsageError
from nntask.inference.beams import BeamSearch
from nntask.inference.generator import Generator
from nntask.inference.sampling import Penalties, Sampling
from nntask.tiling.model_tiling import ModelTiling
from scheduler import Runtime

CONTEXT, COUNT = 32, 9
COARSE = ModelTiling(2, 6, 24, 31, -1, 61)
"""Tiles of positions within windows, and few others: each token is a step."""
WRITERS = [name for name, config in CONFIGS.items() if config.objective in ("causal", "seq2seq")]


def long_config(name: str) -> Any:
    """The config with room for texts beyond its windows."""
    config = CONFIGS[name]
    keys = {field.name for field in fields(config)}
    if name == "t5":  # whose cache in transformers has as many layers as the encoder
        config = replace(config, num_layers=3)
    if name == "phi3 short":  # transformers' texts would begin with the short factors and go on with the long ones
        config = replace(config, rope_scaling=replace(config.rope_scaling, original_max_position_embeddings=CONTEXT))
    return replace(config, **{key: CONTEXT for key in ("n_positions", "max_position_embeddings") if key in keys})


def their_text(theirs: Any, prompt: list[int], stop: list[int], **options: Any) -> list[int]:
    """New tokens by transformers, without one that ends the text."""
    given = torch.tensor([prompt])
    found = theirs.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=COUNT,
        do_sample=False,
        eos_token_id=stop or None,
        pad_token_id=0,
        **options,
    )[0].tolist()
    new = found[1:] if theirs.config.is_encoder_decoder else found[len(prompt) :]
    ends = [at for at, token in enumerate(new) if token in stop]
    return new[: ends[0]] if ends else new


def greedy(generator: Generator, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """New tokens of ours."""
    found: list[list[int]] = [[] for _ in prompts]
    for tokens in generator.stream(prompts, COUNT, Sampling(temperature=0), **options):
        for text, token in zip(found, tokens, strict=True):
            if token is not None:
                text.append(token)
    return found


SEARCHES: tuple[tuple[dict[str, Any], BeamSearch, Penalties], ...] = (
    ({"num_beams": 4}, BeamSearch(4), Penalties()),
    ({"num_beams": 4, "length_penalty": 2.0, "early_stopping": True}, BeamSearch(4, 2.0, "true"), Penalties()),
    ({"num_beams": 4, "length_penalty": -0.5, "early_stopping": "never", "repetition_penalty": 1.3}, BeamSearch(4, -0.5, "never"), Penalties(1.3)),
)


@pytest.mark.parametrize("name", [name if name in ("gemma3", "t5") else pytest.param(name, marks=pytest.mark.long) for name in WRITERS])
def test_texts_are_those_of_transformers(name: str) -> None:
    """Prompts of unequal lengths side by side: greedy with and without the cache, with a repetition penalty, and three searches."""
    config = long_config(name)
    theirs = hf_model(config).eval()
    theirs.generation_config.update(eos_token_id=None, pad_token_id=0)
    prompts = prompts_of(config.vocab_size, 3, 14, 1)
    free = [their_text(theirs, prompt, []) for prompt in prompts]
    stop = [free[1][7]]
    with Runtime(cpu_workers=2, ram=1 << 28) as runtime:
        model = our_model(theirs, config, COARSE, runtime)
        cached, again = (Generator(model, runtime, CONTEXT, use_cache=use) for use in (True, False))
        assert greedy(cached, prompts) == free
        assert greedy(again, prompts) == free
        want = [their_text(theirs, prompt, stop, repetition_penalty=1.3) for prompt in prompts]
        assert greedy(cached, prompts, stop=stop, penalties=Penalties(1.3)) == want
        for options, how, penalties in SEARCHES:
            want = [their_text(theirs, prompt, stop, **options) for prompt in prompts]
            found = cached.beams(prompts, COUNT, how, stop=stop, penalties=penalties)
            assert [list(best.tokens) for best, *_ in found] == want, options


@pytest.mark.parametrize("name", [name for name in DECODERS if any(block.attention.window for block in CONFIGS[name].description.stack.blocks)])
def test_windows_keep_no_more_than_their_tiles(name: str) -> None:
    """A cache of a windowed family gives back the tiles in front of each window, and keeps those of layers without one."""
    config = long_config(name)
    with Runtime(cpu_workers=1, ram=1 << 28) as runtime:
        model = our_model(hf_model(config), config, tiles(config), runtime)
        cache = model.cache(2, CONTEXT)
        cache.grow(CONTEXT)
        cache.leave(CONTEXT - 1)
        windows = [block.attention.window for block in config.description.stack.blocks]
        last = (CONTEXT - 1) // cache.tile * cache.tile  # the tile that is written now may be written from its beginning
        want = [0 if window is None else max(0, last + 1 - window) // cache.tile for window in windows]
        assert cache._left == want
        assert max(want) > 0


@pytest.mark.parametrize("name", ["bert", "bert classifier"])
def test_models_that_write_no_texts(name: str) -> None:
    """A refusal with what the model does."""
    with Runtime(cpu_workers=1, ram=1 << 28) as runtime:
        model = our_model(hf_model(CONFIGS[name]), CONFIGS[name], tiles(CONFIGS[name]), runtime)
        with pytest.raises(UsageError, match="cannot generate text"):
            next(Generator(model, runtime, 12).stream([[1, 2]], 1, Sampling(temperature=0)))
        assert np.isfinite(model.lm_head.data.read()).all()
