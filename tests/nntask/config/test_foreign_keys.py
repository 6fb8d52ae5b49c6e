"""Keys of the files of others: each is a field, read, ignored for a reason or refused. Real configs load without a word, unknown keys are named."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.published_configs import PUBLISHED
from support.transformers_oracle import CONFIGS, hf_logits, hf_model, our_logits, our_model, tiles

from nntask.architecture.foreign_keys import Alias, Ignored
from nntask.config.objective import with_objective
from nntask.config.settings import TrainSettings
from nntask.config.validation import checked_length
from nntask.errors import UsageError
from nntask.inference.generation_keys import GENERATION_KEYS, check_generation, generation_notes
from nntask.models.registry import FAMILIES, config_from_dict, config_notes
from scheduler import InlineRuntime

OF_TRANSFORMERS = [kind for kind in FAMILIES if kind in transformers.CONFIG_MAPPING]
LLAMA: dict[str, Any] = CONFIGS["llama"].to_dict()


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_every_key_of_transformers_has_a_rule(kind: str) -> None:
    """All keys that its class writes, takes or renames are fields here or have a rule, and what is ignored has a reason."""
    theirs, ours = transformers.CONFIG_MAPPING[kind], FAMILIES[kind].config
    taken = {name for name in inspect.signature(theirs).parameters if name not in ("self", "kwargs", "args")}
    written = {*theirs().to_dict(), *theirs.attribute_map, *taken}
    rules, fields = ours.rules(), {field.name for field in dataclasses.fields(ours)}
    assert written - rules.keys() - fields == set()
    assert all(rule.reason for rule in rules.values() if isinstance(rule, Ignored))
    assert {key: rule.field for key, rule in rules.items() if isinstance(rule, Alias)} == theirs.attribute_map


def test_every_key_of_generation_has_a_rule() -> None:
    """All keys that transformers' class writes."""
    assert set(transformers.GenerationConfig().to_dict()) - GENERATION_KEYS.keys() == set()


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_what_transformers_writes_loads_without_a_word(kind: str) -> None:
    """Its own config of each family, with all keys and with those that differ from the defaults; the model is the same."""
    name = next(name for name, config in CONFIGS.items() if config.model_type == kind)
    theirs = transformers.CONFIG_MAPPING[kind](**CONFIGS[name].to_dict())
    for text in (theirs.to_json_string(use_diff=False), theirs.to_json_string()):
        values = {**json.loads(text), "model_type": kind, "architectures": CONFIGS[name].to_dict()["architectures"]}
        if "layer_norm_elementwise_affine" in values:
            assert values["layer_norm_elementwise_affine"] is True
        assert config_notes(values, "x.json") == []
        found = config_from_dict(values, "x.json")
        assert found.description == CONFIGS[name].description
        assert config_notes(found.to_dict(), "x.json") == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_load_without_a_word(name: str) -> None:
    """Keys that older software wrote are known."""
    values = PUBLISHED[name]
    assert config_notes(values, "config.json") == []
    found, kind = config_from_dict(values), transformers.CONFIG_MAPPING[values["model_type"]]
    theirs = config_from_dict({**kind(**values).to_dict(), "architectures": values["architectures"]})
    assert found.description == theirs.description


@pytest.mark.parametrize("name", CONFIGS)
def test_unknown_keys_are_named_once(name: str) -> None:
    """They change nothing in transformers, and the sentence has each of them; null says nothing."""
    values = {**CONFIGS[name].to_dict(), "foo": 1, "bar_baz": {"a": 2}, "nothing": None}
    assert config_from_dict(values) == CONFIGS[name]
    (sentence,) = config_notes(values, "x.json")
    assert sentence == (f"x.json has keys that {CONFIGS[name].title} does not have, here or in transformers, and they are ignored: foo, bar_baz")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"is_causal": False}, "is_causal in x.json must be true (a boolean), got false"),
        (
            "llama",
            {"quantization_config": {"quant_method": "gptq"}},
            'quantization_config in x.json must be null (null), got {"quant_method": "gptq"}',
        ),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention in x.json must be false (a boolean), got true"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads in x.json must be {} (an object)"),
        ("gpt2", {"hidden_size": 60}, "x.json has n_embd twice, 60 (a whole number) in hidden_size and 30 (a whole number) in n_embd"),
        ("t5", {"num_hidden_layers": 5}, "x.json has num_layers twice, 5 (a whole number) in num_hidden_layers"),
        ("t5", {"dense_act_fn": "gelu_new"}, "dense_act_fn in x.json must be relu, which feed_forward_proj relu implies"),
        ("t5 gated", {"is_gated_act": False}, "is_gated_act in x.json must be True, which feed_forward_proj gated-gelu implies"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping in x.json must be null"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention in x.json must be false"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm in x.json must be false"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before in x.json must be true"),
        ("opt", {"layerdrop": 0.1}, "layerdrop in x.json must be 0.0"),
        ("bert", {"is_decoder": True}, "is_decoder in x.json must be false"),
        ("bert", {"position_embedding_type": "relative_key"}, 'position_embedding_type in x.json must be "absolute"'),
        ("bert", {"problem_type": "many"}, "problem_type in x.json must be one of regression, single_label_classification, multi_label_"),
    ],
)
def test_keys_that_would_change_numbers_are_refused(name: str, changes: dict[str, Any], words: str) -> None:
    """One sentence with the key, the value and a remedy."""
    with pytest.raises(UsageError) as error:
        config_from_dict({**CONFIGS[name].to_dict(), **changes}, "x.json")
    assert words in str(error.value)
    assert "; " in str(error.value)


