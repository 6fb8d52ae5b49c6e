"""``nntask generate`` of models that do not continue prompts: outputs of T5, masks that BERT fills, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import refuse
from support.language_directories import BERT, T5, tokenizer
from support.transformers_oracle import CONFIGS, hf_model

from wrappers.cli import main


def written(path: Path, name: str, words: dict[str, str]) -> Any:
    """A directory of a small model with a tokenizer; returns transformers' model."""
    theirs = hf_model(replace(CONFIGS[name], vocab_size=300)).eval()
    theirs.generation_config = None if not theirs.can_generate() else theirs.generation_config
    theirs.save_pretrained(path)
    tokenizer(words).save_pretrained(path)
    return theirs


def test_masks_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The best tokens behind each mask are transformers', and a text without one is refused."""
    monkeypatch.chdir(tmp_path)
    theirs, words = written(tmp_path / "m", "bert", BERT), tokenizer(BERT)
    prompt = "an [MASK] at [MASK]."
    assert main(["generate", "m", f"--prompt={prompt}", "--json", "--ncpu=1"]) == 0
    found = json.loads(capsys.readouterr().out)
    ids = torch.tensor([words(prompt)["input_ids"]])
    with torch.no_grad():
        shares = theirs(ids).logits[0].softmax(-1)
    masks = (ids[0] == words.mask_token_id).nonzero()[:, 0].tolist()
    assert len(found["masks"]) == len(masks) == 2
    for mask, at in zip(found["masks"], masks, strict=True):
        best = shares[at].topk(5)
        assert [each["token"] for each in mask] == [words.decode([token]) for token in best.indices.tolist()]  # special ones by their names
        assert [each["probability"] for each in mask] == pytest.approx(best.values.tolist(), rel=1e-3)
    assert main(["generate", "m", f"--prompt={prompt}", "--ncpu=1"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == found["text"]
    code, err = refuse(capsys, ["perplexity", "m", "--dataset=stdlib", "--ncpu=1"])
    assert (code, "perplexity needs a model that predicts the next token, and m is a bert" in err) == (2, True), err
    for flags, said in (
        (["--max-new-tokens=3"], "--max-new-tokens 3"),
        (["--no-cache"], "--no-cache"),
        (["--top-k=2"], "--top-k 2"),
        (["--num-beams=2"], "--num-beams 2"),
    ):
        code, err = refuse(capsys, ["generate", "m", f"--prompt={prompt}", *flags, "--ncpu=1"])
        assert (code, f"{said} is for text generation, and m fills masks; drop it" in err) == (2, True), err
    code, err = refuse(capsys, ["generate", "m", "--prompt=no masks", "--ncpu=1"])
    assert (code, "the prompt has none; write [MASK]" in err) == (2, True), err


def test_outputs_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The prompt is what the encoder reads, and what is printed is the output; greedy and by four beams."""
    monkeypatch.chdir(tmp_path)
    theirs, words = written(tmp_path / "m", "t5 gated", T5), tokenizer(T5)
    ids = torch.tensor([[*words("ab cd")["input_ids"], words.eos_token_id]])  # rows end so where the tokenizer has no template
    for more, beams in (([], 1), (["--num-beams=4"], 4)):
        assert main(["generate", "m", "--prompt=ab cd", "--temperature=0", "--max-new-tokens=6", "--json", "--ncpu=1", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        expected = theirs.generate(ids, max_new_tokens=6, do_sample=False, num_beams=beams, eos_token_id=words.eos_token_id, pad_token_id=0)[0]
        assert found["text"] == words.decode(expected, skip_special_tokens=True)


def test_a_classifier_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "m", "bert classifier", BERT)
    capsys.readouterr()
    code, err = refuse(capsys, ["generate", "m", "--prompt=ab", "--ncpu=1"])
    assert (code, "predicts a class cannot generate text" in err) == (2, True), err


def test_a_model_of_images_is_not_asked_for_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It writes nothing with one either, so neither generate nor export advises to add it."""
    monkeypatch.chdir(tmp_path)
    np.savez("digits.npz", images=np.zeros((40, 8, 8, 1), np.uint8), labels=np.arange(40) % 10)
    argv = ["--model=mixer-tiny", "--dataset=images", "--dataset-path=digits.npz", "--batch=8", "--steps=1", "--ncpu=1", "--run-dir=run"]
    assert main(["train", *argv]) == 0
    capsys.readouterr()
    assert main(["export", "run", "out"]) == 0
    assert "token" not in capsys.readouterr().out
    for model in ("run", "out"):
        code, err = refuse(capsys, ["generate", model, "--prompt=ab", "--ncpu=1"])
        assert (code, "a mlp_mixer that predicts a class cannot generate text" in err) == (2, True), err


def test_hit_rates_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line at the end if weights can be elsewhere than in memory, and none for other models."""
    monkeypatch.chdir(tmp_path)
    for name in ("olmoe", "llama"):
        written(tmp_path / name, name, BERT)
        assert main(["generate", name, "--prompt=an", "--max-new-tokens=5", "--ncpu=1", "--ram=800KiB", "--disk=tier:64MiB"]) == 0
        shown = capsys.readouterr().err
        assert (re.search(r"^experts: \d+\.\d% of the chosen ones were in memory$", shown, re.MULTILINE) is not None) == (name == "olmoe")
