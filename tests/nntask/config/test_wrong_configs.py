"""Configs of every family with a wrong value: one sentence with the key and what was given, before any work, however large the number."""

from __future__ import annotations

from typing import Any

import pytest
from support.transformers_oracle import CONFIGS

from nntask.errors import UsageError
from nntask.models.registry import FAMILIES, config_from_dict

WRONG = ["x", "12", -1, 0, 10**30, 1.5, 1e308, [], {}, ["x"], {"0": 1}, True, None, float("nan"), [["x"], 1]]
"""Some of which are right for some keys."""
ROTARY = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_neox", "phi", "phi3")
TODAY = (*ROTARY, "bert", "bert classifier", "roberta", "roberta classifier")
"""Families with today's usual keys."""

NO_ROPE: dict[str, Any] = {"rope_parameters": None}
PLAIN_ROPE: dict[str, Any] = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 8.0}


def refusal(name: str, **changes: Any) -> str:
    """What is said of a family's config with changed values."""
    with pytest.raises(UsageError) as error:
        config_from_dict({**CONFIGS[name].to_dict(), **changes}, "x.json")
    text = str(error.value)
    assert "\n" not in text
    assert "; " in text or "nearest legal" in text, text
    return text


@pytest.mark.parametrize("name", CONFIGS)
def test_any_wrong_value_is_refused_or_has_a_meaning(name: str) -> None:
    """No value under any key is an error of Python: it is refused in a sentence, or makes a config that is written and read again as the same."""
    values = CONFIGS[name].to_dict()
    for key in (*values, "rope_scaling", "head_dim", "id2label", "attention_types", "attention_layers", "rotary_pct", "layer_types", "n_inner"):
        for wrong in WRONG:
            try:
                found = config_from_dict({**values, key: wrong}, "x.json")
            except UsageError as error:
                assert "\n" not in str(error)  # noqa: PT017  # most of many values, and those that are right are looked at, too
                continue
            assert found.num_parameters > 0, (key, wrong)
            assert config_from_dict(found.to_dict()) == found, (key, wrong)


def test_every_family_is_tried() -> None:
    """A new family joins the table of the oracles."""
    assert {config.model_type for config in CONFIGS.values()} >= {kind for kind, family in FAMILIES.items() if "description" in dir(family.config)}


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_are_counts(name: str) -> None:
    """Negative, absurd and quoted numbers of blocks, heads, ids."""
    config = CONFIGS[name]
    heads = getattr(config, "heads_key", "n_head")
    for key in (config.layers_key, heads, "vocab_size"):
        assert f"{key} in x.json must be at least 1, got -3" in refusal(name, **{key: -3})
        assert f"{key} in x.json must be at most" in refusal(name, **{key: 10**40})
        assert f'{key} in x.json must be a whole number, got "7" (a string)' in refusal(name, **{key: "7"})


