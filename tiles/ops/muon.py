"""Muon (Jordan et al., 2024) over tiles: the update of a matrix is its averaged gradient with all singular values brought near one.

The Newton-Schulz iteration X <- P X, P = a I + b G + c G^2 with the Gram matrix G = X X^T, is products of tiles, so a matrix in any tiles, on any
workers, is orthogonalised as a whole. If there are more rows than columns, G = X^T X multiplies from the right instead, and nothing is transposed.
A matrix may be stored in pieces, whose products add up to G. All (K, K) matrices are polynomials of G: they commute and are symmetric, and only tiles
on and above the diagonal are computed. So up to `LONGEST` iterations of a long matrix are G <- P G P, and one product with X (`_iterated`).

Everything is fp32, or fp64 for fp64 parameters, where torch.optim.Muon computes in bf16. Legend: X (M, N), G and P (K, K), K = min(M, N).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from scheduler import RW, Access, Handle, R, W

from ..emission import emit, emit_on_cpu
from ..tensor import TileTensor
from .grid import chained, same_axis, same_tiling
from .optimizer import Update, squares_of_tiles, sum_squares

LONGEST: Final = 3
"""Largest number of iterations between two products with X: 0.84 s for the matrices of a layer of GPT-2 small on one core, where single iterations
take 1.23 s. Rounding errors of three are near those of single ones; those of five are 30 times as large, as small eigenvalues of G are lost."""

LONG: Final = 1.25
"""Smallest ratio of the sides of a matrix for which iterations of G take fewer operations than those of X."""


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
    longest = LONGEST if shape[1 - inner] >= LONG * shape[inner] else 1
    for done in range(0, options.ns_steps, longest):
        directions = _iterated(tasks, directions, options.ns_coefficients, inner, min(longest, options.ns_steps - done))
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

    def product(self, a: _Factor, b: _Factor, out: Handle, step: int, *, alpha: float = 1.0, is_symmetric: bool = False) -> None:
        """out (+)= alpha a b; product number `step` of a chain, whose sum `is_symmetric` or not."""
        tiles = [a.tile] if a.tile is b.tile else [a.tile, b.tile]
        assert is_symmetric or len(tiles) == 2, "a product of a tile with itself is symmetric"
        constants: dict[str, Any] = {"alpha": alpha, "accumulate": step > 0}
        if is_symmetric:
            op, constants = "gram", {"trans": a.is_turned, **constants}
        else:
            op, constants = "matmul", {"trans_a": a.is_turned, "trans_b": b.is_turned, **constants}
        self.emit(op, [*((tile, R) for tile in tiles), (out, chained(step))], **constants)


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


def _iterated(tasks: _Tasks, pieces: Sequence[TileTensor], coefficients: tuple[float, float, float], inner: int, count: int) -> list[TileTensor]:
    """Return X after `count` iterations: P_count ... P_1 X, where G_1 = X X^T and G_(n + 1) = P_n G_n P_n; or if `inner` is 1, of X^T.

    Args:
        pieces: X, in pieces along the other axis.
        inner: axis of X that G has.
    """
    gram = _gram(tasks, pieces, inner)
    factor = polynomial = _polynomial(tasks, gram, coefficients)
    for _ in range(count - 1):
        gram = _symmetric_product(tasks, polynomial, _symmetric_product(tasks, polynomial, gram))
        polynomial = _polynomial(tasks, gram, coefficients)
        factor = _symmetric_product(tasks, polynomial, factor)
    return _multiplied(tasks, factor, pieces, inner)


def _gram(tasks: _Tasks, pieces: Sequence[TileTensor], inner: int) -> TileTensor:
    """Return G = X X^T, or if `inner` is 1, X^T X."""
    first, is_tall = pieces[0], inner == 1
    size, tile = first.shape[inner], first.tile[inner]
    gram = TileTensor(first.runtime, (size, size), (tile, tile), first.dtype, name="gram")
    for i, j in _upper(gram):
        pairs = [(x[k, i], x[k, j]) if is_tall else (x[i, k], x[j, k]) for x in pieces for k in range(x.grid[1 - inner])]
        for step, (left, right) in enumerate(pairs):
            tasks.product(_Factor(left, is_tall), _Factor(right, not is_tall), gram[i, j], step, is_symmetric=i == j)
    return gram


def _upper(symmetric: TileTensor) -> list[tuple[int, int]]:
    """Return the places of the tiles on and above the diagonal."""
    return [(i, j) for i in range(symmetric.grid[0]) for j in range(i, symmetric.grid[0])]


def _polynomial(tasks: _Tasks, gram: TileTensor, coefficients: tuple[float, float, float]) -> TileTensor:
    """Return P = a I + b G + c G^2."""
    a, b, c = coefficients
    result = gram.like(name="polynomial")
    for i, j in _upper(gram):
        tasks.emit("muon_polynomial", [(gram[i, j], R), (result[i, j], W)], a=a, b=b, diagonal=i == j)
        for k in range(gram.grid[0]):
            left, right = _of_symmetric(gram, i, k), _of_symmetric(gram, k, j)
            tasks.product(left, right, result[i, j], k + 1, alpha=c, is_symmetric=i == j)
    return result


def _symmetric_product(tasks: _Tasks, a: TileTensor, b: TileTensor) -> TileTensor:
    """Return the product of two polynomials of the same matrix."""
    result = a.like(name="product")
    for i, j in _upper(a):
        for k in range(a.grid[0]):
            tasks.product(_of_symmetric(a, i, k), _of_symmetric(b, k, j), result[i, j], k, is_symmetric=i == j)
    return result


def _multiplied(tasks: _Tasks, factor: TileTensor, pieces: Sequence[TileTensor], inner: int) -> list[TileTensor]:
    """Return the symmetric factor times X, or if `inner` is 1, X times the factor."""
    results = [piece.like(name="direction") for piece in pieces]
    for piece, result in zip(pieces, results, strict=True):
        for row, column in np.ndindex(*piece.grid):
            for k in range(factor.grid[0]):
                if inner == 1:
                    tasks.product(_Factor(piece[row, k]), _of_symmetric(factor, k, column), result[row, column], k)
                else:
                    tasks.product(_of_symmetric(factor, row, k), _Factor(piece[k, column]), result[row, column], k)
    return results
