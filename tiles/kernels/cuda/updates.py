"""Optimizers and sums over whole tiles on a device, of several tiles in one start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ..reference.optimizer import split
from ..registry import register, register_many
from .array import DeviceArray
from .launch import THREADS, KernelSource, device
from .many import MOST_TILES, Row, Task, blocks_for, by_type, filled, in_starts, table

_source = KernelSource("updates")
_FLOAT: Final = np.dtype(np.float32)
MOST_PARTIALS: Final = 1024
"""Blocks that sum up one tile."""
_SQUARED: Final = table("x", "sums")
_MOVED: Final = table("param", "grad", "m", "v", "master")
_SCALARS: Final = np.dtype([("numbers", np.uint64, MOST_TILES)])


@register("adam", "cuda")
def adam(*tiles: DeviceArray, **constants: Any) -> None:
    """Adam or AdamW; tiles are param, grad, m, v, hyper, [norm if clip,] [master,] [scratch]."""
    adam_many([(tiles, constants)])


@register_many(adam)
def adam_many(tasks: Sequence[Task]) -> None:
    """The same of several tiles: one start for as many as have the same numbers."""
    alike: dict[Any, list[Row]] = {}
    for (param, grad, m, v, hyper, *rest), constants in tasks:
        norm, master = split(tuple(rest), constants["clip"], constants["master"])
        if param.size:
            alike.setdefault((param.dtype, hyper, norm, *constants.items()), []).append((param, grad, m, v, master))
    for (dtype, hyper, norm, *items), all_rows in alike.items():
        constants = dict(items)
        numbers = [np.float64(constants[name]) for name in ("beta1", "beta2", "eps", "weight_decay", "max_norm")]
        for rows in in_starts(all_rows):
            blocks = [blocks_for(row[0].size) for row in rows if row[0] is not None]
            _source.start(
                "adam", dtype, filled(_MOVED, rows, blocks), hyper, norm, *numbers, np.int32(constants["decoupled"]), grid=(sum(blocks), 1, 1)
            )


@register("sgd", "cuda")
def sgd(
    param: DeviceArray,
    grad: DeviceArray,
    hyper: DeviceArray,
    *rest: DeviceArray,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    max_norm: float,
    clip: bool,
    master: bool,
) -> None:
    """SGD; `rest` is [buffer if momentum,] [norm,] [master,] [scratch]."""
    optional = list(rest)
    buffer = optional.pop(0) if momentum else None
    norm, weights = split(tuple(optional), clip, master)
    numbers: tuple[Any, ...] = (*map(np.float64, (momentum, weight_decay, max_norm)), np.int32(nesterov))
    _source.each("sgd", param.dtype, param.size, param, grad, hyper, buffer, norm, weights, *numbers)


@register("sum_squares", "cuda")
def sum_squares(x: DeviceArray, out: DeviceArray) -> None:
    """out[0] = sum of squares of x in fp64."""
    sum_squares_many([((x, out), {})])


@register_many(sum_squares)
def sum_squares_many(tasks: Sequence[Task]) -> None:
    """The same of several tiles."""
    for alike in by_type(tasks):
        rows = [tiles for tiles, _ in alike]
        blocks = [max(1, min(MOST_PARTIALS, -(-x.size // (16 * THREADS)))) for x, _ in rows]
        given, partials = filled(_SQUARED, rows, blocks), device().partials.at(np.float64, sum(blocks))
        _source.start("squares", rows[0][0].dtype, given, partials, grid=(sum(blocks), 1, 1), shared=8 * THREADS)
        _source.start("add_parts", _FLOAT, given, partials, grid=(len(rows), 1, 1), threads=1)


@register("sum_scalars", "cuda")
def sum_scalars(*arrays: DeviceArray) -> None:
    """The last argument's element = sum of all others, in order."""
    *addends, out = arrays
    for number, some in enumerate(in_starts(addends)):
        numbers = np.zeros((), _SCALARS)
        numbers["numbers"][: len(some)] = [addend.address for addend in some]
        given: Any = numbers[()]
        _source.start("add_scalars", _FLOAT, given, out, np.int32(len(some)), np.int32(number == 0), grid=(1, 1, 1), threads=1)
