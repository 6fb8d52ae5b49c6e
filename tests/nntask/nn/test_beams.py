"""Beam search and penalties: transformers' texts, the same ones with any cache, memory and neighbours, texts that end, rows that fork."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from support import gpt2_oracle, llama_oracle
from support.small_texts import CUT, LLAMA, SMALL, everywhere, prompts_of

from nntask.errors import Diverged, UsageError
from nntask.inference.beams import BeamSearch, search
from nntask.inference.generator import Generator
from nntask.inference.sampling import Penalties, Sampling
from nntask.models.gpt2 import GPT2
from nntask.models.llama import Llama
from nntask.nn.kv_cache import KVCache
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime, Runtime

CONTEXT, COUNT = 64, 24


def oracle(family, seed):
    """(config, transformers' model, ours of a tiling and runtime)."""
    support = gpt2_oracle if family == "gpt2" else llama_oracle
    positions = {"n_positions": CONTEXT} if family == "gpt2" else {"max_position_embeddings": CONTEXT}
    config = support.random_config(seed, **positions)
    theirs = support.hf_model(config, seed=seed).eval()
    theirs.generation_config.update(pad_token_id=0, eos_token_id=None)
    return config, theirs, lambda tiling, runtime: support.our_model(theirs, config, tiling, runtime)


def their_beams(theirs, prompt, count, stop=(), **options):
    """The hypotheses of transformers as (tokens without the last one that stops, score), best first."""
    found = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=list(stop) or None,
        pad_token_id=0,
        num_return_sequences=options["num_beams"],
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    texts = []
    for ids, came_from in zip(found.sequences.tolist(), found.beam_indices.tolist(), strict=True):
        new = ids[len(prompt) : len(prompt) + sum(each >= 0 for each in came_from)]
        texts.append(tuple(new[:-1] if new and new[-1] in stop else new))
    return list(zip(texts, found.sequences_scores.tolist(), strict=True))


def our_beams(generator, prompts, count, how, **options):
    """The same of ours, for all prompts."""
    return [[(each.tokens, each.score) for each in one] for one in generator.beams(prompts, count, how, **options)]


def same(found, want):
    """Whether texts are equal, and scores but for rounding."""
    texts = [text for text, _ in found] == [text for text, _ in want]
    return texts and np.allclose([score for _, score in found], [score for _, score in want], rtol=1e-3, atol=1e-4)


def stops(theirs, prompts, count, num):
    """Tokens that texts really come to: those that the best beams hold most often."""
    new = list(itertools.chain.from_iterable(their_beams(theirs, prompt, count, num_beams=4)[0][0] for prompt in prompts))
    return sorted(set(new), key=lambda token: (-new.count(token), token))[:num]


FAMILIES = [
    ("gpt2", 1),
    *(pytest.param(*each, marks=pytest.mark.long) for each in (("gpt2", 0), ("gpt2", 2), ("llama", 0), ("llama", 1), ("llama", 3))),
]
"""One model by default, the others are `long`; searches of other families are in test_generation_families."""


@pytest.mark.parametrize(("family", "seed"), FAMILIES)
def test_beams_are_those_of_transformers(family, seed):
    """All hypotheses with their scores, of prompts of unequal lengths side by side, over penalties of length and rules of stopping; texts that come
    to one or two stop tokens and texts that do not."""
    config, theirs, ours = oracle(family, seed)
    prompts = prompts_of(config.vocab_size, 3, 16, 1)
    num_ended = 0
    with Runtime(cpu_workers=2, ram=1 << 28) as runtime:
        generator = Generator(ours(ModelTiling(2, 11, -1, 30, config.n_head // config.n_kv_head, 40), runtime), runtime, CONTEXT)
        for num_beams, penalty, early, num_stops in (
            (4, 1.0, "false", 0),
            (4, 1.0, "false", 1),
            (4, 2.0, "false", 2),
            (3, -0.5, "never", 1),
            (4, 1.0, "true", 2),
            (2, 1.5, "never", 1),
            (5, 0.0, "true", 1),
        ):
            stop = stops(theirs, prompts, COUNT, num_stops)
            rule = {"false": False, "true": True}.get(early, early)
            want = [their_beams(theirs, prompt, COUNT, stop, num_beams=num_beams, length_penalty=penalty, early_stopping=rule) for prompt in prompts]
            found = our_beams(generator, prompts, COUNT, BeamSearch(num_beams, penalty, early), stop=stop)
            for text, (one, other) in enumerate(zip(found, want, strict=True)):
                assert same(one, other), (num_beams, penalty, early, stop, text)
            num_ended += sum(len(text) < COUNT for one in found for text, _ in one)
    assert num_ended > 5


@pytest.mark.parametrize(("family", "seed"), FAMILIES)
def test_penalties_are_those_of_transformers(family, seed):
    """Repetitions and n-grams, greedy and with beams, with and without the cache."""
    config, theirs, ours = oracle(family, seed)
    prompts = prompts_of(config.vocab_size, 9, 2)
    with Runtime(cpu_workers=2, ram=1 << 28) as runtime:
        model = ours(ModelTiling(seq_tile=7), runtime)
        for use_cache, repetition, ngram in ((True, 1.3, 0), (True, 0.8, 0), (True, 1.0, 2), (True, 1.2, 1), (False, 1.5, 3)):
            generator = Generator(model, runtime, CONTEXT, use_cache=use_cache)
            options = {"repetition_penalty": repetition, "no_repeat_ngram_size": ngram}
            for prompt in prompts:
                given = torch.tensor([prompt])
                want = theirs.generate(given, max_new_tokens=COUNT, do_sample=False, attention_mask=torch.ones_like(given), **options)
                drawn = generator.stream([prompt], COUNT, Sampling(temperature=0), penalties=Penalties(repetition, ngram))
                assert [token for (token,) in drawn] == want[0, len(prompt) :].tolist()
                found = our_beams(generator, [prompt], COUNT, BeamSearch(4), penalties=Penalties(repetition, ngram))[0]
                assert same(found, their_beams(theirs, prompt, COUNT, num_beams=4, **options))


def test_greedy_texts_without_penalties_are_what_they_were():
    """A penalty of 1 leaves the array of scores itself, of any element type."""
    for dtype in (np.float32, np.float64, ml_dtypes.bfloat16):
        scores = np.array([1.0, -2.0, 3.0]).astype(dtype)
        assert Penalties().apply(scores, [0, 1]) is scores
        assert np.allclose(Penalties(2.0).apply(scores, [0, 1, 7]), [0.5, -4, 3])
        assert np.array_equal(Penalties(1.0, 2).apply(scores, [2, 1, 2]), [1, -np.inf, 3])
        assert scores.tolist() == [1, -2, 3]


@pytest.mark.parametrize(
    ("values", "words"), [((0.0,), "repetition must be above 0"), ((np.inf,), "and finite, got inf"), ((1.0, -1), "at least 0, got -1")]
)
def test_penalties_that_are_none(values, words):
    """Refused where they are made, not met as infinite scores."""
    with pytest.raises(UsageError, match=words):
        Penalties(*values)


def test_sampled_texts_repeat_no_run():
    """Tokens that may not come are never drawn; where none may, text goes on."""
    with Runtime(cpu_workers=2, ram=1 << 26) as runtime:
        generator = Generator(GPT2(SMALL, ModelTiling(), runtime, seed=4), runtime, 48)
        drawn = generator.stream([[5, 6]], 40, Sampling(temperature=3, seed=1), vocab_size=9, penalties=Penalties(1.0, 2))
        text = [5, 6, *(token for (token,) in drawn)]
        assert len(set(itertools.pairwise(text))) == len(text) - 1 == 41
        drawn = generator.stream([[5, 6]], 12, Sampling(temperature=3, seed=1), vocab_size=9, penalties=Penalties(1.0, 1))
        assert sorted(token for (token,) in itertools.islice(drawn, 7)) == [0, 1, 2, 3, 4, 7, 8]
        assert [token for (token,) in drawn] == [0] * 5


@pytest.mark.parametrize("config", [pytest.param(SMALL, id="gpt2", marks=pytest.mark.long), pytest.param(LLAMA, id="llama")])
def test_beams_are_the_same_everywhere(config, tmp_path):
    """Texts and scores to the last bit on one and two workers, devices, and with RAM that holds a piece of weights and cache."""
    prompts = prompts_of(61, 2, 13, 5)
    found = everywhere(config, 190 << 10, 120 << 10, tmp_path, lambda generator: our_beams(generator, prompts, 12, BeamSearch(3), stop=[7, 8]))
    assert len(set(map(str, found.values()))) == 1


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        pytest.param(SMALL, np.float32, id="gpt2, fp32", marks=pytest.mark.long),
        pytest.param(LLAMA, ml_dtypes.bfloat16, id="llama, bf16"),
        pytest.param(LLAMA, np.float64, id="llama, fp64", marks=pytest.mark.long),
    ],
)
def test_beams_with_the_cache_are_those_without(config, dtype):
    """Every step computed from the whole texts: the same hypotheses, scores but for rounding; tiles of several prompts, and of one. The type whose
    rounding is coarsest by default, the others are `long`."""
    with Runtime(cpu_workers=2, ram=1 << 27) as runtime:
        model = (GPT2 if config is SMALL else Llama)(config, CUT, runtime, dtype=dtype, seed=4)
        prompts = prompts_of(61, 12, 1, 6)
        cached, again = (our_beams(Generator(model, runtime, 48, use_cache=use), prompts, 7, BeamSearch(3), stop=[3, 9]) for use in (True, False))
    if dtype == ml_dtypes.bfloat16:  # beams near each other change places with the rounding of 8 bits
        assert np.allclose([one[0][1] for one in cached], [one[0][1] for one in again], rtol=0.05)
    else:
        assert all(same(one, other) for one, other in zip(cached, again, strict=True))


@pytest.mark.parametrize("use_cache", [True, False])
def test_searches_end_with_the_context(use_cache):
    """A text whose context is full has one token more than its prompt leaves; its neighbours go on, and are what they are alone."""
    with Runtime(cpu_workers=2, ram=1 << 26) as runtime:
        generator = Generator(GPT2(SMALL, ModelTiling(seq_tile=16), runtime, seed=4), runtime, 48, use_cache=use_cache)
        prompts = prompts_of(61, 40, 48, 1)
        found = our_beams(generator, prompts, 60, BeamSearch(3))
        assert [len(one[0][0]) for one in found] == [9, 1, 48]
        assert all(same(one, our_beams(generator, [prompt], 60, BeamSearch(3))[0]) for one, prompt in zip(found, prompts, strict=True))
        assert all(max(text, default=0) < 7 for one in our_beams(generator, prompts, 9, BeamSearch(3), vocab_size=7) for text, _ in one)


def test_one_beam_is_the_greedy_text():
    """A search with a single beam takes the best token each time, as --temperature 0 does."""
    with Runtime(cpu_workers=2, ram=1 << 26) as runtime:
        generator = Generator(Llama(LLAMA, CUT, runtime, seed=4), runtime, 48)
        prompts = prompts_of(61, 4, 9)
        rows = list(generator.stream(prompts, 20, Sampling(temperature=0)))
        assert [list(one[0].tokens) for one in generator.beams(prompts, 20, BeamSearch(1))] == [list(text) for text in zip(*rows, strict=True)]


def bigrams(table):
    """A scorer that knows tokens' successors only, and the lists of rows it was given."""
    asked = []

    def scorer(texts):
        def scores(rows):
            asked.append(([list(text) for text in texts], rows.tolist()))
            return table[[text[-1] for text in texts]]

        return scores

    return scorer, asked


def test_the_search_is_exhaustive_where_beams_suffice():
    """Enough beams find the best of all texts; every row is the row it is said to come from, and one token."""
    rng = np.random.default_rng(3)
    table = np.log(rng.dirichlet(np.ones(4), 4)).astype(np.float32)
    scorer, asked = bigrams(table)
    (found, _) = search([[0], [2, 1]], [3, 1], BeamSearch(16), scorer)
    want = max(itertools.product(range(4), repeat=3), key=lambda text: sum(table[a, b] for a, b in itertools.pairwise((0, *text))))
    assert found[0].tokens == want
    assert found[0].score == pytest.approx(sum(table[a, b] for a, b in itertools.pairwise((0, *want))) / 3, rel=1e-5)
    for (before, _), (after, rows) in itertools.pairwise(asked):
        for text, row in zip(after[:16], rows[:16], strict=True):
            assert text[:-1] == before[row]
    assert asked[1][1][16:] != asked[2][1][16:] == list(range(16, 32))  # the second text has ended


def test_a_text_may_end_at_once():
    """A stop token as the first one leaves an empty text with its score; where every token is forbidden the best beam comes back."""
    table = np.log(np.array([[0.7, 0.2, 0.1]] * 3, np.float32))
    scorer, _ = bigrams(table)
    ((best, *_),) = search([[1]], [4], BeamSearch(2, 1.0, "true"), scorer, stop=[0])
    assert (best.tokens, best.score) == ((), pytest.approx(np.log(0.7)))
    ((best,),) = search([[0, 1, 2]], [2], BeamSearch(2), scorer, penalties=Penalties(1.0, 1))
    assert len(best.tokens) == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_beams": 0}, "num_beams must be at least 1, got 0"),
        ({"length_penalty": 6.0}, "length_penalty must be from -5 to 5, got 6.0; the nearest legal value is 5"),
        ({"length_penalty": float("nan")}, "length_penalty must be from -5 to 5, got nan"),
        ({"early_stopping": True}, 'early_stopping must be "false", "true" or "never", got True'),
    ],
)
def test_values_out_of_range(values, words):
    """A refusal with the rule."""
    with pytest.raises(UsageError, match=words):
        BeamSearch(**values)


def test_scores_that_are_not_finite_are_refused():
    """As for drawn texts."""
    scorer, _ = bigrams(np.full((3, 3), np.nan, np.float32))
    with pytest.raises(Diverged, match="the scores of the next token must be finite"):
        search([[1]], [4], BeamSearch(2), scorer)


def test_only_tiles_behind_the_prompts_are_reordered():
    """Those that all rows of a text share have no task; the others one each, for keys and for values."""
    runtime = InlineRuntime()
    cache = KVCache(SMALL, CUT, runtime, 3, 23, np.float32, num_beams=4)
    tokens, positions = cache.inputs(1)
    assert (tokens.shape, tokens.tile) == ((12, 1), (8, 1))
    past = cache.past(positions, range(2, 4), cache.sources(), shared=11)
    assert [list(layer.forked) for layer in past.layers] == [[2, 3]] * 2
