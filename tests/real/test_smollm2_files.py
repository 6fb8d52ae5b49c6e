"""SmolLM2-135M-Instruct written by nntask: blocks beside ggml's own, and files that transformers and llama.cpp read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from support.real_checkpoints import TEXT, command, our_logits, perplexity_of, their_logits

NAME = "SmolLM2-135M-Instruct"
NO_BLOCKS = ("F32", "F16")


@pytest.fixture(scope="module")
def ids(smollm_directory: Path) -> list[int]:
    """Of the text and its end."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm_directory)
    return [*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]


def tensors(path: Path) -> dict[str, Any]:
    """Name -> tensor of a GGUF file, read by the gguf package."""
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def their_model(path: Path) -> Any:
    """transformers' reading of a GGUF file, decoded."""
    how = transformers.GgufConfig(dequantize=True)
    given = {"gguf_file": path.name, "dtype": torch.float32, "quantization_config": how}
    return transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), **given)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_blocks_are_ggmls(
    smollm_directory: Path, smollm_decoded: Path, story: Path, ids: list[int], tmp_path: Path, llama_cpp: Any, figure: Callable[..., None], kind: str
) -> None:
    """Every matrix has the bytes that ggml's own quantisation makes of the same weights. Perplexity in nntask is llama.cpp's of the same blocks
    decoded, and near that of llama.cpp's products with blocks, which round activations to 8 bits."""
    path = tmp_path / f"{kind}.gguf"
    ran = command("quantize", smollm_directory, path, "--type", kind, "--embeddings")
    before, after = tensors(smollm_decoded), tensors(path)
    assert before.keys() == after.keys()
    blocks = [name for name, tensor in after.items() if tensor.tensor_type.name not in NO_BLOCKS]
    assert len(blocks) == sum(len(tensor.shape) == 2 for tensor in before.values())
    for name in blocks:
        np.testing.assert_array_equal(after[name].data, llama_cpp.ggml_quantised(before[name].data, kind), name)
    figure(NAME, f"{len(blocks)} matrices in {kind}", "ggml_quantize_chunk", "same bytes", memory=ran.memory, seconds=ran.seconds)
    scored = command("perplexity", path, "--dataset", "text", "--dataset-path", story, "--seq-len", 512, "--json")
    ours = json.loads(scored.output.splitlines()[-1])["perplexity"]
    command("quantize", path, tmp_path / "decoded.gguf", "--type", "f32")
    for beside, file, tolerance in (("llama.cpp, blocks decoded", tmp_path / "decoded.gguf", 1e-3), ("llama.cpp, the same file", path, 2e-2)):
        opened = llama_cpp.LlamaCpp(file, 512)
        theirs = opened.perplexity(ids)
        opened.close()
        figure(NAME, f"perplexity in {kind}", beside, f"{ours:.5f}, {theirs:.5f}", memory=scored.memory, seconds=scored.seconds)
        assert ours == pytest.approx(theirs, rel=tolerance)


def test_a_written_file_is_read_back(
    smollm_directory: Path, smollm_decoded: Path, ids: list[int], tmp_path: Path, llama_cpp: Any, figure: Callable[..., None]
) -> None:
    """The directory written as GGUF in fp32 is, to transformers and llama.cpp, the model that it was."""
    path = tmp_path / "written.gguf"
    ran = command("quantize", smollm_directory, path, "--type", "f32")
    first = transformers.AutoModelForCausalLM.from_pretrained(smollm_directory).state_dict()
    again = their_model(path).state_dict()
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    figure(NAME, "a directory as GGUF in F32", "transformers' reading of both", "same bits", memory=ran.memory, seconds=ran.seconds)
    found = []
    for file in (smollm_decoded, path):
        opened = llama_cpp.LlamaCpp(file, 512)
        found.append(opened.logits(ids))
        opened.close()
    np.testing.assert_array_equal(*found)
    figure(NAME, "a directory as GGUF in F32", "llama.cpp's logits of both", "same bits")


def test_a_run_is_exported(
    smollm_file: Path, smollm_stream: Path, ids: list[int], tmp_path: Path, llama_cpp: Any, figure: Callable[..., None]
) -> None:
    """A trained run as a directory for transformers and as a GGUF file for llama.cpp: both score the text as nntask does."""
    flags = ("--dataset=train.bin", "--seq-len=64", "--batch=2", "--lr=1e-4", "--warmup-steps=0", "--steps=1", "--sample-tokens=0")
    command("train", "--init-from", smollm_file, "--dataset-path", smollm_stream, *flags, "--run-dir", tmp_path / "run")
    command("export", tmp_path / "run", tmp_path / "directory")
    command("export", tmp_path / "run", tmp_path / "run.gguf", "--format", "gguf")
    ours = our_logits(tmp_path / "run", ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "directory", dtype=torch.float32)
    opened = llama_cpp.LlamaCpp(tmp_path / "run.gguf", 512)
    for beside, theirs in (("transformers", their_logits(model, ids)), ("llama.cpp", opened.logits(ids))):
        apart = float(np.abs(ours - theirs).max())
        figure(NAME, "logits of a trained and exported run", beside, f"{apart:.1e} of logits up to {np.abs(theirs).max():.0f}")
        assert apart < (1e-5 if beside == "transformers" else 5e-3) * np.abs(theirs).max()
        assert perplexity_of(ours, ids) == pytest.approx(perplexity_of(theirs, ids), rel=1e-3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "directory")
    said = [{"role": "user", "content": "Hello!"}]
    before = transformers.AutoTokenizer.from_pretrained(str(smollm_file.parent), gguf_file=smollm_file.name)
    prompt = before.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True) == prompt
    assert tokenizer(prompt)["input_ids"] == opened.ids(prompt) == before(prompt)["input_ids"]
    opened.close()
