"""Metadata of GGUF files of others: every key that changes a model is read or refuses the file, and every end of a text counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_files import write_gguf
from support.gguf_oracle import expressible, greedy, their_greedy, wide
from support.gguf_rules import keys_of_rule, record, write_small
from support.model_directories import write_model
from support.tokenizers_of_others import llama3
from support.transformers_oracle import CONFIGS, hf_model

from nntask.architecture.rotary import RopeScaling
from nntask.data.tokenizer import load_tokenizer
from nntask.errors import DataError, NntaskError, UsageError
from nntask.export import Conversion, Convertible
from nntask.export import write_gguf as export_gguf
from nntask.gguf.architectures import ARCHITECTURES, architecture_for
from nntask.gguf.config_keys import config_from, metadata_of
from nntask.gguf.model_file import open_gguf
from nntask.hf.model_directory import ModelDirectory
from nntask.inference.pretrained import ModelSource
from nntask.models.qwen import FULL, SLIDING
from nntask.models.registry import config_from_dict
from nntask.models.same_model import is_same_model
from wrappers.cli import main

SIZES = {"context_length": 64, "embedding_length": 64, "block_count": 1, "feed_forward_length": 96, "attention.head_count": 4}
SIZES |= {"attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5}
WINDOWS = {"attention.sliding_window": 8}


def config_with(name: str, *, blocks: int = 1, factors: dict[str, np.ndarray] | None = None, **more: Any) -> dict[str, Any]:
    """The config of a file of an architecture with further keys, whose dots are written as two underlines."""
    sizes = SIZES | (WINDOWS if name == "gemma3" else {}) | {"block_count": blocks}
    keys = {"general.architecture": name} | {f"{name}.{key}": value for key, value in (sizes | more).items()}
    shapes = {"token_embd.weight": (300, 64), **{f"blk.{block}.attn_norm.weight": (64,) for block in range(blocks)}}
    return config_from(keys, shapes, "a.gguf", rotary_factors=factors or {}, ties=False)[0]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi2", "phi3"])
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "linear"}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, None),
        ({"rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.type": "linear"}, None),
        (
            {"rope.scaling.factor": 4.0, "rope.scaling.type": "yarn", "rope.scaling.original_context_length": 16, "rope.scaling.finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "yarn"}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        ({"rope.scaling.factor": 1.0, "rope.scaling.type": "yarn"}, None),
        (
            {"rope.scaling.factor": 4.0, "rope.scaling.type": "yarn", "rope.scaling.attn_factor": float(np.float32(0.83 / (1 + 0.1 * np.log(4))))},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.83},
        ),
        (
            {"rope.scaling.factor": 4.0, "rope.scaling.type": "yarn", "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
    ],
)
def test_scaling_of_positions_is_read(name: str, keys: dict[str, Any], expected: dict[str, Any] | None) -> None:
    """As llama.cpp reads it: a factor without a type is linear, and type none switches it off."""
    assert config_with(name, **keys)["rope_scaling"] == expected


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope.scaling.type": "longrope"}, "must be longrope with rope_factors_long.weight and rope_factors_short.weight alone"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "llama.rope.scaling.factor in a.gguf must be absent with LongRoPE"),
        ({"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0}, "must be none, linear, yarn or longrope, got 'dynamic'"),
        ({"rope.scaling.attn_factor": 1.19}, "attn_factor in a.gguf must be 1, as cosines and sines are scaled by YaRN and LongRoPE only"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_ext_factor": 0.5}, "llama.rope.scaling.yarn_ext_factor"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_log_multiplier": 0.1}, "YaRN with a multiplier of its own"),
        ({"rope.scaling.alpha": 1000.0}, "llama.rope.scaling.alpha in a.gguf is 1000.0: the model has NTK scaling of rotary positions"),
        ({"rope.freq_base": float("nan")}, "llama.rope.freq_base in a.gguf must be a finite number, got nan"),
        ({"rope.freq_base": float("inf")}, "llama.rope.freq_base in a.gguf must be a finite number, got inf"),
        ({"rope.dimension_count": 8}, "llama.rope.dimension_count in a.gguf must be 16"),
        ({"rope.freq_base_swa": 5000.0}, "llama.rope.freq_base_swa in a.gguf changes the model"),
        ({"attention.value_length": 8}, "llama.attention.value_length in a.gguf must be 16, the size of a head"),
        ({"attention.key_length_mla": 8}, "llama.attention.key_length_mla in a.gguf changes the model"),
        ({"attention.sliding_window_pattern": 2}, "llama.attention.sliding_window_pattern in a.gguf changes the model"),
        ({"attention.causal": False}, "tokens that see later tokens"),
        ({"attention.clamp_kqv": 8.0}, "clamped queries, keys and values"),
        ({"attention.max_alibi_bias": 8.0}, "ALiBi"),
        ({"attention.scale": 0.1}, "scores with a scale of their own"),
        ({"attn_logit_softcapping": 50.0}, "capped scores"),
        ({"final_logit_softcapping": 30.0}, "capped logits"),
        ({"logit_scale": 0.5}, "scaled logits"),
        ({"residual_scale": 0.2}, "scaled residuals"),
        ({"embedding_scale": 12.0}, "scaled embeddings"),
        ({"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 2}, "the model has weights of experts that are no softmax"),
        ({"expert_used_count": 2}, "the model has experts"),
        ({"expert_feed_forward_length": 64}, "llama.expert_feed_forward_length in a.gguf changes the model"),
        ({"pooling_type": 1}, "pooled embeddings"),
        ({"ssm.conv_kernel": 4}, "llama.ssm.conv_kernel in a.gguf changes the model"),
        ({"use_parallel_residual": True}, "llama.use_parallel_residual in a.gguf changes the model"),
        ({"nextn_predict_layers": 1}, "predict further tokens"),
    ],
)
def test_keys_that_change_a_model_refuse_the_file(keys: dict[str, Any], words: str) -> None:
    """A sentence with the key, and what it means."""
    with pytest.raises(DataError) as caught:
        config_with("llama", **keys)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_keys_that_change_nothing_are_passed_over() -> None:
    """Neutral values, and keys for a reason; others are named."""
    plain = config_with("llama")
    neutral = {"expert_count": 0, "attention.causal": True, "logit_scale": 1.0, "final_logit_softcapping": 0.0, "attention.clamp_kqv": 0.0}
    ignored = {"vocab_size": 300, "rope.scaling.finetuned": True, "tensor_data_layout": "Meta AI original pth"}
    assert config_with("llama", **neutral, **ignored) == plain
    keys = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in (SIZES | {"of.the.future": 1}).items()}}
    shapes = {"token_embd.weight": (300, 64), "blk.0.attn_norm.weight": (64,)}
    assert config_from(keys, shapes, "a.gguf", rotary_factors={}, ties=False)[1] == ["llama.of.the.future"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_key_that_is_written_is_read(name: str) -> None:
    """Nothing of our own files is unread or refused."""
    families = ("gpt2", "llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi", "phi3", "olmoe", "qwen2_moe", "qwen3_moe")
    config: Any = next(expressible(each) for each in families if architecture_for(CONFIGS[each].model_type) is ARCHITECTURES[name])
    values = config.to_dict() | {"rope_theta": getattr(config, "rope_theta", None), "rope_scaling": None}
    keys = metadata_of(values, ARCHITECTURES[name])
    shapes = {"token_embd.weight": (config.vocab_size, config.n_embd), **{f"blk.{block}.attn_norm.weight": (1,) for block in range(config.n_layer)}}
    assert config_from(keys, shapes, "a.gguf", rotary_factors={}, ties=False)[1] == []


def test_keys_of_a_gemma() -> None:
    """Caps, the base of windows, and which blocks have them, as a number or a list."""
    found = config_with("gemma3", blocks=4, **{"final_logit_softcapping": 30.0, "rope.freq_base_swa": 5000.0, "attention.sliding_window_pattern": 2})
    assert (found["final_logit_softcapping"], found["rope_local_base_freq"]) == (30.0, 5000.0)
    assert found["layer_types"] == [SLIDING, FULL, SLIDING, FULL]
    listed = config_with("gemma3", blocks=3, **{"attention.sliding_window_pattern": np.array([True, False, True])})
    assert listed["layer_types"] == [SLIDING, FULL, SLIDING]
    for wrong in (np.array([True]), np.array([2, 3, 4]), np.array([0.5] * 3), 0, "x"):
        with pytest.raises(DataError, match="sliding_window_pattern"):
            config_with("gemma3", blocks=3, **{"attention.sliding_window_pattern": wrong})


def test_a_gemma_of_62_blocks_divides_by_its_width() -> None:
    """Gemma 3 27B has 168 = 5376 / 32 and heads of 128; all others have the size of a head."""
    keys = {
        "context_length": 131072,
        "embedding_length": 5376,
        "feed_forward_length": 21504,
        "attention.head_count": 32,
        "attention.head_count_kv": 16,
    }
    keys |= {"attention.key_length": 128, "attention.value_length": 128, "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 1024}
    for blocks, scalar in ((62, 168), (48, 128)):
        metadata = {"general.architecture": "gemma3", **{f"gemma3.{key}": value for key, value in (keys | {"block_count": blocks}).items()}}
        shapes = {"token_embd.weight": (262208, 5376), **{f"blk.{block}.attn_norm.weight": (5376,) for block in range(blocks)}}
        found, _ = config_from(metadata, shapes, "a.gguf", rotary_factors={}, ties=False)
        assert found["query_pre_attn_scalar"] == scalar
        assert config_from_dict(found).query_pre_attn_scalar == scalar


def exported(path: Path, config: Any, tokenizer: Any = None, **more: Any) -> Path:
    """A GGUF file of a model of transformers, by way of a directory."""
    hf_model(config).save_pretrained(path)
    source = Convertible.of(path, ModelDirectory.open(path).config, None, tokenizer)
    target = path.with_suffix(".gguf")
    export_gguf(source, target, Conversion("f32", **more))
    return target


@pytest.mark.parametrize("scalar", [8, 16])
def test_a_small_gemma_of_62_blocks(tmp_path: Path, scalar: int) -> None:
    """Width 32 with 4 heads of 16 divides by 8: so it is written and read; one that divides by the size of a head is refused."""
    config = replace(expressible("gemma3"), num_hidden_layers=62, layer_types=None, query_pre_attn_scalar=scalar)
    config = replace(config, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=16)
    if scalar == 16:
        with pytest.raises(UsageError, match="another model in query_pre_attn_scalar 16"):
            exported(tmp_path / "model", config)
        return
    path = exported(tmp_path / "model", config)
    assert greedy(path, [3, 1, 4]) == their_greedy(hf_model(config), [3, 1, 4])


@pytest.mark.parametrize(
    "change",
    [
        {"final_logit_softcapping": 2.0},
        {"rope_local_base_freq": 50.0},
        {"layer_types": (SLIDING, FULL) * 3},
        {"layer_types": (SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING)},
        {"rope_scaling": RopeScaling(rope_type="linear", factor=8.0)},
    ],
    ids=["cap", "base", "pattern", "list", "scaling"],
)
def test_gemmas_that_differ_from_the_constants(tmp_path: Path, change: dict[str, Any]) -> None:
    """Their keys are written, and read."""
    config = replace(expressible("gemma3"), sliding_window=4, **change)
    path = exported(tmp_path / "model", config)
    found = ModelDirectory.open(path).config
    assert found.description == replace(config, initializer_range=found.initializer_range).description


@pytest.mark.parametrize("more", [{}, {"attention_factor": 0.83}, {"factor": 1.5, "attention_factor": 2.0}])
def test_yarn_goes_there_and_back(tmp_path: Path, more: dict[str, Any]) -> None:
    """YaRN's keys; numbers of turns that llama.cpp has as constants are refused."""
    scaling = RopeScaling(**{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, **more})
    config = replace(wide(CONFIGS["llama"]), rope_scaling=scaling, head_dim=None)
    assert ModelDirectory.open(exported(tmp_path / "model", config)).config.rope_scaling == scaling
    with pytest.raises(UsageError, match="another model in rope_scaling"):
        exported(tmp_path / "other", replace(config, rope_scaling=replace(scaling, original_max_position_embeddings=1024, beta_fast=8.0)))


