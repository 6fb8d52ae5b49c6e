"""Configs as the metadata of GGUF files: the keys of an architecture from a config in transformers' JSON, and back.

What the keys do not say is a constant of llama.cpp's code: which activation an architecture has, how its scores are scaled, which blocks of a Gemma
see a window. Dropout is not said at all, and is 0 in a config that comes from a file. Numbers are fp32 in files; their shortest decimals are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import pi
from typing import Any, Final

import numpy as np

from ..errors import DataError, StorageError
from .architectures import ARCHITECTURES, EMBEDDING, HEAD, POSITIONS, Architecture

Values = Mapping[str, Any]
_RMS: Final = "attention.layer_norm_rms_epsilon"
_LAYER: Final = "attention.layer_norm_epsilon"
_LLAMA_3: Final = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all models of Meta; a file has only the factors that follow from them."""


class _Keys:
    """The keys of an architecture in a file.

    Args:
        metadata: all of the file.
        name: of the architecture.
        source: the file, for messages.
    """

    def __init__(self, metadata: Values, name: str, source: str) -> None:
        self.metadata, self._name, self._source = metadata, name, source

    def number(self, key: str, default: float | None = None) -> Any:
        """A number; one that all blocks agree on, if there is one for each.

        Raises:
            DataError: it is missing and has no default, or is no number.
        """
        whole = f"{self._name}.{key}"
        value = self.metadata.get(whole, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if type(value) not in (int, float):
            got = "nothing" if value is None else str(value)[:60]
            raise DataError(f"{whole} in {self._source} must be a number, got {got}; convert the model again, or use another file")
        return float(np.format_float_scientific(np.float32(value))) if isinstance(value, float) and abs(value) < 3e38 else value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0, which others are divided by.

        Raises:
            DataError: it is missing and has no default, or is none.
        """
        value = self.number(key, default)
        if type(value) is not int or value < 1:
            raise self.refusal(key, value, "a whole number above 0")
        return value

    def refusal(self, key: str, value: Any, rule: str) -> DataError:
        """The error of a value that its key may not have here."""
        return DataError(f"{self._name}.{key} in {self._source} must be {rule}, got {value}; use another file")

    def has(self, key: str) -> bool:
        """Whether the file has the key."""
        return f"{self._name}.{key}" in self.metadata

    def text(self, key: str) -> str:
        """A text; "" where it is missing."""
        return str(self.metadata.get(f"{self._name}.{key}", ""))


@dataclass(frozen=True, slots=True)
class _Tensors:
    """What the tensors of a file say about its config.

    Args:
        shapes: name here -> shape.
        rotary_factors: of ``rope_freqs.weight``; None where there is none.
        is_tied: whether the head is the embedding.
    """

    shapes: Mapping[str, tuple[int, ...]]
    rotary_factors: np.ndarray[Any, Any] | None
    is_tied: bool

    def has(self, name: str) -> bool:
        """Whether a block has a tensor of that name."""
        return f"blk.0.{name}" in self.shapes


def config_from(
    metadata: Values, shapes: Mapping[str, tuple[int, ...]], source: str, *, rotary_factors: np.ndarray[Any, Any] | None, ties: bool
) -> dict[str, Any]:
    """The config of a file, in transformers' JSON.

    Args:
        metadata: of the file.
        shapes: name here -> shape.
        source: the file, for messages.
        rotary_factors: values of ``rope_freqs.weight``; None where there is none.
        ties: whether a head that is there is the embedding again.

    Raises:
        DataError: the architecture is not known, or a key is missing.
        StorageError: a size is not that of the tensors.
    """
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise DataError(f"general.architecture in {source} must be one of {', '.join(ARCHITECTURES)}, got {name[:60]!r}; use such a model")
    embedding = shapes.get(EMBEDDING)
    if embedding is None or len(embedding) != 2:
        raise DataError(f"{source} has no matrix {EMBEDDING}, which every model has; convert the model again, or use another file")
    tensors = _Tensors(shapes, rotary_factors, HEAD not in shapes or ties)
    keys = _Keys(metadata, name, source)
    values = _READERS[name](keys, tensors)
    _check_shapes(values, shapes, name, source)
    return {"vocab_size": embedding[0], "tie_word_embeddings": tensors.is_tied, **values}


def _check_shapes(values: Values, shapes: Mapping[str, tuple[int, ...]], name: str, source: str) -> None:
    """Check that the sizes of a config are those of the tensors, before anything is made of these sizes.

    Raises:
        StorageError: one is not.
    """
    heads, width = values.get("num_attention_heads", values.get("n_head")), values.get("hidden_size", values.get("n_embd"))
    shared, size = values.get("num_key_value_heads", heads), values.get("head_dim")
    if not all(type(each) is int and 0 < each < 1 << 31 for each in (heads, width, shared)):
        return  # which the config's own rules refuse
    size = width // heads if size is None else size
    blocks = {number for number in (each.split(".")[1] for each in shapes if each.startswith("blk.")) if number.isdecimal()}
    inner = values.get("intermediate_size", values.get("n_inner"))
    claimed = [
        ("embedding_length", width, EMBEDDING, 1, width),
        ("feed_forward_length", inner, "blk.0.ffn_up.weight", 0, inner),
        ("attention.head_count", heads, "blk.0.attn_q.weight", 0, heads * size),
        ("attention.head_count_kv", shared, "blk.0.attn_k.weight", 0, shared * size),
        ("context_length", values.get("n_positions"), POSITIONS, 0, values.get("n_positions")),
    ]
    for key, value, tensor, axis, expected in claimed:
        shape = shapes.get(tensor)
        if shape is not None and (axis >= len(shape) or shape[axis] != expected):
            raise StorageError(
                f"{name}.{key} in {source} is {value}, and {tensor} has shape {shape}; copy the file again, or convert the model again"
            )
    count = values.get("num_hidden_layers", values.get("n_layer"))
    if count != len(blocks):
        raise StorageError(f"{name}.block_count in {source} is {count}, and there are tensors of {len(blocks)} blocks; copy the file again")


def _gpt2(keys: _Keys, tensors: _Tensors) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_positions": keys.number("context_length"),
        "n_embd": keys.number("embedding_length"),
        "n_layer": keys.number("block_count"),
        "n_head": keys.number("attention.head_count"),
        "n_inner": keys.number("feed_forward_length"),
        "layer_norm_epsilon": keys.number(_LAYER),
        "activation_function": "gelu_new",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def _hidden(keys: _Keys, *, eps: str) -> dict[str, Any]:
    """What all but GPT-2 have."""
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    size = keys.count("attention.key_length", width // heads)
    if eps == _RMS and (turned := keys.number("rope.dimension_count", size)) != size:
        raise keys.refusal("rope.dimension_count", turned, f"the size of a head, {size}, as all of it turns here")
    return {
        "max_position_embeddings": keys.number("context_length"),
        "hidden_size": width,
        "intermediate_size": keys.number("feed_forward_length"),
        "num_hidden_layers": keys.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": size if size * heads != width else None,
        "rope_theta": float(keys.number("rope.freq_base", 10000.0)),
        "rms_norm_eps" if eps == _RMS else "layer_norm_eps": keys.number(eps),
    }


def _head_size(values: Values) -> int:
    """Features of a head."""
    size: int = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    return size


def _scaled(keys: _Keys, values: dict[str, Any], tensors: _Tensors) -> dict[str, Any] | None:
    """The scaling of rotary frequencies; None for none."""
    kind = keys.text("rope.scaling.type")
    if tensors.rotary_factors is not None:
        scaling = {**_LLAMA_3, "factor": float(tensors.rotary_factors.max())}
        size, found = _head_size(values), tensors.rotary_factors
        if found.shape != (-(-size // 2),) or not np.allclose(rotary_factors(scaling, values["rope_theta"], size), found, rtol=1e-4):
            raise DataError(
                "rope_freqs.weight in the file are not the factors of a Llama 3; use a model with plain, linear or Llama 3's rotary scaling"
            )
        return scaling
    if kind in ("", "none"):
        return None
    return {"rope_type": kind, "factor": keys.number("rope.scaling.factor", 1.0)}


def rotary_factors(scaling: Values, theta: float, size: int) -> np.ndarray[Any, Any]:
    """(size / 2,) fp32: what each rotary frequency is divided by, as Llama 3 scales them; see `nntask.models.rotary`."""
    plain = theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = np.clip((scaling["original_max_position_embeddings"] * plain / (2 * pi) - low) / (high - low), 0, 1)
    factors: np.ndarray[Any, Any] = (1 / ((1 - share) / scaling["factor"] + share)).astype(np.float32)
    return factors


def _llama(keys: _Keys, tensors: _Tensors) -> dict[str, Any]:
    values = _hidden(keys, eps=_RMS)
    values |= {"rope_scaling": _scaled(keys, values, tensors), "hidden_act": "silu"}
    if keys.has("attention.sliding_window"):
        return {"model_type": "mistral", "sliding_window": keys.number("attention.sliding_window"), **values}
    return {"model_type": "llama", "attention_bias": tensors.has("attn_q.bias"), "mlp_bias": tensors.has("ffn_up.bias"), **values}


def _qwen2(keys: _Keys, tensors: _Tensors) -> dict[str, Any]:
    values = _hidden(keys, eps=_RMS)
    return {"model_type": "qwen2", **values, "rope_scaling": _scaled(keys, values, tensors), "use_sliding_window": False}


def _qwen3(keys: _Keys, tensors: _Tensors) -> dict[str, Any]:
    values = _qwen2(keys, tensors)
    return {**values, "model_type": "qwen3", "head_dim": _head_size(values), "attention_bias": tensors.has("attn_q.bias")}


def _gemma3(keys: _Keys, tensors: _Tensors) -> dict[str, Any]:
    values = _hidden(keys, eps=_RMS)
    size = _head_size(values)
    own = {
        "head_dim": size,
        "query_pre_attn_scalar": size,
        "sliding_window": keys.number("attention.sliding_window"),
        "rope_local_base_freq": 10000.0,
    }
    return {"model_type": "gemma3_text", **values, **own, "rope_scaling": _scaled(keys, values, tensors)}


def _phi(keys: _Keys, tensors: _Tensors) -> dict[str, Any]:
    values = _hidden(keys, eps=_LAYER)
    size = _head_size(values)
    return {"model_type": "phi", **values, "partial_rotary_factor": keys.number("rope.dimension_count", size) / size, "hidden_act": "gelu_new"}


_READERS: Final[Mapping[str, Callable[[_Keys, _Tensors], dict[str, Any]]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "phi2": _phi,
}


def metadata_of(values: Values, architecture: Architecture) -> dict[str, Any]:
    """Key -> value that a config has in a file; the other direction of `config_from`.

    Args:
        values: the config, in transformers' JSON as our configs write it, with rope_theta and rope_scaling at the top.
        architecture: of its family.
    """
    if architecture.name == "gpt2":
        heads, width = values["n_head"], values["n_embd"]
        found = {
            "context_length": values["n_positions"],
            "embedding_length": width,
            "block_count": values["n_layer"],
            "feed_forward_length": values["n_inner"] or 4 * width,
            "attention.head_count": heads,
            _LAYER: values["layer_norm_epsilon"],
            "vocab_size": values["vocab_size"],
        }
    else:
        found = _metadata_of_hidden(values, architecture.name)
    return {"general.architecture": architecture.name, **{f"{architecture.name}.{key}": value for key, value in found.items()}}


def _metadata_of_hidden(values: Values, name: str) -> dict[str, Any]:
    heads, width = values["num_attention_heads"], values["hidden_size"]
    size = values.get("head_dim") or width // heads
    found = {
        "context_length": values["max_position_embeddings"],
        "embedding_length": width,
        "block_count": values["num_hidden_layers"],
        "feed_forward_length": values["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": values.get("num_key_value_heads") or heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": int(size * values.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(values["rope_theta"]),
        "vocab_size": values["vocab_size"],
    }
    found |= {_LAYER: values["layer_norm_eps"]} if name == "phi2" else {_RMS: values["rms_norm_eps"]}
    if values.get("sliding_window") and (name == "gemma3" or values["model_type"] == "mistral"):
        found["attention.sliding_window"] = values["sliding_window"]
    scaling = values.get("rope_scaling")
    if scaling and scaling["rope_type"] == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
    return found
