"""Layer norm (Ba et al. 2016, eq. 4) and RMS norm (Zhang and Sennrich 2019, eq. 4) over the last axis, readable.

Legend: x (..., c) a tile of width c of rows of width C; mean, rstd, sums (...,) one number per row. If the width is cut into tiles, sums are
chained over them and a second pass finishes the row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..registry import register

Array = npt.NDArray[Any]


@register("layer_norm", "reference")
def layer_norm(x: Array, gamma: Array, beta: Array, y: Array, mean: Array, rstd: Array, *, eps: float) -> None:
    """y = (x - mean) * rstd * gamma + beta, rstd = 1 / sqrt(var + eps)."""
    mean[...] = x.mean(axis=-1)
    rstd[...] = 1.0 / np.sqrt(((x - mean[..., None]) ** 2).mean(axis=-1) + eps)
    y[...] = (x - mean[..., None]) * rstd[..., None] * gamma + beta


@register("residual_layer_norm", "reference")
def residual_layer_norm(x: Array, r: Array, gamma: Array, beta: Array, s: Array, y: Array, mean: Array, rstd: Array, *, eps: float) -> None:
    """s = x + r; y = layer_norm(s)."""
    s[...] = x + r
    layer_norm(s, gamma, beta, y, mean, rstd, eps=eps)


@register("rms_norm", "reference")
def rms_norm(x: Array, gamma: Array, y: Array, rstd: Array, *scratch: Array, eps: float, offset: float = 0.0) -> None:
    """y = x * rstd * (gamma + offset), rstd = 1 / sqrt(mean(x^2) + eps); `scratch` is passed only with an offset."""
    rstd[...] = 1.0 / np.sqrt((x**2).mean(axis=-1) + eps)
    y[...] = x * rstd[..., None] * (gamma + offset)


@register("layer_norm_backward", "reference")
def layer_norm_backward(x: Array, gamma: Array, mean: Array, rstd: Array, dy: Array, *rest: Array, accumulate: bool, residual: bool) -> None:
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) [+ dresidual], g = dy * gamma; dgamma (+)= dy * xhat; dbeta (+)= dy.

    `rest` is [dresidual,] dx, dgamma, dbeta.
    """
    *extra, dx, dgamma, dbeta = rest
    xhat = (x - mean[..., None]) * rstd[..., None]
    g = dy * gamma
    d = rstd[..., None] * (g - g.mean(axis=-1, keepdims=True) - xhat * (g * xhat).mean(axis=-1, keepdims=True))
    dx[...] = d + extra[0] if residual else d
    axes = tuple(range(x.ndim - 1))
    dgamma[...] = (dy * xhat).sum(axis=axes) + (dgamma if accumulate else 0)
    dbeta[...] = dy.sum(axis=axes) + (dbeta if accumulate else 0)


@register("rms_norm_backward", "reference")
def rms_norm_backward(x: Array, gamma: Array, rstd: Array, dy: Array, *rest: Array, accumulate: bool, residual: bool, offset: float = 0.0) -> None:
    """dx = rstd * (g - xhat * mean(g * xhat)) [+ dresidual], g = dy * (gamma + offset); dgamma (+)= dy * xhat.

    `rest` is [dresidual,] dx, dgamma[, scratch with an offset].
    """
    *extra, dx, dgamma = rest[:-1] if offset else rest
    xhat = x * rstd[..., None]
    g = dy * (gamma + offset)
    d = rstd[..., None] * (g - xhat * (g * xhat).mean(axis=-1, keepdims=True))
    dx[...] = d + extra[0] if residual else d
    dgamma[...] = (dy * xhat).sum(axis=tuple(range(x.ndim - 1))) + (dgamma if accumulate else 0)


@register("head_norm", "reference")
def head_norm(x: Array, gamma: Array, y: Array, rstd: Array, *scratch: Array, eps: float, offset: float = 0.0) -> None:
    """RMS norm of each head with weights that all heads share (Henry et al. 2020; Qwen3)  # x, y (.., h * D); gamma (D,); rstd (.., h)."""
    heads = (*rstd.shape, gamma.size)
    out = np.empty(heads, y.dtype)
    rms_norm(x.reshape(heads), gamma, out, rstd, eps=eps, offset=offset)
    y[...] = out.reshape(y.shape)