TABLES = {"rope_factors_long.weight": np.array([1.1, 31.5], np.float32), "rope_factors_short.weight": np.array([1.0, 1.08], np.float32)}
"""Of heads of 16 features, four of which turn."""


@pytest.mark.parametrize(
    ("attention", "expected"),
    [({}, {"attention_factor": 1}), ({"rope.scaling.attn_factor": float(np.float32((1 + np.log(4) / np.log(16)) ** 0.5))}, {})],
)
def test_two_tables_of_a_phi_3_are_read(attention: dict[str, Any], expected: dict[str, Any]) -> None:
    """llama.cpp's converter writes no type; a factor of cosines and sines that follows from the lengths is not said."""
    keys = {"rope.scaling.original_context_length": 16, "rope.dimension_count": 4, **attention}
    found = config_with("phi3", factors=TABLES, **keys)["rope_scaling"]
    lists = {"short_factor": [1.0, 1.08], "long_factor": [1.1, 31.5]}
    assert found == {"rope_type": "longrope", "original_max_position_embeddings": 16, **lists, **expected}


@pytest.mark.parametrize(
    ("name", "factors", "keys"),
    [
        ("phi3", TABLES, {"rope.scaling.type": "yarn"}),
        ("phi3", {name: TABLES[name] for name in list(TABLES)[:1]}, {}),
        ("phi3", {**TABLES, "rope_freqs.weight": np.ones(2, np.float32)}, {}),
        ("llama", TABLES, {}),
        ("qwen2", TABLES, {"rope.scaling.type": "longrope"}),
    ],
)
def test_two_tables_that_llama_cpp_does_not_read_refuse_the_file(name: str, factors: dict[str, np.ndarray], keys: dict[str, Any]) -> None:
    """One of them, both beside another scaling, or in an architecture that has none."""
    with pytest.raises(DataError, match=f"{name}.rope.scaling.type in a.gguf must be longrope with"):
        config_with(name, factors=factors, **keys)


