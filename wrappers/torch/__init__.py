"""PyTorch: tile tensors as torch tensors and back, and transformers' modules as models and back."""

from .interchange import from_tensor, from_torch, lend_tile, to_tensor, to_torch

__all__ = ["from_tensor", "from_torch", "lend_tile", "to_tensor", "to_torch"]
