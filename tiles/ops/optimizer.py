"""Optimizer updates, one task per tile, and the sum of squares for gradient clipping, as a tree of fixed shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from scheduler import RW, SCRATCH, Access, Handle, R, TaskRuntime, W

from ..emission import emit, emit_on_cpu, scratch
from ..kernels.cpu.optimizer import optimizer_scratch_nbytes
from ..kernels.registry import NARROW
from ..tensor import TileTensor
from .grid import same_tiling

FAN_IN: Final = 32
"""Number of terms that one task of a summation tree adds."""


def sum_scalars(terms: TileTensor, name: str) -> TileTensor:
    """Return the sum of a vector of one-element tiles, computed as a tree  # (n,) fp64 -> (1,) fp64."""
    while True:
        groups = [terms.handles[i : i + FAN_IN] for i in range(0, len(terms.handles), FAN_IN)]
        sums = TileTensor(terms.runtime, (len(groups),), (1,), np.float64, name=name)
        for group, total in zip(groups, sums.handles, strict=True):
            emit(terms.runtime, "sum_scalars", [*((term, R) for term in group), (total, W)])
        if len(groups) == 1:
            return sums
        terms = sums


def sum_of_squares(tensors: Sequence[TileTensor]) -> TileTensor:
    """Return the sum of squares of all elements of all tensors  # -> (1,) fp64.

    Raises:
        ValueError: `tensors` is empty.
    """
    if not tensors:
        raise ValueError("the sum of squares needs at least one tensor, got none")
    terms = squares_of_tiles(tensors)
    handles = [handle for tensor in tensors for handle in tensor.handles]
    for handle, term in zip(handles, terms.handles, strict=True):
        square(terms.runtime, handle, term)
    return sum_squares(terms)


def squares_of_tiles(tensors: Sequence[TileTensor]) -> TileTensor:
    """Return a new tensor for the sums of squares of the tiles: one number per tile, in order  # -> (n,) fp64."""
    count = sum(tensor.tiling.num_tiles for tensor in tensors)
    return TileTensor(tensors[0].runtime, (count,), (1,), np.float64, name="squares")


def square(runtime: TaskRuntime, tile: Handle, term: Handle, *, priority: int = 0) -> None:
    """Write the sum of squares of one tile to `term`."""
    emit(runtime, "sum_squares", [(tile, R), (term, W)], priority=priority)


def sum_squares(terms: TileTensor) -> TileTensor:
    """Return the total of the tiles' sums of squares  # (n,) fp64 -> (1,) fp64."""
    return sum_scalars(terms, "sum of squares")


def adamw(
    param: TileTensor,
    grad: TileTensor,
    m: TileTensor,
    v: TileTensor,
    hyper: TileTensor,
    *,
    row: int = 0,
    decays: bool = True,
    decoupled: bool = True,
    norm: TileTensor | None = None,
    max_norm: float = 0.0,
    master: TileTensor | None = None,
    tiles: Iterable[int] | None = None,
    priority: int = 0,
    cpu_only: bool = False,
) -> None:
    """Compute one step of AdamW (`decoupled`) or of Adam with L2, as torch.optim does.

    Args:
        param: parameter, updated in place; with `master` it is only overwritten by the rounded master.
        hyper: (num_groups, HYPER) fp64, one tile, written before the step; its columns are listed in `tiles.kernels.reference.optimizer`.
        row: row of `hyper` for the parameter's group.
        decays: whether to declare the working memory that weight decay takes if it is not decoupled. Weight decay works without it, too.
        norm: (1,) sum of squares of all gradients; with `max_norm` > 0 gradients are clipped by it.
        master: fp32 copy of a 16-bit parameter.
        tiles: numbers of the tiles to update; None for all.
        priority: priority of the tasks.
        cpu_only: whether the tasks run on CPU workers only.
    """
    constants = {"row": row, "decoupled": decoupled}
    _update("adam", param, grad, [m, v], hyper, norm, max_norm, master, constants, tiles, priority, cpu_only, decays=decays and not decoupled)


def sgd(
    param: TileTensor,
    grad: TileTensor,
    buffer: TileTensor | None,
    hyper: TileTensor,
    *,
    row: int = 0,
    decays: bool = True,
    nesterov: bool = False,
    norm: TileTensor | None = None,
    max_norm: float = 0.0,
    master: TileTensor | None = None,
    tiles: Iterable[int] | None = None,
    priority: int = 0,
    cpu_only: bool = False,
) -> None:
    """Compute one step of SGD as torch.optim does.

    Args:
        buffer: momentum buffer; zero before the first step. None for no momentum, regardless of `hyper`.
        nesterov: whether to use Nesterov momentum.
        param, grad, hyper, row, decays, norm, max_norm, master, tiles, priority, cpu_only: the arguments of `adamw`.
    """
    constants = {"row": row, "has_buffer": buffer is not None, "nesterov": nesterov}
    _update("sgd", param, grad, [], hyper, norm, max_norm, master, constants, tiles, priority, cpu_only, buffer, decays=decays)


def _update(
    op: str,
    param: TileTensor,
    grad: TileTensor,
    moments: list[TileTensor],
    hyper: TileTensor,
    norm: TileTensor | None,
    max_norm: float,
    master: TileTensor | None,
    constants: dict[str, Any],
    tiles: Iterable[int] | None,
    priority: int,
    cpu_only: bool,
    buffer: TileTensor | None = None,
    *,
    decays: bool,
) -> None:
    state = [tensor for tensor in (*moments, buffer, master) if tensor is not None]
    same_tiling(param, grad, *state)
    if (param.dtype in NARROW) != (master is not None):
        raise ValueError(f"a 16-bit parameter, and only that, needs an fp32 master; got {param!r} with master {master!r}")
    clip = norm is not None and max_norm > 0
    constants |= {"max_norm": max_norm, "clip": clip, "master": master is not None}
    for number in range(param.tiling.num_tiles) if tiles is None else tiles:
        accesses: list[Access] = [(param.handles[number], RW if master is None else W), (grad.handles[number], R)]
        accesses += [(moment.handles[number], RW) for moment in moments]
        accesses.append((hyper[0, 0], R))
        if buffer is not None:
            accesses.append((buffer.handles[number], RW))
        if clip and norm is not None:
            accesses.append((norm[0,], R))
        if master is not None:
            accesses.append((master.handles[number], RW))
        size = prod(param.tile)
        nbytes = optimizer_scratch_nbytes(size, 8 if param.dtype == np.float64 else 4, decays, clip, bool(constants.get("nesterov")))
        if nbytes:
            accesses.append((scratch(param.runtime, nbytes), SCRATCH))
        (emit_on_cpu if cpu_only else emit)(param.runtime, op, accesses, priority=priority, **constants)
