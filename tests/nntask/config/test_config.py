"""Configurations of every family: what is accepted, what a wrong file says, which family it is of. Rotary scaling: `test_rotary_config`."""

import json

import pytest
from support.transformers_oracle import CONFIGS

from nntask.errors import DataError, UsageError
from nntask.models.gpt2 import GPT2Config
from nntask.models.llama import LlamaConfig
from nntask.models.registry import _HEADS, FAMILIES, PRESETS, config_from_dict, config_from_json, config_notes, type_of, untiled_type

GPT2_SMALL = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
LLAMA_SMALL = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
}
SMALL = {GPT2Config: GPT2_SMALL, LlamaConfig: LLAMA_SMALL}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_a_gpt2_of_hugging_face_is_read(tmp_path):
    """Keys we know are taken, the others ignored, numbers of floats may be whole; a directory stands for its config.json."""
    values = {**GPT2_SMALL, "n_inner": None, "n_ctx": 1024, "architectures": ["GPT2LMHeadModel"], "resid_pdrop": 0, "activation_function": "gelu"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = GPT2Config.from_json(tmp_path)
    assert config == GPT2Config.from_json(tmp_path / "config.json")
    assert (config.inner_size, config.head_size, config.activation_function, config.resid_pdrop) == (3072, 64, "gelu", 0.0)
    assert GPT2Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_llama_of_hugging_face_is_read(tmp_path):
    """The same; without num_key_value_heads every head has its own keys."""
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 500000, "bos_token_id": 1, "pretraining_tp": 1}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_SMALL, **about}))
    config = LlamaConfig.from_json(tmp_path)
    assert config == config_from_json(tmp_path / "config.json")
    assert (config.n_kv_head, config.head_size, config.rope_theta, config.rms_norm_eps) == (32, 64, 500000.0, 1e-6)
    assert (config.n_embd, config.n_layer, config.inner_size, config.n_positions) == (2048, 16, 8192, 131072)
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config


BROKEN = {
    GPT2Config: [
        ({"n_layer": "12"}, ["n_layer", "whole number", '"12" (a string)', '"n_layer": 12']),
        ({"n_layer": 12.0}, ["n_layer", "whole number", "12.0 (a number)"]),
        ({"n_head": True}, ["n_head", "whole number", "true (a boolean)"]),
        ({"n_embd": None}, ["n_embd", "null"]),
        ({"n_embd": 0}, ["n_embd", "at least 1", "got 0"]),
        ({"vocab_size": -5}, ["vocab_size", "at least 1", "got -5"]),
        ({"n_inner": 0}, ["n_inner", "at least 1"]),
        ({"n_embd": 770}, ["divisible by n_head", "n_embd 770 and n_head 12", "n_head is 11"]),
        ({"activation_function": "elu"}, ["activation_function", '"elu"', "gelu_new"]),
        ({"activation_function": 3}, ["activation_function", "3 (a whole number)"]),
        ({"attn_pdrop": 1.0}, ["attn_pdrop", "below 1", "got 1.0"]),
        ({"resid_pdrop": "0.1"}, ["resid_pdrop", "a number", '"0.1" (a string)']),
        ({"layer_norm_epsilon": 0}, ["layer_norm_epsilon", "positive", "got 0"]),
        ({"layer_norm_epsilon": float("nan")}, ["layer_norm_epsilon", "positive", "nan"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "true or false", "1 (a whole number)"]),
        ({"model_type": "llama"}, ["model_type", "gpt2", '"llama"']),
        ({"add_cross_attention": True}, ["add_cross_attention", "false"]),
    ],
    LlamaConfig: [
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
        ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, ["rope_type in rope_scaling", "linear, dynamic, llama3, yarn, longrope", '"su"']),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_scaling", "lacks short_factor, long_factor"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling", "lacks factor", "rope_type linear"]),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, ["factor in rope_scaling", "at least 1", "got 0.5"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["factor in rope_scaling", "a number", '"2" (a string)']),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "must be 1", "0.5"]),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4}}, ["low_freq_factor", "below high_freq_factor", "4.0 and 4.0"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["lacks low_freq_factor, high_freq_factor"]),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 1.5}}, ["original_max_position_embeddings", "whole number"]),
        ({"model_type": "gpt2"}, ["model_type", "llama", '"gpt2"']),
    ],
}


