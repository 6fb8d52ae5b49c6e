"""torch.optim.Muon in fp32: its code, with a bfloat16() that keeps the type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def in_fp32() -> Iterator[None]:
    """torch.optim.Muon computes in the type of the gradient in this block."""
    before = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda tensor: tensor.clone()
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = before
