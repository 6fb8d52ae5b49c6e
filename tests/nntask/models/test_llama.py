"""What LLaMA has alone: rotary frequencies, groups of heads, first weights. The rest: `test_models`."""

from dataclasses import replace

import numpy as np
import pytest
import transformers
from support.families import FAMILIES, MIXED
from support.llama_oracle import SCALINGS, frequencies, hf_model

from nntask.errors import DataError, UsageError
from nntask.models.llama import NAMES, Llama
from nntask.models.registry import PRESETS
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling.rope_type if scaling else "default")
def test_frequencies_are_those_of_transformers(scaling):
    """To the last digits of fp32, in heads long enough that llama3 has short, long and blended waves; and the scalings differ."""
    config = replace(MIXED, head_dim=64, rope_scaling=scaling, rope_theta=500000.0, max_position_embeddings=8192)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_dict())).model.rotary_emb.inv_freq.numpy()
    ours = frequencies(config)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    plain = frequencies(replace(config, rope_scaling=None))
    assert np.array_equal(ours, plain) == (scaling is None or scaling.rope_type == "dynamic")


def test_frequencies_of_the_presets_are_those_of_transformers():
    """Llama 3.2 with its own scaling: short waves unscaled, long ones divided by 32, blended ones between."""
    config = PRESETS["llama-1b"]
    small = {**config.to_dict(), "num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).model.rotary_emb.inv_freq.numpy()
    ours = frequencies(config)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    ratios = frequencies(replace(config, rope_scaling=None)) / ours
    assert (ratios[0], ratios[-1]) == (1, 32)
    assert ((ratios > 1) & (ratios < 32)).any()


def test_an_untied_head_that_is_missing_is_named():
    """The weights of a bare model do not make one with a head."""
    state = {name: value.numpy() for name, value in hf_model(MIXED).state_dict().items() if name != "lm_head.weight"}
    with pytest.raises(DataError, match=r"lack lm_head\.weight"):
        NAMES.from_hf(state, MIXED)


NOWHERE_EVEN = FAMILIES[1].uneven


def test_first_weights_depend_on_the_seed_only():
    """Not on the tiling; all matrices have the config's deviation, norms begin at 1 and biases at 0."""
    models = [Llama(replace(MIXED, hidden_size=60), tiling, InlineRuntime(), seed=3) for tiling in (ModelTiling(), NOWHERE_EVEN[0])]
    first, second = ({name: p.read() for name, p in model.named_parameters().items()} for model in models)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert first["layers.0.self_attn.q_proj.weight"].shape == (48, 60)
    assert first["layers.1.mlp.down_proj.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert not np.array_equal(first["layers.0.self_attn.k_proj.weight"], first["layers.1.self_attn.k_proj.weight"])
    assert set(first["norm.weight"]) == {1.0}
    assert set(first["layers.0.self_attn.k_proj.bias"]) == {0.0}


def test_tiles_hold_whole_groups_of_heads():
    """Two heads of queries share one of keys: tiles of an odd number are refused, with the nearest legal size."""
    with pytest.raises(UsageError, match=r"head_tile must be a multiple of 2, because 2 heads .* got 3; the nearest legal value is 4"):
        Llama(MIXED, ModelTiling(head_tile=3), InlineRuntime(), seed=None)
    with pytest.raises(UsageError, match="the nearest legal value is 2"):
        Llama(MIXED, ModelTiling(head_tile=1), InlineRuntime(), seed=None)