@pytest.mark.parametrize(
    ("names", "changes", "words"),
    [
        (("gpt2",), {"n_head": 7}, "n_embd in x.json must be divisible by n_head, got n_embd 30 and n_head 7"),
        (("gpt_neo",), {"num_heads": 7}, "hidden_size in x.json must be divisible by num_heads"),
        (("bert", "roberta classifier"), {"num_attention_heads": 7}, "hidden_size in x.json must be divisible by num_attention_heads"),
        (("gpt_neox",), {"num_attention_heads": 7}, "must be divisible by num_"),
        (("phi", "llama", "mistral", "qwen2", "qwen3", "gemma3"), {"num_key_value_heads": 5}, "must be divisible by num_key_value_heads"),
        (("gpt2",), {"activation_function": "softmax"}, "activation_function in x.json must be one of gelu_new"),
        (("gpt_neo",), {"activation_function": "softmax"}, "activation_function in x.json must be one of gelu_new"),
        (("llama", "mistral", "qwen2", "qwen3"), {"hidden_act": "softmax"}, "hidden_act in x.json must be one of silu, swish"),
        (("gpt_neox", "phi", "bert", "roberta classifier"), {"hidden_act": "softmax"}, "hidden_act in x.json must be one of gelu_new"),
        (("gemma3",), {"hidden_activation": "softmax"}, "hidden_activation in x.json must be one of gelu_new"),
        (("t5",), {"feed_forward_proj": "gated-relu"}, "feed_forward_proj in x.json must be one of relu, gated-gelu"),
        (("mistral", "qwen2", "gemma3"), {"sliding_window": 0}, "sliding_window in x.json must be at least 1, got 0"),
        (("gpt_neo",), {"window_size": 0}, "window_size in x.json must be at least 1, got 0"),
        (("qwen2", "qwen3", "gemma3"), {"layer_types": ["full_attention"]}, "layer_types in x.json must have one kind for each of"),
        (("qwen2", "qwen3", "gemma3"), {"layer_types": ["full", "full", "full"]}, "must be a list of full_attention and sliding_attention"),
        (("gpt_neo",), {"attention_types": [[["global"], 2]]}, "attention_layers in x.json must have one kind for each of num_layers = 3 blocks"),
        (("gpt_neo",), {"attention_types": [[["global"], "2"]]}, "attention_types in x.json must be pairs of a list of kinds"),
        (("gpt_neo",), {"attention_types": [[["far"], 3]]}, "attention_layers in x.json must be a list of global and local"),
        (("gpt_neox", "phi"), {**NO_ROPE, "partial_rotary_factor": 0.1, "rotary_pct": 0.1}, "must make an even number of the 8 features"),
        (("gpt_neox", "phi"), {**NO_ROPE, "partial_rotary_factor": 1.5, "rotary_pct": 1.5}, "must make an even number of the 8 features"),
        (("llama", "mistral", "qwen3", "gemma3"), {"head_dim": 7}, "head_dim in x.json must be even, because rotary embeddings rotate pairs, got 7"),
        (("bert classifier", "roberta classifier"), {"num_labels": 7}, "id2label in x.json must name num_labels = 7 classes, got"),
        (("bert classifier", "roberta classifier"), {"num_labels": 10**9}, "num_labels in x.json must be at most 1048576, got 1000000000"),
        (("bert classifier",), {"id2label": {"0": "a", "2": "b", "3": "c"}}, "must be an object from the numbers 0, 1, ... to names"),
        (("bert classifier",), {"id2label": {"a": "b", "c": "d", "e": "f"}}, "must be an object from the numbers 0, 1, ... to names"),
        (("bert",), {"architectures": 3}, "architectures in x.json must be a list of names of classes, got 3"),
        (("roberta",), {"pad_token_id": 0}, "pad_token_id in x.json must be 1, from which positions are counted, got 0"),
        (("t5",), {"relative_attention_num_buckets": 9}, "relative_attention_num_buckets in x.json must be a multiple of 4"),
        (("t5",), {"relative_attention_max_distance": 16}, "relative_attention_max_distance above half of it, got 32 and 16"),
        (("roberta", "roberta classifier"), {"max_position_embeddings": 2}, "must be above 2, the position of the first token, got 2"),
        (("t5", "bert", "bert classifier", "opt"), {"pad_token_id": 61}, "pad_token_id in x.json must be below vocab_size = 61, got 61"),
        (("t5",), {"relative_attention_max_distance": 10**9}, "relative_attention_max_distance in x.json must be at most 1048576, got 1000000000"),
        (("t5",), {"decoder_start_token_id": 99}, "decoder_start_token_id in x.json must be below vocab_size = 61, got 99"),
        (("gpt_neo",), {"attention_layers": 5}, "attention_layers in x.json must be a list of global and local"),
        (("gpt_neox",), {"num_key_value_heads": 2}, "num_key_value_heads in x.json must be absent, null or 6, the only value of a GPT-NeoX"),
        (("gpt_neox",), {"head_dim": 16}, "head_dim in x.json must be absent, null or 8, the only value of a GPT-NeoX, got 16"),
        (("gpt_neox", "phi"), {**NO_ROPE, "partial_rotary_factor": 1e308, "rotary_pct": 1e308}, "which makes more"),
        (("gemma3",), {"rope_parameters": {**PLAIN_ROPE, "sliding_attention": LINEAR}}, "rope_type of sliding_attention in x.json must be default"),
        (TODAY, {"initializer_range": "0.02"}, 'initializer_range in x.json must be a number, got "0.02" (a string)'),
        (TODAY, {"max_position_embeddings": 2.5}, "max_position_embeddings in x.json must be a whole number, got 2.5"),
        (ROTARY, {"attention_dropout": 1.0}, "attention_dropout in x.json must be at least 0 and below 1, got 1.0"),
        (TODAY, {"tie_word_embeddings": "yes"}, 'tie_word_embeddings in x.json must be true or false, got "yes"'),
    ],
)
def test_rules_are_named(names: tuple[str, ...], changes: dict[str, Any], words: str) -> None:
    """Rules between values, and words that must be known."""
    for name in names:
        text = refusal(name, **changes)
        assert words in text, (name, text)