@pytest.mark.parametrize(("name", "given", "field"), [("gpt2", "num_hidden_layers", "n_layer"), ("gpt_neo", "num_attention_heads", "num_heads")])
def test_other_names_of_fields_are_those_of_transformers(name: str, given: str, field: str) -> None:
    """A file with the name that transformers maps to another one is the same model."""
    values = CONFIGS[name].to_dict()
    values[given] = values.pop(field)
    assert config_from_dict(values) == CONFIGS[name]


def test_keys_within_a_rotary_scaling_are_named() -> None:
    """Those that its kind does not have, for each kind of block too."""
    values = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 4.0}}
    assert config_notes(values, "x.json")[0].endswith("ignored: rope_scaling.beta_fast")
    both = CONFIGS["gemma3"].to_dict()
    both["rope_parameters"]["full_attention"]["beta_slow"] = 3.0
    assert config_notes(both, "x.json")[0].endswith("ignored: rope_parameters.full_attention.beta_slow")


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_only_classifiers_of_single_labels_are_trained(problem: str) -> None:
    """Other kinds of problems are kept in the config, and refused where a classifier is to be trained."""
    config = config_from_dict({**CONFIGS["bert classifier"].to_dict(), "problem_type": problem})
    assert config.to_dict()["problem_type"] == problem
    with pytest.raises(UsageError, match=f"problem_type in the config is {problem}"):
        with_objective(TrainSettings(), config)


def test_the_kind_of_a_problem_is_kept() -> None:
    """A classifier of single labels says so in what it writes, and one whose file said nothing says nothing."""
    plain = CONFIGS["bert classifier"]
    assert "problem_type" not in plain.to_dict()
    single = config_from_dict({**plain.to_dict(), "problem_type": "single_label_classification"})
    assert single.to_dict()["problem_type"] == "single_label_classification"
    assert transformers.BertConfig(**single.to_dict()).problem_type == "single_label_classification"


def test_a_t5_has_no_longest_sequence() -> None:
    """Twice as many tokens as n_positions: the scores of transformers."""
    config = CONFIGS["t5"]
    theirs, draw = hf_model(config), np.random.default_rng(3)
    tokens, started = (draw.integers(2, config.vocab_size, (2, size), np.int32) for size in (2 * config.n_positions, config.n_positions + 5))
    batch = {"tokens": tokens, "documents": np.ones_like(tokens), "decoder_tokens": started}
    ours = our_logits(our_model(theirs, config, tiles(config), InlineRuntime()), batch)
    with torch.no_grad():
        np.testing.assert_allclose(ours, hf_logits(theirs, config, batch).numpy(), rtol=0, atol=2e-5)
    assert checked_length(3000, config, config.n_positions) == 3000
    assert checked_length(None, config, config.n_positions) == config.n_positions


@pytest.mark.parametrize(
    ("key", "value"),
    [("bad_words_ids", [[3]]), ("suppress_tokens", [1]), ("min_length", 4), ("forced_bos_token_id", 0), ("penalty_alpha", 0.6), ("typical_p", 0.9)],
)
def test_what_changes_texts_is_refused(key: str, value: Any) -> None:
    """Keys of generation_config.json that transformers obeys whatever is asked for."""
    with pytest.raises(UsageError, match=f"{key} in x.json must be null"):
        check_generation({key: value}, "x.json")


def test_what_flags_repeat_is_named() -> None:
    """Penalties of generation_config.json hold in transformers without being asked for."""
    values = {"repetition_penalty": 1.1, "temperature": 0.7, "do_sample": True, "eos_token_id": [1, 2], "foo": 3}
    check_generation(values, "x.json")
    assert generation_notes(values, "x.json") == [
        "x.json has repetition_penalty 1.1, which is used where a flag says it: --repetition-penalty 1.1",
        "x.json has keys that are ignored, here and in transformers: foo",
    ]
