"""Elementwise kernels, readable."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..registry import BUILT_IN_ACTIVATIONS, register

Array = npt.NDArray[Any]

GELU_SCALE: Final = math.sqrt(2.0 / math.pi)
GELU_CUBIC: Final = 0.044715

_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: Array) -> Array:
    """Return the error function of each element."""
    return np.asarray(_erf(x), dtype=x.dtype)


def activate(x: Array, kind: str) -> Array:
    """Return activation(x). "gelu_new" is the tanh form of Hendrycks and Gimpel (2016), eq. 2; "gelu" is the exact one."""
    if kind == "gelu_new":
        return 0.5 * x * (1.0 + np.tanh(GELU_SCALE * (x + GELU_CUBIC * x**3)))
    if kind == "gelu":
        return 0.5 * x * (1.0 + erf(x / math.sqrt(2.0)))
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "silu":
        return x / (1.0 + np.exp(-x))
    if kind == "tanh":
        return np.asarray(np.tanh(x))
    raise ValueError(f"unknown activation {kind!r}; there are {', '.join(BUILT_IN_ACTIVATIONS)}")


def slope(x: Array, kind: str) -> Array:
    """Return activation'(x)."""
    if kind == "gelu_new":
        t = np.tanh(GELU_SCALE * (x + GELU_CUBIC * x**3))
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * x * x)
    if kind == "gelu":
        return 0.5 * (1.0 + erf(x / math.sqrt(2.0))) + x * np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    if kind == "relu":
        return (x > 0).astype(x.dtype)
    if kind == "silu":
        s = 1.0 / (1.0 + np.exp(-x))
        return s * (1.0 + x * (1.0 - s))
    if kind == "tanh":
        return 1.0 - np.tanh(x) ** 2
    raise ValueError(f"unknown activation {kind!r}; there are {', '.join(BUILT_IN_ACTIVATIONS)}")


@register("accumulate", "reference")
def accumulate(total: Array, addend: Array) -> None:
    """total += addend."""
    total[...] = total + addend


@register("add", "reference")
def add(a: Array, b: Array, out: Array) -> None:
    """out = a + b."""
    out[...] = a + b


@register("scale", "reference")
def scale(x: Array, out: Array, *, alpha: float) -> None:
    """out = alpha * x."""
    out[...] = alpha * x


@register("copy", "reference")
def copy(x: Array, out: Array) -> None:
    """out = x, converted to out's dtype."""
    out[...] = x


@register("fill", "reference")
def fill(out: Array, *, value: float) -> None:
    """out = value everywhere."""
    out[...] = value


@register("add_rows", "reference")
def add_rows(x: Array, p: Array, out: Array) -> None:
    """out[b] = x[b] + p[:t]  # (mb, t, c) + (at least t, c)."""
    out[...] = x + p[: x.shape[1]]


@register("add_rows_backward", "reference")
def add_rows_backward(dy: Array, dp: Array, *, accumulate: bool) -> None:
    """dp[:t] (+)= sum of dy over b; rows beyond t get no contribution."""
    total = np.zeros_like(dp)
    total[: dy.shape[1]] = dy.sum(axis=0)
    dp[...] = dp + total if accumulate else total


@register("activation", "reference")
def activation(x: Array, y: Array, *, kind: str) -> None:
    """y = activation(x)."""
    y[...] = activate(x, kind)


@register("activation_backward", "reference")
def activation_backward(x: Array, dy: Array, dx: Array, *, kind: str) -> None:
    """dx = dy * activation'(x)."""
    dx[...] = dy * slope(x, kind)


@register("silu_gate", "reference")
def silu_gate(gate: Array, up: Array, y: Array) -> None:
    """y = silu(gate) * up (SwiGLU of Shazeer 2020, without the products)."""
    y[...] = activate(gate, "silu") * up


@register("silu_gate_backward", "reference")
def silu_gate_backward(gate: Array, up: Array, dy: Array, dgate: Array, dup: Array) -> None:
    """Gradients of `silu_gate`."""
    dgate[...] = dy * up * slope(gate, "silu")
    dup[...] = dy * activate(gate, "silu")