@pytest.mark.parametrize(("kind", "change", "words"), [(kind, *case) for kind, cases in BROKEN.items() for case in cases])
def test_a_broken_value_is_named(kind, change, words):
    """Each message has the key, the value with its JSON type, and what to write."""
    with pytest.raises(UsageError) as caught:
        kind.from_dict({**SMALL[kind], **change}, "some.json")
    assert caught.value.exit_code == 2
    for word in [*words, "some.json"]:
        assert word in str(caught.value)


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, values in SMALL.items() for key in values])
def test_a_missing_key_is_named(kind, key):
    """The shape has no defaults."""
    with pytest.raises(UsageError, match=f"lacks {key};"):
        kind.from_dict({k: v for k, v in SMALL[kind].items() if k != key})


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_config_of_each_family_is_read_by_its_class(tmp_path, family):
    """From a directory, as `config_from_json` reads it; the class of another family refuses the file and names its own."""
    config = next(iter(family.presets.values()), None) or family.config()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert family.config.from_json(tmp_path) == config_from_json(tmp_path) == config
    other = LlamaConfig if family.config is GPT2Config else GPT2Config
    with pytest.raises(UsageError, match=f'model_type in .*config.json must be "{other.model_type}", got "{family.config.model_type}"'):
        other.from_json(tmp_path)


@pytest.mark.parametrize("read", [GPT2Config.from_json, LlamaConfig.from_json, config_from_json])
def test_a_file_that_is_missing_or_truncated_is_missing_data(tmp_path, read):
    """Exit code 4, with the path; a list instead of an object breaks a rule; nor is there an end to what is nested deeper than any reader goes."""
    path = tmp_path / "config.json"
    with pytest.raises(DataError, match=r"config\.json cannot be read"):
        read(path)
    for text in (json.dumps(GPT2_SMALL)[:-7], "[" * 200_000):
        path.write_text(text)
        with pytest.raises(DataError, match=r"config\.json is not whole JSON"):
            read(path)
    path.write_text("[1]")
    with pytest.raises(UsageError, match="JSON object"):
        read(path)


def test_a_config_made_in_python_obeys_the_same_rules():
    """No way around the checks."""
    with pytest.raises(UsageError, match="divisible"):
        GPT2Config(vocab_size=10, n_positions=8, n_embd=10, n_layer=1, n_head=4)
    with pytest.raises(UsageError, match="divisible"):
        LlamaConfig(**{**LLAMA_SMALL, "num_key_value_heads": 3})


def test_the_model_type_names_the_family():
    """An unknown one is named with those that there are."""
    assert list(FAMILIES)[:2] == ["gpt2", "llama"]
    assert isinstance(config_from_dict({**LLAMA_SMALL, "model_type": "llama"}), LlamaConfig)
    assert isinstance(config_from_dict({"vocab_size": 10, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}), GPT2Config)
    for kind in ("mamba", 5, None, ["llama"]):
        with pytest.raises(UsageError, match=r"model_type in x\.json must be one of gpt2, llama, .*, got"):
            config_from_dict({**LLAMA_SMALL, "model_type": kind}, "x.json")
    assert [untiled_type({"model_type": kind}) for kind in ("mamba", "llama", 5, None)] == ["mamba", "", "", ""]
    assert untiled_type({}) == untiled_type([1]) == ""  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="JSON object"):
        config_from_dict([1])  # type: ignore[arg-type]


