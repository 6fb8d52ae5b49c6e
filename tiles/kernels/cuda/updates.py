"""Optimizers and sums over whole tiles on a GPU, for several tiles in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

from ..reference.moments import BLOCK, num_blocks
from ..reference.optimizer import split
from ..registry import register, register_many
from .array import DeviceArray
from .launch import MOST_BLOCKS, THREADS, KernelSource, blocks_for, device
from .many import Row, Task, by_type, filled, in_starts, table

_source = KernelSource("updates")
_FLOAT: Final = np.dtype(np.float32)
MOST_PARTIALS: Final = 1024
"""Largest number of blocks that sum one tile."""
_PER_THREAD: Final = 16
"""Number of weights that a thread of `adam` updates, so that its terms in double precision cost little."""
_SQUARED: Final = table("x", "sums")
_MOVED: Final = table("param", "grad", "m", "v", "master", numbers=("groups",))
_MOST_SUMS: Final = 32
_MOST_SCALARS: Final = 384
"""`MOST_SUMS` and `MOST_SCALARS` of updates.cu."""
_SCALARS: Final = np.dtype(
    [
        ("numbers", np.uint64, _MOST_SCALARS),
        ("sums", np.uint64, _MOST_SUMS),
        ("begins", np.int32, _MOST_SUMS + 1),
        ("goes_on", np.int32, _MOST_SUMS),
    ],
    align=True,
)


@register("adam", "cuda")
def adam(*tiles: DeviceArray, **constants: Any) -> None:
    """Compute Adam or AdamW; tiles are param, grad, m, v, hyper, [norm if clip,] [master,] [scratch]."""
    adam_many([(tiles, constants)])


@register_many(adam)
def adam_many(tasks: Sequence[Task]) -> None:
    """Compute `adam` for several tiles, with one launch per element type, table of numbers and clipping."""
    alike: dict[Any, list[tuple[Row, int]]] = {}
    for (param, grad, m, v, hyper, *rest), constants in tasks:
        norm, master = split(tuple(rest), constants["clip"], constants["master"])
        if param.size:
            key = (param.dtype, hyper, norm, constants["max_norm"], constants["decoupled"])
            alike.setdefault(key, []).append(((param, grad, m, v, master), constants["row"]))
    for (dtype, hyper, norm, max_norm, decoupled), tiles in alike.items():
        for some in in_starts(tiles):
            blocks = [blocks_for(tile[0].size, _PER_THREAD) for tile, _ in some if tile[0] is not None]
            given = filled(_MOVED, [tile for tile, _ in some], blocks, groups=[row for _, row in some])
            _source.start("adam", dtype, given, hyper, norm, np.float64(max_norm), np.int32(decoupled), grid=(sum(blocks), 1, 1))


@register("sgd", "cuda")
def sgd(
    param: DeviceArray,
    grad: DeviceArray,
    hyper: DeviceArray,
    *rest: DeviceArray,
    row: int,
    has_buffer: bool,
    nesterov: bool,
    max_norm: float,
    clip: bool,
    master: bool,
) -> None:
    """Compute SGD; `rest` is [buffer if `has_buffer`,] [norm,] [master,] [scratch]."""
    optional = list(rest)
    buffer = optional.pop(0) if has_buffer else None
    norm, weights = split(tuple(optional), clip, master)
    numbers: tuple[Any, ...] = (np.float64(max_norm), np.int32(row), np.int32(nesterov))
    _source.each("sgd", param.dtype, param.size, param, grad, hyper, buffer, norm, weights, *numbers)


@register("adam8bit", "cuda")
def adam8bit(param: DeviceArray, *tensors: DeviceArray, row: int, stream: int, tile: int, max_norm: float, clip: bool, master: bool) -> None:
    """Compute AdamW on moments in 8 bits; `tensors` are grad, m, its scales, v, its scales, hyper, [norm if clip,] [master]."""
    norm, weights = split(tensors[6:], clip, master)
    numbers: tuple[Any, ...] = (np.float64(max_norm), np.int32(row), np.int64(stream), np.int64(tile), np.int64(param.size))
    grid, shared = (min(MOST_BLOCKS, num_blocks(param.size)), 1, 1), 4 * (BLOCK // 32)
    _source.start("adam8bit", param.dtype, param, *tensors[:6], norm, weights, *numbers, grid=grid, threads=BLOCK, shared=shared)


@register("muon_momentum", "cuda")
def muon_momentum(*tiles: DeviceArray, row: int, nesterov: bool, max_norm: float, clip: bool) -> None:
    """Average a gradient; tiles are grad, buffer, update, hyper, [norm if clip]."""
    grad, buffer, update, hyper, *norm = tiles
    numbers: tuple[Any, ...] = (np.float64(max_norm), np.int32(row), np.int32(nesterov))
    _source.each("muon_momentum", _FLOAT, grad.size, grad, buffer, update, hyper, norm[0] if clip else None, *numbers)


@register("muon_normalise", "cuda")
def muon_normalise(x: DeviceArray, total: DeviceArray, hyper: DeviceArray, *, row: int) -> None:
    """x /= max(norm, smallest norm), where `total` (1,) is the sum of squares of the whole matrix."""
    _source.each("muon_normalise", _FLOAT, x.size, x, total, hyper, np.int32(row))


@register("muon_polynomial", "cuda")
def muon_polynomial(gram: DeviceArray, out: DeviceArray, *, a: float, b: float, diagonal: bool) -> None:
    """out = b gram, plus a times the identity in a tile on the diagonal of the matrix."""
    numbers: tuple[Any, ...] = (np.float64(a), np.float64(b), np.int32(gram.shape[1]), np.int32(diagonal))
    _source.each("muon_polynomial", _FLOAT, gram.size, gram, out, *numbers)


@register("muon_update", "cuda")
def muon_update(param: DeviceArray, x: DeviceArray, hyper: DeviceArray, *weights: DeviceArray, row: int, ratio: float, master: bool) -> None:
    """param = (1 - lr weight_decay) param - lr ratio x; if `master`, on `weights`, an fp32 master, which the parameter becomes after rounding."""
    numbers: tuple[Any, ...] = (np.float64(ratio), np.int32(row))
    _source.each("muon_update", param.dtype, param.size, param, x, hyper, weights[0] if master else None, *numbers)


@register("sum_squares", "cuda")
def sum_squares(x: DeviceArray, out: DeviceArray) -> None:
    """out[0] = sum of squares of x in fp64."""
    sum_squares_many([((x, out), {})])


@register_many(sum_squares)
def sum_squares_many(tasks: Sequence[Task]) -> None:
    """Compute `sum_squares` for several tiles in one launch."""
    for alike in by_type(tasks):
        rows = [tiles for tiles, _ in alike]
        blocks = [max(1, min(MOST_PARTIALS, -(-x.size // (16 * THREADS)))) for x, _ in rows]
        arrays = (device().partials.at(np.float64, sum(blocks)), device().arrivals.at(np.uint32, len(rows)))
        _source.start("squares", rows[0][0].dtype, filled(_SQUARED, rows, blocks), *arrays, grid=(sum(blocks), 1, 1), shared=8 * THREADS)


@register("sum_scalars", "cuda")
def sum_scalars(*arrays: DeviceArray) -> None:
    """Write the sum of all arguments but the last to the last one, in order."""
    sum_scalars_many([(arrays, {})])


@register_many(sum_scalars)
def sum_scalars_many(tasks: Sequence[Task]) -> None:
    """Compute `sum_scalars` for several tasks, with as few launches as their numbers of addends allow."""
    pieces = [
        (addends[first : first + _MOST_SCALARS], out, first > 0) for (*addends, out), _ in tasks for first in range(0, len(addends), _MOST_SCALARS)
    ]
    while pieces:
        ends = [end for end in accumulate(len(addends) for addends, _, _ in pieces[:_MOST_SUMS]) if end <= _MOST_SCALARS]
        some, pieces = pieces[: len(ends)], pieces[len(ends) :]
        numbers = np.zeros((), _SCALARS)
        numbers["numbers"][: ends[-1]] = [addend.address for addends, _, _ in some for addend in addends]
        numbers["sums"][: len(some)] = [out.address for _, out, _ in some]
        numbers["begins"][1 : len(ends) + 1] = ends
        numbers["goes_on"][: len(some)] = [goes_on for _, _, goes_on in some]
        given: Any = numbers[()]
        _source.start("add_scalars", _FLOAT, given, grid=(len(some), 1, 1), threads=1)
