"""Batches and their minibatches: checks of a batch, its division, and the key that equal minibatches share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from nntask import UsageError


def _is_cut(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def check_batch(batch: Mapping[str, Any], count: int, *, learns: bool = False) -> None:
    """Check that a batch can be cut into `count` minibatches, and that a step can learn from it.

    Args:
        learns: whether the batch is for a training step.

    Raises:
        UsageError: the batch is unsuitable; the message names its content and the remedy.
    """
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
            raise UsageError(f"{name} of the batch has tensors inside a {type(value).__name__}", "give each tensor as an argument of its own")
    if empty := [name for name, value in batch.items() if isinstance(value, torch.Tensor) and not value.numel()]:
        raise UsageError(f"{empty[0]} of the batch has no elements (shape {tuple(batch[empty[0]].shape)})", "leave it out, or skip the batch")
    if given := [
        name for name, value in batch.items() if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled() and learns
    ]:
        raise UsageError(
            f"{given[0]} of the batch requires a gradient, which a session does not give back",
            "make it a parameter of the module, or detach() it, and call requires_grad_() inside of the module",
        )
    lengths = {name: len(value) for name, value in batch.items() if _is_cut(value)}
    if not lengths:
        kinds = ", ".join(f"{name} ({type(value).__name__})" for name, value in batch.items()) or "nothing"
        raise UsageError(
            f"a batch must have a torch.Tensor with a first axis, got {kinds}",
            "convert arrays and lists with torch.as_tensor(), and pass the module's arguments by name",
        )
    if count > 1 and (len(set(lengths.values())) > 1 or next(iter(lengths.values())) % count):
        raise UsageError(
            f"a batch of {count} minibatches must have tensors whose first axis has one length, a multiple of {count}, got {lengths}",
            "pad the batch, or use minibatches=1",
        )


def cut(batch: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the minibatches of a batch: tensors are cut along their first axis, other values go to each."""
    pieces = {name: value.chunk(count) if _is_cut(value) else [value] * count for name, value in batch.items()}
    return [{name: piece[number] for name, piece in pieces.items()} for number in range(count)]


def signature_of(minibatch: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key that minibatches share if one recorded pass serves both."""
    return tuple((name, *_signature(name, value)) for name, value in sorted(minibatch.items()))


def layout_of(value: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Return the strides of a batch's tensor in a session, and the number of elements from its first to its last one in memory.

    The strides are those of the tensor, or those of a contiguous copy if the tensor is a sparse part of a large memory.
    """
    extent = 1 + sum((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))
    if value.numel() and extent <= 4 * value.numel() and not value.is_neg() and not value.is_conj():
        return tuple(value.stride()), extent
    return tuple(torch.empty(value.shape, device="meta").stride()), value.numel()


def memory_of(value: torch.Tensor) -> torch.Tensor:
    """Return the elements of a batch's tensor in memory order  # any shape -> (extent,)."""
    value = value.detach().resolve_conj().resolve_neg()
    strides, extent = layout_of(value)
    if strides != tuple(value.stride()):
        value = value.contiguous()
    return value.as_strided((extent,), (1,))


def _signature(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), layout_of(value)[0], value.dtype, value.requires_grad
    if isinstance(value, np.generic):
        return (value.dtype.str, repr(value))
    if not all(isinstance(leaf, bool | int | float | str | torch.dtype | None) for leaf in tree_leaves(value)):
        raise UsageError(f"{name} of the batch is a {type(value).__name__}, and arguments must be tensors or plain values", "make it a tensor")
    return (repr(value),)


def shapes_of(minibatches: Sequence[Mapping[str, Any]]) -> str:
    """Return the shapes of minibatches as words of a message."""
    texts = [
        ", ".join(f"{name} {tuple(value.shape)}" for name, value in each.items() if isinstance(value, torch.Tensor) and value.dim())
        for each in minibatches
    ]
    return " and ".join(dict.fromkeys(texts))
