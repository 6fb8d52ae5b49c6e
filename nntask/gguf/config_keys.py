"""Configs as the metadata of GGUF files: the keys of an architecture from a config in transformers' JSON, and back.

Properties without a key are constants of llama.cpp's code: the activation of an architecture, the scale of its scores, the blocks of a Gemma that see
a window by default. Dropout has no key and is 0 in a config from a file. A file with a key that changes the model, but is neither read nor listed in
`metadata_keys`, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..architecture.config_checks import LARGEST_DEPTH
from ..errors import DataError, StorageError
from .architectures import ARCHITECTURES, EMBEDDING, HEAD, POSITIONS, Architecture
from .metadata_keys import Keys, Values
from .rope_keys import scaling_from, scaling_keys

_RMS: Final = "attention.layer_norm_rms_epsilon"
_LAYER: Final = "attention.layer_norm_epsilon"
_BASE: Final = "rope.freq_base"
_LOCAL_BASE: Final = "rope.freq_base_swa"
_WINDOW: Final = "attention.sliding_window"
_PATTERN: Final = "attention.sliding_window_pattern"
_CAP: Final = "final_logit_softcapping"
_SCORE_CAP: Final = "attn_logit_softcapping"
_GEMMA_2_WINDOW: Final = 4096
_GEMMA_2_CAPS: Final = {_SCORE_CAP: 50.0, _CAP: 30.0}
"""llama.cpp's values for a file without the key."""
_SCALED_BY_WIDTH: Final = {"gemma2": 46, "gemma3": 62}
"""Architecture -> number of blocks of its 27B, in which llama.cpp divides scores by root(width / heads) instead of root(size of a head)."""
NO_WINDOWS: Final = ("llama", "phi3")
"""Architectures whose windows llama.cpp ignores, although the files of Mistral and Phi 3 have the key."""
_PERIODS: Final = {"gemma2": 2, "gemma3": 6}
"""Architecture -> period in which one block is full, unless a key gives another."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_EXPERT_SIZE, _SHARED_SIZE = "expert_feed_forward_length", "expert_shared_feed_forward_length"
_GPT2_KEYS: Final = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    _LAYER: "layer_norm_epsilon",
}
_HIDDEN_KEYS: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
"""Key -> name of the same number in a config, of GPT-2 and of all other architectures."""


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Facts about the config that are read from the tensors of a file.

    Args:
        shapes: name in the GGUF file -> shape.
        rotary_factors: name -> values of those `architectures.ALL_FACTORS` that the file has.
        is_tied: whether the head is the embedding.
    """

    shapes: Mapping[str, tuple[int, ...]]
    rotary_factors: Mapping[str, np.ndarray[Any, Any]]
    is_tied: bool

    def has(self, name: str) -> bool:
        """Return whether a block has a tensor of that name."""
        return f"blk.0.{name}" in self.shapes


