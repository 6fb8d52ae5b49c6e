"""--objective and the flags about it: what is refused, what is filled in, and what a continued run must agree on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.objective_data import TINY, ImageLearner, Learner, lines_in

from nntask.config import TrainSettings, check_values, resolve
from nntask.config.objective import objective_of, with_head, with_objective
from nntask.config.settings import DataSettings, ModelSettings, RunSettings
from nntask.config.stored_run import differences
from nntask.errors import DataError, UsageError
from nntask.models.bert import BertConfig

MASKED = Learner("masked", ("masked", "classify"), model_type="bert")


def settings(seq_len: int = 32, run: RunSettings | None = None, **data: Any) -> TrainSettings:
    """Settings of data."""
    return TrainSettings(model=ModelSettings(seq_len=seq_len), data=DataSettings(**data), run=run or RunSettings())


@pytest.mark.parametrize(
    ("asked", "config", "words"),
    [
        (settings(objective="causal"), MASKED, "--objective causal is not for a bert, which learns masked, classify; use --objective masked"),
        (settings(objective="masked"), TINY, "--objective masked is not for a gpt2, which learns causal"),
        (settings(objective="classify"), MASKED, "--objective classify learns from texts with labels, got --dataset stdlib; use --dataset jsonl"),
        (
            settings(mask_probability=0.3),
            TINY,
            "SHARE in --objective is for masked and seq2seq, which hide tokens, got 0.3 with --objective causal; drop it",
        ),
        (settings(target_len=8), MASKED, "--target-len 8 is for --objective seq2seq, got a model that predicts masked tokens"),
        (
            settings(objective="seq2seq", target_len=65),
            Learner(),
            "--target-len must be at most n_positions = 64, got 65; the nearest",
        ),
        (settings(objective="seq2seq", target_len=2), Learner(), "takes --seq-len and --target-len of at least 3, got 32 and 2"),
        (settings(objective="seq2seq", document_boundaries=True), Learner(), "--document-boundaries is for --objective causal and masked"),
        (settings(chat_template="x"), TINY, "--chat-template x is for JSON lines with messages"),
        (settings(dataset="images"), TINY, "--dataset images is not for a gpt2; use a dataset of text"),
        (settings(), ImageLearner(), "--dataset stdlib is not for a learner; use --dataset images"),
        (settings(dataset="images", tokenizer="bytes"), ImageLearner(), "--tokenizer bytes is for text, and a learner learns from images"),
        (settings(run=RunSettings(prompt="a")), MASKED, "--prompt 'a' is for the text of a model that predicts the next token"),
    ],
)
def test_broken_rules_are_one_sentence(asked: TrainSettings, config: Any, words: str) -> None:
    """The flag, the value, the rule, what to do."""
    with pytest.raises(UsageError) as error:
        with_objective(asked, config)
    assert words in str(error.value)
    assert error.value.exit_code == 2


def test_a_label_is_not_a_number_of_classes_beyond_reason(tmp_path: Path) -> None:
    """A class for each number up to the largest label would fill memory; the line is named before any is made."""
    path = lines_in(tmp_path / "x.jsonl", [{"text": "a", "label": 1}, {"text": "b", "label": 10**12}])
    bert = BertConfig(vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=16)
    with pytest.raises(DataError, match=r"x\.jsonl line 2 must have a \"label\" below 1048576, .*got 1000000000000; number the classes from 0"):
        with_head(settings(objective="classify", dataset="jsonl", dataset_path=str(path)), bert)


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_a_probability_is_between_0_and_1(value: float) -> None:
    """Both ends excluded."""
    with pytest.raises(UsageError, match="SHARE in --objective must be above 0 and below 1, got"):
        check_values(settings(mask_probability=value))
    with pytest.raises(UsageError, match="--target-len must be at least 1, got 0"):
        check_values(settings(target_len=0))


def test_what_is_open_is_filled_in(tmp_path: Path) -> None:
    """The config's objective, a length of outputs, no sample where there is no next token; the first line of a file tells its form."""
    assert with_objective(settings(), MASKED).data.objective == "masked"
    assert with_objective(settings(), MASKED).run.sample_tokens == 0
    spans = with_objective(settings(objective="seq2seq"), Learner())
    assert spans.data.target_len == 8
    assert with_objective(spans, Learner()) == spans
    hidden = with_objective(settings(objective="seq2seq", mask_probability=0.99), Learner()).data.target_len
    assert hidden is not None
    assert 60 < hidden <= Learner().n_positions  # of a text with more hidden tokens than the model takes
    forms = {}
    for key, row in {
        "pairs": {"input": "a", "target": "b"},
        "chat": {"messages": []},
        "stream": {"text": "a"},
        "labels": {"text": "", "pair": ""},
    }.items():
        path = str(lines_in(tmp_path / f"{key}.jsonl", [row]))
        kind = {"pairs": "seq2seq", "labels": "classify"}.get(key, "causal")
        filled = with_objective(settings(objective=kind, dataset="jsonl", dataset_path=path), Learner())
        forms[key] = objective_of(filled, Learner())
    assert [each.form for each in forms.values()] == list(forms)
    assert forms["pairs"].target_length == 32
    pairs = settings(objective="seq2seq", dataset="jsonl", dataset_path=str(tmp_path / "pairs.jsonl"), mask_probability=0.3)
    with pytest.raises(UsageError, match=r"SHARE in --objective is for plain texts, in which seq2seq hides spans, got 0\.3 with pairs; drop it"):
        with_objective(pairs, Learner())
    assert forms["labels"].has_pairs


def test_a_run_of_today_learns_the_next_token() -> None:
    """Its batch has tokens and targets alone; checkpoints from before there were objectives agree with it."""
    run = resolve(TrainSettings(model=ModelSettings(model="tiny")), TINY)
    assert run.data.objective.is_plain
    assert run.data.objective.length == run.model.seq_len
    assert run.settings.data.objective == "causal"
    other = replace(run.settings, data=replace(run.settings.data, objective="masked", document_boundaries=True))
    assert differences(run.settings, other) == [
        "--objective (was causal, is masked)",
        "--document-boundaries (was False, is True)",
    ]
