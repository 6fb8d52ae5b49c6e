"""Situations of public reports about configs, positions and rotary scaling that other software loaded wrongly, set up on small models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.llama_oracle import frequencies
from support.transformers_oracle import CONFIGS, hf_logits, hf_model, our_logits, our_model, random_batch, tiles

from nntask.errors import DataError, UsageError
from nntask.hf.model_directory import read_config
from nntask.inference.pretrained import ModelSource
from nntask.models.registry import config_from_dict, config_notes
from scheduler import InlineRuntime

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}


def logits_agree(values: dict[str, Any]) -> None:
    """The scores of a config's model are those of transformers for the same JSON."""
    kind = transformers.CONFIG_MAPPING[values["model_type"]]
    config = config_from_dict(json.loads(json.dumps(values)))
    theirs = hf_model(config)
    inside = kind(**{**json.loads(json.dumps(values)), "attn_implementation": "eager", "pad_token_id": None})
    again = getattr(transformers, values["architectures"][0])(inside)
    again.load_state_dict(theirs.state_dict())
    batch = random_batch(config, 2)
    ours = our_logits(our_model(theirs, config, tiles(config), InlineRuntime()), batch)
    with torch.no_grad():
        np.testing.assert_allclose(ours, hf_logits(again, config, batch).numpy(), rtol=0, atol=3e-5)


@pytest.mark.parametrize("factor", [1.0, 0.6])
def test_an_explicit_attention_factor_replaces_the_computed_one(factor: float) -> None:
    """YaRN's own factor was taken whatever the config said (mlx-lm 1507, vllm 46280)."""
    config = config_from_dict({**CONFIGS["llama"].to_dict(), "rope_scaling": {**YARN, "attention_factor": factor}})
    assert config.rope_scaling.angle_factor == factor
    logits_agree({**CONFIGS["llama"].to_dict(), "rope_scaling": {**YARN, "attention_factor": factor}})


def test_a_misspelt_attention_factor_is_named() -> None:
    """A published model has attn_factor, which transformers ignores with a warning (DeepSeek-R1 684)."""
    values = {**CONFIGS["qwen3"].to_dict(), "rope_scaling": {**YARN, "attn_factor": 0.88}}
    assert config_notes(values, "config.json")[0].endswith("ignored: rope_scaling.attn_factor")
    logits_agree(values)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt_neox"])
def test_scaling_in_either_format_is_the_same_model(name: str) -> None:
    """transformers 5 moved the base and the scaling to rope_parameters, and readers of rope_scaling lost both (sglang 26187, DeepSpeed 8345)."""
    plain = CONFIGS[name].to_dict()
    for key in ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base"):
        plain.pop(key, None)
    old = config_from_dict({**plain, "rope_theta": 5e5, "rope_scaling": YARN})
    new = config_from_dict({**plain, "rope_parameters": {**YARN, "rope_theta": 5e5}})
    assert old == new
    logits_agree({**plain, "rope_parameters": {**YARN, "rope_theta": 5e5}})


def test_two_bases_are_refused() -> None:
    """A file with a base in both places, of which readers took either one (vllm 42624)."""
    values = {**CONFIGS["llama"].to_dict(), "rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    with pytest.raises(UsageError, match="has rope_theta twice"):
        config_from_dict(values)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        *((each, f'rope_type in rope_scaling in the config must be one of .*, got "{each}"') for each in ("mrope", "proportional")),
        *((each, f'rope_type of a Phi 3 in the config must be "default" or "longrope", got "{each}"') for each in ("dynamic", "linear")),
    ],
)
def test_scaling_that_is_not_computed_is_refused(kind: str, words: str) -> None:
    """Kinds that no version of the family has."""
    scaling = {"type": kind, "factor": 2.0, "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    with pytest.raises(UsageError, match=words):
        config_from_dict({**CONFIGS["phi3"].to_dict(), "rope_parameters": None, "rope_scaling": scaling})


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("original", [5, 11])
def test_a_phi_3_with_two_tables(kind: str, original: int) -> None:
    """Long models of Phi 3 were loaded with one of their two tables (text-generation-inference 2172, mlxcel 1358); "su" and "yarn" mean the same."""
    values = {**CONFIGS["phi3"].to_dict(), "original_max_position_embeddings": original, "rope_parameters": None}
    tables = {"short_factor": [1.0, 1.05, 1.2], "long_factor": [1.5, 4.0, 60.0]}
    if kind == "su":  # which transformers 5 does not read any more
        found = config_from_dict({**values, "rope_scaling": {"type": kind, **tables}})
        assert found == config_from_dict({**values, "rope_scaling": {"type": "longrope", **tables}})
    else:
        logits_agree({**values, "rope_scaling": {"type": kind, **tables}})


def test_scaling_without_a_factor_is_refused() -> None:
    """Readers stopped with a KeyError (FastChat 3907); the factor of YaRN follows from the two lengths."""
    with pytest.raises(UsageError, match="lacks factor; rope_type linear needs factor"):
        config_from_dict({**CONFIGS["llama"].to_dict(), "rope_scaling": {"type": "linear"}})
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 4}
    assert config_from_dict({**CONFIGS["llama"].to_dict(), "rope_scaling": yarn}).rope_scaling.factor == CONFIGS["llama"].n_positions / 4


