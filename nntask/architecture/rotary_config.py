"""Configs of families with rotary positions: grouped queries, scaled frequencies, and heads that turn in part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..errors import UsageError
from .config_checks import check_divisible, count, positive, probability, shown
from .family_config import HiddenConfig
from .foreign_keys import Rules, Used, ignored
from .rotary import RopeScaling, Rotary, check_divisors, rope_of, scaling_of, unread_of_rope


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
    foreign: ClassVar[Rules] = {
        "rope_parameters": Used(),
        "original_max_position_embeddings": Used(),
        "partial_rotary_factor": Used(),
        **ignored("no version of the models here reads it", "default_theta rope_interleaved use_mrope"),
    }

    @classmethod
    def unread(cls, values: Mapping[str, Any]) -> list[str]:
        """Return the keys that `ModelConfig.unread` does, and those within the rotary scaling."""
        return super().unread(values) + unread_of_rope(values)

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Read rotary scaling from ``rope_theta`` and ``rope_scaling`` (transformers 4) or from ``rope_parameters`` (transformers 5)."""
        known = {**super().read(values, source), **rope_of(values, source)}
        if known.get("attention_dropout", 0.0) is None:
            known["attention_dropout"] = 0.0
        return known

    @classmethod
    def _check(cls, values: dict[str, Any], source: str) -> None:
        super()._check(values, source)
        if (scaling := values.get("rope_scaling")) is not None:
            given = scaling.to_dict() if isinstance(scaling, RopeScaling) else scaling
            values["rope_scaling"] = scaling_of(given, values["max_position_embeddings"], source)  # with defaults and element types
            check_divisors(values["rope_scaling"], cls.turned_size({**{f.name: f.default for f in fields(cls)}, **values}), source)

    @classmethod
    def turned_size(cls, values: Mapping[str, Any]) -> int:
        """Return the number of rotated features of a head, from checked values of all fields."""
        size: int = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
        return size

    @classmethod
    def check_together(cls, values: Mapping[str, Any], source: str) -> None:
        """Check that heads of keys divide heads of queries, and that the number of rotated features is even."""
        heads, shared, size = (values[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        if shared is not None:
            check_divisible("num_attention_heads", heads, "num_key_value_heads", shared, source)
        super().check_together(values, source)
        where = f"head_dim in {source}" if size else f"hidden_size / num_attention_heads in {source}, the head size,"
        size = values["hidden_size"] // heads if size is None else size
        if size % 2:
            raise UsageError(
                f"{where} must be even, because rotary embeddings rotate pairs, got {size} with {heads} heads", f"use {size + 1} or {size - 1}"
            )

    @property
    def n_kv_head(self) -> int:
        """G: number of heads of keys and values."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """D: width of one head."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def rotary(self) -> Rotary:
        """Rotation of queries and keys."""
        return Rotary(size=self.turned_size(vars(self)), theta=self.rope_theta, scaling=self.rope_scaling)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as Hugging Face's JSON object; rotary scaling in the format of transformers 4, which both versions read."""
        return {**super().to_dict(), "rope_scaling": None if self.rope_scaling is None else self.rope_scaling.to_dict()}


@dataclass(frozen=True, kw_only=True)
class PartialRotaryConfig(RotaryConfig):
    """Base of the configs in which a part of each head is rotated.

    Args:
        partial_rotary_factor: rotated fraction of each head's features, rounded down.

    Attributes:
        factor_keys, theta_keys: older keys of partial_rotary_factor and rope_theta.
    """

    partial_rotary_factor: float = positive(0.5, 0.5)

    unwritten: ClassVar[tuple[str, ...]] = ("head_dim",)  # transformers would take null for a size
    factor_keys: ClassVar[tuple[str, ...]] = ()
    theta_keys: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls, values: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Read the fraction next to the rotary parameters, within them, or under an older key."""
        taken, factors = dict(values), [values[key] for key in ("partial_rotary_factor", *cls.factor_keys) if key in values]
        taken.pop("partial_rotary_factor", None)
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(taken.get(key), Mapping) and "partial_rotary_factor" in taken[key]:
                factors.append(taken[key]["partial_rotary_factor"])
                taken[key] = {name: value for name, value in taken[key].items() if name != "partial_rotary_factor"}
        for key in cls.theta_keys:
            if key in taken:
                taken.setdefault("rope_theta", taken[key])
        known = super().read(taken, source)
        if factors:
            known["partial_rotary_factor"] = factors[-1]
        return known

    @classmethod
    def check_together(cls, values: Mapping[str, Any], source: str) -> None:
        """Check that the number of rotated features is even."""
        super().check_together(values, source)
        size = super().turned_size(values)
        turned = int(size * min(values["partial_rotary_factor"], 2))  # the limit keeps the product finite
        if not 0 < turned <= size or turned % 2:
            raise UsageError(
                f"partial_rotary_factor in {source} must make an even number of the {size} features of a head rotate, at least 2, "
                f"got {shown(values['partial_rotary_factor'])}, which makes {turned if turned <= size else 'more'}",
                "write for example 0.5",
            )

    @classmethod
    def turned_size(cls, values: Mapping[str, Any]) -> int:
        """Return the number of rotated features of a head, from checked values of all fields."""
        return int(super().turned_size(values) * values["partial_rotary_factor"])

    def to_dict(self) -> dict[str, Any]:
        """Return the config as Hugging Face's JSON object, with older keys in addition to today's, so that versions 4 and 5 read it."""
        values = super().to_dict()
        scaling = values["rope_scaling"] or {"rope_type": "default"}
        values["rope_parameters"] = {**scaling, "rope_theta": self.rope_theta, "partial_rotary_factor": self.partial_rotary_factor}
        values |= dict.fromkeys(self.factor_keys, self.partial_rotary_factor) | dict.fromkeys(self.theta_keys, self.rope_theta)
        return values
