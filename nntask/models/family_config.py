"""Configs of families as dataclasses whose fields have rules: one declaration is a field, its check, its default and its example.

Rules of reading: keys without a default are required, unknown keys are ignored, and a value of the wrong JSON type is an error and is never
converted, apart from whole numbers where a float belongs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

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
from .description import Description
from .rotary import RopeScaling, Rotary, rope_of, scaling_of

Check = Callable[[str, Any, str], None]
"""(key, value, source): raises `UsageError` where the value breaks its rule."""

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


def _field(check: Check, default: Any, *, convert: Callable[[Any], Any] | None = None) -> Any:
    return field(default=default, metadata={"check": check, "convert": convert})


def count(usual: int, default: Any = MISSING, most: int = LARGEST_COUNT, *, or_null: bool = False, or_zero: bool = False) -> Any:
    """A field of a whole number from 1 to `most`, or null or 0 where that is its default or allowed; `usual` is the example of error messages."""

    def check(key: str, value: Any, source: str) -> None:
        if not (value is None and (or_null or default is None)) and not (or_zero and type(value) is int and value == 0):
            check_count(key, value, source, usual, most)

    return _field(check, default)


def depth(usual: int, default: Any = MISSING) -> Any:
    """A field of a number of blocks."""
    return count(usual, default, LARGEST_DEPTH)


def positive(usual: float, default: Any = MISSING) -> Any:
    """A field of a number above 0, or null where that is its default."""

    def check(key: str, value: Any, source: str) -> None:
        if value is not None or default is not None:
            check_positive(key, value, source, usual)

    return _field(check, default, convert=float)


def probability(default: float | None) -> Any:
    """A field of a number in [0, 1), or null where that is its default."""

    def check(key: str, value: Any, source: str) -> None:
        if value is not None or default is not None:
            check_probability(key, value, source)

    return _field(check, default, convert=float)


def switch(default: bool) -> Any:
    """A field of true or false."""
    return _field(check_switch, default)


def choice(names: Collection[str], default: Any = MISSING) -> Any:
    """A field of one of some strings."""
    return _field(lambda key, value, source: check_choice(key, value, names, source), default)


def token(default: int | None) -> Any:
    """A field of the id of a token, or null."""

    def check(key: str, value: Any, source: str) -> None:
        if value is not None and (type(value) is not int or value < 0):
            raise UsageError(f"{key} in {source} must be the id of a token, 0 or above, or null, got {shown(value)}; write for example 0")

    return _field(check, default)


def layer_kinds(kinds: Collection[str]) -> Any:
    """A field of a list with one of `kinds` for every block, or null."""

    def check(key: str, value: Any, source: str) -> None:
        if value is not None and (not isinstance(value, (list, tuple)) or any(kind not in kinds for kind in value)):
            raise UsageError(f"{key} in {source} must be a list of {' and '.join(kinds)}, one for every layer, got {shown(value)}; correct it")

    return _field(check, None, convert=tuple)


@dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """Base of the configs of families; field names and meaning as in transformers.

    A subclass declares its fields with the functions above, checks rules between fields in `check_together`, and has the properties of
    `interface.ModelConfig` and a `description`.

    Attributes:
        model_type: Hugging Face's name of the family.
        title: the family's name for people.
        architecture: transformers' class.
        positions_key, layers_key: keys of the longest sequence and of the number of blocks.
        example_key: a key that every config has, for error messages.
        kinds_keys: fields with a kind for every block.
        dropouts: the fields that `with_dropout` sets.
        objective: what such a model is trained for unless told; `objectives` has all.
    """

    model_type: ClassVar[str]
    title: ClassVar[str]
    architecture: ClassVar[str]
    positions_key: ClassVar[str] = "max_position_embeddings"
    layers_key: ClassVar[str] = "num_hidden_layers"
    example_key: ClassVar[str] = "hidden_size"
    kinds_keys: ClassVar[tuple[str, ...]] = ()
    dropouts: ClassVar[tuple[str, ...]] = ()
    objective: ClassVar[str] = "causal"
    objectives: ClassVar[tuple[str, ...]] = ("causal",)

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        self._check(values, "the config")
        for f in fields(self):
            if f.metadata.get("convert") and values[f.name] is not None:
                object.__setattr__(self, f.name, f.metadata["convert"](values[f.name]))

    @classmethod
    def _check(cls, values: Mapping[str, Any], source: str) -> None:
        """Check every present value by the rule of its field, those of the shape first, then the rules between them."""
        for f in sorted(fields(cls), key=lambda f: f.default is not MISSING):
            if f.name in values and "check" in f.metadata:
                f.metadata["check"](f.name, values[f.name], source)
        together = {f.name: values.get(f.name, f.default) for f in fields(cls)}
        for key in cls.kinds_keys:
            if together[key] is not None and len(together[key]) != together[cls.layers_key]:
                raise UsageError(
                    f"{key} in {source} must have one kind for each of {cls.layers_key} = {together[cls.layers_key]} blocks, "
                    f"got {len(together[key])}; correct one of them"
                )
        cls.check_together(together, source)

    @classmethod
    def check_together(cls, values: Mapping[str, Any], source: str) -> None:
        """Check the rules between values.

        Args:
            values: the value of every field.

        Raises:
            UsageError: one is broken.
        """

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """The fields that a JSON object has, by name; a subclass translates keys here."""
        return {f.name: values[f.name] for f in fields(cls) if f.name in values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "the config") -> Self:
        """A config from decoded JSON.

        Args:
            values: the decoded JSON.
            source: name of the file or object that holds the values, for error messages.

        Raises:
            UsageError: a key is missing, has the wrong JSON type, or a value breaks its rule.
        """
        check_object(values, source, cls.example_key)
        model_type = values.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise UsageError(
                f'model_type in {source} must be "{cls.model_type}", got {json.dumps(model_type)}; use the config of {_article(cls.title)}'
            )
        required = [f.name for f in fields(cls) if _is_required(f)]
        known = cls.read(values, source)
        if missing := [key for key in required if key not in known]:
            raise UsageError(f"{source} lacks {', '.join(missing)}; {_article(cls.title)} config needs {', '.join(required)}")
        cls._check(known, source)
        return cls(**known)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """A config from a file in Hugging Face's format, or from a directory with a ``config.json``.

        Raises:
            DataError: the file cannot be read or is not JSON.
            UsageError: a key is missing, has the wrong JSON type, or a value breaks its rule.
        """
        return cls.from_dict(*config_values(path))

    if TYPE_CHECKING:

        @property
        def n_embd(self) -> int:
            """C."""

        @property
        def vocab_size(self) -> int:
            """V."""

        @property
        def description(self) -> Description:
            """The parts of the model."""

    @property
    def num_labels(self) -> int:
        """Classes of a classifier; 0 of other models."""
        return 0

    @property
    def ties_head(self) -> bool:
        """Whether the head is the token embedding."""
        return self.description.head.is_tied

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied head counts once."""
        return self.description.num_parameters(self.n_embd, self.vocab_size)

    def to_dict(self) -> dict[str, Any]:
        """The config as Hugging Face's JSON object, which transformers loads."""
        return {"model_type": self.model_type, "architectures": [self.architecture], **asdict(self)}

    def with_dropout(self, p: float) -> Self:
        """The same config with every dropout probability `p`."""
        return replace(self, **dict.fromkeys(self.dropouts, p))

    def with_layers(self, count: int) -> Self:
        """The same config with `count` blocks; kinds of blocks are repeated."""
        kinds = {key: tuple(found[layer % len(found)] for layer in range(count)) for key in self.kinds_keys if (found := getattr(self, key))}
        return replace(self, **{self.layers_key: count, **kinds})


