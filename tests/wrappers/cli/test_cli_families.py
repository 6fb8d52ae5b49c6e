"""Every family through the commands: trained from a directory of transformers, exported, with adapters, and as a classifier of another model.

By default a family of each kind of directory and data: joined weights, labels, pairs; the others are `long`, and so are adapters on joined weights.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file
from support.commands import refuse
from support.language_directories import BERT, GPT, T5, tokenizer
from support.model_directories import TEXT, losses
from support.transformers_oracle import CONFIGS, EAGER_EXPERTS, hf_logits, hf_model, our_logits, random_batch, seen

from nntask.checkpoints.store import find_checkpoint
from nntask.config.resolution import model_spec
from nntask.config.settings import from_dict
from nntask.engine.models import load_model
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime
from wrappers.cli import main

WORDS = {"causal": GPT, "masked": BERT, "classify": BERT, "seq2seq": T5}
DATA = {
    "causal": "--dataset=text --dataset-path=text.txt",
    "masked": "--dataset=text --dataset-path=text.txt",
    "classify": "--dataset=jsonl --dataset-path=labels.jsonl",
    "seq2seq": "--dataset=jsonl --dataset-path=pairs.jsonl",
}
ENDS = ["--warmup-steps=0", "--sample-tokens=0", "--ncpu=2", "--batch=4", "--minibatch=2"]
LORA = ["--lora-alpha=8", "--lr=1e-2", "--steps=4"]
MIXTURES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
LABELS = ("calm", "glad", "sad")
EVERY = pytest.mark.parametrize(
    "kind", [name if name in ("gpt_neox", "roberta classifier", "t5") else pytest.param(name, marks=pytest.mark.long) for name in CONFIGS]
)


def config_of(kind: str) -> Any:
    """Of `CONFIGS`, with as many ids as the tokenizer has."""
    return replace(CONFIGS[kind], vocab_size=300)


def train(kind: str, *more: str) -> list[str]:
    """The words of a command that trains from the directory."""
    return ["train", "--init-from=start", *DATA[CONFIGS[kind].objective].split(), *ENDS, *more]


@pytest.fixture
def here(folder: Path) -> Path:
    """A directory with texts, lines with labels, and pairs."""
    (folder / "text.txt").write_text(TEXT)
    words = [f"number {i} of {i * i % 17} things" for i in range(60)]
    (folder / "labels.jsonl").write_text("".join(json.dumps({"text": text, "label": i % 2}) + "\n" for i, text in enumerate(words)))
    (folder / "names.jsonl").write_text("".join(json.dumps({"text": text, "label": LABELS[i % 3]}) + "\n" for i, text in enumerate(words)))
    (folder / "pairs.jsonl").write_text("".join(json.dumps({"input": text, "target": text[:9]}) + "\n" for text in words))
    return folder


def write_start(here: Path, kind: str) -> Any:
    """The directory `start` of transformers; returns its module."""
    config = config_of(kind)
    theirs = hf_model(config)
    theirs.save_pretrained(here / "start")
    tokenizer(WORDS[config.objective]).save_pretrained(here / "start")
    return theirs


def our_scores(run: str, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Our logits of a run."""
    checkpoint = find_checkpoint(run)
    model = load_model(checkpoint, model_spec(from_dict(checkpoint.state["settings"], run), checkpoint.config, ModelTiling()), InlineRuntime())
    model.eval()
    return seen(batch, our_logits(model, batch))


