"""transformers' GPT-2 as the oracle of ours: equal weights, equal batches, its losses and gradients as arrays."""

from dataclasses import replace

import numpy as np
import torch
import transformers

from nntask.models.gpt2 import GPT2, NAMES, GPT2Config

WIDE = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}


def random_config(seed, **changes):
    """A small config with odd sizes: head counts, inner width and vocabulary that no tile divides."""
    rng = np.random.default_rng(seed)
    heads = int(rng.choice([1, 3, 5]))
    config = GPT2Config(
        vocab_size=int(rng.integers(37, 90)),
        n_positions=int(rng.integers(12, 20)),
        n_embd=heads * int(rng.choice([6, 8, 10])),
        n_layer=int(rng.integers(1, 4)),
        n_head=heads,
        n_inner=int(rng.integers(20, 70)),
        activation_function=str(rng.choice(["gelu_new", "gelu", "relu", "silu"])),
        layer_norm_epsilon=float(rng.choice([1e-5, 1e-3])),
        scale_attn_weights=bool(rng.integers(2)),
        scale_attn_by_inverse_layer_idx=bool(rng.integers(2)),
        tie_word_embeddings=bool(rng.integers(2)),
        initializer_range=0.2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return replace(config, **changes)


def batches(config, count, batch, length, seed=0):
    """`count` pairs of tokens and targets (B, T) int32."""
    streams = np.random.default_rng(seed).integers(0, config.vocab_size, (count, batch, length + 1), np.int32)
    return [(stream[:, :-1], stream[:, 1:]) for stream in streams]


def hf_model(config, dtype=np.float32, seed=0):
    """The oracle, its biases and norms away from their trivial first values."""
    torch.manual_seed(seed)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config.to_dict(), attn_implementation="eager"))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs.to(WIDE[np.dtype(dtype)])


def our_model(theirs, config, tiling, runtime, *, dtype=np.float32, **options):
    """Ours with the weights of `theirs`."""
    model = GPT2(config, tiling, runtime, dtype=dtype, seed=None, **options)
    model.load(NAMES.from_hf({name: value.numpy() for name, value in theirs.state_dict().items()}, config))
    return model


def hf_loss(theirs, tokens, targets):
    """Mean token loss of the oracle, a torch scalar; targets of -1 are not used here."""
    logits = theirs(torch.from_numpy(tokens.astype(np.int64))).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets.astype(np.int64)).flatten())


def gradients_of(model):
    """Gradients under our names; rows that got no contribution are zero."""
    found = {}
    for name, parameter in model.named_parameters().items():
        out = np.zeros(parameter.shape, parameter.dtype)
        gradient = parameter.gradient
        for index, handle in zip(gradient.tiling.indices(), gradient.handles, strict=True):
            if handle.written:
                with gradient.runtime.acquire(handle, "R") as view:
                    out[gradient.tiling.slices(index)] = view
        found[name] = out
    return found


def our_gradients(model):
    """Our gradients under Hugging Face's names."""
    return NAMES.to_hf(gradients_of(model), model.config)


def hf_gradients(theirs):
    """The oracle's gradients by name, the tied head as the embedding's."""
    found = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    if theirs.config.tie_word_embeddings:
        found["lm_head.weight"] = found["transformer.wte.weight"]
    return found


def relative(ours, theirs):
    """Relative Frobenius distance; absolute where the oracle is zero."""
    return np.linalg.norm(ours - theirs) / (np.linalg.norm(theirs) or 1.0)
