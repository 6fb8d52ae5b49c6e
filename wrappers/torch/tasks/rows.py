"""Operations on a part of a table's rows: looking up ids in a piece of it, and summing gradients into a piece of its gradient.

Letters: N = number of ids; C = width; V = rows of the table; v = rows of the piece, those from `first` on.

Each row belongs to one piece, and the order of pieces does not matter. So looking up is exact, and a row of a gradient is the sum over its ids in
their order, as PyTorch computes it on one thread. Ids are processed in groups, so the working memory is small. On a CPU, ids outside the piece are
removed first; on a GPU, where counting them would make the host wait, they take part without effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

AT_ONCE: Final = 256
"""Number of ids that are processed at once."""

_LIBRARY: Final = torch.library.Library("nntask", "DEF")
_LIBRARY.define("look_up_rows(Tensor(a!) out, Tensor weight, Tensor ids, int first, int total) -> ()")
_LIBRARY.define("rows_gradient(Tensor gradient, Tensor ids, int first, int rows, int padding) -> Tensor")
_LIBRARY.define("add_rows_gradient(Tensor(a!) out, Tensor gradient, Tensor ids, int first, int padding) -> ()")


def look_up(out: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, first: int, total: int) -> None:
    """Write the rows of the ids that lie in a piece of the table; other rows of the result are unchanged.

    Args:
        out: (N, C), or more axes before the last.
        weight: (v, C), the piece.
        ids: N ids, one for each row of the result.
        first: number of the piece's first row in the table.
        total: number of rows V of the table.

    Raises:
        IndexError: an id has no row in the table; checked on CPUs only, with the first piece.
    """
    flat = out.view(-1, out.shape[-1])
    if ids.is_cuda:
        look_up_without_counting(flat, weight, ids, first)
        return
    if first == 0 and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= total):
        raise IndexError(f"ids must be from 0 to {total - 1}, got {int(ids.min())} to {int(ids.max())}")
    for positions, rows in _inside(ids, first, weight.shape[0]):
        flat.index_copy_(0, positions, weight.index_select(0, rows))  # (n,), (n, C) -> (N, C)


def look_up_without_counting(out: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, first: int) -> None:
    """Compute `look_up` without counting the ids in the piece; `out` is (N, C)."""
    if first == 0:
        out.fill_(torch.nan)  # the result for an id without a row
    for target, rows in zip(out.split(AT_ONCE), (ids.reshape(-1).long() - first).split(AT_ONCE), strict=True):
        inside = (rows >= 0) & (rows < weight.shape[0])
        looked_up = weight.index_select(0, rows.clamp(0, weight.shape[0] - 1))
        torch.where(inside[:, None], looked_up, target, out=target)


def add_gradient(out: torch.Tensor, gradient: torch.Tensor, ids: torch.Tensor, first: int, padding: int) -> None:
    """Add the gradients of the ids that lie in a piece of the table to the gradient of the piece.

    Args:
        out: (v, C), the gradient of the piece.
        gradient: (N, C), or more axes before the last: the gradient of the result of the lookup.
        ids: N ids, one for each row of `gradient`.
        first: number of the piece's first row in the table.
        padding: id without a gradient; -1 for none.
    """
    flat = gradient.reshape(-1, gradient.shape[-1])
    if ids.is_cuda:
        add_gradient_without_counting(out, flat, ids, first, padding)
        return
    for positions, rows in _inside(ids, first, out.shape[0], padding):
        out.index_add_(0, rows, flat.index_select(0, positions))  # (n,), (n, C) -> (v, C)


def add_gradient_without_counting(out: torch.Tensor, gradient: torch.Tensor, ids: torch.Tensor, first: int, padding: int) -> None:
    """Compute `add_gradient` without counting the ids in the piece: other ids add zeros. `gradient` is (N, C)."""
    for values, rows in zip(gradient.split(AT_ONCE), (ids.reshape(-1).long() - first).split(AT_ONCE), strict=True):
        inside = (rows >= 0) & (rows < out.shape[0]) & ((rows != padding - first) if padding >= 0 else True)
        out.index_add_(0, rows.clamp(0, out.shape[0] - 1), torch.where(inside[:, None], values, 0))


def gradient_into(out: torch.Tensor, gradient: torch.Tensor, ids: torch.Tensor, first: int, padding: int) -> None:
    """Write the gradient of a piece; the arguments are those of `add_gradient`."""
    add_gradient(out.zero_(), gradient, ids, first, padding)


def _inside(ids: torch.Tensor, first: int, count: int, padding: int = -1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield positions of the ids that lie in a piece, and their rows in it, in groups."""
    flat = ids.reshape(-1).long()
    chosen = (flat >= first) & (flat < first + count)
    if padding >= 0:
        chosen &= flat != padding
    positions = chosen.nonzero().view(-1)
    for some in positions.split(AT_ONCE):
        yield some, flat.index_select(0, some) - first


def _rows_gradient(gradient: torch.Tensor, ids: torch.Tensor, first: int, rows: int, padding: int) -> torch.Tensor:
    out = gradient.new_empty((rows, gradient.shape[-1]))
    gradient_into(out, gradient, ids, first, padding)
    return out


for _name, _function in (("look_up_rows", look_up), ("rows_gradient", _rows_gradient), ("add_rows_gradient", add_gradient)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")

ops: Final[Any] = torch.ops.nntask
