"""Comparison of two configs by the models that they describe, as files with 32-bit floats keep them.

An explicit value equals a derived one (a head size, rotary frequencies), and floats are equal if they round to the same fp32. Options of training
do not count: deviations of initial weights, dropout, and the factor of a load-balancing loss.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from ..architecture.family_config import ModelConfig
from ..architecture.rotary import Rotary


def is_same_model(one: ModelConfig, other: ModelConfig) -> bool:
    """Return whether two configs describe the same model."""
    return _model_shape(one) == _model_shape(other)


def differing_keys(ours: Any, theirs: Any) -> list[str]:
    """Return the fields of a config that make it another model than `theirs`, of the same family; all differing fields if no single one does."""
    names = [field.name for field in fields(ours) if field.name not in ours.dropouts and getattr(ours, field.name) != getattr(theirs, field.name)]
    expected = _model_shape(theirs)
    alone = []
    for name in names:
        others = {each: getattr(theirs, each) for each in names if each != name}
        if _model_shape(replace(ours, **others)) != expected:
            alone.append(name)
    return alone or names


def _model_shape(config: ModelConfig) -> Hashable:
    return _comparable(config.with_dropout(0.0).description)


def _comparable(shape: Any) -> Hashable:
    """Return a shape of a description with floats as fp32, without deviations, and with the computed values of rotary positions."""
    if isinstance(shape, float):
        return float(np.float32(shape))
    if isinstance(shape, Rotary):
        grows = shape.scaling is not None and shape.scaling.rope_type == "dynamic"
        factor = 1.0 if shape.scaling is None else shape.scaling.angle_factor
        tables = [shape.frequencies(is_long=is_long).tobytes() for is_long in (False, True)]
        original = shape.scaling.original_max_position_embeddings if tables[0] != tables[1] and shape.scaling is not None else None
        return (shape.size, *tables, original, float(np.float32(factor)), grows)
    if isinstance(shape, tuple):
        return tuple(_comparable(each) for each in shape)
    if is_dataclass(shape):
        compared = [field.name for field in fields(shape) if not field.name.endswith("std") and field.name != "balance"]
        return (type(shape).__name__, *(_comparable(getattr(shape, name)) for name in compared))
    return shape  # type: ignore[no-any-return]  # strings, whole numbers and None
