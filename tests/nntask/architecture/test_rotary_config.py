"""Rotary scaling in configurations of LLaMA: read where transformers finds it, written so that it reads it back. The rest: `test_config`."""

import json
from dataclasses import replace

import numpy as np
import pytest
import transformers
from support.llama_oracle import frequencies
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nntask.architecture.rotary import RopeScaling
from nntask.errors import UsageError
from nntask.models.llama import LlamaConfig
from nntask.models.registry import config_from_dict

SMALL = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, None),
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 2}, RopeScaling(rope_type="linear", factor=2.0)),
        ({"type": "yarn", "factor": 4.0}, RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=131072)),
        (
            {"type": "yarn", "original_max_position_embeddings": 32768},
            RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
        ),
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


def test_scaling_made_in_python_obeys_the_same_rules():
    """No way around the checks."""
    with pytest.raises(UsageError, match="lacks low_freq_factor"):
        LlamaConfig(**SMALL, rope_scaling=RopeScaling(rope_type="llama3", factor=2.0))
    with pytest.raises(UsageError, match="rope_type"):
        LlamaConfig(**SMALL, rope_scaling=RopeScaling(rope_type="mrope", factor=2.0))
    with pytest.raises(UsageError, match="short_factor in rope_scaling in the config must have 32 numbers"):
        LlamaConfig(**SMALL, rope_scaling=RopeScaling(rope_type="longrope", factor=2.0, short_factor=(1.0,), long_factor=(1.0,) * 32))


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
    assert frequencies(made).shape == (32,)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"factor": 1.0},
        {"factor": 40},
        {"attention_factor": 0.83},
        {"beta_fast": 16, "beta_slow": 2},
        {"truncate": False},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": 0.707},
        {"original_max_position_embeddings": 3},
        {"original_max_position_embeddings": 2**31 - 1},
    ],
)
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_yarn_is_that_of_transformers(more, theta):
    """Frequencies to the last bits of a power in fp32, in which libraries differ, and the same factor of cosines and sines, for every key."""
    values = {**SMALL, "rope_parameters": {**YARN, **more, "rope_theta": theta}}
    ours = LlamaConfig.from_dict(json.loads(json.dumps(values)))
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](transformers.LlamaConfig(**values))
    np.testing.assert_array_max_ulp(frequencies(ours), theirs.numpy(), 4)
    assert ours.rope_scaling.angle_factor == factor


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"factor": 0.5}, "factor in rope_scaling in x.json must be at least 1, got 0.5"),
        ({"attention_factor": -1.0}, "attention_factor in rope_scaling in x.json must be positive and finite"),
        ({"beta_fast": 1, "beta_slow": 2}, "beta_slow in rope_scaling in x.json must be below beta_fast, got 2.0 and 1.0"),
        ({"beta_slow": 40}, "beta_slow in rope_scaling in x.json must be below beta_fast, got 40.0 and 32.0"),
        ({"truncate": "no"}, "truncate in rope_scaling in x.json must be true or false"),
        ({"original_max_position_embeddings": 1.5}, "original_max_position_embeddings in rope_scaling in x.json must be a whole number"),
    ],
)
def test_wrong_keys_of_yarn_are_refused(more, words):
    """A sentence with the key and the value."""
    with pytest.raises(UsageError) as error:
        LlamaConfig.from_dict({**SMALL, "rope_scaling": {**YARN, **more}}, "x.json")
    assert words in str(error.value)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + each / 64 for each in range(32)],
    "long_factor": [1.5**each for each in range(32)],
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize("more", [{}, {"factor": 8.0}, {"factor": 1.0}, {"attention_factor": 1.19}, {"original_max_position_embeddings": 1 << 18}])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_longrope_is_that_of_transformers(more, theta):
    """Both tables to the last bits of a power in fp32, and the same factor of cosines and sines; above the original length it is the long one."""
    values = {**SMALL, "rope_parameters": {**LONGROPE, **more, "rope_theta": theta}}
    ours = LlamaConfig.from_dict(json.loads(json.dumps(values)))
    rotary, original = ours.attention(0).rotary, values["rope_parameters"]["original_max_position_embeddings"]
    for length in (1, original, original + 1, 1 << 20):
        theirs, factor = ROPE_INIT_FUNCTIONS["longrope"](transformers.LlamaConfig(**values), seq_len=length)
        np.testing.assert_array_max_ulp(rotary.frequencies(is_long=rotary.is_long(length)), theirs.numpy(), 4)
        assert ours.rope_scaling.angle_factor == pytest.approx(factor, rel=1e-15)
    assert LlamaConfig.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"short_factor": 2.0}, "short_factor in rope_scaling in x.json must be a list of numbers, got 2.0"),
        ({"long_factor": [1.0] * 31}, "long_factor in rope_scaling in x.json must have 32 numbers, one for each pair of the 64 rotated features"),
        ({"long_factor": [1.0] * 31 + [0.0]}, "long_factor[31] in rope_scaling in x.json must be positive and finite, got 0.0"),
        ({"short_factor": ["1"] * 32}, "short_factor[0] in rope_scaling in x.json"),
        ({"factor": 0.5}, "factor in rope_scaling in x.json must be at least 1, got 0.5"),
        ({"attention_factor": 0}, "attention_factor in rope_scaling in x.json must be positive"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings in x.json must be above 1"),
    ],
)
def test_wrong_keys_of_longrope_are_refused(more, words):
    """A sentence with the key and the value."""
    with pytest.raises(UsageError) as error:
        LlamaConfig.from_dict({**SMALL, "rope_scaling": {**LONGROPE, **more}}, "x.json")
    assert words in str(error.value)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_of_a_published_phi_3(kind):
    """Lengths beside the scaling, older names of the kind; what is written has the three keys that transformers 4 wants, and is read back."""
    scaling = {"type": kind, **{key: LONGROPE[key][:24] for key in ("short_factor", "long_factor")}}
    values = {**SMALL, "model_type": "phi3", "partial_rotary_factor": 0.75, "rope_scaling": scaling, "original_max_position_embeddings": 4096}
    ours = config_from_dict(json.loads(json.dumps(values)))
    assert (ours.rope_scaling.rope_type, ours.rope_scaling.factor, ours.rotary.size) == ("longrope", 32.0, 48)
    written = json.loads(json.dumps(ours.to_dict()))
    assert set(written["rope_scaling"]) == {"type", "short_factor", "long_factor"}
    assert config_from_dict(written) == ours
    theirs = transformers.Phi3Config(**json.loads(json.dumps(written)))
    assert ROPE_INIT_FUNCTIONS["longrope"](theirs)[1] == pytest.approx(ours.rope_scaling.angle_factor, rel=1e-15)
    again = config_from_dict(json.loads(theirs.to_json_string(use_diff=False)))
    assert replace(again, num_key_value_heads=None, initializer_range=ours.initializer_range, pad_token_id=None) == ours
    moved = {**values, "rope_scaling": {**scaling, "original_max_position_embeddings": 2048}}
    del moved["original_max_position_embeddings"]
    with pytest.raises(UsageError, match="must be next to rope_scaling, because transformers assumes 4096 otherwise, got 2048"):
        config_from_dict(moved)