@dataclass(frozen=True, kw_only=True)
class KeyedConfig(FamilyConfig):
    """Base of the configs whose fields have other names than `interface.ModelConfig` has.

    Attributes:
        width_key, heads_key, inner_key: keys of C, H and I.
    """

    width_key: ClassVar[str] = "hidden_size"
    heads_key: ClassVar[str] = "num_attention_heads"
    inner_key: ClassVar[str] = "intermediate_size"
    num_inner_matrices: ClassVar[int] = 2

    @classmethod
    def check_together(cls, values: Mapping[str, Any], source: str) -> None:
        """Heads divide the width, unless they have a size of their own."""
        if values.get("head_dim") is None:
            check_divisible(cls.width_key, values[cls.width_key], cls.heads_key, values[cls.heads_key], source)

    @property
    def n_positions(self) -> int:
        """P: longest sequence."""
        return int(getattr(self, self.positions_key))

    @property
    def n_embd(self) -> int:
        """C: width of the residual stream."""
        return int(getattr(self, self.width_key))

    @property
    def n_layer(self) -> int:
        """Number of blocks."""
        return int(getattr(self, self.layers_key))

    @property
    def n_head(self) -> int:
        """H: number of heads of queries."""
        return int(getattr(self, self.heads_key))

    @property
    def n_kv_head(self) -> int:
        """G: number of heads of keys and values, equal to the number of heads of queries."""
        return self.n_head

    @property
    def head_size(self) -> int:
        """D: width of one head."""
        return self.n_embd // self.n_head

    @property
    def inner_size(self) -> int:
        """I: width inside the feed-forward layer; 4 C where it is null."""
        given = getattr(self, self.inner_key)
        return 4 * self.n_embd if given is None else int(given)