@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.parametrize("more", [{}, {"attention_factor": 0.83}, {"factor": 3.0}, {"original_max_position_embeddings": 64}])
def test_longrope_goes_there_and_back(tmp_path: Path, name: str, more: dict[str, Any]) -> None:
    """Two tensors and the keys beside them; the same model and the same text of a short and of a long prompt."""
    config = replace(wide(CONFIGS[name]), max_position_embeddings=32, **({"sliding_window": None} if name == "phi3" else {"head_dim": None}))
    tables = {"short_factor": (1.0, 1.08, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6), "long_factor": (1.1, 1.2, 2.25, 4.0, 9.0, 12.0, 20.0, 31.5)}
    if name == "phi3":
        tables = {key: values[:6] for key, values in tables.items()}
    scaling = RopeScaling(**{"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 16, **tables, **more})
    config = replace(config, rope_scaling=scaling)
    path = exported(tmp_path / "model", config)
    assert is_same_model(ModelDirectory.open(path).config, config)
    for prompt in ([3, 1, 4], [3, 1, 4] * 6):
        assert greedy(path, prompt) == their_greedy(hf_model(config), prompt)


def test_longrope_that_llama_cpp_does_not_read_is_refused(tmp_path: Path) -> None:
    """A Qwen 2 may have it in a directory."""
    tables = dict.fromkeys(("short_factor", "long_factor"), (1.0, 1.1, 1.2, 1.3, 2.0, 3.0, 4.0, 8.0))
    scaling = RopeScaling(rope_type="longrope", factor=2.0, original_max_position_embeddings=8, **tables)
    with pytest.raises(UsageError, match=r"cannot be written as GGUF, .* qwen2.rope.scaling.type .* must be longrope with .*, for a llama or phi3"):
        exported(tmp_path / "model", replace(wide(expressible("qwen2")), rope_scaling=scaling))


def test_a_window_that_llama_cpp_ignores_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mistral's is a key that its llama does not read."""
    hf_model(replace(CONFIGS["mistral"], sliding_window=4)).save_pretrained(tmp_path / "model")
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "model.gguf"), "--type=f32"]) == 0
    assert "note: llama.cpp has no windows in a llama: texts of more than 4 tokens are computed otherwise there" in capsys.readouterr().out


