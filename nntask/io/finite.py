"""Search for values that are not finite."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

_EXPONENTS: Final = {np.dtype(np.float16): np.uint16(0x7C00), np.dtype(ml_dtypes.bfloat16): np.uint16(0x7F80)}
"""Mask of the exponent bits, which are all set exactly in infinity and NaN.

The test on bits is several times faster than `np.isfinite`, which widens these types first.
"""
_AT_ONCE: Final = 1 << 16


def first_not_finite(values: npt.NDArray[Any]) -> Any:
    """Return the first infinite or NaN value of an array in C order; None if all values are finite.

    An array that is not C-contiguous is copied; other temporaries have at most 65536 values.
    """
    flat = values.reshape(-1)
    exponent = _EXPONENTS.get(flat.dtype)
    for first in range(0, len(flat), _AT_ONCE):
        piece = flat[first : first + _AT_ONCE]
        finite = np.isfinite(piece) if exponent is None else (piece.view(np.uint16) & exponent) != exponent
        if not finite.all():
            return piece[int(np.argmin(finite))]
    return None