@dataclass(frozen=True, kw_only=True)
class HiddenConfig(KeyedConfig):
    """Base of the configs with today's usual keys.

    Args:
        vocab_size: V, number of token ids.
        hidden_size: C, width of the residual stream.
        intermediate_size: I, width inside the feed-forward layer.
        num_hidden_layers: number of blocks.
        num_attention_heads: H, number of heads of queries.
        max_position_embeddings: P, longest sequence.
        initializer_range: standard deviation of initial weights.
        tie_word_embeddings: whether the head is the token embedding.
    """

    vocab_size: int = count(128256)
    hidden_size: int = count(2048)
    intermediate_size: int = count(8192)
    num_hidden_layers: int = depth(16)
    num_attention_heads: int = count(32)
    max_position_embeddings: int = count(131072)
    initializer_range: float = positive(0.02, 0.02)
    tie_word_embeddings: bool = switch(False)


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(HiddenConfig):
    """Base of the configs with rotary positions and grouped queries.

    Args:
        num_key_value_heads: G, number of heads of keys and values; divides H; None for H.
        rope_theta: base of the rotary frequencies.
        rope_scaling: scaling of the rotary frequencies; None for no scaling.
        attention_dropout: dropout probability of attention probabilities.
        head_dim: D, even; None for C / H.
    """

    num_key_value_heads: int | None = count(8, None)
    rope_theta: float = positive(500000.0, 10000.0)
    rope_scaling: RopeScaling | None = None
    attention_dropout: float = probability(0.0)
    head_dim: int | None = count(64, None)

    dropouts: ClassVar[tuple[str, ...]] = ("attention_dropout",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_scaling is not None:  # with defaults and element types as read from a file
            object.__setattr__(self, "rope_scaling", scaling_of(self.rope_scaling.to_dict(), self.max_position_embeddings, "the config"))

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Rotary scaling is read from ``rope_theta`` and ``rope_scaling`` (transformers 4) or from ``rope_parameters`` (transformers 5)."""
        known = {**super().read(values, source), **rope_of(values, source)}
        if known.get("attention_dropout", 0.0) is None:
            known["attention_dropout"] = 0.0
        return known

    @classmethod
    def _check(cls, values: Mapping[str, Any], source: str) -> None:
        super()._check(values, source)
        if isinstance(values, dict) and not isinstance(values.get("rope_scaling"), RopeScaling | None):
            values["rope_scaling"] = scaling_of(values["rope_scaling"], values["max_position_embeddings"], source)

    @classmethod
    def check_together(cls, values: Mapping[str, Any], source: str) -> None:
        """Heads of keys divide heads of queries, and rotary embeddings turn pairs."""
        heads, shared, size = (values[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        if shared is not None:
            check_divisible("num_attention_heads", heads, "num_key_value_heads", shared, source)
        super().check_together(values, source)
        where = f"head_dim in {source}" if size else f"hidden_size / num_attention_heads in {source}, the head size,"
        size = values["hidden_size"] // heads if size is None else size
        if size % 2:
            raise UsageError(
                f"{where} must be even, because rotary embeddings turn pairs, got {size} with {heads} heads; use {size + 1} or {size - 1}"
            )

    @property
    def n_kv_head(self) -> int:
        """G: number of heads of keys and values."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """D: width of one head."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    def to_dict(self) -> dict[str, Any]:
        """The config as Hugging Face's JSON object; rotary scaling in the format of transformers 4, which both versions read."""
        return {**super().to_dict(), "rope_scaling": None if self.rope_scaling is None else self.rope_scaling.to_dict()}


@dataclass(frozen=True, kw_only=True)
class PartialRotaryConfig(RotaryConfig):
    """Base of the configs in which a part of each head turns.

    Args:
        partial_rotary_factor: that part; the features that turn are rounded down.

    Attributes:
        factor_keys, theta_keys: older keys of partial_rotary_factor and rope_theta.
    """

    partial_rotary_factor: float = positive(0.5, 0.5)

    factor_keys: ClassVar[tuple[str, ...]] = ()
    theta_keys: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """The part is beside the rotary parameters or among them, or has an older key."""
        taken, found = dict(values), [values[key] for key in ("partial_rotary_factor", *cls.factor_keys) if key in values]
        taken.pop("partial_rotary_factor", None)
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(taken.get(key), Mapping) and "partial_rotary_factor" in taken[key]:
                found.append(taken[key]["partial_rotary_factor"])
                taken[key] = {name: value for name, value in taken[key].items() if name != "partial_rotary_factor"}
        for key in cls.theta_keys:
            if key in taken:
                taken.setdefault("rope_theta", taken[key])
        known = super().read(taken, source)
        if found:
            known["partial_rotary_factor"] = found[-1]
        return known

    @classmethod
    def check_together(cls, values: Mapping[str, Any], source: str) -> None:
        """The part holds pairs of features."""
        super().check_together(values, source)
        size = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
        turned = int(size * values["partial_rotary_factor"])
        if not 0 < turned <= size or turned % 2:
            raise UsageError(
                f"partial_rotary_factor in {source} must make an even number of the {size} features of a head turn, from 2 on, "
                f"got {shown(values['partial_rotary_factor'])}, which makes {turned}; write for example 0.5"
            )

    @property
    def rotary(self) -> Rotary:
        """How queries and keys turn."""
        return Rotary(size=int(self.head_size * self.partial_rotary_factor), theta=self.rope_theta, scaling=self.rope_scaling)

    def to_dict(self) -> dict[str, Any]:
        """The config as Hugging Face's JSON object, with older keys beside today's, so that versions 4 and 5 read it."""
        values = super().to_dict()
        scaling = values["rope_scaling"] or {"rope_type": "default"}
        values["rope_parameters"] = {**scaling, "rope_theta": self.rope_theta, "partial_rotary_factor": self.partial_rotary_factor}
        if self.head_dim is None:  # which transformers would take for a size
            del values["head_dim"]
        values |= dict.fromkeys(self.factor_keys, self.partial_rotary_factor) | dict.fromkeys(self.theta_keys, self.rope_theta)
        return values


def _is_required(f: Field[Any]) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _article(title: str) -> str:
    return f"{'an' if title[0] in 'AEIOU' else 'a'} {title}"
