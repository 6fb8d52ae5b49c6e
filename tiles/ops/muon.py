"""Muon (Jordan et al., 2024) over tiles: the update of a matrix is its averaged gradient with all singular values brought near one.

The Newton-Schulz iteration X <- (a I + b G + c G^2) X, with the Gram matrix G = X X^T, is products of tiles, so a matrix in any tiles, on any
workers, is orthogonalised as a whole. If there are more rows than columns, G = X^T X multiplies from the right instead: the result is the transpose
of that of the transposed matrix, and nothing is transposed. A matrix may be stored in pieces, whose products add up to G. Only tiles on and above the
diagonal of G and of the polynomial are computed.

Everything is fp32, or fp64 for fp64 parameters, where torch.optim.Muon computes in bf16. Legend: X (M, N), G and polynomial (K, K), K = min(M, N).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from scheduler import RW, Access, Handle, R, W

from ..emission import emit, emit_on_cpu
from ..tensor import TileTensor
from .grid import chained, same_axis, same_tiling
from .optimizer import Update, squares_of_tiles, sum_squares


@dataclass(frozen=True, slots=True)
class NewtonSchulz:
    """Options of Muon that are constant in a run, with the names, defaults and meaning of torch.optim.Muon.

    Attributes:
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: a, b, c of the iteration.
        ns_steps: number of iterations.
        adjust_lr_fn: factor of the learning rate: "original" is sqrt(max(1, rows / columns)); "match_rms_adamw" is 0.2 sqrt(max(rows, columns)), with
            which learning rates of AdamW fit (Liu et al., "Muon is Scalable for LLM Training", 2025, equation 4).
    """

    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"

    def ratio(self, rows: int, columns: int) -> float:
        """Return the factor of the learning rate for a matrix of this shape."""
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))


def muon(updates: Sequence[Update], buffers: Sequence[TileTensor], options: NewtonSchulz, axis: int = 0) -> None:
    """Compute one step of Muon for a whole matrix; `hyper` has the momentum in the place of beta1 and the smallest norm in that of epsilon.

    Args:
        updates: the matrix, or the pieces whose concatenation it is, in order.
        buffers: (M, N) momentum buffer of each piece, in fp32 or wider; zero before the first step.
        axis: axis along which pieces are concatenated.

    Raises:
        ValueError: a parameter is not a matrix, only some of its tiles are to be updated, or pieces are cut differently along the other axis.
    """
    pieces = list(zip(updates, buffers, strict=True))
    for update, buffer in pieces:
        count, tiles = update.param.tiling.num_tiles, update.tiles
        if len(update.param.shape) != 2 or (tiles is not None and sorted(tiles) != list(range(count))):
            raise ValueError(f"Muon updates whole matrices, got {update.param!r} with tiles {'all' if tiles is None else list(tiles)}")
        same_tiling(update.param, update.grad, buffer)
        update.check_master()
    shape = [*updates[0].param.shape]
    shape[axis] = sum(update.param.shape[axis] for update in updates)
    inner = 1 - axis if len(pieces) > 1 else int(shape[0] > shape[1])
    for update in updates:
        same_axis(updates[0].param, inner, update.param, inner)
    tasks = _Tasks(updates[0])
    directions = [_averaged(update, buffer, options) for update, buffer in pieces]
    total = _sum_of_squares(tasks, directions)
    for (update, _), direction in zip(pieces, directions, strict=True):
        for tile in direction.handles:
            tasks.emit("muon_normalise", [(tile, RW), (total[0,], R), (update.hyper[0, 0], R)], row=update.row)
    for _ in range(options.ns_steps):
        directions = _iterated(tasks, directions, options.ns_coefficients, inner)
    for (update, _), direction in zip(pieces, directions, strict=True):
        _moved(update, direction, options.ratio(*shape))


def _averaged(update: Update, buffer: TileTensor, options: NewtonSchulz) -> TileTensor:
    """Average a gradient in its buffer; return the direction before it is orthogonalised."""
    clip = update.norm is not None and update.max_norm > 0
    direction = buffer.like(name="direction")
    for grad, mean, tile in zip(update.grad.handles, buffer.handles, direction.handles, strict=True):
        accesses: list[Access] = [(grad, R), (mean, RW), (tile, W), (update.hyper[0, 0], R)]
        if clip and update.norm is not None:
            accesses.append((update.norm[0,], R))
        _Tasks(update).emit("muon_momentum", accesses, row=update.row, nesterov=options.nesterov, max_norm=update.max_norm, clip=clip)
    return direction


def _moved(update: Update, direction: TileTensor, ratio: float) -> None:
    """Move a parameter by its orthogonalised direction, times `ratio` and the learning rate."""
    param, master = update.param, update.master
    for number, tile in enumerate(direction.handles):
        accesses: list[Access] = [(param.handles[number], RW if master is None else W), (tile, R), (update.hyper[0, 0], R)]
        if master is not None:
            accesses.append((master.handles[number], RW))
        _Tasks(update).emit("muon_update", accesses, row=update.row, ratio=ratio, master=master is not None)


@dataclass(frozen=True, slots=True)
class _Tasks:
    """Emission of the tasks of one update, with its priority, on its kind of worker."""

    update: Update

    def emit(self, op: str, accesses: list[Access], **constants: Any) -> None:
        """Emit a task."""
        emitted = emit_on_cpu if self.update.cpu_only else emit
        emitted(self.update.param.runtime, op, accesses, priority=self.update.priority, **constants)

    def product(self, a: _Factor, b: _Factor, out: Handle, step: int, alpha: float = 1.0) -> None:
        """out (+)= alpha a b; product number `step` of a chain."""
        if a.tile is b.tile:  # a symmetric tile is its transpose, so the product is a Gram matrix in any case
            constants: dict[str, Any] = {"trans": a.is_turned, "alpha": alpha, "accumulate": step > 0}
            self.emit("gram", [(a.tile, R), (out, chained(step))], **constants)
            return
        constants = {"trans_a": a.is_turned, "trans_b": b.is_turned, "alpha": alpha, "accumulate": step > 0}
        self.emit("matmul", [(a.tile, R), (b.tile, R), (out, chained(step))], **constants)


@dataclass(frozen=True, slots=True)
class _Factor:
    """A tile as a factor of a product: itself or its transpose."""

    tile: Handle
    is_turned: bool = False


def _of_symmetric(tensor: TileTensor, row: int, column: int) -> _Factor:
    """Return the factor at a place of a symmetric matrix, of which only the tiles on and above the diagonal exist."""
    return _Factor(tensor[row, column]) if row <= column else _Factor(tensor[column, row], True)


def _sum_of_squares(tasks: _Tasks, pieces: Sequence[TileTensor]) -> TileTensor:
    """Return the sum of squares of a matrix in pieces  # -> (1,) fp64."""
    terms = squares_of_tiles(pieces)
    tiles = [tile for piece in pieces for tile in piece.handles]
    for tile, term in zip(tiles, terms.handles, strict=True):
        tasks.emit("sum_squares", [(tile, R), (term, W)])
    return sum_squares(terms)