@register("head_norm_backward", "reference")
def head_norm_backward(x: Array, gamma: Array, rstd: Array, dy: Array, *rest: Array, accumulate: bool, residual: bool, offset: float = 0.0) -> None:
    """Gradients of `head_norm`, which are those of `rms_norm` over (.., h, D); `rest` is [dresidual,] dx, dgamma[, scratch with an offset]."""
    *extra, dx, dgamma = rest[:-1] if offset else rest
    heads = (*rstd.shape, gamma.size)
    out = np.empty(heads, dx.dtype)
    given = [array.reshape(heads) for array in extra]
    rms_norm_backward(x.reshape(heads), gamma + offset, rstd, dy.reshape(heads), *given, out, dgamma, accumulate=accumulate, residual=residual)
    dx[...] = out.reshape(dx.shape)


@register("row_sums", "reference")
def row_sums(x: Array, sums: Array, *, accumulate: bool) -> None:
    """sums (+)= sum of x over the tile's width."""
    sums[...] = x.sum(axis=-1) + (sums if accumulate else 0)


@register("row_squares", "reference")
def row_squares(x: Array, center: Array, squares: Array, scratch: Array, *, width: int, accumulate: bool) -> None:
    """squares (+)= sum of (x - center / width)^2 over the tile's width; `center` holds row sums."""
    squares[...] = ((x - center[..., None] / width) ** 2).sum(axis=-1) + (squares if accumulate else 0)


@register("norm_finish", "reference")
def norm_finish(sums: Array, squares: Array, mean: Array, rstd: Array, *, width: int, eps: float) -> None:
    """mean = sums / width; rstd = 1 / sqrt(squares / width + eps)."""
    mean[...] = sums / width
    rstd[...] = 1.0 / np.sqrt(squares / width + eps)


@register("norm_apply", "reference")
def norm_apply(x: Array, mean: Array, rstd: Array, gamma: Array, *rest: Array, offset: float = 0.0) -> None:
    """y = (x - mean) * rstd * (gamma + offset) [+ beta]; `rest` is [beta,] y[, scratch with an offset]."""
    *beta, y = rest[:-1] if offset else rest
    y[...] = (x - mean[..., None]) * rstd[..., None] * (gamma + offset) + (beta[0] if beta else 0)


@register("norm_backward_sums", "reference")
def norm_backward_sums(
    x: Array,
    gamma: Array,
    mean: Array,
    rstd: Array,
    dy: Array,
    plain: Array,
    weighted: Array,
    *scratch: Array,
    accumulate: bool,
    offset: float = 0.0,
) -> None:
    """plain (+)= sum of g, weighted (+)= sum of g * xhat over the tile's width, g = dy * (gamma + offset)."""
    g = dy * (gamma + offset)
    xhat = (x - mean[..., None]) * rstd[..., None]
    plain[...] = g.sum(axis=-1) + (plain if accumulate else 0)
    weighted[...] = (g * xhat).sum(axis=-1) + (weighted if accumulate else 0)


@register("norm_backward_apply", "reference")
def norm_backward_apply(
    x: Array,
    gamma: Array,
    mean: Array,
    rstd: Array,
    dy: Array,
    plain: Array,
    weighted: Array,
    *rest: Array,
    width: int,
    center: bool,
    residual: bool,
    accumulate: bool,
    offset: float = 0.0,
) -> None:
    """Finish the backward pass from the row sums; `rest` is [dresidual,] dx, dgamma[, dbeta if center][, scratch with an offset]."""
    arrays = list(rest)
    extra = arrays.pop(0) if residual else None
    dx, dgamma = arrays[0], arrays[1]
    xhat = (x - mean[..., None]) * rstd[..., None]
    d = dy * (gamma + offset) - xhat * (weighted / width)[..., None]
    if center:
        d = d - (plain / width)[..., None]
    d = d * rstd[..., None]
    dx[...] = d if extra is None else d + extra
    axes = tuple(range(x.ndim - 1))
    dgamma[...] = (dy * xhat).sum(axis=axes) + (dgamma if accumulate else 0)
    if center:
        arrays[2][...] = dy.sum(axis=axes) + (arrays[2] if accumulate else 0)


@register("residual_rms_norm", "reference")
def residual_rms_norm(x: Array, r: Array, gamma: Array, s: Array, y: Array, rstd: Array, *scratch: Array, eps: float, offset: float = 0.0) -> None:
    """s = x + r; y = rms_norm(s)."""
    s[...] = x + r
    rms_norm(s, gamma, y, rstd, eps=eps, offset=offset)
