"""``nntask train`` on the families: each objective is learnt from a config, and wrong configs, data and flags are one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.commands import refuse
from support.objective_data import TEXTS, lines_in
from support.transformers_oracle import CONFIGS

from wrappers.cli import main

TRAIN = ["train", "--tokenizer=bytes", "--seq-len=8", "--batch=4", "--steps=1", "--ncpu=1", "--sample-tokens=0"]


@pytest.fixture
def here(folder: Path) -> Path:
    """A directory with data."""
    lines_in(folder / "text.jsonl", [{"text": text} for text in TEXTS])
    lines_in(folder / "labels.jsonl", [{"text": text, "label": at % 2} for at, text in enumerate(TEXTS)])
    lines_in(folder / "far.jsonl", [{"text": text, "label": at} for at, text in enumerate(TEXTS)])
    lines_in(folder / "pairs.jsonl", [{"text": text, "pair": text[:3], "label": at % 2} for at, text in enumerate(TEXTS)])
    lines_in(folder / "named.jsonl", [{"text": text, "label": ("glad", "calm", "sad")[at % 3]} for at, text in enumerate(TEXTS)])
    (folder / "text.txt").write_text("\n".join(TEXTS))
    return folder


def config_of(name: str, **changes: Any) -> str:
    """The flag for a family's config with changed values, in a file of this directory."""
    Path("config.json").write_text(json.dumps({**CONFIGS[name].to_dict(), "vocab_size": 300, **changes}))
    return "--config-path=config.json"


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("t5", ["--dataset=text", "--dataset-path=text.txt"]),
        ("bert classifier", ["--dataset=jsonl", "--dataset-path=labels.jsonl"]),
        ("bert", ["--dataset=jsonl", "--dataset-path=labels.jsonl", "--objective=classify"]),
        ("bert", ["--dataset=jsonl", "--dataset-path=named.jsonl", "--objective=classify"]),
        ("roberta classifier", ["--dataset=jsonl", "--dataset-path=pairs.jsonl"]),
        ("gpt_neo", ["--dataset=text", "--dataset-path=text.txt"]),
    ],
)
def test_a_config_trains(here: Path, capsys: pytest.CaptureFixture[str], name: str, flags: list[str]) -> None:
    """What it learns by itself, or what --objective makes of it; the run goes on with the same head. Names of classes that transformers makes up are
    none, and a model with one kind of tokens takes pairs."""
    more: dict[str, Any] = {"bert": {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, "roberta classifier": {"type_vocab_size": 1}}
    assert main([*TRAIN, config_of(name, **more.get(name, {})), *flags, "--run-dir=run"]) == 0
    assert main(["train", "--resume=run", "--steps=2"]) == 0
    assert "step 2/2" in capsys.readouterr().out


def test_unknown_keys_are_named_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By training from a config, and by commands that take a model directory; a run that goes on says nothing."""
    data = ["--dataset=text", "--dataset-path=text.txt"]
    words = "has keys that LLaMA does not have, here or in transformers, and they are ignored: foo"
    assert main([*TRAIN, config_of("llama", foo=3), *data, "--run-dir=run"]) == 0
    assert capsys.readouterr().err.count(words) == 1
    assert main(["export", "run", "model"]) == 0
    assert "foo" not in capsys.readouterr().err
    values = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps({**values, "foo": 3}))
    Path("short.txt").write_text(TEXTS[0])
    for argv in (
        ["generate", "model", "--prompt=a", "--max-new-tokens=1"],
        ["perplexity", "model", "--dataset=text", "--dataset-path=short.txt", "--seq-len=8"],
        ["quantize", "model", "small", "--type=f16"],
        [*TRAIN[:1], "--init-from=model", *data, "--seq-len=8", "--batch=4", "--steps=1", "--sample-tokens=0"],
    ):
        assert main(argv) == 0
        assert capsys.readouterr().err.count(words) == 1, argv


def test_conversations_have_the_losses_of_each_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Validation of a GPT-2 is the same number whether conversations share a sequence or not, since each begins at position 0."""
    lines_in(
        here / "chat.jsonl",
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"[: 1 + n % 3]}]} for n in range(24)],
    )
    Path("t.jinja").write_text("{% for m in messages %}{{ m.content }}{{ '.' }}{% endfor %}")
    chat = ["--dataset=jsonl", "--dataset-path=chat.jsonl", "--val-path=chat.jsonl", "--chat-template=t.jinja", "--eval-every=1", "--lr=1e-9"]
    found = []
    for more in ([], ["--document-boundaries"]):
        argv = [*TRAIN, config_of("gpt2", n_positions=16), *chat, *more, "--seq-len=16", "--eval-batches=99", f"--run-dir=run{len(more)}"]
        assert main([flag for flag in argv if flag != "--seq-len=8"]) == 0
        found.append(float(re.findall(r"validation loss ([0-9.]+)", capsys.readouterr().out)[-1]))
    assert found[0] == pytest.approx(found[1], abs=2e-4)


def test_outputs_may_be_longer_than_inputs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A T5 writes texts as long as those it was trained to write."""
    lines_in(here / "outputs.jsonl", [{"input": text[:4], "target": text} for text in TEXTS])
    assert main([*TRAIN, config_of("t5"), "--dataset=jsonl", "--dataset-path=outputs.jsonl", "--target-len=12", "--run-dir=run"]) == 0
    capsys.readouterr()
    assert main(["generate", "run", "--prompt=abc", "--max-new-tokens=11", "--temperature=5", "--json", "--ncpu=1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["end"]) == (11, "length")


CLASSIFIED = ["--dataset=jsonl", "--dataset-path=far.jsonl"]


@pytest.mark.parametrize(
    ("name", "changes", "flags", "code", "words"),
    [
        ("bert classifier", {}, ["--dataset=text", "--dataset-path=text.txt"], 2, "got --dataset text; use --dataset jsonl"),
        ("bert classifier", {}, CLASSIFIED, 4, 'must have a "label", a whole number from 0 to 2, got 3'),
        ("bert", {}, ["--dataset=text", "--dataset-path=text.txt"], 4, "the tokenizer of the data has none or is not known"),
        ("bert", {}, ["--dataset=text", "--dataset-path=text.txt", "--objective=seq2seq"], 2, "is not for a bert, which learns masked, classify"),
        ("t5", {}, ["--dataset=text", "--dataset-path=text.txt", "--objective=causal"], 2, "is not for a t5, which learns seq2seq"),
        ("t5", {"relative_attention_num_buckets": 9}, [], 2, "must be a multiple of 4"),
        ("gpt_neo", {"num_layers": 10**40}, [], 2, "num_layers in config.json must be at most"),
        ("gemma3", {"layer_types": 3}, [], 2, "layer_types in config.json must be a list of"),
        ("mistral", {"sliding_window": 0}, [], 2, "sliding_window in config.json must be at least 1"),
        ("phi", {"num_attention_heads": "6"}, [], 2, "num_attention_heads in config.json must be a whole number"),
        ("bert classifier", {"num_labels": 1, "id2label": None}, CLASSIFIED, 2, "takes a model with two classes or more, got num_labels 1"),
        ("bert classifier", {"num_labels": 7}, CLASSIFIED, 2, "must name num_labels = 7 classes"),
        ("qwen2", {"model_type": "qwen"}, [], 2, "qwen"),
    ],
)
def test_mistakes_are_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, changes: dict[str, Any], flags: list[str], code: int, words: str
) -> None:
    """With the exit code of what is wrong."""
    found, message = refuse(capsys, [*TRAIN, config_of(name, **changes), *flags])
    assert (found, words in message) == (code, True), message