@register("gate", "reference")
def gate(gates: Array, up: Array, y: Array, *, kind: str) -> None:
    """y = activation(gates) * up (Shazeer 2020, without the products)."""
    y[...] = activate(gates, kind) * up


@register("gate_backward", "reference")
def gate_backward(gates: Array, up: Array, dy: Array, dgates: Array, dup: Array, *, kind: str) -> None:
    """Gradients of `gate`."""
    dgates[...] = dy * up * slope(gates, kind)
    dup[...] = dy * activate(gates, kind)


@register("cap", "reference")
def cap(x: Array, y: Array, *, most: float) -> None:
    """y = most * tanh(x / most) (Bello et al. 2016, eq. 16; Gemma 2)."""
    y[...] = most * np.tanh(x / most)


@register("cap_backward", "reference")
def cap_backward(y: Array, dy: Array, dx: Array, *, most: float) -> None:
    """dx = dy * (1 - (y / most)^2), from the output y of `cap`."""
    dx[...] = dy * (1.0 - (y / most) ** 2)


@register("clamp", "reference")
def clamp(x: Array, y: Array, *, most: float) -> None:
    """y = x between -most and most, of the type of x, as in torch."""
    y[...] = np.clip(x, x.dtype.type(-most), x.dtype.type(most))


@register("clamp_backward", "reference")
def clamp_backward(x: Array, dy: Array, dx: Array, *, most: float) -> None:
    """dx = dy if |x| <= most, of the type of x, else 0."""
    dx[...] = np.where(abs(x) <= x.dtype.type(most), dy, dy.dtype.type(0))


@register("rotary", "reference")
def rotary(x: Array, cos: Array, sin: Array, y: Array, *, head_size: int, inverse: bool) -> None:
    """Rotate pairs (i, i + R/2) of the first R features of each head by the position's angles (Su et al. 2021, in LLaMA's half-split layout).

    Shapes: x, y (mb, t, h * D); cos, sin (t, R / 2), or (mb, t, R / 2) if sequences have positions of their own. Features from R on are copied.
    """
    half = cos.shape[-1]
    sign = -1.0 if inverse else 1.0
    heads = x.reshape(*x.shape[:-1], -1, head_size)
    first, second, others = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    c, s = cos[..., None, :], sign * sin[..., None, :]
    y[...] = np.concatenate([first * c - second * s, second * c + first * s, others], axis=-1).reshape(x.shape)


@register("add_into", "reference")
def add_into(addend: Array, total: Array, *, accumulate: bool) -> None:
    """total (+)= addend."""
    total[...] = total + addend if accumulate else addend


@register("rotary_angles", "reference")
def rotary_angles(frequencies: Array, cos: Array, sin: Array, *, start: int) -> None:
    """cos and sin of position * frequency  # (D / 2,) -> (t, D / 2) each, positions from `start`."""
    angles = np.arange(start, start + cos.shape[0], dtype=cos.dtype)[:, None] * frequencies
    cos[...] = np.cos(angles)
    sin[...] = np.sin(angles)


@register("rotary_angles_at", "reference")
def rotary_angles_at(frequencies: Array, positions: Array, cos: Array, sin: Array) -> None:
    """cos and sin of position * frequency  # (D / 2,), (b, t) -> (b, t, D / 2) each."""
    angles = positions[..., None].astype(cos.dtype) * frequencies
    cos[...] = np.cos(angles)
    sin[...] = np.sin(angles)


@register("row_gate", "reference")
def row_gate(gate: Array, x: Array, y: Array) -> None:
    """y = sigmoid(gate) * x, one gate for each row  # (.., 1), (.., c) -> (.., c)."""
    y[...] = x / (1 + np.exp(-gate))


@register("row_gate_backward", "reference")
def row_gate_backward(gate: Array, x: Array, dy: Array, dx: Array, dgate: Array, *, first: bool) -> None:
    """Gradients of `row_gate`; that of the gate is a sum over tiles of the row, of which this is the first or not."""
    sigmoid = 1 / (1 + np.exp(-gate))
    dx[...] = sigmoid * dy
    share = (x * dy).sum(axis=-1, keepdims=True) * sigmoid * (1 - sigmoid)
    dgate[...] = share if first else dgate + share
