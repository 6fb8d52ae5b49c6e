"""Quantised models through the commands: texts, perplexity, plans, comparison, adapters on them (QLoRA) and what those are merged into."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from support.model_directories import TEXT, losses
from support.quantised_directories import write_decoded, write_quantised

from nntask.data.tokenizer import train_bpe
from nntask.models.gpt2 import GPT2Config
from nntask.models.llama import LlamaConfig
from nntask.models.registry import build
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime
from wrappers.cli import main

CONFIGS: dict[str, Any] = {
    "gpt2": GPT2Config(vocab_size=300, n_positions=32, n_embd=64, n_layer=2, n_head=4, initializer_range=0.1).with_dropout(0.0),
    "llama": LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.1,
    ),
}
FLAGS = "--train=lora:4 --lora-alpha=8 --dataset=text --dataset-path=text.txt --batch=4 --minibatch=2 --lr=1e-2 --warmup-steps=0 --sample-tokens=0"
TRAIN = ["train", *FLAGS.split(), "--ncpu=2"]


def of_families(usual: str) -> pytest.MarkDecorator:
    """Every family; those besides the usual one are `long`."""
    each = [name if name == usual else pytest.param(name, marks=pytest.mark.long) for name in CONFIGS]
    return pytest.mark.parametrize("here", each, indirect=True)


@pytest.fixture
def here(folder: Path, request: pytest.FixtureRequest) -> Path:
    """A directory with text, a plain model, a quantised one, and what that stands for."""
    config = replace(CONFIGS[request.param])
    arrays = {name: tensor.read() for name, tensor in build(config, ModelTiling(), InlineRuntime(), seed=4).tensors().items()}
    (folder / "plain").mkdir()
    head = {"lm_head.weight"} if config.tie_word_embeddings else set()
    theirs = {name: np.ascontiguousarray(value) for name, value in config.names.to_hf(arrays, config).items() if name not in head}
    save_file(theirs, folder / "plain" / "model.safetensors", {"format": "pt"})
    (folder / "plain" / "config.json").write_text(json.dumps(config.to_dict()))
    train_bpe([TEXT], 290).save(folder / "plain")
    (folder / "text.txt").write_text(TEXT)
    write_decoded(folder / "plain", folder / "decoded", write_quantised(folder / "plain", folder / "small", "q4_0"))
    return folder


def said(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """What a command that succeeds prints."""
    capsys.readouterr()
    assert main(list(command)) == 0
    return capsys.readouterr().out


@of_families("gpt2")
def test_texts_perplexity_comparison_and_plans(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A quantised directory says what the decoded one says, where commands read models; and a plan of adapters on it needs less."""
    texts = [said(capsys, "generate", name, "--prompt=some words", "--max-new-tokens=8", "--temperature=0") for name in ("small", "decoded")]
    assert texts[0] == texts[1]
    data = ("--dataset=text", "--dataset-path=text.txt", "--seq-len=16", "--json")
    scores = [json.loads(said(capsys, "perplexity", name, *data))["perplexity"] for name in ("small", "decoded")]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    assert json.loads(said(capsys, "compare", "small", "--seq-len=8", "--rtol=0", "--atol=0", "--json"))["equal"]
    plans = [json.loads(said(capsys, "plan", *TRAIN[1:], f"--init-from={name}", "--json")) for name in ("small", "decoded")]
    small, floats = (plan["bytes_by_class"]["parameters"] for plan in plans)
    assert small < 0.75 * floats  # the table of tokens is most of so small a model


@of_families("llama")
def test_adapters_on_a_quantised_base_are_those_on_the_decoded_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The losses, a resumed run bit by bit, texts of the run, and the merged model, which is the sum of the decoded weights and the adapters."""
    assert main([*TRAIN, "--init-from=small", "--steps=4", "--run-dir=a"]) == 0
    assert main([*TRAIN, "--init-from=decoded", "--steps=4", "--run-dir=floats"]) == 0
    assert losses(here / "a") == pytest.approx(losses(here / "floats"), abs=1e-5)
    assert losses(here / "a")[-1] < losses(here / "a")[0] - 0.05
    assert main([*TRAIN, "--init-from=small", "--steps=2", "--run-dir=b", "--ram=1100KiB", "--disk=tier", "--recompute=none"]) == 0
    assert main(["train", "--resume=b", "--steps=4", "--disk=tier", "--ncpu=1", "--sched=eager", "--sample-tokens=0"]) == 0
    assert losses(here / "a") == losses(here / "b")
    texts = [said(capsys, "generate", name, "--prompt=some words", "--max-new-tokens=8", "--temperature=0") for name in ("a", "floats")]
    assert texts[0] == texts[1]
    said(capsys, "export", "a", "merged", "--merge")
    said(capsys, "export", "floats", "plain-merged", "--merge")
    ours, theirs = (load_file(here / name / "model.safetensors") for name in ("merged", "plain-merged"))
    assert set(ours) == set(theirs)
    for name, values in ours.items():
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, theirs[name], atol=1e-4)
    said(capsys, "export", "a", "adapters")
    merged = transformers.AutoModelForCausalLM.from_pretrained(here / "merged")
    assert torch.isfinite(merged(torch.arange(20)[None]).logits).all()


@of_families("gpt2")
def test_all_weights_of_a_quantised_directory_train_as_floats(here: Path) -> None:
    """Without adapters the decoded weights are what training begins with."""
    rest = [each for each in TRAIN if "lora" not in each]
    for name in ("small", "decoded"):
        assert main([*rest, f"--init-from={name}", "--steps=2", f"--run-dir=run-{name}"]) == 0
    assert losses(here / "run-small") == losses(here / "run-decoded")
