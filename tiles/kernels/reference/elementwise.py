"""Elementwise kernels, readable."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ..registry import register

Array = npt.NDArray[Any]


@register("accumulate", "reference")
def accumulate(total: Array, part: Array) -> None:
    """total += part."""
    total[...] = total + part
