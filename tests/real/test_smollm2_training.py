"""SmolLM2-135M-Instruct trained by the command: all weights beside torch, a quarter of the memory, and adapters beside PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from support.real_checkpoints import Ran, command, sequences, torch_losses

NAME = "SmolLM2-135M-Instruct"
LENGTH, RATE = 64, 1e-4
FLAGS = ("--dataset=train.bin", f"--seq-len={LENGTH}", "--batch=2", f"--lr={RATE}", "--warmup-steps=0", "--sample-tokens=0", "--ncpu=2")


def losses(run: Path) -> list[float]:
    """Of every step."""
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def arrays(path: Path) -> dict[str, bytes]:
    """Name -> bytes of the tensors of a checkpoint's files."""
    return {f"{file.name} {name}": value.tobytes() for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


def their_model(path: Path) -> Any:
    """The module of transformers, in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def whole(smollm_file: Path, smollm_stream: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """A run of five steps of all weights in plenty of memory, and its command."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return run, command("train", "--init-from", smollm_file, "--dataset-path", smollm_stream, *FLAGS, "--steps=5", "--run-dir", run)


def test_losses_are_torchs(whole: tuple[Path, Ran], smollm_directory: Path, smollm_stream: Path, tmp_path: Path, figure: Callable[..., None]) -> None:
    """Five steps of AdamW beside torch on the decoded weights; the export scores a text as torch's model does behind its steps."""
    run, ran = whole
    model = their_model(smollm_directory)
    ids = sequences(smollm_stream, LENGTH)
    expected = torch_losses(model, ids, 5, RATE)
    apart = float(np.abs(np.array(losses(run)) - expected).max())
    figure(
        NAME,
        "losses of 5 steps of all weights",
        "torch",
        f"{apart:.1e} of {expected[0]:.4f} to {expected[-1]:.4f}",
        memory=ran.memory,
        seconds=ran.seconds,
    )
    assert apart < 2e-4
    exported = tmp_path / "exported"
    command("export", run, exported)
    with torch.no_grad():
        ours, theirs = (each(ids[:, :-1]).logits for each in (their_model(exported), model))
    away = float((ours - theirs).abs().max())
    figure(NAME, "logits of the exported run", "torch's model after the same steps", f"{away:.1e} of logits up to {float(theirs.abs().max()):.0f}")
    assert away < 2e-2


def test_a_quarter_of_the_memory(
    whole: tuple[Path, Ran], smollm_file: Path, smollm_stream: Path, tmp_path: Path, figure: Callable[..., None]
) -> None:
    """With a disk below: every loss, weight and moment has the same bits."""
    run, _ = whole
    peak = json.loads((run / "summary.json").read_text())["peak_bytes"]["ram"]
    (tmp_path / "disk").mkdir()
    memory = (f"--ram={peak // 4}B", f"--disk={tmp_path / 'disk'}")
    ran = command("train", "--init-from", smollm_file, "--dataset-path", smollm_stream, *FLAGS, "--steps=5", "--run-dir", tmp_path / "run", *memory)
    assert losses(tmp_path / "run") == losses(run)
    assert arrays(tmp_path / "run" / "latest") == arrays(run / "latest")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["peak_bytes"]["ram"] <= peak // 4
    budget = f"the same run in {peak / 2**20:,.0f} MiB"
    figure(NAME, f"5 steps in {peak / 2**22:,.0f} MiB and a disk", budget, "same bits", memory=ran.memory, seconds=ran.seconds)


@pytest.mark.parametrize("kind", ["file", "q8_0"])
def test_adapters_are_pefts(
    smollm_file: Path, smollm_directory: Path, smollm_stream: Path, tmp_path: Path, figure: Callable[..., None], kind: str
) -> None:
    """Ten steps of adapters of rank 8 beside PEFT from the same first values: beside the file as it is, and beside blocks of q8_0. The adapters of a
    run of one step at rate 0 are these first values; the merged export is PEFT's merged model."""
    import peft  # takes seconds

    base, decoded = smollm_file, smollm_directory
    if kind == "q8_0":
        base, decoded = tmp_path / "q8", tmp_path / "decoded"
        command("quantize", smollm_directory, base, "--type", "q8_0")
        command("quantize", base, tmp_path / "decoded.gguf", "--type", "f32")
        _save_decoded(tmp_path / "decoded.gguf", decoded)
    given = ("--init-from", base, "--dataset-path", smollm_stream, *FLAGS, "--train=lora:8", "--lora-alpha=16")
    command("train", *given, "--lr=0", "--steps=1", "--run-dir", tmp_path / "first")
    command("export", tmp_path / "first", tmp_path / "adapters")
    ran = command("train", *given, "--lr=1e-3", "--steps=10", "--run-dir", tmp_path / "run")
    theirs = peft.PeftModel.from_pretrained(their_model(decoded), tmp_path / "adapters", is_trainable=True)
    ids = sequences(smollm_stream, LENGTH)
    expected = torch_losses(theirs, ids, 10, 1e-3)
    apart = float(np.abs(np.array(losses(tmp_path / "run")) - expected).max())
    what = "losses of 10 steps of adapters" + (" on q8_0" if kind == "q8_0" else "")
    figure(NAME, what, "PEFT", f"{apart:.1e} of {expected[0]:.4f} to {expected[-1]:.4f}", memory=ran.memory, seconds=ran.seconds)
    assert apart < 5e-4
    assert expected[-1] < expected[0] - 0.3
    if kind == "file":
        command("export", tmp_path / "run", tmp_path / "merged", "--merge")
        with torch.no_grad():
            merged = their_model(tmp_path / "merged")(ids[:, :-1]).logits
            away = float((merged - theirs(ids[:, :-1]).logits).abs().max())
        figure(
            NAME, "logits of the merged adapters", "PEFT's model after the same steps", f"{away:.1e} of logits up to {float(merged.abs().max()):.0f}"
        )
        assert away < 2e-2


TALKS = [
    [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."}],
    [
        {"role": "system", "content": "You are a lighthouse keeper."},
        {"role": "user", "content": "Is there a storm?"},
        {"role": "assistant", "content": "Yes, from the south-west. Keep away from the reef!"},
    ],
]


def test_conversations_are_learnt_by_the_files_own_template(
    smollm_file: Path, smollm_directory: Path, tmp_path: Path, figure: Callable[..., None]
) -> None:
    """The first loss of a run on two conversations is that of transformers' model over the tokens of the answers and their ends, in the template
    that the file brings along."""
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    data = ("--dataset=jsonl", "--dataset-path", tmp_path / "talks.jsonl", "--val-path", tmp_path / "talks.jsonl", "--seq-len=96", "--batch=2")
    how = ("--train=lora:4", "--steps=1", "--lr=0", "--warmup-steps=0", "--sample-tokens=0")
    ran = command("train", "--init-from", smollm_file, *data, *how, "--run-dir", tmp_path / "run")
    model, tokenizer = their_model(smollm_directory), transformers.AutoTokenizer.from_pretrained(smollm_directory)
    scores = []
    for talk in TALKS:
        first = len(tokenizer.apply_chat_template(talk[:-1], add_generation_prompt=True)["input_ids"])
        ids = torch.tensor(tokenizer.apply_chat_template(talk)["input_ids"])
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        scores.append(torch.nn.functional.cross_entropy(logits[first - 1 : -1], ids[first:], reduction="none"))
    expected = float(torch.cat(scores).mean())
    (ours,) = losses(tmp_path / "run")
    figure(
        NAME,
        "loss of the answers of 2 conversations",
        "transformers",
        f"{abs(ours - expected):.1e} of {expected:.4f}",
        memory=ran.memory,
        seconds=ran.seconds,
    )
    assert ours == pytest.approx(expected, rel=1e-4)


def _save_decoded(file: Path, path: Path) -> None:
    """A directory of transformers from a GGUF file of fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    model.save_pretrained(path)
