"""GGUF files that the gguf package wrote from models of transformers: config, weights, tokens of greedy texts, tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.gguf_files import MODEL_ARCHES, paired, write_gguf
from support.gguf_oracle import FAMILIES, expressible, greedy, of_transformers, read, their_greedy, wide
from support.transformers_oracle import CONFIGS, hf_model, tiles

from nntask.errors import DataError
from nntask.gguf.architectures import ARCHITECTURES
from nntask.hf.model_directory import ModelDirectory
from nntask.inference.pretrained import ModelSource
from nntask.tiling.model_tiling import ModelTiling


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_config_and_tokens(tmp_path: Path, name: str) -> None:
    """All of a family, tile by tile: equal to the model that was written, bit by bit but for norms of Gemma, which have 1 added in between."""
    config = expressible(name)
    theirs = hf_model(config)
    path = write_gguf(tmp_path / "model.gguf", theirs)
    found = ModelDirectory.open(path).config
    assert found.with_dropout(0.0).description == replace(config, initializer_range=found.initializer_range).description
    expected = of_transformers(theirs, config)
    for tiling in (ModelTiling(), tiles(config)):
        weights = read(path, tiling)
        assert weights.keys() == expected.keys()
        for key, value in expected.items():
            if name.startswith("gemma") and "norm" in key:
                np.testing.assert_allclose(weights[key], value, atol=1e-6)
            else:
                np.testing.assert_array_equal(weights[key], value, key)
    assert greedy(path, [3, 1, 4]) == their_greedy(theirs, [3, 1, 4])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_1"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_types(tmp_path: Path, name: str, kind: str) -> None:
    """Other types of matrices are what the gguf package decodes."""
    config = wide(expressible(name))
    theirs = hf_model(config)
    path = write_gguf(tmp_path / "model.gguf", theirs, kind=kind)
    number = gguf.GGMLQuantizationType[kind]
    weights = read(path, tiles(config))
    for key, value in of_transformers(theirs, config).items():
        if value.ndim == 1 or key == "wpe.weight":
            np.testing.assert_array_equal(weights[key], value)
            continue
        stored = value if name == "llama" or key == "wte.weight" else value.T
        decoded = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(stored), number), number)
        expected = decoded if stored is value else decoded.T
        np.testing.assert_array_equal(weights[key], expected, key)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_K", "IQ4_NL", "TQ1_0", "TQ2_0"])
def test_types_that_the_package_decodes(tmp_path: Path, kind: str) -> None:
    """Blocks of types that nobody here encodes, tile by tile; and one that is not read."""
    config = replace(wide(expressible("llama")), hidden_size=256, intermediate_size=256, head_dim=64)
    theirs = hf_model(config)
    path = write_gguf(tmp_path / "model.gguf", theirs, random=kind)
    number = gguf.GGMLQuantizationType[kind]
    stored = {tensor.name: gguf.quants.dequantize(tensor.data, number) for tensor in gguf.GGUFReader(path).tensors if tensor.tensor_type == number}
    weights = read(path, ModelTiling(embd_tile=100, inner_tile=90, head_tile=2, vocab_tile=17))
    np.testing.assert_array_equal(weights["layers.1.mlp.down_proj.weight"], stored["blk.1.ffn_down.weight"])
    np.testing.assert_array_equal(weights["embed_tokens.weight"], stored["token_embd.weight"])
    turned = paired(weights["layers.1.self_attn.k_proj.weight"], config.n_kv_head)
    np.testing.assert_array_equal(turned, stored["blk.1.attn_k.weight"])


def test_a_type_that_is_not_read(tmp_path: Path) -> None:
    """One sentence that names the type and those that are read."""
    config = replace(wide(expressible("llama")), hidden_size=256, intermediate_size=256, head_dim=64)
    path = write_gguf(tmp_path / "model.gguf", hf_model(config), random="Q8_K")
    with pytest.raises(DataError, match="has the type Q8_K, which is not read here; use a file of F32, F16, BF16, Q8_0, Q4_0"):
        ModelDirectory.open(path)


def test_a_head_that_repeats_the_embedding(tmp_path: Path) -> None:
    """Older converters wrote it; the model is tied all the same."""
    theirs = hf_model(CONFIGS["gpt2"])
    path = write_gguf(tmp_path / "model.gguf", theirs, repeats_head=True)
    assert ModelDirectory.open(path).config.ties_head
    assert greedy(path, [3, 1, 4]) == their_greedy(theirs, [3, 1, 4])


def test_a_file_of_another_architecture(tmp_path: Path) -> None:
    """One sentence that lists those that are known."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        DataError, match="must be one of gpt2, llama, olmoe, qwen2, qwen2moe, qwen3, qwen3moe, gemma2, gemma3, phi3, phi2, got 'mamba'"
    ):
        ModelSource.open(tmp_path / "model.gguf")


def test_names_are_those_of_the_package() -> None:
    """Every module of a block, and every one outside."""
    for name, ours in ARCHITECTURES.items():
        theirs = gguf.get_tensor_name_map(MODEL_ARCHES[name], 2)
        for module, short in ours.outside.items():
            assert theirs.get_name(module) == short
        for module, short in ours.inside.items():
            assert theirs.get_name(f"{ours.blocks}1.{module.replace('.*', '')}") == f"blk.1.{short}"
