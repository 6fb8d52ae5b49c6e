"""Elementwise operations over tiles: one task per tile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler import REDUX, RW, Access, R, W

from ..emission import emit
from ..kernels.registry import activations
from ..tensor import TileTensor
from .grid import same_axis, same_tiling


def add(a: TileTensor, b: TileTensor) -> TileTensor:
    """a + b."""
    return _each("add", [a, b], "add")[0]


def _each(op: str, inputs: Sequence[TileTensor], *names: str, **constants: Any) -> list[TileTensor]:
    """Emit one task per tile over the inputs; return its outputs, tensors like the first input of the given names."""
    first = inputs[0]
    same_tiling(*inputs)
    outputs = [first.like(name=name) for name in names]
    for number in range(first.tiling.num_tiles):
        accesses: list[Access] = [(tensor.handles[number], R) for tensor in inputs]
        emit(first.runtime, op, [*accesses, *((tensor.handles[number], W) for tensor in outputs)], **constants)
    return outputs


def accumulate(addend: TileTensor, total: TileTensor) -> None:
    """total += addend, as one contribution per tile."""
    same_tiling(addend, total)
    for source, target in zip(addend.handles, total.handles, strict=True):
        emit(addend.runtime, "add_into", [(source, R), (target, REDUX)])


def scale(a: TileTensor, alpha: float) -> TileTensor:
    """alpha * a."""
    return _each("scale", [a], "scale", alpha=alpha)[0]


def cast(a: TileTensor, dtype: npt.DTypeLike) -> TileTensor:
    """`a` converted to another element type."""
    return copy_into(a, a.like(dtype=dtype, name="cast"))


def copy(a: TileTensor) -> TileTensor:
    """Return a copy of `a`."""
    return copy_into(a, a.like(name="copy"))


def copy_into(a: TileTensor, out: TileTensor, tiles: Iterable[int] | None = None) -> TileTensor:
    """Overwrite `out`, or only its tiles with the numbers `tiles`, with `a` converted to the element type of `out`; return `out`."""
    same_tiling(a, out)
    for number in range(out.tiling.num_tiles) if tiles is None else tiles:
        emit(a.runtime, "copy", [(a.handles[number], R), (out.handles[number], W)])
    return out


def fill(a: TileTensor, value: float, tiles: Iterable[int] | None = None) -> TileTensor:
    """Overwrite every element of `a`, or only of its tiles with the numbers `tiles`; return `a`."""
    for number in range(a.tiling.num_tiles) if tiles is None else tiles:
        emit(a.runtime, "fill", [(a.handles[number], W)], value=value)
    return a


def add_rows(x: TileTensor, p: TileTensor) -> TileTensor:
    """x + p[:T] for every sequence  # (B, T, C) + (at least T, C) -> (B, T, C)."""
    _check_rows(x, p)
    out = x.like(name="add_rows")
    for index in x.tiling.indices():
        _, t, c = index
        emit(x.runtime, "add_rows", [(x[index], R), (p[t, c], R), (out[index], W)])
    return out


def add_rows_backward(dy: TileTensor, dp: TileTensor) -> None:
    """dp[:T] (+)= sum of dy over sequences; tiles of dp entirely beyond T receive no contribution."""
    _check_rows(dy, dp)
    for index in dy.tiling.indices():
        _, t, c = index
        emit(dy.runtime, "add_rows_backward", [(dy[index], R), (dp[t, c], REDUX)])


def _check_rows(x: TileTensor, p: TileTensor) -> None:
    same_axis(x, 2, p, 1)
    if p.shape[0] < x.shape[1] or (x.grid[1] > 1 and x.tile[1] != p.tile[0]) or p.tile[0] < x.tile[1]:
        raise ValueError(f"positions {p!r} must be cut like axis 1 of {x!r} and be at least as long")


def activation(x: TileTensor, kind: str) -> TileTensor:
    """activation(x) for kind "gelu_new", "gelu", "relu", "silu", "tanh", or a registered one."""
    _check_kind(kind)
    return _each("activation", [x], "activation", kind=kind)[0]


def activation_backward(x: TileTensor, dy: TileTensor, kind: str) -> TileTensor:
    """dx = dy * activation'(x)."""
    _check_kind(kind)
    return _each("activation_backward", [x, dy], "d activation", kind=kind)[0]


def _check_kind(kind: str) -> None:
    if kind not in activations():
        raise ValueError(f"unknown activation {kind!r}; there are {', '.join(activations())}")


def gated(gates: TileTensor, up: TileTensor, kind: str) -> TileTensor:
    """activation(gates) * up, for the kinds of `activation`."""
    _check_kind(kind)
    if kind == "silu":
        return _each("silu_gate", [gates, up], "silu_gate")[0]
    return _each("gate", [gates, up], "gate", kind=kind)[0]


def gated_backward(gates: TileTensor, up: TileTensor, dy: TileTensor, kind: str) -> tuple[TileTensor, TileTensor]:
    """Gradients (dgates, dup) of `gated`."""
    _check_kind(kind)
    op, constants = ("silu_gate_backward", {}) if kind == "silu" else ("gate_backward", {"kind": kind})
    dgates, dup = _each(op, [gates, up, dy], "d gate", "d up", **constants)
    return dgates, dup


def row_gated(gate: TileTensor, x: TileTensor) -> TileTensor:
    """y = sigmoid(gate) * x  # (.., 1), (.., C) -> (.., C)."""
    y = x.like(name="row gate")
    for index in x.tiling.indices():
        emit(x.runtime, "row_gate", [(gate[*index[:-1], 0], R), (x[index], R), (y[index], W)])
    return y


