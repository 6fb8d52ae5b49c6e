"""Optimizer updates, one task per tile, and the sum of squares for gradient clipping, as a tree of fixed shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from scheduler import RW, SCRATCH, Access, Handle, R, TaskRuntime, W

from ..emission import emit, emit_on_cpu, scratch
from ..kernels.cpu.optimizer import optimizer_scratch_nbytes
from ..kernels.reference.moments import num_blocks
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Update of one parameter: the arguments that all optimizers share.

    Args:
        param: parameter, updated in place; with `master` it is only overwritten by the rounded master.
        grad: gradient of the parameter.
        hyper: (num_groups, HYPER) fp64, one tile, written before the step; its columns are listed in `tiles.kernels.reference.optimizer`.
        row: row of `hyper` for the parameter's group.
        decays: whether to declare the working memory that weight decay takes if it is added to the gradient. Weight decay works without it, too.
        norm: (1,) sum of squares of all gradients; with `max_norm` > 0 gradients are clipped by it.
        master: fp32 copy of a 16-bit parameter.
        tiles: numbers of the tiles to update; None for all.
        priority: priority of the tasks.
        cpu_only: whether the tasks run on CPU workers only.
    """

    param: TileTensor
    grad: TileTensor
    hyper: TileTensor
    row: int = 0
    decays: bool = True
    norm: TileTensor | None = None
    max_norm: float = 0.0
    master: TileTensor | None = None
    tiles: Iterable[int] | None = None
    priority: int = 0
    cpu_only: bool = False

    def check_master(self) -> None:
        """Check that a 16-bit parameter, and no other, has a master.

        Raises:
            ValueError: the master is missing, or the parameter needs none.
        """
        if (self.param.dtype in NARROW) != (self.master is not None):
            raise ValueError(f"a 16-bit parameter, and only that, needs an fp32 master; got {self.param!r} with master {self.master!r}")


def adamw(update: Update, m: TileTensor, v: TileTensor, *, decoupled: bool = True) -> None:
    """Compute one step of AdamW (`decoupled`) or of Adam with L2, as torch.optim does."""
    same_tiling(update.param, m, v)
    _update("adam", update, [m, v], None, has_penalty=update.decays and not decoupled, decoupled=decoupled)


def moment_scales(param: TileTensor, name: str) -> TileTensor:
    """Return a new tensor for the scales of a moment in 8 bits: tile i has a number for each block of tile i of the parameter, and maybe more.

    A block is 256 elements of one tile, row by row (`tiles.kernels.reference.moments`).
    """
    count, per_tile = param.tiling.num_tiles, num_blocks(prod(param.tile))
    return TileTensor(param.runtime, (count * per_tile,), (per_tile,), np.float32, kind="persistent", data_class="optimizer", name=name)


def adamw8bit(update: Update, m: TileTensor, m_scales: TileTensor, v: TileTensor, v_scales: TileTensor, *, stream: int) -> None:
    """Compute one step of AdamW on moments in 8 bits: codes (uint8) in the parameter's tiles, and `moment_scales`, all zero before the first step.

    Args:
        stream: random stream by which codes are rounded: another one for each parameter.
    """
    same_tiling(update.param, m, v)
    _update("adam8bit", update, [m, m_scales, v, v_scales], None, has_penalty=False, stream=stream)


def sgd(update: Update, buffer: TileTensor | None, *, nesterov: bool = False) -> None:
    """Compute one step of SGD as torch.optim does.

    Args:
        buffer: momentum buffer; zero before the first step. None for no momentum, regardless of `hyper`.
        nesterov: whether to use Nesterov momentum.
    """
    same_tiling(update.param, *([] if buffer is None else [buffer]))
    _update("sgd", update, [], buffer, has_penalty=update.decays, has_buffer=buffer is not None, nesterov=nesterov)


def _update(op: str, update: Update, moments: list[TileTensor], buffer: TileTensor | None, *, has_penalty: bool, **constants: Any) -> None:
    param, norm, master = update.param, update.norm, update.master
    same_tiling(param, update.grad, *([] if master is None else [master]))
    update.check_master()
    clip = norm is not None and update.max_norm > 0
    shared: dict[str, Any] = {"max_norm": update.max_norm, "clip": clip, "master": master is not None}
    for number in range(param.tiling.num_tiles) if update.tiles is None else update.tiles:
        accesses: list[Access] = [(param.handles[number], RW if master is None else W), (update.grad.handles[number], R)]
        accesses += [(moment.handles[number], RW) for moment in moments]
        accesses.append((update.hyper[0, 0], R))
        if buffer is not None:
            accesses.append((buffer.handles[number], RW))
        if clip and norm is not None:
            accesses.append((norm[0,], R))
        if master is not None:
            accesses.append((master.handles[number], RW))
        itemsize = 8 if param.dtype == np.float64 else 4
        nbytes = optimizer_scratch_nbytes(prod(param.tile), itemsize, has_penalty, clip, constants.get("nesterov", False))
        if nbytes:
            accesses.append((scratch(param.runtime, nbytes), SCRATCH))
        own: dict[str, Any] = {"tile": number} if "stream" in constants else {}
        emitted = emit_on_cpu if update.cpu_only else emit
        emitted(param.runtime, op, accesses, priority=update.priority, row=update.row, **own, **constants, **shared)
