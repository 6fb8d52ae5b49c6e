"""LLaMA configurations with the JSON keys of Hugging Face, checked one by one, and the presets.

Rules: the six keys that fix the shape are required, every other key has Hugging Face's default, and unknown keys are ignored. Rotary scaling is read
from ``rope_theta`` and ``rope_scaling`` (transformers 4) or from ``rope_parameters`` (transformers 5), and written in the former format, which both
versions read. Where a file has both formats, their values must agree.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Final

from ..errors import UsageError
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
    shown,
)

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3")
"""The kinds of rotary scaling that are implemented; yarn and longrope are not."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies for longer sequences; field names as in ``rope_scaling``.

    Args:
        rope_type: "linear" divides every frequency by `factor` (Chen et al., Position Interpolation, 2023). "llama3" divides only frequencies with
            long wavelengths (Llama 3.1). "dynamic" has no effect up to max_position_embeddings tokens, the longest sequence that is accepted here.
        factor: the divisor, at least 1.
        low_freq_factor, high_freq_factor: for "llama3": frequencies with a wavelength above original / low are divided, frequencies with a
            wavelength below original / high are kept, and the frequencies between are blended.
        original_max_position_embeddings: for "llama3": the longest sequence of the original training, in tokens.
    """

    rope_type: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The scaling as a JSON object, without the keys that its kind does not use."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape and hyperparameters of a LLaMA; field names and meaning as in ``transformers.LlamaConfig``.

    Args:
        vocab_size: V, number of token ids.
        hidden_size: C, width of the residual stream.
        intermediate_size: I, width inside the feed-forward layer.
        num_hidden_layers: number of blocks.
        num_attention_heads: H, number of heads of queries.
        num_key_value_heads: G, number of heads of keys and values; divides H; None for H.
        max_position_embeddings: P, longest sequence.
        hidden_act: "silu", or its synonym "swish".
        initializer_range: standard deviation of initial weights.
        rms_norm_eps: term added to the mean of squares.
        tie_word_embeddings: whether the head is the token embedding.
        rope_theta: base of the rotary frequencies.
        rope_scaling: scaling of the rotary frequencies; None for no scaling.
        attention_bias, mlp_bias: whether the projections of attention and of the feed-forward layer have biases.
        attention_dropout: dropout probability of attention probabilities.
        head_dim: D, even; None for C / H.

    Raises:
        UsageError: a value breaks its rule.
    """

    model_type: ClassVar[str] = "llama"
    positions_key: ClassVar[str] = "max_position_embeddings"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    head_dim: int | None = None

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        _check(values, "the config")
        if self.rope_scaling is not None:  # with defaults and element types as read from a file
            scaling = _scaling(self.rope_scaling.to_dict(), self.max_position_embeddings, "the config")
            object.__setattr__(self, "rope_scaling", scaling)

    @property
    def n_positions(self) -> int:
        """P: longest sequence."""
        return self.max_position_embeddings

    @property
    def n_embd(self) -> int:
        """C: width of the residual stream."""
        return self.hidden_size

    @property
    def n_layer(self) -> int:
        """Number of blocks."""
        return self.num_hidden_layers

    @property
    def n_head(self) -> int:
        """H: number of heads of queries."""
        return self.num_attention_heads

    @property
    def n_kv_head(self) -> int:
        """G: number of heads of keys and values."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """D: width of one head."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def inner_size(self) -> int:
        """I: width inside the feed-forward layer."""
        return self.intermediate_size

    @property
    def num_inner_matrices(self) -> int:
        """Number of matrices of a feed-forward layer: gate, up and down."""
        return 3

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied head counts once."""
        width, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.n_head * self.head_size, self.n_kv_head * self.head_size
        block = 2 * width * (queries + keys) + 3 * width * inner + 2 * width
        block += (queries + 2 * keys + width) * self.attention_bias + (2 * inner + width) * self.mlp_bias
        heads = 1 if self.tie_word_embeddings else 2
        return heads * self.vocab_size * width + self.n_layer * block + width

    def with_dropout(self, p: float) -> LlamaConfig:
        """The same config with dropout probability `p`; attention probabilities are the only dropout of a LLaMA."""
        return replace(self, attention_dropout=p)

    def with_layers(self, count: int) -> LlamaConfig:
        """The same config with `count` blocks."""
        return replace(self, num_hidden_layers=count)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "the config") -> LlamaConfig:
        """A config from decoded JSON.

        Args:
            values: the decoded JSON.
            source: name of the file or object that holds the values, for error messages.

        Raises:
            UsageError: a key is missing, has the wrong JSON type, or a value breaks its rule.
        """
        check_object(values, source, "hidden_size")
        model_type = values.get("model_type", "llama")
        if model_type != "llama":
            raise UsageError(f'model_type in {source} must be "llama", got {json.dumps(model_type)}; use the config of a LLaMA')
        if missing := [key for key in _REQUIRED if key not in values]:
            raise UsageError(f"{source} lacks {', '.join(missing)}; a LLaMA config needs {', '.join(_REQUIRED)}")
        known: dict[str, Any] = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        known.update(_rope_of(values, source))
        if known.get("attention_dropout", 0.0) is None:
            known["attention_dropout"] = 0.0
        _check(known, source)
        known["rope_scaling"] = _scaling(known.get("rope_scaling"), known["max_position_embeddings"], source)
        known.update({key: float(known[key]) for key in ("attention_dropout", *_POSITIVE) if key in known})
        return cls(**known)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> LlamaConfig:
        """A config from a file in Hugging Face's format, or from a directory with a ``config.json``.

        Raises:
            DataError: the file cannot be read or is not JSON.
            UsageError: a key is missing, has the wrong JSON type, or a value breaks its rule.
        """
        return cls.from_dict(*config_values(path))

    def to_dict(self) -> dict[str, Any]:
        """The config as Hugging Face's JSON object, which ``LlamaForCausalLM`` loads."""
        values = {**asdict(self), "rope_scaling": None if self.rope_scaling is None else self.rope_scaling.to_dict()}
        return {"model_type": self.model_type, "architectures": ["LlamaForCausalLM"], **values}