def row_gated_backward(gate: TileTensor, x: TileTensor, dy: TileTensor) -> tuple[TileTensor, TileTensor]:
    """Return dgate (.., 1) and dx (.., C) of `row_gated`."""
    dgate, dx = gate.like(name="d row gate"), x.like(name="d row gate")
    for index in x.tiling.indices():
        row, c = index[:-1], index[-1]
        accesses: list[Access] = [(gate[*row, 0], R), (x[index], R), (dy[index], R), (dx[index], W), (dgate[*row, 0], RW if c else W)]
        emit(x.runtime, "row_gate_backward", accesses, first=c == 0)
    return dgate, dx


def capped(x: TileTensor, most: float) -> TileTensor:
    """most * tanh(x / most)."""
    if not most > 0:
        raise ValueError(f"a cap must be above 0, got {most}")
    return _each("cap", [x], "capped", most=most)[0]


def capped_backward(y: TileTensor, dy: TileTensor, most: float) -> TileTensor:
    """dx = dy * (1 - (y / most)^2), from the output y of `capped`."""
    return _each("cap_backward", [y, dy], "d capped", most=most)[0]


def clamped(x: TileTensor, most: float) -> TileTensor:
    """`x` between -most and most, which is above 0 and rounded to the type of `x`, as in torch."""
    return _each("clamp", [x], "clamped", most=float(np.asarray(most, x.dtype)))[0]


def clamped_backward(x: TileTensor, dy: TileTensor, most: float) -> TileTensor:
    """dx = dy if |x| <= most, rounded as in `clamped`, else 0."""
    return _each("clamp_backward", [x, dy], "d clamped", most=float(np.asarray(most, x.dtype)))[0]


def rotary_angles(frequencies: TileTensor, length: int, tile: int) -> tuple[TileTensor, TileTensor]:
    """cos and sin of position * frequency, for positions from 0 to length - 1  # (D / 2,) -> (T, D / 2) each.

    Args:
        frequencies: (D / 2,), one tile, in radians per position.
        length: number of positions T.
        tile: number of positions in a tile.
    """
    _check_frequencies(frequencies)
    shape, width = (length, frequencies.shape[0]), frequencies.shape[0]
    cos, sin = (TileTensor(frequencies.runtime, shape, (tile, width), frequencies.dtype, name=name) for name in ("cos", "sin"))
    for t in range(cos.grid[0]):
        emit(cos.runtime, "rotary_angles", [(frequencies[0,], R), (cos[t, 0], W), (sin[t, 0], W)], start=t * cos.tile[0])
    return cos, sin


def rotary_angles_at(frequencies: TileTensor, positions: TileTensor) -> tuple[TileTensor, TileTensor]:
    """cos and sin of position * frequency, for given positions  # (D / 2,), (B, T) int32 -> (B, T, D / 2) each."""
    _check_frequencies(frequencies)
    shape, tile = (*positions.shape, *frequencies.shape), (*positions.tile, *frequencies.shape)
    cos, sin = (TileTensor(frequencies.runtime, shape, tile, frequencies.dtype, name=name) for name in ("cos", "sin"))
    for index in positions.tiling.indices():
        accesses: list[Access] = [(frequencies[0,], R), (positions[index], R), (cos[*index, 0], W), (sin[*index, 0], W)]
        emit(cos.runtime, "rotary_angles_at", accesses)
    return cos, sin


def _check_frequencies(frequencies: TileTensor) -> None:
    if frequencies.grid != (1,):
        raise ValueError(f"frequencies must be one tile of one axis, got {frequencies!r}")


def rotary(x: TileTensor, cos: TileTensor, sin: TileTensor, head_size: int, rotary_size: int | None = None, *, inverse: bool = False) -> TileTensor:
    """Apply rotary position embedding to every head; the inverse rotation is its backward pass.

    Args:
        x: (B, T, H * D), tiles of whole heads.
        cos, sin: (T, R / 2), rows cut like T; or (B, T, R / 2), cut like B and T, if sequences have positions of their own.
        head_size: number of features D of a head.
        rotary_size: even number R of leading features of each head that rotate; the others are copied. None for D.
        inverse: whether to rotate by the negative angles.
    """
    rotary_size = head_size if rotary_size is None else rotary_size
    if x.shape[2] % head_size or x.tile[2] % head_size:
        raise ValueError(f"heads must fill whole tiles; got head size {head_size} and {x!r}")
    if rotary_size % 2 or not 0 < rotary_size <= head_size:
        raise ValueError(f"rotary_size must be even and from 2 to the head size {head_size}, got {rotary_size}")
    for table in (cos, sin):
        rank = len(table.shape)
        for axis in range(rank - 1):
            same_axis(x, 3 - rank + axis, table, axis)
        if table.grid[-1] != 1 or table.shape[-1] != rotary_size // 2:
            raise ValueError(f"angles must be one tile of {rotary_size // 2} columns, got {table!r}")
    out = x.like(name="rotary")
    for index in x.tiling.indices():
        row = index[3 - len(cos.shape) : 2]
        accesses: list[Access] = [(x[index], R), (cos[*row, 0], R), (sin[*row, 0], R), (out[index], W)]
        emit(x.runtime, "rotary", accesses, head_size=head_size, inverse=inverse)
    return out
