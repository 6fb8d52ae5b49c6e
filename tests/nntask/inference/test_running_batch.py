"""Texts that join and leave a running batch: the same texts as alone, beginnings in common, few pages, little memory, probabilities, pages' books."""

from __future__ import annotations

from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_texts import COARSE, LLAMA, SMALL, prompts_of
from support.transformers_oracle import CONFIGS, hf_model, our_model

from nntask import no_grad
from nntask.errors import Diverged, UsageError
from nntask.inference.generator import Generator
from nntask.inference.page_pool import PagePool, digests_of
from nntask.inference.row_steps import BatchShape, token_rows
from nntask.inference.running_batch import NextToken, RunningBatch, RunningText, TextRequest
from nntask.inference.sampling import OutputPenalties, Penalties, Sampling
from nntask.models.gpt2 import GPT2
from nntask.models.llama import Llama
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime, Runtime
from tiles import TOKEN_ROWS

COUNT = 9
WRITERS = [name for name, config in CONFIGS.items() if config.objective == "causal"]


def run(batch: RunningBatch, requests: list[TextRequest]) -> list[RunningText]:
    """All of them, each joining as soon as it can."""
    waiting, found = list(requests), []
    while waiting or batch.texts:
        while waiting and (text := batch.join(waiting[0])) is not None:
            found.append(text)
            waiting.pop(0)
        batch.step()
    return found


def new_tokens(text: RunningText) -> list[int]:
    """What it has said."""
    return text.tokens[len(text.request.prompt) :]


@pytest.mark.parametrize("name", [name if name == "gemma3" else pytest.param(name, marks=pytest.mark.long) for name in WRITERS])
def test_texts_of_families_are_those_of_generation(name):
    """Windows, caps, rotary positions, tables of positions; greedy, drawn and with penalties, side by side."""
    keys = {field.name for field in fields(CONFIGS[name])}
    config = replace(CONFIGS[name], **{key: 32 for key in ("n_positions", "max_position_embeddings") if key in keys})
    if name == "phi3 short":  # a batch's context decides which frequencies all of its texts have
        config = replace(config, rope_scaling=replace(config.rope_scaling, original_max_position_embeddings=32))
    ways = [(Sampling(0), Penalties()), (Sampling(0.9, 20, 0.9, 3), Penalties()), (Sampling(0), Penalties(1.4, 2))]
    with Runtime(cpu_workers=2, ram=1 << 28) as runtime:
        model = our_model(hf_model(config), config, ModelTiling(2, 6, 24, 31, -1, 61), runtime)
        asked = [(prompt, *way) for prompt in prompts_of(config.vocab_size, 3, 20, 1) for way in ways]
        batch = RunningBatch(model, runtime, BatchShape.of(3, 32))
        found = run(batch, [TextRequest(tuple(prompt), COUNT, how, penalties=penalties) for prompt, how, penalties in asked])
        generator = Generator(model, runtime, 32)
        for text, (prompt, how, penalties) in zip(found, asked, strict=True):
            assert new_tokens(text) == [token for (token,) in generator.stream([prompt], COUNT, how, penalties=penalties)]


PROMPTS = [tuple(prompt) for prompt in prompts_of(61, 1, 2, 17, 18, 34, 40, 5)]
PROMPTS += [(*PROMPTS[5][:33], 7, 7), (*PROMPTS[5][:20], 9)]
"""The last two begin as another one."""


@pytest.fixture(scope="module")
def alone():
    """A model on a runtime, and its greedy texts with their probabilities, each alone in a batch of its own."""
    with Runtime(cpu_workers=2, ram=1 << 28) as runtime:
        model = Llama(LLAMA, COARSE, runtime, seed=4)
        asked = [TextRequest(prompt, 48 + 1 - len(prompt), num_top=2) for prompt in PROMPTS]
        found = {}
        for request in asked:
            batch, told = RunningBatch(model, runtime, BatchShape.of(4, 48)), []
            batch.join(request)
            while batch.texts:
                told += [each.score for _, each in batch.step()]
            found[request.prompt] = told
        yield model, runtime, found


