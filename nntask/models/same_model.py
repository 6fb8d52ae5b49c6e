"""Comparison of two configs by the models that they describe, as files with 32-bit floats keep them.

A value that is said and one that follows from others are equal (a head size, rotary frequencies), and so are floats that round to the same fp32.
Deviations of initial weights and dropout do not count.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from .interface import ModelConfig
from .rotary import Rotary


def is_same_model(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two configs describe the same model."""
    return _parts(one) == _parts(other)


def differing_keys(ours: Any, theirs: Any) -> list[str]:
    """Fields of a config that make it another model than `theirs`, of the same family; all fields that differ where none does by itself."""
    names = [field.name for field in fields(ours) if field.name not in ours.dropouts and getattr(ours, field.name) != getattr(theirs, field.name)]
    expected = _parts(theirs)
    alone = []
    for name in names:
        others = {each: getattr(theirs, each) for each in names if each != name}
        if _parts(replace(ours, **others)) != expected:
            alone.append(name)
    return alone or names


def _parts(config: ModelConfig) -> Hashable:
    return _comparable(config.with_dropout(0.0).description)


def _comparable(part: Any) -> Hashable:
    """A part of a description with floats as fp32, without deviations, and of rotary positions what is computed with."""
    if isinstance(part, float):
        return float(np.float32(part))
    if isinstance(part, Rotary):
        grows = part.scaling is not None and part.scaling.rope_type == "dynamic"
        factor = 1.0 if part.scaling is None else part.scaling.angle_factor
        return (part.size, part.frequencies().tobytes(), float(np.float32(factor)), grows)
    if isinstance(part, tuple):
        return tuple(_comparable(each) for each in part)
    if is_dataclass(part):
        return (type(part).__name__, *(_comparable(getattr(part, field.name)) for field in fields(part) if not field.name.endswith("std")))
    return part  # type: ignore[no-any-return]  # strings, whole numbers and None
