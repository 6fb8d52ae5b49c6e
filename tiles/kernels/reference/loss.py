"""Cross-entropy of a linear head without the whole logits, readable: one vocabulary tile of logits at a time.

Legend: x tiles (b, t, c) of one row panel, w tiles (v, c) of one vocabulary tile, both over all width tiles; targets (b, t), -1 = ignored;
peak, total, picked, lse (b, t): running maximum, sum of exponentials, the target's logit, log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..registry import register
from .embedding import check_tokens

Array = npt.NDArray[Any]


def check_targets(targets: Array, vocab: int) -> None:
    """Refuse targets outside the vocabulary, -1 excepted.

    Raises:
        IndexError: names the first such id and its position in the tile.
    """
    check_tokens(np.where(targets == -1, 0, targets), vocab)


def logits(xs: tuple[Array, ...], ws: tuple[Array, ...]) -> Array:
    """x @ w^T of a row panel and a vocabulary tile  # (R, v)."""
    total: Array = sum(x.reshape(-1, x.shape[-1]) @ w.T for x, w in zip(xs, ws, strict=True))  # type: ignore[assignment]
    return total


@register("head_forward", "reference")
def head_forward(*tiles: Array, num_c: int, v_start: int, vocab: int, first: bool) -> None:
    """Add one vocabulary tile to the running statistics; tiles are x * num_c, w * num_c, targets, peak, total, picked, scratch."""
    xs, ws, (targets, peak, total, picked, _) = tiles[:num_c], tiles[num_c : 2 * num_c], tiles[2 * num_c :]
    check_targets(targets, vocab)
    s = logits(xs, ws).reshape(*targets.shape, -1)
    top = s.max(axis=-1) if first else np.maximum(s.max(axis=-1), peak)
    total[...] = np.exp(s - top[..., None]).sum(axis=-1) + (0 if first else total * np.exp(peak - top))
    peak[...] = top
    if first:
        picked[...] = 0
    inside = (targets >= v_start) & (targets < v_start + s.shape[-1])
    picked[inside] = s[inside, targets[inside] - v_start]


@register("head_finish", "reference")
def head_finish(targets: Array, peak: Array, total: Array, picked: Array, lse: Array, loss: Array, *, scale: float) -> None:
    """lse = peak + log total; loss[0] = scale * sum over tokens of (lse - picked), in fp64."""
    lse[...] = peak + np.log(total)
    loss[0] = scale * np.where(targets >= 0, lse.astype(np.float64) - picked, 0.0).sum()


@register("head_backward", "reference")
def head_backward(*tiles: Array, num_c: int, v_start: int, scale: float, first: bool, accumulate: bool) -> None:
    """One vocabulary tile's share of dx and dw; tiles are x * num_c, w * num_c, targets, lse, dx * num_c, [dw * num_c,] scratch."""
    xs, ws = tiles[:num_c], tiles[num_c : 2 * num_c]
    targets, lse = tiles[2 * num_c : 2 * num_c + 2]
    dxs, dws = tiles[2 * num_c + 2 : 3 * num_c + 2], tiles[3 * num_c + 2 : -1]
    ids = targets.reshape(-1)
    p = scale * np.exp(logits(xs, ws) - lse.reshape(-1, 1))
    inside = np.flatnonzero((ids >= v_start) & (ids < v_start + p.shape[1]))
    p[inside, ids[inside] - v_start] -= scale
    p[ids < 0] = 0
    for w, dx in zip(ws, dxs, strict=True):
        grown = (p @ w).reshape(dx.shape)
        dx[...] = grown if first else dx + grown
    for x, dw in zip(xs, dws, strict=bool(dws)):
        share = p.T @ x.reshape(-1, x.shape[-1])
        dw[...] = dw + share if accumulate else share