_ORIGINAL: Final = "original_max_position_embeddings"
_REQUIRED: Final = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_OPTIONAL: Final = ("num_key_value_heads", "head_dim")
_POSITIVE: Final = ("initializer_range", "rms_norm_eps", "rope_theta")
_SWITCHES: Final = ("tie_word_embeddings", "attention_bias", "mlp_bias")
_EXAMPLES: Final[dict[str, Any]] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Legal values for error messages: those of Llama 3.2 1B."""


def _check(values: Mapping[str, Any], source: str) -> None:
    """Check the type and range of every present key except rotary scaling, then the rules between keys.

    Raises:
        UsageError: a rule is broken; the message names the first one.
    """
    for key in (*_REQUIRED, *_OPTIONAL):
        value = values.get(key)
        if key in _REQUIRED or value is not None:
            check_count(key, value, source, _EXAMPLES[key], LARGEST_DEPTH if key == "num_hidden_layers" else LARGEST_COUNT)
    for key in _POSITIVE:
        check_positive(key, values.get(key, 1.0), source, _EXAMPLES[key])
    check_probability("attention_dropout", values.get("attention_dropout", 0.0), source)
    for key in _SWITCHES:
        check_switch(key, values.get(key, True), source)
    check_choice("hidden_act", values.get("hidden_act", "silu"), ("silu", "swish"), source)
    heads, shared, size = (values.get(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if shared is not None:
        check_divisible("num_attention_heads", values["num_attention_heads"], "num_key_value_heads", shared, source)
    if size is None:
        check_divisible("hidden_size", values["hidden_size"], "num_attention_heads", values["num_attention_heads"], source)
        size = values["hidden_size"] // values["num_attention_heads"]
    if size % 2:
        where = f"head_dim in {source}" if values.get("head_dim") else f"hidden_size / num_attention_heads in {source}, the head size,"
        raise UsageError(f"{where} must be even, because rotary embeddings turn pairs, got {size} with {heads} heads; use {size + 1} or {size - 1}")


def _rope_of(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` from either format, as far as they are present.

    A number that is present under two keys must be equal under both; transformers 5 silently takes one of them.

    Raises:
        UsageError: two values disagree, or a scaling is no JSON object.
    """
    scalings: dict[str, dict[str, Any]] = {}
    thetas, originals = ({key: values[key]} if values.get(key) is not None else {} for key in ("rope_theta", _ORIGINAL))
    for key in ("rope_parameters", "rope_scaling"):
        if values.get(key) in (None, {}):
            continue
        check_object(values[key], f"{key} in {source}", "rope_type")
        scaling = dict(values[key])
        if "type" in scaling:
            scaling.setdefault("rope_type", scaling.pop("type"))
        thetas |= {key: scaling.pop("rope_theta")} if "rope_theta" in scaling else {}
        originals |= {key: scaling[_ORIGINAL]} if _ORIGINAL in scaling else {}
        scalings[key] = scaling
    found: dict[str, Any] = {"rope_scaling": next(iter(scalings.values()), None)}
    if thetas:
        found["rope_theta"] = _agreed("rope_theta", thetas, source)
    own = {key: (values[key] or {}).get("rope_theta", values.get("rope_theta")) for key in scalings}  # one scaling does not complete another
    _agreed("rotary scaling", {key: {"rope_type": "default", **scaling, "rope_theta": own[key]} for key, scaling in scalings.items()}, source)
    if found["rope_scaling"] is not None:
        own = {_ORIGINAL: _agreed(_ORIGINAL, originals, source)} if originals else {}
        partial = {key: values[key] for key in ("partial_rotary_factor",) if key in values}
        found["rope_scaling"] = {**partial, **found["rope_scaling"], **own}
    elif values.get("partial_rotary_factor") not in (None, 1):
        found["rope_scaling"] = {"rope_type": "default", "partial_rotary_factor": values["partial_rotary_factor"]}
    return found