NNTILE = {"vocab_size": 10, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_inner": 32, "activation_function": "gelu_new"}
"""Keys of a file for NNTile."""


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("head", ["", "Model", "ForCausalLM", "ForSequenceClassification"])
def test_architectures_name_the_family_of_a_file_without_a_model_type(name, head):
    """Any class of transformers for the family, with a notice."""
    values = CONFIGS[name].to_dict()
    kind = values.pop("model_type")
    if head:
        values["architectures"] = [_HEADS.sub("", values["architectures"][0]) + head]
    assert type_of(values) == kind
    assert config_notes(values, "x.json")[0].startswith("x.json lacks model_type; its architectures are those of ")
    assert type(config_from_dict(values)) is type(CONFIGS[name])


@pytest.mark.parametrize("name", PRESETS)
def test_a_file_without_a_model_type_is_a_gpt2_or_refused(name):
    """Every preset and no other family is taken for a GPT-2; what is taken is said."""
    values = {key: value for key, value in PRESETS[name].to_dict().items() if key not in ("model_type", "architectures")}
    if isinstance(PRESETS[name], GPT2Config):
        assert config_from_dict(values) == PRESETS[name]
        (sentence,) = config_notes(values, "x.json")
        assert sentence == 'x.json lacks model_type; its keys are those of GPT-2, and it is read as one (add "model_type": "gpt2")'
    else:
        with pytest.raises(UsageError, match=r"x.json lacks model_type, and .*; add the model_type of its family, one of gpt2, llama"):
            config_from_dict(values, "x.json")


@pytest.mark.parametrize("more", [{}, {"n_inner": None}, {"resid_pdrop": 0.0}, {"architectures": []}, {"architectures": None}, {"n_ctx": 8}])
def test_files_of_nntile_keep_working(more):
    """Keys of a GPT-2 without a model_type."""
    assert isinstance(config_from_dict({**NNTILE, **more}), GPT2Config)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rotary_dim": 4}, "a GPT-2, the default, has no key rotary_dim"),  # a GPT-J
        ({"multi_query": True}, "has no key multi_query"),  # a GPTBigCode
        ({"afn": "gelu"}, "has no key afn"),  # the first GPT
        ({"architectures": ["MambaForCausalLM"]}, 'its architectures are ["MambaForCausalLM"] (a list), not of one family here'),
        ({"architectures": ["GPTJForCausalLM"]}, "not of one family here"),
        ({"architectures": ["GPT2LMHeadModel", "LlamaForCausalLM"]}, "not of one family here"),
        ({"architectures": [5]}, "its architectures are [5] (a list)"),
        ({"architectures": {"GPT2": 1}}, "not of one family here"),
    ],
)
def test_a_file_without_a_model_type_that_may_be_another_model(more, words):
    """A refusal that says what to add; with it the file is read as far as the family goes."""
    with pytest.raises(UsageError) as error:
        config_from_dict({**NNTILE, **more}, "x.json")
    assert words in str(error.value)
    assert "add the model_type of its family, one of gpt2, llama" in str(error.value)
    assert isinstance(config_from_dict({**NNTILE, **more, "model_type": "gpt2"}), GPT2Config)


def test_presets_have_the_published_sizes():
    """Numbers of parameters of OpenAI's models, of the other families as on the Hub, and ours."""
    sizes = {name: config.num_parameters for name, config in PRESETS.items()}
    assert sizes["gpt2"] == 124_439_808
    assert sizes["gpt2-medium"] == 354_823_168
    assert sizes["gpt2-large"] == 774_030_080
    assert sizes["gpt2-xl"] == 1_557_611_200
    assert sizes["llama-1b"] == 1_235_814_400
    assert sizes["llama-3b"] == 3_212_749_824
    assert sizes["mistral-7b"] == 7_241_732_096
    assert sizes["qwen2.5-0.5b"] == 494_032_768
    assert sizes["qwen3-0.6b"] == 596_049_920
    assert sizes["gemma2-2b"] == 2_614_341_888
    assert sizes["phi3-mini"] == 3_821_079_552
    assert sizes["gemma3-270m"] == 268_098_176
    assert sizes["gemma3-1b"] == 999_885_952
    assert sizes["gpt-neo-125m"] == 125_198_592
    assert sizes["pythia-160m"] == 162_322_944
    assert sizes["phi-2"] == 2_779_683_840
    assert sizes["bert-base"] == 109_514_298
    assert sizes["roberta-base"] == 124_697_433
    assert sizes["t5-small"] == 60_506_624
    assert sizes["t5-v1.1-small"] == 76_961_152
    assert (PRESETS["tiny"].n_layer, PRESETS["tiny"].n_embd, PRESETS["tiny"].vocab_size) == (4, 256, 4096)
    tiny = PRESETS["llama-tiny"]
    assert (tiny.n_layer, tiny.n_embd, tiny.vocab_size, tiny.n_head, tiny.n_kv_head) == (4, 256, 4096, 4, 2)
    assert PRESETS["llama-3b"].head_size == 128


def test_layers_and_dropout_are_changed_by_one_name():
    """--dropout has one place in a LLaMA and three in a GPT-2; tiles are tried on fewer blocks of either."""
    assert [PRESETS[name].with_layers(2).n_layer for name in ("tiny", "llama-1b")] == [2, 2]
    assert PRESETS["llama-tiny"].with_dropout(0.2).attention_dropout == 0.2
    changed = PRESETS["tiny"].with_dropout(0.2)
    assert (changed.resid_pdrop, changed.embd_pdrop, changed.attn_pdrop) == (0.2, 0.2, 0.2)
