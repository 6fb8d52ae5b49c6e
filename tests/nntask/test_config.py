"""GPT-2 configurations: what is accepted, and what each wrong file says."""

import json

import pytest

from nntask.errors import DataError, UsageError
from nntask.models.config import PRESETS, GPT2Config

SMALL = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}


def test_a_hugging_face_config_is_read(tmp_path):
    """Keys we know are taken, the others ignored, numbers of floats may be whole; a directory stands for its config.json."""
    values = {**SMALL, "n_inner": None, "n_ctx": 1024, "architectures": ["GPT2LMHeadModel"], "resid_pdrop": 0, "activation_function": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = GPT2Config.from_json(tmp_path)
    assert config == GPT2Config.from_json(tmp_path / "config.json")
    assert (config.inner_size, config.head_size, config.activation, config.resid_pdrop) == (3072, 64, "gelu", 0.0)
    assert GPT2Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layer": "12"}, ["n_layer", "whole number", '"12" (a string)', '"n_layer": 12']),
        ({"n_layer": 12.0}, ["n_layer", "whole number", "12.0 (a number)"]),
        ({"n_head": True}, ["n_head", "whole number", "true (a boolean)"]),
        ({"n_embd": None}, ["n_embd", "null"]),
        ({"n_embd": 0}, ["n_embd", "at least 1", "got 0"]),
        ({"vocab_size": -5}, ["vocab_size", "at least 1", "got -5"]),
        ({"n_inner": 0}, ["n_inner", "at least 1"]),
        ({"n_embd": 770}, ["divisible by n_head", "n_embd 770 and n_head 12", "n_head is 11"]),
        ({"activation_function": "tanh"}, ["activation_function", '"tanh"', "gelu_new"]),
        ({"activation_function": 3}, ["activation_function", "3 (a whole number)"]),
        ({"attn_pdrop": 1.0}, ["attn_pdrop", "below 1", "got 1.0"]),
        ({"resid_pdrop": "0.1"}, ["resid_pdrop", "a number", '"0.1" (a string)']),
        ({"layer_norm_epsilon": 0}, ["layer_norm_epsilon", "positive", "got 0"]),
        ({"layer_norm_epsilon": float("nan")}, ["layer_norm_epsilon", "positive", "nan"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "true or false", "1 (a whole number)"]),
        ({"model_type": "llama"}, ["model_type", "gpt2", '"llama"']),
        ({"add_cross_attention": True}, ["add_cross_attention", "false"]),
    ],
)
def test_a_broken_value_is_named(change, words):
    """Each message has the key, the value with its JSON type, and what to write."""
    with pytest.raises(UsageError) as caught:
        GPT2Config.from_dict({**SMALL, **change}, "some.json")
    assert caught.value.exit_code == 2
    for word in [*words, "some.json"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("key", list(SMALL))
def test_a_missing_key_is_named(key):
    """The shape has no defaults."""
    with pytest.raises(UsageError, match=f"lacks {key};"):
        GPT2Config.from_dict({k: v for k, v in SMALL.items() if k != key})


def test_a_file_that_is_missing_or_truncated_is_missing_data(tmp_path):
    """Exit code 4, with the path; a list instead of an object breaks a rule."""
    path = tmp_path / "config.json"
    with pytest.raises(DataError, match=r"config\.json cannot be read"):
        GPT2Config.from_json(path)
    path.write_text(json.dumps(SMALL)[:-7])
    with pytest.raises(DataError, match="not whole JSON"):
        GPT2Config.from_json(path)
    path.write_text("[1]")
    with pytest.raises(UsageError, match="JSON object"):
        GPT2Config.from_json(path)


def test_a_config_made_in_python_obeys_the_same_rules():
    """No way around the checks."""
    with pytest.raises(UsageError, match="divisible"):
        GPT2Config(vocab_size=10, n_positions=8, n_embd=10, n_layer=1, n_head=4)


def test_presets_have_the_published_sizes():
    """Numbers of parameters of OpenAI's models, and ours."""
    sizes = {name: config.num_parameters for name, config in PRESETS.items()}
    assert sizes["gpt2"] == 124_439_808
    assert sizes["gpt2-medium"] == 354_823_168
    assert sizes["gpt2-large"] == 774_030_080
    assert sizes["gpt2-xl"] == 1_557_611_200
    assert (PRESETS["tiny"].n_layer, PRESETS["tiny"].n_embd, PRESETS["tiny"].vocab_size) == (4, 256, 4096)