@given(data=st.data())
def test_texts_are_those_alone(alone, data):
    """Whatever joins and leaves, whenever, with few slots and pages: the same bits in every slot."""
    model, runtime, want = alone
    num_pages = data.draw(st.integers(3, 9), "pages")
    batch = RunningBatch(model, runtime, BatchShape.of(4, 48, num_pages))
    told: dict[RunningText, list] = {}
    waiting: list[TextRequest] = []
    for _ in range(data.draw(st.integers(1, 60), "steps")):
        action = data.draw(st.sampled_from(["join", "step", "step", "step", "leave"]))
        if action == "join":
            prompt = data.draw(st.sampled_from(PROMPTS))
            waiting.append(TextRequest(prompt, data.draw(st.integers(1, 49 - len(prompt))), num_top=2))
        elif action == "leave" and batch.texts:
            batch.leave(data.draw(st.sampled_from(batch.texts)))
        while waiting and (text := batch.join(waiting[0])) is not None:
            told[text] = []
            waiting.pop(0)
        for text, each in batch.step() if action == "step" else ():
            told[text].append(each.score)
    for text, scores in told.items():
        expected = want[text.request.prompt][: len(scores)]
        assert scores == expected
    for text in batch.texts:
        batch.leave(text)
    assert batch.pool.num_available == num_pages
    assert batch.pool.num_held == batch.pool.num_reserved == 0


def test_beginnings_in_common_are_read_once():
    """While the first text runs and after it has ended; not when the prompt's probabilities are asked for. The bits are the same."""
    with Runtime(cpu_workers=2, ram=1 << 28) as runtime:
        batch = RunningBatch(GPT2(SMALL, COARSE, runtime, seed=4), runtime, BatchShape.of(1, 48))
        long = TextRequest(PROMPTS[5], COUNT, num_top=1)
        told = []
        for request in (long, long, TextRequest(PROMPTS[7], COUNT), replace(long, scores_prompt=True), long):
            text = batch.join(request)
            told.append((text.num_shared, [each for _, each in iter_steps(batch)]))
        assert [count for count, _ in told] == [0, 32, 32, 0, 32]
        assert told[0][1] == told[1][1] == told[3][1] == told[4][1]
        assert batch.num_shared == 96
        assert batch.num_steps["prompt"] == 4  # of the third only what follows its 32 tokens, of the others what lies behind the last full page


def iter_steps(batch):
    """What all steps say until nobody is left."""
    while batch.texts:
        yield from batch.step()


