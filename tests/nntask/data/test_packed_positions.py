"""Positions of texts that share a sequence: each text is as if it were alone, in families with tables of positions as in those with turning ones."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.gpt2_oracle import relative
from support.objective_data import opened, tokenizer_in
from support.search import search
from support.transformers_oracle import BATCH, CONFIGS, LENGTH, hf_gradients, hf_loss, hf_model, our_gradients, our_model, tiles

from nntask.config.settings import DataSettings
from nntask.data import BatchStream
from nntask.data.packing import positions_in
from scheduler import InlineRuntime

PACKED = [name for name, config in CONFIGS.items() if config.objective in ("causal", "masked") and name not in ("phi3 long", "mixtral balanced")]
"""Families; LongRoPE's long factors follow from the length of the sequence, and the loads of experts from all texts, unlike those of a text alone."""
WITH_TABLES = [name for name in PACKED if CONFIGS[name].description.stack.num_positions is not None]
WORDS = ["cat", "dog", "mat", "sat", "the", "on"]


def texts_of(config: Any, seed: int) -> tuple[dict[str, np.ndarray], list[tuple[int, slice]]]:
    """A packed batch with padding at its end, and where its texts are."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(2, config.vocab_size, (BATCH, LENGTH), np.int32)
    documents, places = np.zeros((BATCH, LENGTH), np.int32), []
    for row in range(BATCH):
        edges = [0, *sorted(draw.choice(np.arange(1, LENGTH), 3, replace=False))]
        for number, (first, last) in enumerate(pairwise(edges), 1):
            documents[row, first:last] = number
            places.append((row, slice(int(first), int(last))))
    targets = np.where(documents > 0, draw.integers(2, config.vocab_size, documents.shape), -1).astype(np.int32)
    batch = {"tokens": tokens, "targets": targets, "documents": documents, "factor": np.array([1 / (targets >= 0).sum()], np.float32)}
    if config.description.stack.num_positions is not None:
        batch["positions"] = positions_in(documents)
    return batch, places


def written(model: Any, batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Tensors of a batch."""
    found: dict[str, Any] = model.inputs(*batch["tokens"].shape, tuple(batch))
    for name, tensor in found.items():
        tensor.write(batch[name])
    return found


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_packed_texts_are_as_if_alone(name: str, dtype: Any) -> None:
    """Loss and gradients of texts in one sequence are those of transformers for each text by itself."""
    config = CONFIGS[name]
    theirs = hf_model(config, np.float64).train()
    batch, places = texts_of(config, 4)
    count, terms = int((batch["targets"] >= 0).sum()), []
    for row, cut in places:
        alone = {"tokens": batch["tokens"][row : row + 1, cut], "targets": batch["targets"][row : row + 1, cut]}
        terms.append(hf_loss(theirs, config, alone) * alone["targets"].size)
    expected = torch.stack(terms).sum() / count
    expected.backward()
    model = our_model(theirs, config, tiles(config), InlineRuntime(), dtype=dtype)
    loss = model(**written(model, batch))
    loss.backward()
    has_experts = config.description.stack.num_idle(config.n_embd) > 0
    limit = (2e-6 if has_experts else 1e-6) if dtype is np.float64 else 2e-5  # factors are fp32, and probabilities of experts in transformers
    assert loss.read()[0] == pytest.approx(expected.item(), rel=limit)
    found, largest = our_gradients(model), max(float(p.grad.abs().max()) for p in theirs.parameters() if p.grad is not None)
    for weight, gradient in hf_gradients(theirs).items():
        if np.abs(gradient).max() > 1e-6 * largest:
            assert relative(found[weight], gradient) < limit, weight


@pytest.mark.parametrize("name", WITH_TABLES)
def test_one_text_alone_keeps_its_bits(name: str) -> None:
    """Positions that are given as 0 to T - 1 are the ones that are taken without."""
    config = CONFIGS[name]
    batch, _ = texts_of(config, 5)
    batch["documents"][:] = 1
    model = our_model(hf_model(config), config, tiles(config), InlineRuntime())
    plain = model(**written(model, {key: value for key, value in batch.items() if key != "positions"})).read()
    batch["positions"] = positions_in(batch["documents"])
    assert np.array_equal(model(**written(model, batch)).read(), plain)


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=8), min_size=1, max_size=4))
@search(60)
def test_positions_count_from_each_text(sizes: list[list[int]]) -> None:
    """Texts of any lengths, and padding behind them, which counts for itself."""
    length = max(map(sum, sizes)) + 2
    documents, expected = np.zeros((len(sizes), length), np.int32), np.empty((len(sizes), length), np.int32)
    for row, each in enumerate(sizes):
        at = 0
        for number, size in enumerate([*each, length - sum(each)], 1):
            documents[row, at : at + size] = 0 if number > len(each) else number
            expected[row, at : at + size] = np.arange(size)
            at += size
    np.testing.assert_array_equal(positions_in(documents), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("form", ["stream", "chat"])
def test_batches_have_positions_where_models_need_them(name: str, form: str, tmp_path: Path) -> None:
    """Streams of texts and conversations, with --document-boundaries; a model whose positions turn has no use for them."""
    config, length = CONFIGS[name], 10
    if form == "chat":
        rows = [{"messages": [{"role": "user", "content": "cat"}, {"role": "assistant", "content": " ".join(WORDS[: 1 + n % 3])}]} for n in range(40)]
        (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    else:
        rows = [{"text": " ".join(WORDS[: 1 + n % 5])} for n in range(60)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSettings(
        dataset="jsonl",
        dataset_path=str(tmp_path / "t.jsonl"),
        tokenizer_path=str(tokenizer_in(tmp_path / "tok", WORDS)),
        chat_template=str(tmp_path / "t.jinja") if form == "chat" else "",
        document_boundaries=True,
    )
    dataset = opened(config, data, length)
    batch = BatchStream(dataset.examples(0), 2, seed=0).next()
    assert sorted(batch.arrays) == sorted(dataset.spec.objective.names)
    assert ("positions" in batch.arrays) == (name == "gpt2")
    if name == "gpt2":
        np.testing.assert_array_equal(batch.arrays["positions"], positions_in(batch.arrays["documents"]))
        assert (batch.arrays["positions"] == 0).sum() > 2
