"""GPT-2 configurations with the JSON keys of Hugging Face, checked one by one, and the presets of every family by name.

Rules: the five keys that fix the shape are required, every other key has Hugging Face's default, and unknown keys are ignored. A value of the wrong
JSON type is an error and is never converted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Final

from ..errors import UsageError
from . import llama_config
from .config_checks import (
    LARGEST_COUNT,
    LARGEST_DEPTH,
    check_choice,
    check_count,
    check_divisible,
    check_object,
    check_positive,
    check_probability,
    check_switch,
    config_values,
)
from .interface import ModelConfig

ACTIVATIONS: Final = {
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelutanh": "gelu_new",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""Name of an activation in configs -> name of its kernel. The first four names are the tanh approximation of GELU."""


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Shape and hyperparameters of a GPT-2; field names and meaning as in ``transformers.GPT2Config``.

    Args:
        vocab_size: V, number of token ids.
        n_positions: P, longest sequence.
        n_embd: C, width of the residual stream.
        n_layer: number of blocks.
        n_head: H, attention heads; divides n_embd.
        n_inner: I, width inside the feed-forward layer; None for 4 C.
        activation_function: one of `ACTIVATIONS`.
        resid_pdrop, embd_pdrop, attn_pdrop: dropout probability after each branch, after the embeddings, on attention probabilities.
        layer_norm_epsilon: term added to the variance.
        initializer_range: standard deviation of initial weights.
        scale_attn_weights: whether scores are divided by sqrt(C / H).
        scale_attn_by_inverse_layer_idx: whether the scores of layer i (from 0) are also divided by i + 1.
        reorder_and_upcast_attn: accepted without effect, since scores are always computed in fp32 or better.
        tie_word_embeddings: whether the head is the token embedding.

    Raises:
        UsageError: a value breaks its rule.
    """

    model_type: ClassVar[str] = "gpt2"
    positions_key: ClassVar[str] = "n_positions"

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        _check(asdict(self), "the config")

    @property
    def inner_size(self) -> int:
        """I: width inside the feed-forward layer."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def head_size(self) -> int:
        """D: width of one head."""
        return self.n_embd // self.n_head

    @property
    def n_kv_head(self) -> int:
        """Number of heads of keys and values, equal to the number of heads of queries."""
        return self.n_head

    @property
    def num_inner_matrices(self) -> int:
        """Number of matrices of a feed-forward layer: in and out."""
        return 2

    @property
    def activation(self) -> str:
        """Name of the activation's kernel."""
        return ACTIVATIONS[self.activation_function]

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied head counts once."""
        width, inner = self.n_embd, self.inner_size
        block = 4 * width * (width + 1) + 2 * width * inner + inner + width + 4 * width
        heads = 1 if self.tie_word_embeddings else 2
        return heads * self.vocab_size * width + self.n_positions * width + self.n_layer * block + 2 * width

    def with_dropout(self, p: float) -> GPT2Config:
        """The same config with all three dropout probabilities `p`."""
        return replace(self, resid_pdrop=p, embd_pdrop=p, attn_pdrop=p)

    def with_layers(self, count: int) -> GPT2Config:
        """The same config with `count` blocks."""
        return replace(self, n_layer=count)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "the config") -> GPT2Config:
        """A config from decoded JSON.

        Args:
            values: the decoded JSON.
            source: name of the file or object that holds the values, for error messages.

        Raises:
            UsageError: a key is missing, has the wrong JSON type, or a value breaks its rule.
        """
        check_object(values, source, "n_embd")
        model_type = values.get("model_type", "gpt2")
        if model_type != "gpt2":
            raise UsageError(f'model_type in {source} must be "gpt2", got {json.dumps(model_type)}; use the config of a GPT-2')
        if missing := [key for key in _REQUIRED if key not in values]:
            raise UsageError(f"{source} lacks {', '.join(missing)}; a GPT-2 config needs {', '.join(_REQUIRED)}")
        if values.get("add_cross_attention"):
            raise UsageError(f"add_cross_attention in {source} must be false, got true; cross attention is not implemented, remove the key")
        known: dict[str, Any] = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        _check(known, source)
        known.update({key: float(known[key]) for key in _FLOATS if key in known})
        return cls(**known)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> GPT2Config:
        """A config from a file in Hugging Face's format, or from a directory with a ``config.json``.

        Raises:
            DataError: the file cannot be read or is not JSON.
            UsageError: a key is missing, has the wrong JSON type, or a value breaks its rule.
        """
        return cls.from_dict(*config_values(path))

    def to_dict(self) -> dict[str, Any]:
        """The config as Hugging Face's JSON object, which ``GPT2LMHeadModel`` loads."""
        return {"model_type": self.model_type, "architectures": ["GPT2LMHeadModel"], **asdict(self)}


_REQUIRED: Final = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
_PROBABILITIES: Final = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_POSITIVE: Final = ("layer_norm_epsilon", "initializer_range")
_FLOATS: Final = (*_PROBABILITIES, *_POSITIVE)
_SWITCHES: Final = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "tie_word_embeddings")


def _check(values: Mapping[str, Any], source: str) -> None:
    """Check the type and range of every present key, then the rules between keys.

    Raises:
        UsageError: a rule is broken; the message names the first one.
    """
    for key in (*_REQUIRED, "n_inner"):
        value = values.get(key, 1)
        if key != "n_inner" or value is not None:
            check_count(key, value, source, _DEFAULTS[key], LARGEST_DEPTH if key == "n_layer" else LARGEST_COUNT)
    for key in _PROBABILITIES:
        check_probability(key, values.get(key, 0.1), source)
    for key in _POSITIVE:
        check_positive(key, values.get(key, 1.0), source, _DEFAULTS[key])
    for key in _SWITCHES:
        check_switch(key, values.get(key, True), source)
    check_choice("activation_function", values.get("activation_function", "gelu_new"), ACTIVATIONS, source)
    if "n_embd" in values and "n_head" in values:
        check_divisible("n_embd", values["n_embd"], "n_head", values["n_head"], source)


_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": 3072,
    "layer_norm_epsilon": 1e-05,
    "initializer_range": 0.02,
}

PRESETS: Final[dict[str, ModelConfig]] = {
    "tiny": GPT2Config(vocab_size=4096, n_positions=256, n_embd=256, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gpt2": GPT2Config(vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12),
    "gpt2-medium": GPT2Config(vocab_size=50257, n_positions=1024, n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": GPT2Config(vocab_size=50257, n_positions=1024, n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": GPT2Config(vocab_size=50257, n_positions=1024, n_embd=1600, n_layer=48, n_head=25),
    **llama_config.PRESETS,
}
"""Name -> config. `tiny` learns text in minutes on two cores and has no dropout; the names with gpt2 are OpenAI's models."""
