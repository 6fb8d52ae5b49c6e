"""GGUF files of mixtures of experts: matrices of all experts in one tensor, whole and broken files, and files that say less than llama.cpp's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
from support.gguf_files import write_gguf as write_theirs
from support.gguf_oracle import MIXTURES, big, expressible, greedy, read, wide
from support.transformers_oracle import hf_model, our_logits, random_batch, tiles

from nntask.errors import DataError, NntaskError, StorageError, UsageError
from nntask.export import Conversion, Convertible, write_gguf, write_quantised
from nntask.hf.model_directory import ModelDirectory
from nntask.inference.pretrained import ModelSource
from nntask.models.registry import build
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime
from tiles import QuantisedTensor
from wrappers.cli import main


def opened(path: Path) -> Convertible:
    """A directory or a file, opened."""
    return Convertible.of(path, ModelDirectory.open(path).config, None, None)


def logits_of(path: Path, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Scores of the model of a directory or a file, in tiles."""
    config = ModelDirectory.open(path).config
    model = ModelSource.open(path).build(InlineRuntime(), tiles(config))
    return np.asarray(our_logits(model, batch))


def without(
    source: Path,
    target: Path,
    left_out: str,
    changes: Mapping[str, int],
    *,
    is_apart: bool = False,
    more: Mapping[str, np.ndarray] = MappingProxyType({}),
    is_first: bool = False,
) -> Path:
    """A file without keys and tensors that end in `left_out`, and with other numbers of some keys.

    Args:
        is_apart: whether the file has a tensor for each expert, as llama.cpp's converter first wrote them.
        more: fp32 tensors to add, or to put in the place of others.
        is_first: whether those come before the others in the file.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and not (left_out and key.endswith(left_out)):
            value = changes.get(key.rpartition(".")[2], field.contents())
            writer.add_key_value(key, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    tensors = [(name, values, None) for name, values in more.items()]
    others = []
    for tensor in reader.tensors:
        pieces = {tensor.name: np.array(tensor.data)}
        if is_apart and tensor.name.endswith("_exps.weight"):
            pieces = {tensor.name.replace("_exps.weight", f".{expert}.weight"): values for expert, values in enumerate(pieces[tensor.name])}
        for name, values in pieces.items():
            if not (left_out and name.endswith(left_out)) and name not in more:
                others.append((name, values, tensor.tensor_type))
    for name, values, kind in [*tensors, *others] if is_first else [*others, *tensors]:
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("name", MIXTURES)
def test_scores_are_those_of_the_directory(tmp_path: Path, name: str) -> None:
    """There and back, with quantised experts, whose tiles are the same blocks in all files."""
    config = wide(expressible(name))
    hf_model(config).save_pretrained(tmp_path / "model")
    write_quantised(opened(tmp_path / "model"), tmp_path / "small", Conversion("q4_0"))
    write_gguf(opened(tmp_path / "small"), tmp_path / "small.gguf", Conversion("q4_0"))
    write_quantised(opened(tmp_path / "small.gguf"), tmp_path / "back", Conversion("q4_0"))
    batch = random_batch(config, 3)
    expected = logits_of(tmp_path / "small", batch)
    assert np.isfinite(expected).all()
    for path in (tmp_path / "small.gguf", tmp_path / "back"):
        assert logits_of(path, batch).tobytes() == expected.tobytes()
    model = build(config, ModelTiling(), InlineRuntime(), seed=None)
    held = ModelDirectory.open(tmp_path / "small.gguf").blocks({key: tensor.shape for key, tensor in model.tensors().items()})
    routers = (".mlp.gate.weight", "block_sparse_moe.gate.weight", "shared_expert_gate.weight")
    assert all((key in held) != key.endswith(routers) for key in model.tensors() if ".mlp." in key or ".block_sparse_moe." in key)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixed_types_of_llama_cpp(tmp_path: Path, name: str) -> None:
    """Experts stay in the blocks of their file, and have the values that the package decodes."""
    path = write_theirs(tmp_path / "blocks.gguf", hf_model(big(name)), random="Q4_K", mixed={"ffn_down_exps": "Q6_K", "attn_v": "Q8_0"})
    weights, decoded = read(path, ModelTiling()), {each.name: each for each in gguf.GGUFReader(path).tensors}
    stored = decoded["blk.1.ffn_down_exps.weight"]
    values = gguf.quants.dequantize(stored.data, stored.tensor_type)
    names = (f"layers.1.{module}.{{}}.{layer}.weight" for module, layer in (("mlp.experts", "down_proj"), ("block_sparse_moe.experts", "w2")))
    down = [name.format(expert) for name in names for expert in range(values.shape[0]) if name.format(expert) in weights]
    assert len(down) == values.shape[0]
    np.testing.assert_array_equal(np.stack([weights[key] for key in down]), values)
    model = ModelSource.open(path).build(InlineRuntime(), ModelTiling())
    formats = {key: each.block_format.name for key, each in model.tensors().items() if isinstance(each, QuantisedTensor)}
    assert {formats[key] for key in down} == {"q6_k"}


@pytest.mark.parametrize(
    ("name", "left_out", "changes", "error", "words"),
    [
        ("mixtral", "1.ffn_up_exps.weight", {}, DataError, "has no tensor model.layers.1.block_sparse_moe.experts.0.w3.weight"),
        ("qwen3_moe", "0.ffn_gate_inp.weight", {}, DataError, "has no tensor model.layers.0.mlp.gate.weight"),
        ("qwen2_moe", "2.ffn_down_shexp.weight", {}, DataError, "has no tensor model.layers.2.mlp.shared_expert.down_proj.weight"),
        ("olmoe", "expert_used_count", {}, DataError, "olmoe.expert_used_count in"),
        ("olmoe", "expert_count", {}, DataError, "olmoe.expert_count in"),
        ("mixtral", "llama.expert_count", {}, DataError, "llama.expert_used_count in"),
        ("qwen3_moe", "", {"expert_count": 8}, StorageError, "qwen3moe.expert_count in"),
        ("qwen2_moe", "", {"expert_feed_forward_length": 18}, StorageError, "qwen2moe.expert_feed_forward_length in"),
        ("qwen2_moe", "", {"expert_used_count": 7}, UsageError, "num_experts_per_tok in"),
    ],
)
def test_incomplete_files_are_refused(
    tmp_path: Path, name: str, left_out: str, changes: dict[str, int], error: type[NntaskError], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one sentence, before any weight is read; by the command, too."""
    config = expressible(name)
    whole = write_theirs(tmp_path / "whole.gguf", hf_model(config))
    path = without(whole, tmp_path / "broken.gguf", left_out, changes)
    with pytest.raises(error, match=words):
        read(path, ModelTiling())
    assert main(["quantize", str(path), str(tmp_path / "out.gguf"), "--type", "f16"]) == error.exit_code
    shown = capsys.readouterr()
    assert words in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_first_files_of_mixtral(tmp_path: Path, kind: str) -> None:
    """A tensor for each expert gives the bits of one tensor for all, also when the file is written anew; one that is missing is named."""
    config = wide(expressible("mixtral"))
    whole = write_theirs(tmp_path / "whole.gguf", hf_model(config), kind=kind)
    old, batch = without(whole, tmp_path / "old.gguf", "", {}, is_apart=True), random_batch(config, 3)
    expected = logits_of(whole, batch)
    assert logits_of(old, batch).tobytes() == expected.tobytes()
    write_gguf(opened(old), tmp_path / "new.gguf", Conversion(kind.lower()))
    assert {"blk.0.ffn_up_exps.weight", "blk.2.ffn_down_exps.weight"} <= {tensor.name for tensor in gguf.GGUFReader(tmp_path / "new.gguf").tensors}
    assert logits_of(tmp_path / "new.gguf", batch).tobytes() == expected.tobytes()
    broken = without(whole, tmp_path / "broken.gguf", "blk.1.ffn_down.2.weight", {}, is_apart=True)
    with pytest.raises(DataError, match=r"has no tensor model\.layers\.1\.block_sparse_moe\.experts\.2\.w2\.weight"):
        logits_of(broken, batch)