def their_scores(module: Any, config: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Those of a module of transformers or PEFT."""
    with torch.no_grad():
        return seen(batch, hf_logits(module.eval(), config, batch))


def opened(path: Path) -> Any:
    """The module of a directory, of which nothing is missing or unexpected."""
    named = getattr(transformers, json.loads((path / "config.json").read_text())["architectures"][0])
    module, info = named.from_pretrained(path, attn_implementation="eager", output_loading_info=True, **EAGER_EXPERTS)
    assert not any(info.values())
    return module


@EVERY
def test_training_goes_on_from_a_directory(here: Path, kind: str) -> None:
    """A step with a learning rate of zero and an export: the bits of the files; a step that learns changes the loss."""
    theirs = write_start(here, kind)
    assert main(train(kind, "--steps=1", "--lr=0", "--weight-decay=0", "--inner-tile=7", "--run-dir=run")) == 0
    assert main(["export", "run", "out"]) == 0
    again = opened(here / "out")
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in again.state_dict().items())
    assert main(train(kind, "--steps=8", "--lr=1e-2", "--run-dir=learns")) == 0
    found = losses(here / "learns")
    assert found[0] == pytest.approx(losses(here / "run")[0], rel=1e-6)  # in other tiles
    assert found[-1] < found[0]


@pytest.mark.parametrize(
    ("kind", "adapters"),
    [
        *[pytest.param(name, "lora:4", marks=() if name == "t5" else pytest.mark.long) for name in CONFIGS],
        *[pytest.param(name, "lora:4:experts", marks=() if name == "qwen3_moe" else pytest.mark.long) for name in MIXTURES],
    ],
)
def test_adapters_are_pefts(here: Path, kind: str, adapters: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Adapters beside the directory, exported for PEFT and merged: our scores, which are not those of the directory. A run resumes bit by bit."""
    import peft  # takes seconds

    config, base, lora = config_of(kind), write_start(here, kind), [f"--train={adapters}", *LORA]
    assert main(train(kind, *lora, "--run-dir=run")) == 0
    assert main(train(kind, *lora, "--run-dir=half", "--steps=2")) == 0
    assert main(["train", "--resume=half", "--steps=4", "--ncpu=1"]) == 0
    assert losses(here / "half") == losses(here / "run")
    a, b = ((here / name / "latest" / "model.safetensors").read_bytes() for name in ("run", "half"))
    assert a == b
    assert main(["export", "run", "adapters"]) == 0
    for argv in (["generate", "adapters"], ["perplexity", "adapters"], ["train", "--init-from=adapters"]):
        assert main(argv) == 4
        assert (
            "adapters has adapters of PEFT and no model; give a model with them merged, as nntask export RUN DIR --merge" in capsys.readouterr().err
        )
    assert main(["export", "run", "merged", "--merge", "--shard-size=20KB"]) == 0
    batch = random_batch(config, 4)
    ours = our_scores("run", batch)
    limit = 1e-4 * max(1.0, np.abs(ours).max())
    assert np.abs(their_scores(base, config, batch) - ours).max() > 2 * limit
    assert np.abs(their_scores(opened(here / "merged"), config, batch) - ours).max() < limit
    theirs = peft.PeftModel.from_pretrained(opened(here / "start"), here / "adapters")
    with safe_open(here / "adapters" / "adapter_model.safetensors", "np") as file:
        assert set(file.keys()) == set(peft.get_peft_model_state_dict(theirs))
    assert np.abs(their_scores(theirs, config, batch) - ours).max() < limit


@pytest.mark.parametrize(
    ("family", "new", "adapters"),
    [
        pytest.param("bert", "bert.pooler.dense.weight", [], id="bert whole"),
        pytest.param("bert", "bert.pooler.dense.weight", ["--train=lora:4"], id="bert adapters", marks=pytest.mark.long),
        pytest.param("roberta", "classifier.dense.weight", [], id="roberta whole", marks=pytest.mark.long),
        pytest.param("roberta", "classifier.dense.weight", ["--train=lora:4"], id="roberta adapters"),
    ],
)
def test_a_classifier_of_a_masked_model(here: Path, family: str, new: str, adapters: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The trunk is the directory's, the head the seed's, and the run says so; names of labels are the data's; it resumes bit by bit."""
    import peft

    base, data = write_start(here, family), ["--objective=classify", "--dataset-path=names.jsonl", "--dataset=jsonl", *adapters]
    argv = train(family, *data, "--lr=1e-2")
    assert main([*argv, "--steps=1", "--run-dir=first"]) == 0
    out = capsys.readouterr().out
    assert "start is of a model with another head; new, from the seed: " in out
    assert new in out
    assert main([*argv, "--steps=6", "--run-dir=a"]) == 0
    assert main([*argv, "--steps=3", "--run-dir=b"]) == 0
    assert main(["train", "--resume=b", "--steps=6", "--ncpu=1"]) == 0
    assert losses(here / "a") == losses(here / "b")
    a, b = ((here / name / "latest" / "model.safetensors").read_bytes() for name in "ab")
    assert a == b
    assert losses(here / "a")[0] == losses(here / "first")[0] == pytest.approx(np.log(3), abs=1.0)
    assert losses(here / "a")[-1] < losses(here / "a")[0]
    checkpoint = find_checkpoint("a")
    assert (checkpoint.config.num_labels, dict(checkpoint.config.id2label)) == (3, {"0": "calm", "1": "glad", "2": "sad"})
    assert main(["export", "a", "out", *(["--merge"] if adapters else [])]) == 0
    theirs, batch = opened(here / "out"), random_batch(checkpoint.config, 4)
    assert theirs.config.id2label == {0: "calm", 1: "glad", 2: "sad"}
    ours = our_scores("a", batch)
    assert np.abs(their_scores(theirs, checkpoint.config, batch) - ours).max() < 1e-4 * max(1.0, np.abs(ours).max())
    if adapters:
        assert main(["export", "a", "adapters"]) == 0
        kind = type(theirs)
        bare = kind.from_pretrained(here / "start", attn_implementation="eager", num_labels=3)
        theirs = peft.PeftModel.from_pretrained(bare, here / "adapters")
        with safe_open(here / "adapters" / "adapter_model.safetensors", "np") as file:
            assert set(file.keys()) == set(peft.get_peft_model_state_dict(theirs))
        assert np.abs(their_scores(theirs, checkpoint.config, batch) - ours).max() < 1e-4 * max(1.0, np.abs(ours).max())
    else:
        assert main(["export", "first", "after"]) == 0
        weights = load_file(here / "after" / "model.safetensors")
        trunk = next(name for name in weights if name.endswith("word_embeddings.weight"))
        assert np.abs(weights[trunk] - base.state_dict()[trunk].numpy()).max() < 0.02  # one step away
    capsys.readouterr()
    code, err = refuse(capsys, ["train", "--init-from=out", *DATA["masked"].split(), *ENDS, "--objective=masked", "--run-dir=c"])
    assert (code, "--init-from out is a classifier, whose head predicts labels alone, got --objective masked" in err) == (2, True), err


def test_classes_that_a_config_names_and_numbers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """id2label of a masked model, numbers of labels, a pooler that the files have, and a classifier from the seed."""
    write_start(here, "bert")
    path = here / "start" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "id2label": {"0": "no", "1": "yes", "2": "sad", "3": "calm", "4": "glad"}}))
    argv = train("bert", "--objective=classify", "--steps=1", "--dataset=jsonl", "--dataset-path=names.jsonl")
    assert main([*argv, "--run-dir=a"]) == 0
    assert find_checkpoint("a").config.num_labels == 5
    path.write_text(json.dumps(values))
    assert main([*argv, "--dataset-path=labels.jsonl", "--run-dir=b"]) == 0
    assert (find_checkpoint("b").config.num_labels, find_checkpoint("b").config.id2label) == (2, None)
    assert main(["export", "b", "b-out"]) == 0
    assert "another head" in capsys.readouterr().out
    (here / "small.json").write_text(json.dumps(config_of("bert").to_dict()))
    argv = [word for word in argv if not word.startswith("--init-from")]
    assert main([*argv, "--config-path=small.json", "--tokenizer-path=start", "--run-dir=c"]) == 0
    assert "another head" not in capsys.readouterr().out
    assert main([*argv, "--config-path=small.json", "--tokenizer-path=start", "--train=lora:2", "--run-dir=d", "--steps=2"]) == 0
    assert main(["train", "--resume=d", "--steps=3"]) == 0
    assert main(["export", "d", "merged", "--merge"]) == 0
    opened(here / "merged")


