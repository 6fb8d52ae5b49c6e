"""Elementwise CPU kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..registry import register

Array = npt.NDArray[Any]


@register("accumulate", "cpu")
def accumulate(total: Array, part: Array) -> None:
    """total += part."""
    np.add(total, part, out=total)
