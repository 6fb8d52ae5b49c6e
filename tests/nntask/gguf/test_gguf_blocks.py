"""GGUF files whose matrices stay in the blocks that they have: texts, losses of adapters, plans, and what is written from them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.gguf_files import write_gguf
from support.gguf_oracle import big, greedy, read
from support.transformers_oracle import hf_model

from nntask.adapters.frozen_base import FrozenBase
from nntask.adapters.lora import LoRA, add_adapters
from nntask.hf.model_directory import ModelDirectory, block_sizes
from nntask.inference.pretrained import ModelSource
from nntask.models.registry import build
from nntask.optim.optimizers import AdamW
from nntask.tiling.model_tiling import ModelTiling
from scheduler import CapturingRuntime, InlineRuntime
from tiles import BLOCK_FORMATS, QuantisedTensor
from wrappers.cli import main

TYPES = [name.upper() for name in BLOCK_FORMATS]
"""The types that stay as they are."""
FALLBACK = {"ffn_down": "Q6_K", "attn_v": "Q5_0", "attn_k": "IQ4_NL", "token_embd": "Q6_K", "ffn_up": "Q5_1"}
"""Types of some matrices in a file of Q4_K, as a mix of llama.cpp has them."""


def written(folder: Path, name: str, kind: str, mixed: dict[str, str] | None = None) -> tuple[Path, Path]:
    """A file of random blocks, and a file of the floats that the gguf package decodes from them."""
    theirs = hf_model(big(name))
    plain = {"kind": kind} if kind in ("F16", "BF16") else {"random": kind}
    path = write_gguf(folder / "blocks.gguf", theirs, **plain, mixed=mixed or {})
    reader, decoded = gguf.GGUFReader(path), folder / "decoded.gguf"
    writer = gguf.GGUFWriter(decoded, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        values = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, decoded


def formats_of(path: Path) -> dict[str, str]:
    """Our name -> format, of the matrices of a model that is built for texts."""
    model = ModelSource.open(path).build(InlineRuntime(), ModelTiling())
    return {name: each.block_format.name for name, each in model.tensors().items() if isinstance(each, QuantisedTensor)}


@pytest.mark.parametrize("kind", TYPES)
def test_texts_are_those_of_the_decoded_file(tmp_path: Path, kind: str) -> None:
    """Every matrix stays in its blocks, the tied embedding too; weights are the decoded ones, bit by bit, and so are greedy tokens."""
    path, decoded = written(tmp_path, "llama", kind)
    formats = formats_of(path)
    assert set(formats.values()) == {kind.lower()}
    assert len(formats) == sum(len(tensor.shape) == 2 for tensor in gguf.GGUFReader(path).tensors)
    ours, theirs = (read(each, ModelTiling(embd_tile=100, inner_tile=90, head_tile=2, vocab_tile=17)) for each in (path, decoded))
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, name)
    assert greedy(path, [3, 1, 4]) == greedy(decoded, [3, 1, 4])


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "phi"])
def test_a_file_of_several_types_keeps_each(tmp_path: Path, name: str) -> None:
    """A mix as llama.cpp makes them, in families that store matrices turned, paired or with biases."""
    path, decoded = written(tmp_path, name, "Q4_K", FALLBACK)
    kinds = set(formats_of(path).values())
    assert kinds >= {"q4_k", "q6_k", "q5_1"}
    assert block_sizes(path) == (32, 256)
    assert greedy(path, [3, 1, 4]) == greedy(decoded, [3, 1, 4])


def test_memory_of_weights_is_the_file(tmp_path: Path) -> None:
    """All weights of a model take the bytes of the tensors in the file, also where tiles are small."""
    path, _ = written(tmp_path, "llama", "Q4_K", FALLBACK)
    stored = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    for tiling in (ModelTiling(), ModelTiling(embd_tile=20, inner_tile=40, head_tile=2, vocab_tile=17)):
        model = ModelSource.open(path).build(InlineRuntime(), tiling)
        assert sum(tensor.nbytes for tensor in model.tensors().values()) == stored


def losses(path: Path, tiling: ModelTiling) -> list[float]:
    """Four steps of adapters."""
    runtime = InlineRuntime()
    model = build(ModelDirectory.open(path).config, tiling, runtime, seed=None)
    add_adapters(model, LoRA(3, 6.0), seed=1)
    FrozenBase("gguf", str(path)).attach(model)
    optimizer = AdamW(model.parameters(), 2e-3, weight_decay=0.1, max_norm=0.5)
    tokens, targets = model.input_tensors(3)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (3, model.config.n_positions + 1)).astype(np.int32)
    tokens.write(ids[:, :-1])
    targets.write(ids[:, 1:])
    found = []
    for step in range(1, 5):
        optimizer.prepare(step)
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        found.append(float(loss.read()[0]))
    return found


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ4_XS", "Q5_1", "F16"])
def test_adapters_learn_beside_blocks_as_beside_floats(tmp_path: Path, kind: str) -> None:
    """Losses of adapters equal those beside the decoded weights: the gradient passes through products with blocks; 16-bit floats become fp32."""
    path, decoded = written(tmp_path, "llama", kind)
    tiling = ModelTiling(minibatch_tile=2, seq_tile=9, inner_tile=256, vocab_tile=50)
    ours, theirs = losses(path, tiling), losses(decoded, tiling)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5)
    assert ours[-1] < ours[0]


def test_16_bits_are_floats_on_devices_and_in_bf16(tmp_path: Path) -> None:
    """Matrices of F16 stay as they are for products on the CPU in fp32 only; quantised ones stay everywhere."""
    half, _ = written(tmp_path, "llama", "F16")
    blocks = write_gguf(tmp_path / "quantised.gguf", hf_model(big("llama")), random="Q6_K")

    def count(path: Path, dtype: str, *, has_gpus: bool) -> int:
        model = ModelSource.open(path).build(CapturingRuntime(has_gpus=has_gpus), ModelTiling(), dtype, read=False)
        return sum(isinstance(tensor, QuantisedTensor) for tensor in model.tensors().values())

    assert count(half, "fp32", has_gpus=False) == count(blocks, "fp32", has_gpus=False) > 0
    assert count(half, "fp32", has_gpus=True) == count(half, "bf16", has_gpus=False) == 0
    assert count(blocks, "bf16", has_gpus=True) == count(blocks, "fp32", has_gpus=False)


@pytest.mark.parametrize("target", ["new.gguf", "new"])
def test_what_stays_is_copied(tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Matrices that `quantize` leaves as they are keep their type and bytes, turned ones too, and the result says what the decoded one says."""
    path, _ = written(tmp_path, "gpt2", "Q6_K", {"attn_qkv": "Q5_1"})
    new = tmp_path / target
    assert main(["quantize", str(path), str(new), "--type=q4_0", "--keep=*.1.attn.*"]) == 0
    assert "stayed as it was" in capsys.readouterr().out
    before, after = formats_of(path), formats_of(new)
    assert after["wte.weight"] == "q6_k"
    assert (
        {kind for name, kind in after.items() if ".1.attn" in name}
        == {kind for name, kind in before.items() if ".1.attn" in name}
        == {"q5_1", "q6_k"}
    )
    assert {kind for name, kind in after.items() if ".0." in name} == {"q4_0"}
    ours, theirs = read(path, ModelTiling()), read(new, ModelTiling())
    for name in ours:
        if after.get(name) != "q4_0":
            np.testing.assert_array_equal(ours[name], theirs[name], name)


def test_training_tiles_are_whole_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan of adapters on a file takes tiles of whole blocks without being told, and counts the bytes of the blocks."""
    path, decoded = written(tmp_path, "llama", "Q4_K", FALLBACK)
    (tmp_path / "text.txt").write_text("one text of several words. " * 40)
    flags = "--train=lora:2 --dataset=text --tokenizer=bytes --batch=2 --seq-len=8 --sample-tokens=0 --json"
    found = []
    for each in (path, decoded):
        assert main(["plan", *flags.split(), f"--dataset-path={tmp_path / 'text.txt'}", f"--init-from={each}"]) == 0
        found.append(json.loads(capsys.readouterr().out)["bytes_by_class"]["parameters"])
    assert found[0] < 0.3 * found[1]