def config_from(
    metadata: Values, shapes: Mapping[str, tuple[int, ...]], source: str, *, rotary_factors: Mapping[str, np.ndarray[Any, Any]], ties: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the config of a file, in transformers' JSON, and keys of its architecture that neither llama.cpp nor this reader knows.

    Args:
        metadata: metadata of the file.
        shapes: name in the GGUF file -> shape.
        source: name of the file, for messages.
        rotary_factors: name -> values of those `architectures.ALL_FACTORS` that the file has.
        ties: whether a head in the file repeats the embedding.

    Raises:
        DataError: the architecture is unknown, a key is missing, or a key changes the model in a way that is not read.
        StorageError: a size differs from the tensors'.
    """
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise DataError(f"general.architecture in {source} must be one of {', '.join(ARCHITECTURES)}, got {name[:60]!r}", "use such a model")
    embedding = shapes.get(EMBEDDING)
    if embedding is None or len(embedding) != 2:
        raise DataError(f"{source} has no matrix {EMBEDDING}, which every model has", "convert the model again, or use another file")
    tensors = _Tensors(shapes, rotary_factors, HEAD not in shapes or ties)
    keys = Keys(metadata, name, source)
    values, unread = _READERS[name](keys, tensors), keys.check_rest()
    _check_shapes(values, shapes, name, source)
    return {"vocab_size": embedding[0], "tie_word_embeddings": tensors.is_tied, **values}, unread


def _check_shapes(values: Values, shapes: Mapping[str, tuple[int, ...]], name: str, source: str) -> None:
    """Check that the sizes of a config agree with the tensors, before memory is taken for these sizes; raise StorageError if a size differs."""
    heads, width = values.get("num_attention_heads", values.get("n_head")), values.get("hidden_size", values.get("n_embd"))
    shared, size = values.get("num_key_value_heads", heads), values.get("head_dim")
    if not all(type(each) is int and 0 < each < 1 << 31 for each in (heads, width, shared)):
        return  # the config's own rules refuse it
    size = width // heads if size is None else size
    blocks = {number for number in (each.split(".")[1] for each in shapes if each.startswith("blk.")) if number.isdecimal()}
    inner = values.get("intermediate_size", values.get("n_inner"))
    claimed = [
        ("embedding_length", width, EMBEDDING, 1, width),
        ("feed_forward_length", inner, "blk.0.ffn_up.weight", 0, 2 * inner if name == "phi3" and type(inner) is int else inner),
        ("attention.head_count", heads, "blk.0.attn_q.weight", 0, heads * size),
        ("attention.head_count_kv", shared, "blk.0.attn_k.weight", 0, shared * size),
        ("attention.head_count", heads, "blk.0.attn_qkv.weight", 0, (heads + 2 * shared) * size),
        ("context_length", values.get("n_positions"), POSITIONS, 0, values.get("n_positions")),
    ]
    if (count := values.get("num_local_experts", values.get("num_experts"))) is not None:
        size = values.get("moe_intermediate_size", inner)
        claimed += [("expert_count", count, "blk.0.ffn_gate_inp.weight", 0, count), (_EXPERT_SIZE, size, "blk.0.ffn_up_exps.weight", 1, size)]
        claimed += [("expert_count", count, each, 0, count) for each in shapes if Architecture.has_experts(each)]
        for layer, axis in (("ffn_gate", 0), ("ffn_up", 0), ("ffn_down", 1)):
            alone = [each for each in shapes if Architecture.is_of_one_expert(each, layer)]
            claimed += [("feed_forward_length", size, each, axis, size) for each in alone]
            claimed += [("embedding_length", width, each, 1 - axis, width) for each in alone]
    for key, value, tensor, axis, expected in claimed:
        shape = shapes.get(tensor)
        if shape is not None and (axis >= len(shape) or shape[axis] != expected):
            raise StorageError(
                f"{name}.{key} in {source} is {value}, and {tensor} has shape {shape}", "copy the file again, or convert the model again"
            )
    count = values.get("num_hidden_layers", values.get("n_layer"))
    if count != len(blocks):
        raise StorageError(f"{name}.block_count in {source} is {count}, and there are tensors of {len(blocks)} blocks", "copy the file again")


def _gpt2(keys: Keys, tensors: _Tensors) -> dict[str, Any]:
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    keys.equal("attention.head_count_kv", heads, "the number of heads of queries")
    keys.equal("attention.key_length", width // heads, "the share of a head in the width")
    keys.equal("attention.value_length", width // heads, "the share of a head in the width")
    return {
        "model_type": "gpt2",
        **{name: keys.number(key) for key, name in _GPT2_KEYS.items()},
        "activation_function": "gelu_new",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def _hidden(keys: Keys, tensors: _Tensors, *, eps: str = _RMS, is_partial: bool = False) -> dict[str, Any]:
    """Return the values of all architectures except GPT-2.

    Args:
        eps: key of the term in norms.
        is_partial: whether a part of a head may stay without rotation.
    """
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    size = keys.count("attention.key_length", width // heads)
    keys.equal("attention.value_length", size, "the size of a head")
    if not is_partial:
        keys.equal("rope.dimension_count", size, "the size of a head, as these models rotate whole heads")
    values = {
        **{name: keys.number(key) for key, name in _HIDDEN_KEYS.items()},
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": size if size * heads != width else None,
        "rope_theta": float(keys.number(_BASE, 10000.0)),
        "rms_norm_eps" if eps == _RMS else "layer_norm_eps": keys.number(eps),
    }
    return {**values, "rope_scaling": scaling_from(keys, values, keys.count("rope.dimension_count", size), tensors.rotary_factors)}


def _head_size(values: Values) -> int:
    """Return the number of features of a head."""
    size: int = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    return size


def _llama(keys: Keys, tensors: _Tensors) -> dict[str, Any]:
    values = {**_hidden(keys, tensors), "hidden_act": "silu"}
    if keys.number("expert_count", 0):
        return {"model_type": "mixtral", **values, **_experts(keys, "num_local_experts"), "sliding_window": keys.number(_WINDOW, 0) or None}
    if window := keys.number(_WINDOW, 0):
        return {"model_type": "mistral", "sliding_window": window, **values}
    return {"model_type": "llama", "attention_bias": tensors.has("attn_q.bias"), "mlp_bias": tensors.has("ffn_up.bias"), **values}


def _experts(keys: Keys, name: str) -> dict[str, Any]:
    """Return the numbers of experts, the first one under `name`."""
    return {name: keys.count("expert_count"), "num_experts_per_tok": keys.count("expert_used_count")}


def _olmoe(keys: Keys, tensors: _Tensors) -> dict[str, Any]:
    return {"model_type": "olmoe", **_hidden(keys, tensors), **_experts(keys, "num_experts"), "norm_topk_prob": False}


def _qwen2_moe(keys: Keys, tensors: _Tensors) -> dict[str, Any]:
    values = _qwen_moe(keys, tensors, "num_experts")
    keys.equal("expert_shared_count", 1, "the shared expert of this architecture")
    shared = keys.count(_SHARED_SIZE, values["intermediate_size"])
    bias = {"qkv_bias": tensors.has("attn_q.bias"), "norm_topk_prob": False}
    return {"model_type": "qwen2_moe", **values, **bias, "shared_expert_intermediate_size": shared}


def _qwen3_moe(keys: Keys, tensors: _Tensors) -> dict[str, Any]:
    values = _qwen_moe(keys, tensors, "num_local_experts")
    return {"model_type": "qwen3_moe", **values, "head_dim": _head_size(values), "norm_topk_prob": True}


def _qwen_moe(keys: Keys, tensors: _Tensors, name: str) -> dict[str, Any]:
    """Return the values that Qwen's mixtures share; in llama.cpp all blocks have experts, by default of an equal share of the width."""
    values = {**_hidden(keys, tensors), **_experts(keys, name), "use_sliding_window": False}
    size = keys.count(_EXPERT_SIZE, values["intermediate_size"] // values["num_experts_per_tok"])
    return {**values, "moe_intermediate_size": size}


def _qwen2(keys: Keys, tensors: _Tensors) -> dict[str, Any]:
    return {"model_type": "qwen2", **_hidden(keys, tensors), "use_sliding_window": False}


def _qwen3(keys: Keys, tensors: _Tensors) -> dict[str, Any]:
    values = _qwen2(keys, tensors)
    return {**values, "model_type": "qwen3", "head_dim": _head_size(values), "attention_bias": tensors.has("attn_q.bias")}


def _gemma2(keys: Keys, tensors: _Tensors) -> dict[str, Any]:
    values = _gemma(keys, tensors, keys.number(_WINDOW, _GEMMA_2_WINDOW))
    keys.equal(_LOCAL_BASE, values["rope_theta"], "the base of all blocks")
    return {"model_type": "gemma2", **values, **{key: keys.number(key, usual) or None for key, usual in _GEMMA_2_CAPS.items()}}


def _gemma3(keys: Keys, tensors: _Tensors) -> dict[str, Any]:
    values = _gemma(keys, tensors, keys.number(_WINDOW))
    return {
        "model_type": "gemma3_text",
        **values,
        "rope_local_base_freq": float(keys.number(_LOCAL_BASE, 10000.0)),
        _CAP: keys.number(_CAP, 0) or None,
    }


def _gemma(keys: Keys, tensors: _Tensors, window: int) -> dict[str, Any]:
    """Return the values that Gemma 2 and 3 share."""
    values = _hidden(keys, tensors)
    values |= {"head_dim": _head_size(values), "query_pre_attn_scalar": _divisor(keys.name, values), "sliding_window": window}
    return {**values, "layer_types": _kinds(keys, values["num_hidden_layers"], _PERIODS[keys.name])}


def _divisor(name: str, values: Values) -> int:
    """Return the number whose root divides the scores of a Gemma in llama.cpp."""
    is_wide = values["num_hidden_layers"] == _SCALED_BY_WIDTH[name]
    return int(values["hidden_size"] // values["num_attention_heads"]) if is_wide else _head_size(values)


def _kinds(keys: Keys, count: int, usual: int) -> list[str] | None:
    """Return the kinds of a Gemma's blocks, from a list or the period of full blocks; None for the default, the period `usual`."""
    if (flags := keys.flags(_PATTERN)) is not None:
        if len(flags) != count:
            raise keys.refusal(_PATTERN, f"{len(flags)} of them", f"{count} switches, one for each block")
        return [_SLIDING if has_window else _FULL for has_window in flags.tolist()]
    period = keys.count(_PATTERN, usual)
    if type(count) is not int or not 0 < count <= LARGEST_DEPTH or period == usual:
        return None  # the config's own rules refuse such a depth
    return [_FULL if (layer + 1) % period == 0 else _SLIDING for layer in range(count)]


def _phi(keys: Keys, tensors: _Tensors) -> dict[str, Any]:
    values = _hidden(keys, tensors, eps=_LAYER, is_partial=True)
    return {"model_type": "phi", **values, "partial_rotary_factor": _turned(keys, values), "hidden_act": "gelu_new"}


def _phi3(keys: Keys, tensors: _Tensors) -> dict[str, Any]:
    values = _hidden(keys, tensors, is_partial=True)
    values |= {"partial_rotary_factor": _turned(keys, values), "sliding_window": keys.number(_WINDOW, 0) or None, "hidden_act": "silu"}
    scaling = values["rope_scaling"] or {}
    return {"model_type": "phi3", **values, **{key: scaling[key] for key in ("original_max_position_embeddings",) if key in scaling}}


def _turned(keys: Keys, values: Values) -> float:
    """Return the rotated fraction of a head."""
    size = _head_size(values)
    return float(keys.number("rope.dimension_count", size) / size)


_READERS: Final[Mapping[str, Callable[[Keys, _Tensors], dict[str, Any]]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "olmoe": _olmoe,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "phi2": _phi,
}


def metadata_of(values: Values, architecture: Architecture) -> dict[str, Any]:
    """Return key -> value of a config in a file; the inverse of `config_from`.

    Args:
        values: config in transformers' JSON as our configs write it, with rope_theta and rope_scaling at the top.
        architecture: architecture of its family.
    """
    if architecture.name == "gpt2":
        values = {**values, "n_inner": values["n_inner"] or 4 * values["n_embd"]}
        keys = {**{key: values[name] for key, name in _GPT2_KEYS.items()}, "vocab_size": values["vocab_size"]}
    else:
        keys = _metadata_of_hidden(values, architecture.name)
    return {"general.architecture": architecture.name, **{f"{architecture.name}.{key}": value for key, value in keys.items()}}


def _metadata_of_hidden(values: Values, name: str) -> dict[str, Any]:
    heads = values["num_attention_heads"]
    size = values.get("head_dim") or values["hidden_size"] // heads
    keys = {
        **{key: values[name] for key, name in _HIDDEN_KEYS.items()},
        "attention.head_count_kv": values.get("num_key_value_heads") or heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": int(size * values.get("partial_rotary_factor", 1.0)),
        _BASE: float(values["rope_theta"]),
        "vocab_size": values["vocab_size"],
    }
    keys |= {_LAYER: values["layer_norm_eps"]} if name == "phi2" else {_RMS: values["rms_norm_eps"]}
    if values.get("sliding_window") and (name in ("gemma2", "gemma3", "phi3") or values["model_type"] in ("mistral", "mixtral")):
        keys[_WINDOW] = values["sliding_window"]
    if "num_experts_per_tok" in values:
        keys |= {"expert_count": values.get("num_local_experts", values.get("num_experts")), "expert_used_count": values["num_experts_per_tok"]}
    sizes = ((_EXPERT_SIZE, "moe_intermediate_size"), (_SHARED_SIZE, "shared_expert_intermediate_size"))
    keys |= {key: values[name] for key, name in sizes if name in values}
    if name in _PERIODS:
        keys |= _metadata_of_gemma(values, name)
    return keys | scaling_keys(values.get("rope_scaling"))


def _metadata_of_gemma(values: Values, name: str) -> dict[str, Any]:
    """Return the keys that differ from llama.cpp's constants in few models only."""
    kinds, found = list(values["layer_types"]), {key: float(values[key]) for key in _GEMMA_2_CAPS if values.get(key)}
    if name == "gemma3" and (local := values["rope_parameters"][_SLIDING]["rope_theta"]) != 10000.0:
        found[_LOCAL_BASE] = float(local)
    usual = [_FULL if (layer + 1) % _PERIODS[name] == 0 else _SLIDING for layer in range(len(kinds))]
    return found if kinds == usual else {**found, _PATTERN: [kind == _SLIDING for kind in kinds]}