def _iterated(tasks: _Tasks, pieces: Sequence[TileTensor], coefficients: tuple[float, float, float], inner: int) -> list[TileTensor]:
    """Return (a I + b G + c G^2) X, G = X X^T; or if `inner`, the axis of X that G has, is 1, X (a I + b G + c G^2), G = X^T X.

    Args:
        pieces: X, in pieces along the other axis.
    """
    first, is_tall = pieces[0], inner == 1
    a, b, c = coefficients
    size, tile, count = first.shape[inner], first.tile[inner], first.grid[inner]
    gram, polynomial = (TileTensor(first.runtime, (size, size), (tile, tile), first.dtype, name=name) for name in ("gram", "polynomial"))
    upper = [(i, j) for i in range(count) for j in range(i, count)]
    for i, j in upper:
        pairs = [(x[k, i], x[k, j]) if is_tall else (x[i, k], x[j, k]) for x in pieces for k in range(x.grid[1 - inner])]
        for step, (left, right) in enumerate(pairs):
            tasks.product(_Factor(left, is_tall), _Factor(right, not is_tall), gram[i, j], step)
    for i, j in upper:
        tasks.emit("muon_polynomial", [(gram[i, j], R), (polynomial[i, j], W)], a=a, b=b, diagonal=i == j)
        for k in range(count):
            tasks.product(_of_symmetric(gram, i, k), _of_symmetric(gram, k, j), polynomial[i, j], k + 1, alpha=c)
    results = [piece.like(name="direction") for piece in pieces]
    for piece, result in zip(pieces, results, strict=True):
        for row, column in np.ndindex(*piece.grid):
            for k in range(count):
                if is_tall:
                    tasks.product(_Factor(piece[row, k]), _of_symmetric(polynomial, k, column), result[row, column], k)
                else:
                    tasks.product(_of_symmetric(polynomial, row, k), _Factor(piece[k, column]), result[row, column], k)
    return results