def test_probabilities_are_those_of_the_model():
    """Of the prompt's tokens and of new ones: logarithms of the softmax, with the best tokens there."""
    model = GPT2(SMALL, COARSE, InlineRuntime(), seed=4)
    with Runtime(cpu_workers=2, ram=1 << 28) as runtime:
        batch = RunningBatch(GPT2(SMALL, COARSE, runtime, seed=4), runtime, BatchShape.of(2, 48), vocab_size=60)
        text = batch.join(TextRequest(PROMPTS[5], 5, num_top=3, scores_prompt=True))
        told = [each.score for _, each in iter_steps(batch)]
    tokens, _ = model.input_tensors(1, len(text.tokens))
    tokens.write(np.array([text.tokens], np.int32))
    with no_grad():
        model.eval()
        scores = model.logits(tokens).read()[0, :, :60].astype(np.float64)
    want = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    every = [*text.prompt_scores, *told]
    assert [each.token for each in every] == text.tokens[1:]
    for at, each in enumerate(every):
        assert abs(each.logprob - want[at, each.token]) < 1e-4
        assert [token for token, _ in each.top] == np.argsort(-want[at])[:3].tolist()
        np.testing.assert_allclose([logprob for _, logprob in each.top], np.sort(want[at])[::-1][:3], atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_cache_beyond_memory(dtype, tmp_path):
    """With RAM that holds a piece of weights and cache the rest goes to the disk, and the texts are the same."""
    requests = [TextRequest(prompt, 8) for prompt in PROMPTS]
    found = []
    for machine in ({"ram": 1 << 26}, {"ram": 160 << 10, "disk": tmp_path}):
        with Runtime(cpu_workers=2, **machine) as runtime:
            batch = RunningBatch(GPT2(SMALL, COARSE, runtime, seed=4, dtype=dtype), runtime, BatchShape.of(3, 48))
            found.append([new_tokens(text) for text in run(batch, requests)])
            runtime.wait()
            assert (runtime.stats()["evictions"] > 0) == ("disk" in machine)
            assert runtime.stats()["peak_bytes"]["ram"] <= machine["ram"]
    assert found[0] == found[1]


def test_texts_end():
    """At a token that stops them, at their limit, and alone where their scores are not finite."""
    with Runtime(cpu_workers=2, ram=1 << 26) as runtime:
        model = GPT2(SMALL, COARSE, runtime, seed=4)
        batch = RunningBatch(model, runtime, BatchShape.of(2, 48))
        (free,) = run(batch, [TextRequest(PROMPTS[1], 6)])
        stop = new_tokens(free)[3]
        count = new_tokens(free).index(stop)
        batch.join(TextRequest(PROMPTS[1], 6, stop=frozenset([stop])))
        said = [each for _, each in iter_steps(batch)]
        assert said[-1] == NextToken(None, "stop")
        assert len(said) == count + 1
        rows = model.embed.weight.data.read()
        rows[60] = np.inf
        model.embed.weight.data.write(rows)
        well, ill = batch.join(TextRequest(PROMPTS[1], 2)), batch.join(TextRequest((60,), 2))
        found = dict(batch.step())
        assert isinstance(found[ill], Diverged)
        assert batch.texts == [well] or isinstance(found[well], Diverged)  # a tied head scores everything with that row


def test_a_text_ends_whose_prompt_has_scores_that_are_not_finite():
    """Where they are asked for, before anything is made of them."""
    with Runtime(cpu_workers=2, ram=1 << 26) as runtime:
        model = GPT2(SMALL, COARSE, runtime, seed=4)
        rows = model.embed.weight.data.read()
        rows[60] = np.nan
        model.embed.weight.data.write(rows)
        batch = RunningBatch(model, runtime, BatchShape.of(2, 48))
        ill = batch.join(TextRequest((60, 3, 5), 2, num_top=0, scores_prompt=True))
        ((text, found),) = batch.step()
        assert (text, ill.prompt_scores, batch.texts) == (ill, [], [])
        assert isinstance(found, Diverged)


def test_penalties_of_what_was_said():
    """Presence once, frequency for each time, a bias by id; the scores themselves stay."""
    scores = np.zeros(5, np.float32)
    found = OutputPenalties(0.5, 0.25, {4: 2.0, 99: 1.0}).apply(scores, [1, 2, 2])
    assert found.tolist() == [0, -0.75, -1.0, 0, 2.0]
    assert not scores.any()


def test_requests_that_cannot_run():
    """Empty, unknown, too long for the context or for all pages; a model with an encoder."""
    runtime = InlineRuntime()
    batch = RunningBatch(GPT2(SMALL, COARSE, runtime, seed=4), runtime, BatchShape.of(2, 48, 2))
    for request, words in (
        (TextRequest((), 1), "at least 1 prompt token and 1 new token"),
        (TextRequest((1,), 0), "at least 1 prompt token and 1 new token"),
        (TextRequest((61,), 1), "the model knows 0 to 60"),
        (TextRequest((1,) * 30, 4), "at most 33 tokens together"),
    ):
        with pytest.raises(UsageError, match=words):
            batch.join(request)
    config = CONFIGS["t5"]
    with pytest.raises(UsageError, match="has an encoder"):
        RunningBatch(our_model(hf_model(config), config, ModelTiling(), runtime), runtime, BatchShape.of(2, 48))


def test_books_of_pages():
    """Low pages first; known ones are found, kept, used again the longest unused first, and reserved ones are nobody else's."""
    pool, digests = PagePool(4, 2), digests_of([1, 2, 3, 4, 5], 2)
    assert digests == digests_of([1, 2, 3, 4], 2)
    assert digests_of([9, 2, 3, 4], 2)[1] != digests[1]
    assert pool.begin([], 3)
    assert not pool.begin([], 2)
    first = [pool.take(), pool.take()]
    assert (first, pool.num_highest, pool.num_available) == ([0, 1], 2, 1)
    for page, digest in zip(first, digests, strict=True):
        pool.know(page, digest)
    assert pool.known(digests) == [0, 1]
    assert pool.begin([0, 1], 1)
    pool.end(first, 1)
    pool.end([0, 1], 1)
    assert (pool.num_kept, pool.num_available, pool.num_held) == (2, 4, 0)
    assert not pool.begin([0, 1], 3)
    assert pool.begin([], 3)
    assert [pool.take() for _ in range(3)] == [2, 3, 1]
    assert pool.known(digests) == [0]


def test_the_cost_of_a_step_follows_the_texts() -> None:
    """Rows that are computed: the smallest power of two that holds the texts that run, whatever the slots; of many texts several steps."""
    assert token_rows(1, has_gpus=False) == (1,)
    assert token_rows(16, has_gpus=False) == (1, 2, 4, 8, 16)
    assert token_rows(12, has_gpus=False) == (1, 2, 4, 8, 12)
    assert token_rows(100, has_gpus=False) == (1, 2, 4, 8, 16, TOKEN_ROWS)
    assert token_rows(16, has_gpus=True) == (16,)  # products there are chosen by the number of rows
    rows: set[int] = set()
    with Runtime(cpu_workers=2, ram=1 << 28) as runtime:
        batch = RunningBatch(GPT2(SMALL, COARSE, runtime, seed=4), runtime, BatchShape.of(40, 48))
        runtime.on_task(lambda task: rows.update(tile.nbytes // 4 for tile in task.tiles if tile.name.startswith("positions")))
        for more, want in ((1, {1}), (1, {2}), (1, {4}), (2, {8}), (35, {32, 8})):
            for _ in range(more):
                batch.join(TextRequest((3,), 40))
            rows.clear()
            batch.step()
            assert rows == want
