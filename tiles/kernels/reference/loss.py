"""Cross-entropy of a linear head, readable: one vocabulary tile of logits at a time, so that the full logits are never stored.

Legend: x tiles (b, t, c) of one row panel, w tiles (v, c) of one vocabulary tile, both over all width tiles; targets (b, t), -1 = ignored;
peak, total, picked, lse (b, t): running maximum, sum of exponentials, the target's logit, log-sum-exp. According to `Head`, bias (v,) is added
to the logits, and factor (1,) multiplies loss and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..registry import register
from .embedding import check_tokens

Array = npt.NDArray[Any]


class Head(NamedTuple):
    """Options of a head beyond the product x @ w^T.

    Attributes:
        has_bias: whether a bias is added to the logits.
        has_factor: whether a number known only when the task runs multiplies the gradients.
        has_dbias: whether to compute the sums of the logits' gradients over rows.
        cap: limit c of the soft cap c tanh(logits / c), after the bias (Gemma 2, 2024); 0 for none.
    """

    has_bias: bool = False
    has_factor: bool = False
    has_dbias: bool = False
    cap: float = 0.0


PLAIN: Final = Head()


class Forward(NamedTuple):
    """The tiles of `head_forward`, by name."""

    xs: list[Any]
    ws: list[Any]
    bias: Any
    statistics: list[Any]
    """targets, peak, total, picked"""
    scratch: Any


class Backward(NamedTuple):
    """The tiles of `head_backward`, by name; missing ones are None, and `dws` is empty if it is missing."""

    xs: list[Any]
    ws: list[Any]
    bias: Any
    targets: Any
    lse: Any
    factor: Any
    dxs: list[Any]
    dws: list[Any]
    dbias: Any
    scratch: Any


def forward_tiles(tiles: Sequence[Any], num_c: int, how: Head) -> Forward:
    """Name the tiles, which are x * num_c, w * num_c, [bias,] targets, peak, total, picked, scratch."""
    given = iter(tiles)
    xs, ws = list(islice(given, num_c)), list(islice(given, num_c))
    bias = next(given) if how.has_bias else None
    *statistics, scratch = given
    return Forward(xs, ws, bias, statistics, scratch)


def backward_tiles(tiles: Sequence[Any], num_c: int, how: Head) -> Backward:
    """Name the tiles, which are x * num_c, w * num_c, [bias,] targets, lse, [factor,] dx * num_c, [dw * num_c,] [dbias,] scratch."""
    given = iter(tiles)
    xs, ws = list(islice(given, num_c)), list(islice(given, num_c))
    bias = next(given) if how.has_bias else None
    targets, lse = next(given), next(given)
    factor = next(given) if how.has_factor else None
    dxs = list(islice(given, num_c))
    *dws, scratch = given
    dbias = dws.pop() if how.has_dbias else None
    return Backward(xs, ws, bias, targets, lse, factor, dxs, dws, dbias, scratch)


def check_targets(targets: Array, vocab: int) -> None:
    """Check that all targets are in the vocabulary or -1.

    Raises:
        IndexError: a target is outside; the message names the first one and its position in the tile.
    """
    check_tokens(np.where(targets == -1, 0, targets), vocab)


def logits(xs: Sequence[Array], ws: Sequence[Array], bias: Array | None, cap: float) -> Array:
    """Return x @ w^T [+ bias] of a row panel and a vocabulary tile, capped  # (R, v)."""
    total: Array = sum(x.reshape(-1, x.shape[-1]) @ w.T for x, w in zip(xs, ws, strict=True))  # type: ignore[assignment]
    if bias is not None:
        total = total + bias
    return cap * np.tanh(total / cap) if cap else total


@register("head_forward", "reference")
def head_forward(*tiles: Array, num_c: int, v_start: int, vocab: int, first: bool, how: Head = PLAIN) -> None:
    """Add one vocabulary tile to the running statistics; `tiles` are those of `forward_tiles`."""
    given = forward_tiles(tiles, num_c, how)
    targets, peak, total, picked = given.statistics
    check_targets(targets, vocab)
    s = logits(given.xs, given.ws, given.bias, how.cap).reshape(*targets.shape, -1)
    top = s.max(axis=-1) if first else np.maximum(s.max(axis=-1), peak)
    total[...] = np.exp(s - top[..., None]).sum(axis=-1) + (0 if first else total * np.exp(peak - top))
    peak[...] = top
    if first:
        picked[...] = 0
    inside = (targets >= v_start) & (targets < v_start + s.shape[-1])
    picked[inside] = s[inside, targets[inside] - v_start]


@register("head_finish", "reference")
def head_finish(targets: Array, peak: Array, total: Array, picked: Array, *rest: Array, scale: float) -> None:
    """lse = peak + log total; loss[0] = scale * [factor *] sum over tokens of (lse - picked), in fp64; `rest` is [factor,] lse, loss."""
    *factor, lse, loss = rest
    lse[...] = peak + np.log(total)
    loss[0] = scaled(scale, *factor) * np.where(targets >= 0, lse.astype(np.float64) - picked, 0.0).sum()


def scaled(scale: float, factor: Array | None = None) -> float:
    """Return `scale` times the factor, if there is one."""
    return scale if factor is None else scale * float(factor[0])


@register("head_backward", "reference")
def head_backward(*tiles: Array, num_c: int, v_start: int, scale: float, first: bool, accumulate: bool, how: Head = PLAIN) -> None:
    """Compute the contribution of one vocabulary tile to dx and dw, and overwrite dbias; `tiles` are those of `backward_tiles`."""
    given = backward_tiles(tiles, num_c, how)
    ids, scale = given.targets.reshape(-1), scaled(scale, given.factor)
    s = logits(given.xs, given.ws, given.bias, how.cap)
    p = scale * np.exp(s - given.lse.reshape(-1, 1))
    inside = np.flatnonzero((ids >= v_start) & (ids < v_start + p.shape[1]))
    p[inside, ids[inside] - v_start] -= scale
    p[ids < 0] = 0
    if how.cap:
        p *= 1 - np.square(s / how.cap)  # of c tanh(z / c): 1 - tanh^2
    if given.dbias is not None:
        given.dbias[...] = p.sum(axis=0)
    for w, dx in zip(given.ws, given.dxs, strict=True):
        contribution = (p @ w).reshape(dx.shape)
        dx[...] = contribution if first else dx + contribution
    for x, dw in zip(given.xs, given.dws, strict=bool(given.dws)):
        share = p.T @ x.reshape(-1, x.shape[-1])
        dw[...] = dw + share if accumulate else share
