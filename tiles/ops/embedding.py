"""Embedding lookup over vocabulary tiles, which may be quantised, and the gradient of the table."""

from __future__ import annotations

from typing import Any

from scheduler import REDUX, Access, R

from ..emission import emit
from ..quantised import QuantisedTensor
from ..tensor import TileTensor
from .grid import chained, same_axis


def embedding(tokens: TileTensor, table: TileTensor, first: int = 0) -> TileTensor:
    """x[b, t] = table[first + tokens[b, t]]  # (B, T) int32, (V, C) -> (B, T, C).

    A token id outside [0, V - first) fails the task with IndexError, which names the id and its position.
    """
    (b, t), (vocab, width) = tokens.shape, table.shape
    x = TileTensor(tokens.runtime, (b, t, width), (*tokens.tile, table.tile[1]), table.dtype, name="embedding")
    op, more = "embedding", dict[str, Any]()
    if isinstance(table, QuantisedTensor):
        op, more = "quantised_embedding", {"block_format": table.block_format.name}
    for index in x.tiling.indices():
        for v in range(table.grid[0]):
            accesses: list[Access] = [(tokens[index[:2]], R), (table[v, index[2]], R), (x[index], chained(v))]
            emit(x.runtime, op, accesses, v_start=v * table.tile[0] - first, vocab=vocab - first, accumulate=v > 0, **more)
    return x


def embedding_backward(tokens: TileTensor, dy: TileTensor, dtable: TileTensor, first: int = 0) -> None:
    """dtable[first + tokens[b, t]] += dy[b, t]; every tile of dtable receives a contribution from each tile of dy."""
    same_axis(dy, 2, dtable, 1)
    for index in dy.tiling.indices():
        for v in range(dtable.grid[0]):
            accesses: list[Access] = [(tokens[index[:2]], R), (dy[index], R), (dtable[v, index[2]], REDUX)]
            emit(dy.runtime, "embedding_backward", accesses, v_start=v * dtable.tile[0] - first)
