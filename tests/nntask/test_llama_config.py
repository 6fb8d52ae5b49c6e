"""LLaMA configurations: what is accepted, and what each wrong file says; and which family a config is of."""

import json
from dataclasses import replace

import pytest
import transformers

from nntask.errors import DataError, UsageError
from nntask.models.config import PRESETS, GPT2Config
from nntask.models.llama import rotary_frequencies
from nntask.models.llama_config import LlamaConfig, RopeScaling
from nntask.models.registry import FAMILIES, config_from_dict, config_from_json

SMALL = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_a_hugging_face_config_is_read(tmp_path):
    """Keys we know are taken, the others ignored; numbers of floats may be whole; without num_key_value_heads every head has its own keys."""
    values = {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 500000, "bos_token_id": 1, "pretraining_tp": 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = LlamaConfig.from_json(tmp_path)
    assert config == config_from_json(tmp_path / "config.json")
    assert (config.n_kv_head, config.head_size, config.rope_theta, config.rms_norm_eps) == (32, 64, 500000.0, 1e-6)
    assert (config.n_embd, config.n_layer, config.inner_size, config.n_positions) == (2048, 16, 8192, 131072)
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, None),
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 2}, RopeScaling(rope_type="linear", factor=2.0)),
        ({"type": "dynamic", "factor": 4.0}, RopeScaling(rope_type="dynamic", factor=4.0)),
        (LLAMA3, RopeScaling(**LLAMA3)),
        (
            {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"},
            RopeScaling(**{**LLAMA3, "original_max_position_embeddings": 131072}),
        ),
    ],
)
def test_both_formats_of_rotary_scaling_are_read(given, found):
    """rope_scaling of transformers 4 and rope_parameters of transformers 5; what is written, transformers reads back the same."""
    old = LlamaConfig.from_dict({**SMALL, "rope_theta": 500000.0, "rope_scaling": given})
    new = LlamaConfig.from_dict({**SMALL, "rope_parameters": {**(given or {"rope_type": "default"}), "rope_theta": 500000.0}})
    assert old == new
    assert old.rope_scaling == found
    theirs = transformers.LlamaConfig(**old.to_dict())
    back = LlamaConfig.from_dict(json.loads(theirs.to_json_string(use_diff=False)))
    assert back == replace(old, num_key_value_heads=32, head_dim=64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": "16"}, ["num_hidden_layers", "whole number", '"16" (a string)', '"num_hidden_layers": 16']),
        ({"num_attention_heads": True}, ["num_attention_heads", "true (a boolean)"]),
        ({"hidden_size": 0}, ["hidden_size", "at least 1", "got 0"]),
        ({"hidden_size": 2050}, ["divisible by num_attention_heads", "hidden_size 2050 and num_attention_heads 32"]),
        ({"num_key_value_heads": 5}, ["divisible by num_key_value_heads", "num_attention_heads 32 and num_key_value_heads 5", "is 4"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads", "at least 1"]),
        ({"head_dim": 63}, ["head_dim", "must be even", "got 63", "use 64 or 62"]),
        ({"hidden_size": 32 * 33}, ["the head size, must be even", "got 33"]),
        ({"hidden_act": "gelu"}, ["hidden_act", '"gelu"', "silu"]),
        ({"hidden_act": None}, ["hidden_act", "null"]),
        ({"attention_dropout": 1.0}, ["attention_dropout", "below 1"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps", "positive"]),
        ({"rope_theta": 10**400}, ["rope_theta", "positive and finite", "of 401 characters"]),
        ({"hidden_size": 10**30}, ["hidden_size", "at most 2147483647"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "at most 16384"]),
        ({"hidden_size": 2**31 - 2}, ["divisible by num_attention_heads", "the nearest legal num_attention_heads is"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}, ["rotary scaling twice", "remove"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 2.0, "rope_theta": 5.0}}, ["twice"]),
        ({"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 6.0}}, ["rope_theta twice, 5.0", "6.0", "remove"]),
        ({"original_max_position_embeddings": 4, "rope_scaling": LLAMA3}, ["original_max_position_embeddings twice, 4", "8192", "remove"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "must be 1", "0.5"]),
        ({"rope_theta": "1e6"}, ["rope_theta", "a number", '"1e6" (a string)']),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "true or false"]),
        ({"mlp_bias": None}, ["mlp_bias", "true or false", "null"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "JSON object", "a string"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope_type in rope_scaling", "default, linear, dynamic, llama3", '"yarn"']),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_type in rope_scaling", '"longrope"']),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "lacks factor", "rope_type linear"]),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, ["factor in rope_scaling", "at least 1", "got 0.5"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["factor in rope_scaling", "a number", '"2" (a string)']),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "must be 1", "0.5"]),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4}}, ["low_freq_factor", "below high_freq_factor", "4.0 and 4.0"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["lacks low_freq_factor, high_freq_factor"]),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 1.5}}, ["original_max_position_embeddings", "whole number"]),
        ({"model_type": "gpt2"}, ["model_type", "llama", '"gpt2"']),
    ],
)
def test_a_broken_value_is_named(change, words):
    """Each message has the key, the value with its JSON type, and what to write."""
    with pytest.raises(UsageError) as caught:
        LlamaConfig.from_dict({**SMALL, **change}, "some.json")
    assert caught.value.exit_code == 2
    for word in [*words, "some.json"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("key", list(SMALL))
def test_a_missing_key_is_named(key):
    """The shape has no defaults."""
    with pytest.raises(UsageError, match=f"lacks {key};"):
        LlamaConfig.from_dict({k: v for k, v in SMALL.items() if k != key})


def test_a_config_made_in_python_obeys_the_same_rules():
    """No way around the checks, of rotary scaling neither."""
    with pytest.raises(UsageError, match="divisible"):
        LlamaConfig(**{**SMALL, "num_key_value_heads": 3})
    with pytest.raises(UsageError, match="lacks low_freq_factor"):
        LlamaConfig(**SMALL, rope_scaling=RopeScaling(rope_type="llama3", factor=2.0))
    with pytest.raises(UsageError, match="rope_type"):
        LlamaConfig(**SMALL, rope_scaling=RopeScaling(rope_type="yarn", factor=2.0))


def test_the_model_type_names_the_family():
    """Without one it is a GPT-2, as in NNTile's files; an unknown one is named with those that there are."""
    assert list(FAMILIES) == ["gpt2", "llama"]
    assert isinstance(config_from_dict({**SMALL, "model_type": "llama"}), LlamaConfig)
    gpt2 = {"vocab_size": 10, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    assert isinstance(config_from_dict(gpt2), GPT2Config)
    for kind in ("mistral", 5, None, ["llama"]):
        with pytest.raises(UsageError, match=r"model_type in x\.json must be one of gpt2, llama, got"):
            config_from_dict({**SMALL, "model_type": kind}, "x.json")
    with pytest.raises(UsageError, match="JSON object"):
        config_from_dict([1])  # type: ignore[arg-type]


def test_a_file_that_is_missing_is_missing_data(tmp_path):
    """Exit code 4, with the path."""
    with pytest.raises(DataError, match=r"config\.json cannot be read"):
        config_from_json(tmp_path)


def test_presets_have_the_published_sizes():
    """Numbers of parameters of Llama 3.2 1B and 3B, and ours."""
    assert PRESETS["llama-1b"].num_parameters == 1_235_814_400
    assert PRESETS["llama-3b"].num_parameters == 3_212_749_824
    tiny = PRESETS["llama-tiny"]
    assert (tiny.n_layer, tiny.n_embd, tiny.vocab_size, tiny.n_head, tiny.n_kv_head) == (4, 256, 4096, 4, 2)
    assert PRESETS["llama-3b"].head_size == 128


def test_layers_and_dropout_are_changed_by_one_name():
    """--dropout has one place in a LLaMA and three in a GPT-2; tiles are tried on fewer blocks of either."""
    assert [PRESETS[name].with_layers(2).n_layer for name in ("tiny", "llama-1b")] == [2, 2]
    assert PRESETS["llama-tiny"].with_dropout(0.2).attention_dropout == 0.2
    changed = PRESETS["tiny"].with_dropout(0.2)
    assert (changed.resid_pdrop, changed.embd_pdrop, changed.attn_pdrop) == (0.2, 0.2, 0.2)


@pytest.mark.parametrize(
    "values",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"original_max_position_embeddings": 8, "rope_scaling": {key: LLAMA3[key] for key in LLAMA3 if not key.startswith("original")}},
    ],
)
def test_numbers_are_found_where_transformers_finds_them(values):
    """A base within the scaling, an empty scaling beside parameters, both alike, a first length beside them."""
    found = LlamaConfig.from_dict({**SMALL, **values})
    config = transformers.LlamaConfig(**json.loads(json.dumps({**SMALL, **values})))
    config.standardize_rope_params()  # as a model does
    theirs = config.rope_parameters
    assert found.rope_theta == theirs["rope_theta"]
    assert found.rope_scaling is not None
    assert found.rope_scaling.to_dict() == {key: value for key, value in theirs.items() if key in RopeScaling.__dataclass_fields__}


def test_scaling_made_in_python_is_as_if_read():
    """Whole numbers and a first length that is left out: the same config, whose frequencies can be computed."""
    given = {key: int(value) for key, value in LLAMA3.items() if key not in ("rope_type", "original_max_position_embeddings")}
    made = LlamaConfig(**SMALL, rope_scaling=RopeScaling(rope_type="llama3", **given))
    assert made == LlamaConfig.from_dict({**SMALL, "rope_scaling": {"rope_type": "llama3", **given}})
    assert rotary_frequencies(made).shape == (32,)


def test_a_file_that_never_ends_is_refused(tmp_path):
    """Nested deeper than any reader goes."""
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(DataError, match=r"config\.json is not whole JSON"):
        config_from_json(tmp_path)
