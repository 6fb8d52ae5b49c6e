"""Muon (Jordan et al., 2024) over tiles: the update of a matrix is its averaged gradient with all singular values brought near one.

The Newton-Schulz iteration X <- (a I + b G + c G^2) X, with the Gram matrix G = X X^T, is products of tiles, so a matrix in any tiles, on any
workers, is orthogonalised as a whole. If there are more rows than columns, G = X^T X multiplies from the right instead: the result is the transpose
of that of the transposed matrix, and nothing is transposed. Only tiles on and above the diagonal of G and of the polynomial are computed.

Everything is fp32, or fp64 for fp64 parameters, where torch.optim.Muon computes in bf16. Legend: X (M, N), G and polynomial (K, K), K = min(M, N).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from scheduler import RW, Access, Handle, R, W

from ..emission import emit, emit_on_cpu
from ..tensor import TileTensor
from .grid import chained, same_tiling
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


def muon(update: Update, buffer: TileTensor, options: NewtonSchulz) -> None:
    """Compute one step of Muon for a whole matrix; `hyper` has the momentum in the place of beta1 and the smallest norm in that of epsilon.

    Args:
        buffer: (M, N) momentum buffer, in fp32 or wider; zero before the first step.

    Raises:
        ValueError: the parameter is not a matrix, or only some of its tiles are to be updated.
    """
    param, count = update.param, update.param.tiling.num_tiles
    if len(param.shape) != 2 or (update.tiles is not None and sorted(update.tiles) != list(range(count))):
        raise ValueError(f"Muon updates whole matrices, got {param!r} with tiles {'all' if update.tiles is None else list(update.tiles)}")
    same_tiling(param, update.grad, buffer)
    update.check_master()
    clip = update.norm is not None and update.max_norm > 0
    tasks = _Tasks(update)
    x = buffer.like(name="direction")
    for grad, mean, direction in zip(update.grad.handles, buffer.handles, x.handles, strict=True):
        accesses: list[Access] = [(grad, R), (mean, RW), (direction, W), (update.hyper[0, 0], R)]
        if clip and update.norm is not None:
            accesses.append((update.norm[0,], R))
        tasks.emit("muon_momentum", accesses, row=update.row, nesterov=options.nesterov, max_norm=update.max_norm, clip=clip)
    total = _sum_of_squares(tasks, x)
    for direction in x.handles:
        tasks.emit("muon_normalise", [(direction, RW), (total[0,], R), (update.hyper[0, 0], R)], row=update.row)
    for _ in range(options.ns_steps):
        x = _iterated(tasks, x, options.ns_coefficients)
    ratio, master = options.ratio(*param.shape), update.master
    for number, direction in enumerate(x.handles):
        accesses = [(param.handles[number], RW if master is None else W), (direction, R), (update.hyper[0, 0], R)]
        if master is not None:
            accesses.append((master.handles[number], RW))
        tasks.emit("muon_update", accesses, row=update.row, ratio=ratio, master=master is not None)


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


def _sum_of_squares(tasks: _Tasks, x: TileTensor) -> TileTensor:
    """Return the sum of squares of a matrix  # (M, N) -> (1,) fp64."""
    terms = squares_of_tiles([x])
    for tile, term in zip(x.handles, terms.handles, strict=True):
        tasks.emit("sum_squares", [(tile, R), (term, W)])
    return sum_squares(terms)


def _iterated(tasks: _Tasks, x: TileTensor, coefficients: tuple[float, float, float]) -> TileTensor:
    """Return (a I + b G + c G^2) X, G = X X^T, or if X has more rows than columns X (a I + b G + c G^2), G = X^T X."""
    is_tall = x.shape[0] > x.shape[1]
    inner, outer = (1, 0) if is_tall else (0, 1)  # G has the axis `inner`, its products are summed over `outer`
    a, b, c = coefficients
    size, tile = x.shape[inner], x.tile[inner]
    gram, polynomial = (TileTensor(x.runtime, (size, size), (tile, tile), x.dtype, name=name) for name in ("gram", "polynomial"))
    count = x.grid[inner]
    upper = [(i, j) for i in range(count) for j in range(i, count)]
    for i, j in upper:
        for k in range(x.grid[outer]):
            left, right = (x[k, i], x[k, j]) if is_tall else (x[i, k], x[j, k])
            tasks.product(_Factor(left, is_tall), _Factor(right, not is_tall), gram[i, j], k)
    for i, j in upper:
        tasks.emit("muon_polynomial", [(gram[i, j], R), (polynomial[i, j], W)], a=a, b=b, diagonal=i == j)
        for k in range(count):
            tasks.product(_of_symmetric(gram, i, k), _of_symmetric(gram, k, j), polynomial[i, j], k + 1, alpha=c)
    result = x.like(name="direction")
    for row, column in np.ndindex(*x.grid):
        for k in range(count):
            if is_tall:
                tasks.product(_Factor(x[row, k]), _of_symmetric(polynomial, k, column), result[row, column], k)
            else:
                tasks.product(_of_symmetric(polynomial, row, k), _Factor(x[k, column]), result[row, column], k)
    return result