def test_a_part_of_each_head_turns_as_the_file_says() -> None:
    """partial_rotary_factor was not looked for, beside the rotary parameters or among them (exllamav2 741)."""
    values = CONFIGS["phi3"].to_dict()
    del values["rope_parameters"]
    assert config_from_dict(values).rotary.size == 6
    logits_agree(values)
    within = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert config_from_dict({**values, "partial_rotary_factor": 0.5, "rope_parameters": within}).rotary.size == 4


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2"])
def test_heads_wider_than_the_model_keep_their_size(name: str, tmp_path: Path) -> None:
    """head_dim that is not width / heads was lost in exports and replaced by the quotient (lmdeploy 2761, Fast-LLM 102)."""
    config = replace(CONFIGS[name], head_dim=14)
    assert config.to_dict()["head_dim"] == 14
    hf_model(config).save_pretrained(tmp_path / "m")
    assert read_config(tmp_path / "m").head_size == 14
    logits_agree(config.to_dict())


@pytest.mark.parametrize("window", [None, 13, 40])
def test_a_window_of_null_or_of_all_tokens_is_none(window: int | None) -> None:
    """Mistrals without a window stopped with a type error, or got one (axolotl 1213, lorax 127)."""
    values = {**CONFIGS["mistral"].to_dict(), "sliding_window": window}
    assert all(block.attention.window is None for block in config_from_dict(values).description.stack.blocks)
    logits_agree(values)


def test_a_window_that_is_switched_off_is_none() -> None:
    """A Qwen 2 names a window and does not use it (vllm 17306)."""
    values = {**CONFIGS["qwen2"].to_dict(), "use_sliding_window": False, "sliding_window": 3}
    assert all(block.attention.window is None for block in config_from_dict(values).description.stack.blocks)
    logits_agree(values)


@pytest.mark.parametrize("legacy", ["gelu", "gelu_pytorch_tanh"])
def test_a_gemma_obeys_hidden_activation_alone(legacy: str) -> None:
    """Published files have hidden_act besides, with another value in older ones (text-generation-inference 2381, Megatron-Bridge 4661)."""
    values = {**CONFIGS["gemma2"].to_dict(), "hidden_act": legacy}
    assert config_from_dict(values) == CONFIGS["gemma2"]
    assert config_notes(values, "config.json") == []
    logits_agree(values)


@pytest.mark.parametrize("cap", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_both_caps_of_a_gemma_2_hold(cap: str) -> None:
    """One of them was left out, in scores or in generation only (keras-hub 1712, maxtext 1022); null switches one off."""
    values = CONFIGS["gemma2"].to_dict()
    logits_agree(values)
    logits_agree({**values, cap: None})
    assert config_from_dict({**values, cap: None}) != CONFIGS["gemma2"]
    with pytest.raises(UsageError, match=f"{cap} in the config must be positive"):
        config_from_dict({**values, cap: 0.0})


@pytest.mark.parametrize("key", ["scale_attn_weights", "scale_attn_by_inverse_layer_idx"])
def test_switches_of_gpt2_scores_hold(key: str) -> None:
    """They were ignored by fast attention (transformers 44380)."""
    values = CONFIGS["gpt2"].to_dict()
    logits_agree({**values, key: not values[key]})


def test_a_model_with_adapters_beside_it_is_refused(tmp_path: Path) -> None:
    """transformers applies them without being asked (transformers 43781), so the model alone is another one."""
    hf_model(CONFIGS["llama"]).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    with pytest.raises(DataError, match="has both a model and adapters of PEFT, which transformers would apply"):
        read_config(tmp_path / "m")


def test_a_penalty_of_the_generation_config_is_named(tmp_path: Path) -> None:
    """transformers applies a repetition penalty of the file to greedy text, too (transformers 29080, ollama 17679)."""
    hf_model(CONFIGS["llama"]).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.3, "temperature": 0.6, "do_sample": True}))
    (note,) = ModelSource.open(tmp_path / "m").notes()
    assert note.endswith("has repetition_penalty 1.3, which is used where a flag says it: --repetition-penalty 1.3")


def test_frequencies_follow_the_base_that_the_file_says() -> None:
    """A base within the parameters that is far from the default (vllm 56066)."""
    values = CONFIGS["llama"].to_dict()
    del values["rope_theta"]
    config = config_from_dict({**values, "rope_parameters": {"rope_type": "default", "rope_theta": 6e5}})
    assert frequencies(config)[-1] == pytest.approx(6e5 ** -(6 / 8), rel=1e-6)
