"""Optimizer updates, one task per tile, and the sum of squares that clipping needs, as a tree of fixed shape."""

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
"""Numbers one task of a summation tree adds."""


def sum_scalars(terms: TileTensor, name: str) -> TileTensor:
    """Sum of a vector of one-element tiles as a tree  # (n,) fp64 -> (1,) fp64."""
    while True:
        groups = [terms.handles[i : i + FAN_IN] for i in range(0, len(terms.handles), FAN_IN)]
        sums = TileTensor(terms.runtime, (len(groups),), (1,), np.float64, name=name)
        for group, total in zip(groups, sums.handles, strict=True):
            emit(terms.runtime, "sum_scalars", [*((term, R) for term in group), (total, W)])
        if len(groups) == 1:
            return sums
        terms = sums


def sum_of_squares(tensors: Sequence[TileTensor]) -> TileTensor:
    """Sum of squares of all elements of all tensors  # -> (1,) fp64.

    Raises:
        ValueError: there are no tensors.
    """
    if not tensors:
        raise ValueError("the sum of squares needs at least one tensor, got none")
    terms = squares_of_tiles(tensors)
    handles = [handle for tensor in tensors for handle in tensor.handles]
    for handle, term in zip(handles, terms.handles, strict=True):
        square(terms.runtime, handle, term)
    return sum_squares(terms)


def squares_of_tiles(tensors: Sequence[TileTensor]) -> TileTensor:
    """A number for each tile of the tensors, in order, for its sum of squares  # -> (n,) fp64."""
    count = sum(tensor.tiling.num_tiles for tensor in tensors)
    return TileTensor(tensors[0].runtime, (count,), (1,), np.float64, name="squares")


def square(runtime: TaskRuntime, tile: Handle, term: Handle, *, priority: int = 0) -> None:
    """Sum of squares of one tile."""
    emit(runtime, "sum_squares", [(tile, R), (term, W)], priority=priority)


def sum_squares(terms: TileTensor) -> TileTensor:
    """The sum of squares from those of the tiles  # (n,) fp64 -> (1,) fp64."""
    return sum_scalars(terms, "sum of squares")


def adamw(
    param: TileTensor,
    grad: TileTensor,
    m: TileTensor,
    v: TileTensor,
    hyper: TileTensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    norm: TileTensor | None = None,
    max_norm: float = 0.0,
    master: TileTensor | None = None,
    tiles: Iterable[int] | None = None,
    priority: int = 0,
    cpu_only: bool = False,
) -> None:
    """One step of AdamW (`decoupled`) or of Adam with L2, as torch.optim computes it.

    Args:
        param: updated in place; with `master` only overwritten by its rounded value.
        hyper: (4,) fp64, (lr, 1 - beta1^t, 1 - beta2^t, unused), written before the step.
        norm: (1,) sum of squares of all gradients; with `max_norm` > 0 gradients are clipped by it.
        master: fp32 copy of a 16-bit parameter.
        tiles: numbers of those that are updated; None for all.
        priority: of the tasks.
        cpu_only: whether CPU workers alone run them.
    """
    constants = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
    _update("adam", param, grad, [m, v], hyper, norm, max_norm, master, constants, tiles, priority, cpu_only)


def sgd(
    param: TileTensor,
    grad: TileTensor,
    buffer: TileTensor | None,
    hyper: TileTensor,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    norm: TileTensor | None = None,
    max_norm: float = 0.0,
    master: TileTensor | None = None,
    tiles: Iterable[int] | None = None,
    priority: int = 0,
    cpu_only: bool = False,
) -> None:
    """One step of SGD as torch.optim computes it; the momentum `buffer` starts at zero. Other arguments as of `adamw`."""
    if (buffer is None) != (momentum == 0.0):
        raise ValueError(f"SGD needs a buffer exactly when momentum is not 0, got momentum {momentum} and buffer {buffer!r}")
    constants = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    _update("sgd", param, grad, [], hyper, norm, max_norm, master, constants, tiles, priority, cpu_only, buffer)


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
) -> None:
    state = [tensor for tensor in (*moments, buffer, master) if tensor is not None]
    same_tiling(param, grad, *state)
    if (param.dtype in NARROW) != (master is not None):
        raise ValueError(f"a 16-bit parameter, and only that, needs an fp32 master; got {param!r} with master {master!r}")
    clip = norm is not None and max_norm > 0
    penalty = bool(constants["weight_decay"]) and not constants.get("decoupled", False)
    constants |= {"max_norm": max_norm, "clip": clip, "master": master is not None}
    for number in range(param.tiling.num_tiles) if tiles is None else tiles:
        accesses: list[Access] = [(param.handles[number], RW if master is None else W), (grad.handles[number], R)]
        accesses += [(moment.handles[number], RW) for moment in moments]
        accesses.append((hyper[0,], R))
        if buffer is not None:
            accesses.append((buffer.handles[number], RW))
        if clip and norm is not None:
            accesses.append((norm[0,], R))
        if master is not None:
            accesses.append((master.handles[number], RW))
        size = prod(param.tile)
        nbytes = optimizer_scratch_nbytes(size, 8 if param.dtype == np.float64 else 4, penalty, clip, bool(constants.get("nesterov")))
        if nbytes:
            accesses.append((scratch(param.runtime, nbytes), SCRATCH))
        (emit_on_cpu if cpu_only else emit)(param.runtime, op, accesses, priority=priority, **constants)
