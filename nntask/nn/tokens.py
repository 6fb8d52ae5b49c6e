"""Differentiable operations on the tokens of sequences: reduction to one vector, exchange of tokens and features, and a cast to the model's type.

Letters: B sequences, T tokens, C features. This is a part of `functional`, whose rules hold.
"""

from __future__ import annotations

import numpy.typing as npt

from tiles.ops import elementwise
from tiles.ops import tokens as token_ops

from .autograd import Gradients, Tensor, on_tape, only


def first_token(x: Tensor) -> Tensor:
    """Return the first token of each sequence, as BERT's pooler takes it (Devlin et al., 2019)  # (B, T, C) -> (B, 1, C)."""
    edge, length, tile = x.edge, x.shape[1], x.data.tile[1]

    def backward(gradients: Gradients) -> None:
        if edge is not None:
            edge.add(token_ops.first_token_backward(only(gradients), length, tile))

    return on_tape("first_token", [x], [token_ops.first_token(x.data)], backward)[0]


def mean_tokens(x: Tensor) -> Tensor:
    """Return the mean over the tokens of each sequence, added up from the first to the last  # (B, T, C) -> (B, 1, C)."""
    edge, length, tile = x.edge, x.shape[1], x.data.tile[1]

    def backward(gradients: Gradients) -> None:
        if edge is not None:
            edge.add(token_ops.mean_tokens_backward(only(gradients), length, tile))

    return on_tape("mean_tokens", [x], [token_ops.mean_tokens(x.data)], backward)[0]


def swapped(x: Tensor) -> Tensor:
    """Exchange tokens and features, so that a linear layer mixes tokens (Tolstikhin et al., MLP-Mixer, 2021)  # (B, T, C) -> (B, C, T)."""
    edge = x.edge

    def backward(gradients: Gradients) -> None:
        if edge is not None:
            edge.add(token_ops.swapped(only(gradients)))

    return on_tape("swapped", [x], [token_ops.swapped(x.data)], backward)[0]


def cast(x: Tensor, dtype: npt.DTypeLike) -> Tensor:
    """Cast x to another element type; return `x` itself if it has that type. Layers need inputs in the type of their weights."""
    if x.dtype == dtype:
        return x
    edge, before = x.edge, x.dtype

    def backward(gradients: Gradients) -> None:
        if edge is not None:
            edge.add(elementwise.cast(only(gradients), before))

    return on_tape("cast", [x], [elementwise.cast(x.data, dtype)], backward)[0]