@pytest.mark.parametrize(
    ("layer", "shape", "key"),
    [
        ("gate", (95, 64), "feed_forward_length"),
        ("up", (96, 63), "embedding_length"),
        ("down", (64, 97), "feed_forward_length"),
        ("down", (65, 96), "embedding_length"),
        ("down", (96,), "feed_forward_length"),
    ],
)
def test_a_wrong_size_of_one_expert_names_the_file(tmp_path: Path, layer: str, shape: tuple[int, ...], key: str) -> None:
    """Before memory is taken, also in blocks after the first."""
    whole = write_theirs(tmp_path / "whole.gguf", hf_model(wide(expressible("mixtral"))))
    name, path = f"blk.1.ffn_{layer}.3.weight", tmp_path / "broken.gguf"
    without(whole, path, "", {}, is_apart=True, more={name: np.zeros(shape, np.float32)})
    with pytest.raises(StorageError, match=rf"llama\.{key} in .*broken\.gguf is \d+, and {name} has shape"):
        read(path, ModelTiling())


@pytest.mark.parametrize(("is_first", "names"), [(False, (".3", "_exps")), (True, ("_exps", ".3"))], ids=["after", "before"])
def test_an_expert_that_is_there_twice(tmp_path: Path, is_first: bool, names: tuple[str, str]) -> None:
    """Alone, after or before the tensor of all experts."""
    whole = write_theirs(tmp_path / "whole.gguf", hf_model(wide(expressible("mixtral"))))
    without(whole, tmp_path / "twice.gguf", "", {}, more={"blk.1.ffn_up.3.weight": np.zeros((96, 64), np.float32)}, is_first=is_first)
    second, first = (rf"blk\.1\.ffn_up{name}\.weight" for name in names)
    with pytest.raises(DataError, match=rf"{second} in .*twice\.gguf has the same weights as another tensor, {first}"):
        read(tmp_path / "twice.gguf", ModelTiling())


