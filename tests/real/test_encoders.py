"""Real encoders: all-MiniLM-L6-v2, and the BERTs for chemical reactions of rxnfp, one that fills masks and one of 50 classes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.commands import refuse
from support.real_checkpoints import TEXT, classifier_losses, command, our_logits, their_logits

from nntask import ModelTiling, no_grad
from nntask.data import load_tokenizer
from nntask.hf.model_directory import ModelDirectory
from nntask.models.registry import build
from scheduler import InlineRuntime

MINILM, REACTIONS = "all-MiniLM-L6-v2", "rxnfp"
LENGTH, STEPS, RATE = 48, 5, 1e-4
REVIEWS = [
    ("a warm and funny film", 1),
    ("two hours I will not get back", 0),
    ("the best play of the year", 1),
    ("dull, long and loud", 0),
    ("I laughed and I cried", 1),
    ("the story makes no sense at all", 0),
]
ESTER = "CC(=O)O.OCC>>CC(=O)OCC"
SMILES = [
    (ESTER, 3),
    ("c1ccccc1Br.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1", 17),
    ("CC(=O)Cl.NCC>>CC(=O)NCC", 8),
    ("CC=O.[BH4-].[Na+]>>CCO", 42),
]
MASKED = "CC(=O)O.OCC>>C[MASK](=O)OCC.[MASK]"


def write_rows(path: Path, rows: Sequence[tuple[str, int]]) -> Path:
    """Texts with labels as JSON lines."""
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    return path


def classifier_run(base: Path, rows: Path, run: Path, steps: int, rate: float, batch: int) -> Any:
    """The command that trains a classifier on all rows in every step, without dropout."""
    data = ("--objective=classify", "--dataset=jsonl", "--dataset-path", rows, "--val-path", rows, f"--seq-len={LENGTH}", f"--batch={batch}")
    how = (f"--steps={steps}", f"--lr={rate}", "--warmup-steps=0", "--dropout=0")
    return command("train", "--init-from", base, *data, *how, "--run-dir", run)


@pytest.mark.parametrize("name", ["minilm", "masked", "classify"])
def test_ids(minilm_directory: Path, reaction_directories: dict[str, Path], name: str) -> None:
    """Of long texts too: all-MiniLM's tokenizer.json cuts to 128 tokens and fills up, which transformers does only if it is asked."""
    path = minilm_directory if name == "minilm" else reaction_directories[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    for text in [ESTER * 20, SMILES[1][0]] if name != "minilm" else [TEXT, "Hello, Wörld!"]:
        (found,) = load_tokenizer(path).encode([text], special=True)
        assert found.tolist() == tokenizer(text)["input_ids"]


def test_filled_masks(reaction_directories: dict[str, Path], figure: Callable[..., None]) -> None:
    """``nntask generate`` puts in what transformers finds most probable, with its probability; logits are transformers'."""
    path = reaction_directories["masked"]
    model = transformers.AutoModelForMaskedLM.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids = tokenizer(MASKED)["input_ids"]
    theirs = their_logits(model, ids)
    apart = float(np.abs(our_logits(path, ids) - theirs).max())
    figure(REACTIONS, f"logits of {len(ids)} tokens", "transformers", f"{apart:.1e} of logits up to {np.abs(theirs).max():.0f}")
    assert apart < 1e-5 * np.abs(theirs).max()
    ran = command("generate", path, "--prompt", MASKED, "--json")
    masks = [at for at, token in enumerate(ids) if token == tokenizer.mask_token_id]
    for found, row in zip(json.loads(ran.output)["masks"], torch.from_numpy(theirs[masks]).double().softmax(1), strict=True):
        best = int(row.argmax())
        assert (found[0]["token"], found[0]["probability"]) == (tokenizer.decode([best]), pytest.approx(float(row[best]), abs=1e-5))
    figure(REACTIONS, "filled masks", "transformers", "equal", memory=ran.memory, seconds=ran.seconds)


@pytest.mark.parametrize("name", [MINILM, REACTIONS])
def test_classifiers_learn_as_in_torch(
    minilm_directory: Path, reaction_directories: dict[str, Path], tmp_path: Path, figure: Callable[..., None], name: str
) -> None:
    """Five steps beside torch: all-MiniLM gets a new classifier, whose first values a run at rate 0 exports; rxnfp has 50 classes already. The
    exported run is, to transformers, the classifier that torch has trained."""
    base, pairs = (minilm_directory, REVIEWS) if name == MINILM else (reaction_directories["classify"], SMILES)
    rows = write_rows(tmp_path / "rows.jsonl", pairs)
    start = base
    if name == MINILM:
        start = tmp_path / "start"
        classifier_run(base, rows, tmp_path / "first", 1, 0, len(pairs))
        command("export", tmp_path / "first", start)
    ran = classifier_run(base, rows, tmp_path / "run", STEPS, RATE, len(pairs))
    ours = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(start, dtype=torch.float32).eval()
    theirs = classifier_losses(model, transformers.AutoTokenizer.from_pretrained(base), pairs, LENGTH, STEPS, RATE)
    apart = float(np.abs(np.array(ours) - theirs).max())
    figure(name, f"losses of {STEPS} steps of a classifier", "torch", f"{apart:.1e} of {theirs[0]:.4f}", memory=ran.memory, seconds=ran.seconds)
    assert apart < 2e-4
    command("export", tmp_path / "run", tmp_path / "exported")
    exported = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    ids = transformers.AutoTokenizer.from_pretrained(base)(pairs[0][0])["input_ids"]
    away = float(np.abs(their_logits(exported, ids) - their_logits(model, ids)).max())
    assert away < 1e-2
    assert exported.config.num_labels == model.config.num_labels


def their_pooled(path: Path, ids: Sequence[int]) -> np.ndarray:
    """What a classifier reads, by transformers, (features)."""
    with torch.no_grad():
        return transformers.AutoModel.from_pretrained(path).eval()(torch.tensor([list(ids)])).pooler_output[0].numpy()


def test_hidden_states(minilm_directory: Path, figure: Callable[..., None]) -> None:
    """What a classifier would read of all-MiniLM, behind all of its layers, is what transformers has there."""
    ids = transformers.AutoTokenizer.from_pretrained(minilm_directory)(TEXT)["input_ids"]
    config = ModelDirectory.open(minilm_directory).config.for_objective("classify", 2)
    model = build(config.with_dropout(0.0), ModelTiling(), InlineRuntime(), seed=0)
    ModelDirectory.open(minilm_directory, config).attach(model.tensors())
    model.eval()
    tokens, _ = model.input_tensors(1, len(ids))
    tokens.write(np.array([ids], np.int32))
    with no_grad():
        ours = model.trunk(tokens, None).read()[0, 0]
    apart = float(np.abs(ours - their_pooled(minilm_directory, ids)).max())
    figure(MINILM, f"pooled features of {len(ids)} tokens", "transformers", f"{apart:.1e} of features up to 1")
    assert apart < 1e-5


def test_an_encoder_without_a_head_says_so(minilm_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """all-MiniLM has no head that predicts: nothing of it is missing, and the sentence says what can be made of it."""
    for line in (["generate", str(minilm_directory), "--prompt", "hello [MASK]"], ["train", "--init-from", str(minilm_directory), "--steps=1"]):
        code, err = refuse(capsys, line)
        assert code == 4
        assert "has no head" in err
        assert "--objective classify" in err
        assert "copy it again" not in err