def _agreed(what: str, by_key: Mapping[str, Any], source: str) -> Any:
    """The one value under all keys of `by_key`; None where `by_key` is empty.

    Raises:
        UsageError: two keys have different values.
    """
    value = next(iter(by_key.values()), None)
    for key, other in by_key.items():
        if other != value:
            raise UsageError(
                f"{source} has {what} twice, {shown(value)} in {next(iter(by_key))} and {shown(other)} in {key}; remove the one that is wrong"
            )
    return value


def _scaling(values: object, longest: int, source: str) -> RopeScaling | None:
    """Checked rotary scaling from decoded JSON; None without scaling.

    Args:
        values: the value of "rope_scaling".
        longest: max_position_embeddings, the default of original_max_position_embeddings.
        source: name of the config, for error messages.

    Raises:
        UsageError: the kind of scaling is not implemented, or a value breaks its rule.
    """
    if values is None:
        return None
    where = f"rope_scaling in {source}"
    check_object(values, where, "rope_type")
    assert isinstance(values, Mapping)
    kind = values.get("rope_type", values.get("type", "default"))
    check_choice("rope_type", kind, ROPE_TYPES, where)
    if values.get("partial_rotary_factor") not in (None, 1):
        raise UsageError(f"partial_rotary_factor in {where} must be 1, got {shown(values['partial_rotary_factor'])}; use a config without it")
    if kind == "default":
        return None
    needed = ("factor",) if kind != "llama3" else ("factor", "low_freq_factor", "high_freq_factor")
    if missing := [key for key in needed if key not in values]:
        raise UsageError(f"{where} lacks {', '.join(missing)}; rope_type {kind} needs {', '.join(needed)}")
    for key in needed:
        check_positive(key, values[key], where, _EXAMPLES[key])
    if values["factor"] < 1:
        raise UsageError(f"factor in {where} must be at least 1, got {values['factor']}; the nearest legal value is 1")
    if kind != "llama3":
        return RopeScaling(rope_type=kind, factor=float(values["factor"]))
    original = values.get(_ORIGINAL, longest)
    check_count(_ORIGINAL, original, where, _EXAMPLES[_ORIGINAL])
    low, high = float(values["low_freq_factor"]), float(values["high_freq_factor"])
    if low >= high:
        raise UsageError(f"low_freq_factor in {where} must be below high_freq_factor, got {low} and {high}; write for example 1.0 and 4.0")
    return RopeScaling(
        rope_type=kind, factor=float(values["factor"]), low_freq_factor=low, high_freq_factor=high, original_max_position_embeddings=original
    )


def _llama_3_2(*, hidden_size: int, num_hidden_layers: int, num_attention_heads: int) -> LlamaConfig:
    """The config of a text model of Meta's Llama 3.2, whose sizes differ in three numbers."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=8192,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
    )


PRESETS: Final[dict[str, LlamaConfig]] = {
    "llama-tiny": LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
    ),
    "llama-1b": _llama_3_2(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32),
    "llama-3b": _llama_3_2(hidden_size=3072, num_hidden_layers=28, num_attention_heads=24),
}
"""Name -> config. `llama-tiny` learns text in minutes on two cores; the others are Llama 3.2 1B and 3B."""
