"""A kernel case of `kernels`: a kernel that training a GPT-2 uses, with the torch operation and the NumPy expression for the same thing.

A case makes sets of arrays and has three actions on a set: ours, torch's and NumPy's. torch writes into given outputs if it has such an overload, and
allocates them otherwise. `nbytes` counts each input read once and each output written once (an accumulator both), without write-allocation. A case
without it is bound by arithmetic; `flops` are its operations, without masked keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Set = dict[str, Any]
Action = Callable[[Set], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the tiles."""

    tokens: int
    width: int
    inner: int
    num_heads: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel and its peers.

    Args:
        name: name in tables.
        make: function that returns one set of NumPy arrays and, under the same name with "_t", tensors over the same memory.
        ours, torch, numpy: the timed actions.
        checked: names of the outputs that ours and torch must agree on; ours goes first, from the same contents.
        nbytes: bytes that must move; 0 if arithmetic binds.
        flops: floating-point operations if arithmetic binds.
    """

    name: str
    make: Callable[[np.random.Generator], Set]
    ours: Action
    torch: Action
    numpy: Action
    checked: tuple[str, ...]
    nbytes: int = 0
    flops: float = 0.0


def arrays(**given: Any) -> Set:
    """Return arrays with tensors over the same memory."""
    tensors = {
        f"{name}_t": torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype == ml_dtypes.bfloat16 else torch.from_numpy(array)
        for name, array in given.items()
        if isinstance(array, np.ndarray) and array.dtype not in (np.uint8, np.uint64)
    }
    return given | tensors


def normal(generator: np.random.Generator, *shape: int) -> Array:
    """Return normal fp32 numbers."""
    return generator.standard_normal(shape, np.float32)


def zeros(*shape: int) -> Array:
    """Return fp32 zeros."""
    return np.zeros(shape, np.float32)


def softmax(x: Array, y: Array) -> None:
    """Write the softmax of the last axis of `x` to `y`."""
    e = np.exp(x - x.max(-1, keepdims=True))
    y[...] = e / e.sum(-1, keepdims=True)
