"""Base of the configs of families: dataclasses whose fields are declared with their rules (`config_checks`), read from JSON.

Keys without a default are required. Keys that are not fields have rules in `foreign_keys`. `unread` lists keys without a rule, for callers to report.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ..errors import UsageError
from .config_checks import ACTIVATIONS, check_divisible, check_object, config_values, count, depth, positive, switch
from .description import AttentionShape, Description, FeedForwardShape
from .foreign_keys import COMMON, Rules, check_foreign, renamed

if TYPE_CHECKING:
    from .names import Names


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Base of the configs of families; field names and meaning as in transformers.

    A subclass declares its fields with `config_checks`, checks rules between fields in `check_together`, and has `names` and a `description`.
    Letters: V number of token ids, P longest sequence, C width of the residual stream, H heads of queries, G heads of keys and values, D width of a
    head, I width of the feed-forward layer.

    Attributes:
        model_type: Hugging Face's name of the family.
        title: the family's name for people.
        architecture: name of transformers' class.
        positions_key, layers_key, width_key, heads_key, inner_key: keys of P, of the number of blocks, of C, H and I.
        example_key: a key that every config has, for error messages.
        kinds_keys: fields with a kind for every block.
        dropouts: fields that `with_dropout` sets.
        unwritten: fields that files lack if they are null.
        objective: default objective of training; `objectives` has all.
        foreign: rules of the keys in files that are not fields, in addition to those of the base classes (`foreign_keys`).

    Raises:
        UsageError: a value breaks its rule.
    """

    model_type: ClassVar[str]
    title: ClassVar[str]
    architecture: ClassVar[str]
    positions_key: ClassVar[str] = "max_position_embeddings"
    layers_key: ClassVar[str] = "num_hidden_layers"
    width_key: ClassVar[str] = "hidden_size"
    heads_key: ClassVar[str] = "num_attention_heads"
    inner_key: ClassVar[str] = "intermediate_size"
    num_inner_matrices: ClassVar[int] = 2
    example_key: ClassVar[str] = "hidden_size"
    kinds_keys: ClassVar[tuple[str, ...]] = ()
    dropouts: ClassVar[tuple[str, ...]] = ()
    unwritten: ClassVar[tuple[str, ...]] = ()
    objective: ClassVar[str] = "causal"
    objectives: ClassVar[tuple[str, ...]] = ("causal",)
    foreign: ClassVar[Rules] = COMMON

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        self._check(values, "the config")
        for f in fields(self):
            convert, value = f.metadata.get("convert"), values[f.name]
            if value is None:
                value = f.metadata.get("null")
            elif convert is not None:
                value = convert(value)
            object.__setattr__(self, f.name, value)

    @classmethod
    def _check(cls, values: dict[str, Any], source: str) -> None:
        """Check every present value by the rule of its field, required fields first, then the rules between fields.

        A subclass may replace a value in `values` by its parsed form.
        """
        for f in sorted(fields(cls), key=lambda f: f.default is not MISSING):
            if f.name in values and "check" in f.metadata:
                f.metadata["check"](f.name, values[f.name], source)
        together = {f.name: values.get(f.name, f.default) for f in fields(cls)}
        for key in (f.name for f in fields(cls) if f.metadata.get("is_token")):
            if together[key] is not None and together[key] >= together["vocab_size"]:
                most = together["vocab_size"] - 1
                raise UsageError(
                    f"{key} in {source} must be below vocab_size = {most + 1}, got {together[key]}", f"the nearest legal value is {most}"
                )
        for key in cls.kinds_keys:
            if together[key] is not None and len(together[key]) != together[cls.layers_key]:
                raise UsageError(
                    f"{key} in {source} must have one kind for each of {cls.layers_key} = {together[cls.layers_key]} blocks, "
                    f"got {len(together[key])}",
                    "correct one of them",
                )
        cls.check_together(together, source)

    @classmethod
    def check_together(cls, values: Mapping[str, Any], source: str) -> None:
        """Check the rules between values. The base class checks that heads divide the width, unless they have a size of their own.

        Args:
            values: the value of every field.

        Raises:
            UsageError: a rule is broken.
        """
        if values.get("head_dim") is None:
            check_divisible(cls.width_key, values[cls.width_key], cls.heads_key, values[cls.heads_key], source)

    @classmethod
    def rules(cls) -> Rules:
        """Return the rules of keys that are not fields, of the class and its bases."""
        return {key: rule for base in reversed(cls.__mro__) for key, rule in vars(base).get("foreign", {}).items()}

    @classmethod
    def unread(cls, values: Mapping[str, Any]) -> list[str]:
        """Return keys of decoded JSON that have a value but are neither fields nor have a rule; transformers' model does not read them either."""
        known = {f.name for f in fields(cls)} | cls.rules().keys()
        return [key for key, value in values.items() if value is not None and key not in known]

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Return the fields that a JSON object has, by name; subclasses translate keys here."""
        return {f.name: values[f.name] for f in fields(cls) if f.name in values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "the config") -> Self:
        """Return a config from decoded JSON.

        Args:
            values: the decoded JSON.
            source: name of the file or object that holds the values, for error messages.

        Raises:
            UsageError: a key is missing, has the wrong JSON type, or a value breaks its rule; or a key that only transformers reads would change the
                model's results.
        """
        check_object(values, source, cls.example_key)
        model_type = values.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise UsageError(
                f'model_type in {source} must be "{cls.model_type}", got {json.dumps(model_type)}', f"use the config of {_article(cls.title)}"
            )
        rules = cls.rules()
        check_foreign(rules, values, source)
        required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        known = cls.read(renamed(rules, values, source), source)
        if missing := [key for key in required if key not in known]:
            raise UsageError(f"{source} lacks {', '.join(missing)}", f"{_article(cls.title)} config needs {', '.join(required)}")
        cls._check(known, source)
        return cls(**known)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Return a config of this family from a file in Hugging Face's format; `config_from_json` reads one of any family.

        Args:
            path: the file, or the directory of a ``config.json``.

        Raises:
            DataError: the file cannot be read or is not JSON.
            UsageError: like `from_dict`.
        """
        return cls.from_dict(*config_values(path))

    @classmethod
    def of_size(cls, vocab_size: int, width: int, inner_size: int, num_layers: int, num_heads: int, longest: int, **more: Any) -> Self:
        """Return a config with these values of V, C, I, the number of blocks, H and P, and the fields `more`."""
        keys = ("vocab_size", cls.width_key, cls.inner_key, cls.layers_key, cls.heads_key, cls.positions_key)
        return cls(**dict(zip(keys, (vocab_size, width, inner_size, num_layers, num_heads, longest), strict=True)), **more)

    if TYPE_CHECKING:

        @property
        def n_embd(self) -> int:
            """C: width of the residual stream."""

        @property
        def n_positions(self) -> int:
            """P: longest sequence; the usual length for a model without a limit."""

        @property
        def n_layer(self) -> int:
            """Number of blocks."""

        @property
        def n_head(self) -> int:
            """H: number of heads of queries."""

        @property
        def vocab_size(self) -> int:
            """V: number of token ids."""

        @property
        def initializer_range(self) -> float:
            """Standard deviation of initial weights."""

        @property
        def names(self) -> Names:
            """Names and layouts of the model's weights in files."""

        @property
        def description(self) -> Description:
            """Parts of the model."""

    @property
    def n_kv_head(self) -> int:
        """G: number of heads of keys and values; divides H."""
        return self.n_head

    @property
    def head_size(self) -> int:
        """D: width of one head."""
        return self.n_embd // self.n_head

    @property
    def inner_size(self) -> int:
        """I: width inside the feed-forward layer; 4 C if the key is null."""
        given = getattr(self, self.inner_key)
        return 4 * self.n_embd if given is None else int(given)

    def attention_shape(self, **more: Any) -> AttentionShape:
        """Return attention with scores divided by sqrt(D) and one standard deviation for all weights, with the fields `more` replaced."""
        std, heads = self.initializer_range, {"num_heads": self.n_head, "num_kv_heads": self.n_kv_head, "head_size": self.head_size}
        return AttentionShape(**{**heads, "scale": self.head_size**-0.5, "std": std, "kv_std": std, "out_std": std, **more})

    def feed_forward_shape(self, activation: str, **more: Any) -> FeedForwardShape:
        """Return a feed-forward layer without a gate, with biases and one standard deviation for all weights, with the fields `more` replaced.

        Args:
            activation: name in configs, a key of `ACTIVATIONS`.
        """
        usual = {"has_gate": False, "has_bias": True, "std": self.initializer_range, "out_std": self.initializer_range}
        return FeedForwardShape(inner_size=self.inner_size, activation=ACTIVATIONS[activation], **{**usual, **more})

    @property
    def longest(self) -> int | None:
        """Largest number of tokens of a sequence; None for no limit."""
        return self.n_positions

    @property
    def num_labels(self) -> int:
        """Number of classes of a classifier; 0 for other models."""
        return 0

    @property
    def ties_head(self) -> bool:
        """Whether the head is the token embedding."""
        return self.description.head.is_tied

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied head counts once."""
        return self.description.num_parameters(self.n_embd, self.vocab_size)

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that a token passes through: all but those of experts that are not chosen for it."""
        return self.num_parameters - self.description.stack.num_idle(self.n_embd)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as Hugging Face's JSON object, which transformers loads."""
        values = {key: value for key, value in asdict(self).items() if value is not None or key not in self.unwritten}
        return {"model_type": self.model_type, "architectures": [self.architecture], **values}

    def with_dropout(self, p: float) -> Self:
        """Return the same config with every dropout probability `p`."""
        return replace(self, **dict.fromkeys(self.dropouts, p))

    def with_layers(self, count: int) -> Self:
        """Return the same config with `count` blocks; kinds of blocks are repeated."""
        kinds = {key: tuple(found[layer % len(found)] for layer in range(count)) for key in self.kinds_keys if (found := getattr(self, key))}
        return replace(self, **{self.layers_key: count, **kinds})


@dataclass(frozen=True, kw_only=True)
class KeyedConfig(ModelConfig):
    """Base of the configs whose fields have other names than the properties of `ModelConfig`."""

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


@dataclass(frozen=True, kw_only=True)
class HiddenConfig(KeyedConfig):
    """Base of the configs with the usual keys of recent models.

    Args:
        vocab_size, hidden_size, intermediate_size: V, C and I.
        num_hidden_layers, num_attention_heads, max_position_embeddings: number of blocks, H and P.
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


def _article(title: str) -> str:
    return f"{'an' if title[0] in 'AEIOU' else 'a'} {title}"