def test_adapters_of_a_classifier_beside_a_file_of_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The head begins as in the file, and a merged export holds it as trained; a plan counts what is trained."""
    write_start(here, "bert classifier")
    assert main(train("bert classifier", "--steps=1", "--lr=0", "--run-dir=a")) == 0
    assert main(["export", "a", "all.safetensors", "--format=weights"]) == 0
    (here / "small.json").write_text(json.dumps(config_of("bert classifier").to_dict()))
    argv = [word for word in train("bert classifier", "--train=lora:4", *LORA) if not word.startswith("--init-from")]
    argv += ["--config-path=small.json", "--init-from=all.safetensors", "--tokenizer-path=start"]
    assert main([*argv, "--run-dir=b"]) == 0
    assert losses(here / "b")[0] == losses(here / "a")[0]
    assert main(["export", "b", "merged", "--merge"]) == 0
    batch = random_batch(config_of("bert classifier"), 4)
    ours = our_scores("b", batch)
    assert np.abs(their_scores(opened(here / "merged"), config_of("bert classifier"), batch) - ours).max() < 1e-4 * max(1.0, np.abs(ours).max())
    head = load_file(here / "b" / "latest" / "model.safetensors")
    assert {name for name in head if ".lora." not in name} == {"head.transform.weight", "head.transform.bias", "lm_head", "head_bias"}
    capsys.readouterr()
    write_start(here, "bert")
    assert (
        main(["plan", "--init-from=start", "--objective=classify", "--dataset=jsonl", "--dataset-path=names.jsonl", "--train=lora:4", "--json"]) == 0
    )
    figures = json.loads(capsys.readouterr().out)
    assert figures["trained_parameters"] < figures["parameters"]
