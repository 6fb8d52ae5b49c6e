"""transformers' LLaMA as the oracle of ours: equal weights, its losses and gradients as arrays. `gpt2_oracle` has what is the same for GPT-2."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import transformers
from support.gpt2_oracle import WIDE, gradients_of

from nntask.architecture.rotary import RopeScaling
from nntask.models.llama import NAMES, Llama, LlamaConfig

SCALINGS = [
    None,
    RopeScaling(rope_type="linear", factor=3.0),
    RopeScaling(rope_type="dynamic", factor=4.0),
    RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=0.2),
    RopeScaling(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8),
]
"""The last one has short, long and blended wavelengths among heads of at least 6 features."""


def random_config(seed, **changes):
    """A small config with odd sizes: groups of one to three heads of queries, inner width and vocabulary that no tile divides, biases or none."""
    rng = np.random.default_rng(seed)
    shared, group, size = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 3])), int(rng.choice([6, 8, 10]))
    config = LlamaConfig(
        vocab_size=int(rng.integers(37, 90)),
        hidden_size=shared * group * 2 * int(rng.integers(3, 6)),
        intermediate_size=int(rng.integers(20, 70)),
        num_hidden_layers=int(rng.integers(1, 4)),
        num_attention_heads=shared * group,
        num_key_value_heads=shared,
        max_position_embeddings=int(rng.integers(12, 20)),
        head_dim=size,
        rms_norm_eps=float(rng.choice([1e-6, 1e-3])),
        tie_word_embeddings=bool(rng.integers(2)),
        rope_theta=float(rng.choice([100.0, 10000.0])),
        rope_scaling=SCALINGS[int(rng.integers(len(SCALINGS)))],
        attention_bias=bool(rng.integers(2)),
        mlp_bias=bool(rng.integers(2)),
        initializer_range=0.2,
    )
    return replace(config, **changes)


def hf_model(config, dtype=np.float32, seed=0):
    """The oracle, its biases and norms away from their trivial first values."""
    torch.manual_seed(seed)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.to_dict(), attn_implementation="eager"))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs.to(WIDE[np.dtype(dtype)])


def our_model(theirs, config, tiling, runtime, **options):
    """Ours with the weights of `theirs`."""
    model = Llama(config, tiling, runtime, seed=None, **options)
    model.load(NAMES.from_hf({name: value.numpy() for name, value in theirs.state_dict().items()}, config))
    return model


def our_gradients(model):
    """Our gradients under Hugging Face's names."""
    return NAMES.to_hf(gradients_of(model), model.config)


def hf_gradients(theirs):
    """The oracle's gradients by name, the tied head as the embedding's."""
    found = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    if theirs.config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def frequencies(config: LlamaConfig) -> npt.NDArray[np.float32]:
    """Rotary frequencies of a model, (D / 2,)."""
    rotary = config.attention(0).rotary
    assert rotary is not None
    return rotary.frequencies()