@pytest.mark.parametrize("left_out", ["expert_feed_forward_length", "expert_shared_feed_forward_length"])
def test_sizes_of_experts_in_older_files(tmp_path: Path, left_out: str) -> None:
    """As in llama.cpp, experts share the width by default, and the shared expert has all of it."""
    config: Any = replace(expressible("qwen2_moe"), intermediate_size=57, shared_expert_intermediate_size=57)
    whole = write_theirs(tmp_path / "whole.gguf", hf_model(config))
    path = without(whole, tmp_path / "older.gguf", left_out, {})
    assert greedy(path, [3, 1, 4]) == greedy(whole, [3, 1, 4])


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("qwen3_moe", {"mlp_only_layers": (1,)}, "no tensor|mlp_only_layers|has no name"),
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("olmoe", {"clip_qkv": 0.75}, "clip_qkv 0.75"),
    ],
)
def test_models_that_llama_cpp_cannot_compute(tmp_path: Path, name: str, changes: dict[str, Any], words: str) -> None:
    """Constants of its code are no keys of a file, so these models are refused."""
    hf_model(replace(expressible(name), **changes)).save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match=words):
        write_gguf(opened(tmp_path / "model"), tmp_path / "model.gguf", Conversion("f32"))


def test_experts_of_a_block_have_one_type(tmp_path: Path) -> None:
    """--keep can leave all of them as they are, or none."""
    hf_model(wide(expressible("olmoe"))).save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match=r"would be F32 in blk\.0\.ffn_up_exps\.weight, which is Q8_0; let all of them stay"):
        write_gguf(opened(tmp_path / "model"), tmp_path / "model.gguf", Conversion("q8_0", keep=("*.0.mlp.experts.3.up_proj.weight",)))
    write_gguf(opened(tmp_path / "model"), tmp_path / "model.gguf", Conversion("q8_0", keep=("*.mlp.experts.*.up_proj.weight",)))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert [kinds[f"blk.0.ffn_{kind}_exps.weight"] for kind in ("gate", "up", "down")] == ["Q8_0", "F32", "Q8_0"]