@pytest.mark.parametrize("ends", [[1, 2, 3], [257, 258, 3], [258], [257, 256, 258, 3, 5], [3, 258]])
def test_every_end_of_a_directory_ends_a_text_of_its_file(tmp_path: Path, ends: list[int]) -> None:
    """Of config.json, special tokens or not: `generate` stops where it does with the directory."""
    config = replace(CONFIGS["llama"], vocab_size=300)
    directory = llama3(tmp_path / "model")
    hf_model(config).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**values, "eos_token_id": ends if len(ends) > 1 else ends[0]}))
    tokenizer = load_tokenizer(directory)
    source = Convertible.of(directory, ModelDirectory.open(directory).config, None, tokenizer)
    export_gguf(source, tmp_path / "model.gguf", Conversion("f32"))
    both = [ModelSource.open(path) for path in (directory, tmp_path / "model.gguf")]
    stops = [each.text_ids(each.tokenizer()).stop for each in both]
    expected = set(ends) if {257, 258, 256} & set(ends) else set()
    assert stops[0] == set(ends)
    assert not expected or stops[1] == expected


@pytest.mark.parametrize("name", ["of the future", "kimi-k2", "afmoe", "gemma4"])
def test_a_tokenizer_that_is_not_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Not "came without a tokenizer"; another one may be named."""
    found = record()
    keys = keys_of_rule(name, found["merges"])
    path = write_small(tmp_path / "model.gguf", keys, len(keys["tokenizer.ggml.tokens"]))
    assert main(["generate", str(path), "--prompt=a"]) == 4
    err = capsys.readouterr().err
    assert f"the tokenizer in {path} cuts texts by the rule '{name}' (tokenizer.ggml.pre), which nntask does not know" in err
    assert err.count("\n") == 1
    with pytest.raises(DataError, match="which nntask does not know"):
        load_tokenizer(path)
    write_model(tmp_path / "other")
    assert main(["generate", str(path), "--prompt=a", f"--tokenizer-path={tmp_path / 'other'}", "--max-new-tokens=2"]) == 0


def test_unread_keys_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, by every command that opens the file."""
    keys = keys_of_rule("gpt-2", record()["merges"]) | {"llama.of.the.future": 1, "tokenizer.ggml.of_the_future": True, "someone.else": "x"}
    path = write_small(tmp_path / "model.gguf", keys, len(keys["tokenizer.ggml.tokens"]))
    assert main(["generate", str(path), "--prompt=a", "--max-new-tokens=2"]) == 0
    err = capsys.readouterr().err
    assert err.count("keys that neither nntask nor llama.cpp knows") == 1
    assert "llama.of.the.future, tokenizer.ggml.of_the_future, someone.else" in err


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix", 7])
def test_a_file_of_something_else_is_refused(tmp_path: Path, kind: Any) -> None:
    """Adapters, projectors of images, and matrices of importance."""
    keys = keys_of_rule("gpt-2", record()["merges"]) | {"general.type": kind}
    path = write_small(tmp_path / "model.gguf", keys, len(keys["tokenizer.ggml.tokens"]))
    with pytest.raises(DataError, match=r"general.type in .* is .*, not a model"):
        open_gguf(path)


def test_ids_of_another_architecture_are_the_models_own(tmp_path: Path) -> None:
    """A file of the gguf package that has no tokenizer gives ids of its keys, and none by words."""
    path = write_gguf(tmp_path / "model.gguf", hf_model(CONFIGS["llama"]))
    assert open_gguf(path).values["eos_token_id"] is None
    assert open_gguf(path).notes == []
    with pytest.raises(NntaskError, match="came without a tokenizer"):
        ModelSource.open(path).tokenizer()
