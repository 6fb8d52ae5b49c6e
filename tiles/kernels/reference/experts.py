"""Mixtures of experts, readable: routing, the work of one expert on one tile of rows, and the load-balancing loss.

Legend: R rows (tokens of a tile), E experts, K experts per row, C features in c tiles, I width inside an expert. logits (.., E); choices (.., K)
int32, best expert first; weights (.., K); flags (.., E) uint8, 1 for each expert that some row chose. x, y and their gradients are c tiles of one
row panel; gate and up (I, c) and down (c, I) are tiles of one expert's matrices. With low-rank updates of rank r (LoRA), the matrices are
gate + scale gate_b a, up + scale up_b a and down + scale down_b down_a, without being formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..registry import register

Array = npt.NDArray[Any]


class ExpertFactors(NamedTuple):
    """The tiles of an expert's low-rank updates, or of their gradients, by name: a (r, c), gate_b and up_b (I, r), down_a (r, I), down_b (c, r)."""

    a: Sequence[Any]
    gate_b: Any
    up_b: Any
    down_a: Any
    down_b: Sequence[Any]

    @property
    def tiles(self) -> list[Any]:
        """All tiles."""
        return [*self.a, self.gate_b, self.up_b, self.down_a, *self.down_b]


class ExpertForward(NamedTuple):
    """The tiles of `expert_forward`, by name; no factors without low-rank updates."""

    xs: Sequence[Any]
    gates: Sequence[Any]
    ups: Sequence[Any]
    downs: Sequence[Any]
    choices: Any
    weights: Any
    flags: Any
    factors: ExpertFactors | None
    ys: Sequence[Any]
    scratch: Any


class ExpertBackward(NamedTuple):
    """The tiles of `expert_backward`, by name; the last three lists are empty for a frozen expert, which may have low-rank updates."""

    xs: Sequence[Any]
    gates: Sequence[Any]
    ups: Sequence[Any]
    downs: Sequence[Any]
    choices: Any
    weights: Any
    flags: Any
    factors: ExpertFactors | None
    dys: Sequence[Any]
    dxs: Sequence[Any]
    dweights: Any
    dgates: Sequence[Any]
    dups: Sequence[Any]
    ddowns: Sequence[Any]
    dfactors: ExpertFactors | None
    scratch: Any

    @property
    def learnt(self) -> list[Any]:
        """Gradients of matrices or factors, all of them sums over tiles of rows."""
        return [*self.dgates, *self.dups, *self.ddowns] if self.dfactors is None else self.dfactors.tiles


def _factors(tiles: list[Any], num_c: int) -> tuple[ExpertFactors, list[Any]]:
    """Name the first tiles, which are a * num_c, gate_b, up_b, down_a, down_b * num_c, and return the rest."""
    n = num_c
    gate_b, up_b, down_a = tiles[n : n + 3]
    return ExpertFactors(tiles[:n], gate_b, up_b, down_a, tiles[n + 3 : 2 * n + 3]), tiles[2 * n + 3 :]


def expert_forward_tiles(tiles: Sequence[Any], num_c: int, *, has_factors: bool = False) -> ExpertForward:
    """Name the tiles, which are x, gate, up, down (each times num_c), choices, weights, flags, [factors,] y * num_c, scratch."""
    n = num_c
    choices, weights, flags, *rest = tiles[4 * n :]
    factors, rest = _factors(rest, n) if has_factors else (None, rest)
    return ExpertForward(
        tiles[:n], tiles[n : 2 * n], tiles[2 * n : 3 * n], tiles[3 * n : 4 * n], choices, weights, flags, factors, rest[:n], rest[-1]
    )


def expert_backward_tiles(tiles: Sequence[Any], num_c: int, *, has_factors: bool = False) -> ExpertBackward:
    """Name the tiles, which are x, gate, up, down (each times num_c), choices, weights, flags, [factors,] dy, dx (each times num_c), dweights,
    [dgate, dup, ddown (each times num_c), or the gradients of factors,] scratch."""
    n = num_c
    choices, weights, flags, *rest = tiles[4 * n :]
    factors, rest = _factors(rest, n) if has_factors else (None, rest)
    dys, dxs, dweights, (*learnt, scratch) = rest[:n], rest[n : 2 * n], rest[2 * n], rest[2 * n + 1 :]
    dfactors, learnt = _factors(learnt, n) if has_factors else (None, learnt)
    return ExpertBackward(
        tiles[:n], tiles[n : 2 * n], tiles[2 * n : 3 * n], tiles[3 * n : 4 * n], choices, weights, flags, factors, dys, dxs, dweights,
        learnt[:n], learnt[n : 2 * n], learnt[2 * n :], dfactors, scratch,
    )  # fmt: skip


def update_size(factors: ExpertFactors | None) -> int:
    """Return the number of weights of low-rank updates; 0 without any."""
    return 0 if factors is None else sum(prod(tile.shape) for tile in factors.tiles)


def softmax(logits: Array) -> Array:
    """Return the probabilities of all experts  # (.., E)."""
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: Array = p / p.sum(axis=-1, keepdims=True)
    return probabilities


@register("route", "reference")
def route(logits: Array, choices: Array, weights: Array, flags: Array, *, renormalises: bool) -> None:
    """Choose the K experts with the largest logits, of equal ones those with the lower index; weights are their probabilities.

    Args:
        renormalises: whether weights are divided by their sum.
    """
    order = np.argsort(-logits, axis=-1, kind="stable")
    choices[...] = order[..., : choices.shape[-1]]
    chosen = np.take_along_axis(softmax(logits), choices.astype(np.int64), axis=-1)
    weights[...] = chosen / chosen.sum(axis=-1, keepdims=True) if renormalises else chosen
    flags.reshape(-1)[...] = np.bincount(choices.reshape(-1), minlength=logits.shape[-1]) > 0


@register("route_backward", "reference")
def route_backward(logits: Array, choices: Array, dweights: Array, dlogits: Array, *, renormalises: bool) -> None:
    """dlogits from dweights; choices have no gradient."""
    p, index = softmax(logits), choices.astype(np.int64)
    chosen, dchosen = np.take_along_axis(p, index, axis=-1), dweights
    if renormalises:
        total = chosen.sum(axis=-1, keepdims=True)
        dchosen = (dweights - (dweights * chosen / total).sum(axis=-1, keepdims=True)) / total
    dp = np.zeros_like(p)
    np.put_along_axis(dp, index, dchosen, axis=-1)
    dlogits[...] = p * (dp - (p * dp).sum(axis=-1, keepdims=True))


def _rows_of(choices: Array, expert: int) -> tuple[Array, Array]:
    """Return the rows that chose an expert, in order, and the slot of the choice in each."""
    return np.nonzero(choices.reshape(-1, choices.shape[-1]) == expert)  # type: ignore[return-value]


def _wide(tiles: Sequence[Array], rows: Array) -> Array:
    """Return some rows of a panel  # c tiles (.., c) -> (n, C)."""
    return np.concatenate([tile.reshape(-1, tile.shape[-1])[rows] for tile in tiles], axis=-1)


def _add_rows(tiles: Sequence[Array], rows: Array, addend: Array) -> None:
    """Add (n, C) to some rows of a panel."""
    start = 0
    for tile in tiles:
        tile.reshape(-1, tile.shape[-1])[rows] += addend[:, start : start + tile.shape[-1]]
        start += tile.shape[-1]


def _adapted(given: ExpertForward | ExpertBackward, scale: float | None) -> tuple[Array, Array, Array]:
    """Return gate (I, C), up (I, C) and down (C, I), each with its low-rank update if there are any."""
    gate, up, down = np.concatenate(given.gates, axis=1), np.concatenate(given.ups, axis=1), np.concatenate(given.downs, axis=0)
    if given.factors is None or scale is None:
        return gate, up, down
    a, gate_b, up_b, down_a, down_b = given.factors
    wide = scale * np.concatenate(a, axis=1)
    return gate + gate_b @ wide, up + up_b @ wide, down + np.concatenate(down_b, axis=0) @ (scale * down_a)


@register("expert_forward", "reference")
def expert_forward(*tiles: Array, num_c: int, expert: int, scale: float | None = None) -> None:
    """y += weight * (silu(x gate^T) * (x up^T)) down^T for the rows that chose the expert, for a tile of I; `tiles` as in `expert_forward_tiles`.

    Args:
        scale: factor of low-rank updates; None if there are none.
    """
    given = expert_forward_tiles(tiles, num_c, has_factors=scale is not None)
    rows, slot = _rows_of(given.choices, expert)
    x, (gate, up, down) = _wide(given.xs, rows), _adapted(given, scale)
    g, u = x @ gate.T, x @ up.T
    out = (g / (1 + np.exp(-g)) * u) @ down.T
    weight = given.weights.reshape(-1, given.weights.shape[-1])[rows, slot]
    _add_rows(given.ys, rows, weight[:, None] * out)


@register("expert_backward", "reference")
def expert_backward(*tiles: Array, num_c: int, expert: int, accumulate: bool = False, scale: float | None = None) -> None:
    """Gradients of `expert_forward`, which are added to dx and dweights, and overwrite those of the matrices or factors unless `accumulate`; the
    products of the forward pass are recomputed. `tiles` as in `expert_backward_tiles`."""
    given = expert_backward_tiles(tiles, num_c, has_factors=scale is not None)
    rows, slot = _rows_of(given.choices, expert)
    x, dy, (gate, up, down) = _wide(given.xs, rows), _wide(given.dys, rows), _adapted(given, scale)
    g, u = x @ gate.T, x @ up.T
    sigmoid = 1 / (1 + np.exp(-g))
    h, dout = g * sigmoid * u, dy @ down
    weight = given.weights.reshape(-1, given.weights.shape[-1])[rows, slot][:, None]
    given.dweights.reshape(-1, given.dweights.shape[-1])[rows, slot] += (dout * h).sum(axis=-1)
    dh = weight * dout
    dg, du = dh * u * sigmoid * (1 + g * (1 - sigmoid)), dh * g * sigmoid
    _add_rows(given.dxs, rows, dg @ gate + du @ up)
    dgate, dup, ddown = dg.T @ x, du.T @ x, (weight * dy).T @ h
    _spread(given.dgates, dgate, 1, accumulate)
    _spread(given.dups, dup, 1, accumulate)
    _spread(given.ddowns, ddown, 0, accumulate)
    if given.factors is not None and given.dfactors is not None and scale is not None:
        a, gate_b, up_b, down_a, down_b = given.factors
        of, wide = given.dfactors, np.concatenate(a, axis=1)
        _spread(of.a, scale * (gate_b.T @ dgate + up_b.T @ dup), 1, accumulate)
        _spread([of.gate_b], scale * dgate @ wide.T, 0, accumulate)
        _spread([of.up_b], scale * dup @ wide.T, 0, accumulate)
        _spread([of.down_a], scale * np.concatenate(down_b, axis=0).T @ ddown, 0, accumulate)
        _spread(of.down_b, scale * ddown @ down_a.T, 0, accumulate)


@register("zero_sums", "reference")
def zero_sums(flags: Array, *sums: Array, accumulate: bool) -> None:
    """Write zeros to sums that begin here; keep those that have begun. An expert that no row chose adds nothing to them."""
    for total in () if accumulate else sums:
        total[...] = 0


def _spread(tiles: Sequence[Array], whole: Array, axis: int, accumulate: bool) -> None:
    """Write a matrix, or add it, to its tiles along an axis; nothing if there are none."""
    start = 0
    for tile in tiles:
        piece = whole.take(range(start, start + tile.shape[axis]), axis=axis)
        tile[...] = tile + piece if accumulate else piece
        start += tile.shape[axis]


@register("balance", "reference")
def balance(logits: Array, choices: Array, *rest: Array, first: bool) -> None:
    """Add one tile of rows to the sums of the load-balancing loss; `rest` is [documents,] sums. Rows of document 0 are padding, which does not count.

    Args:
        first: whether the sums begin here.
    """
    *documents, sums = rest
    num_experts = logits.shape[-1]
    counts = (documents[0] != 0 if documents else np.ones(logits.shape[:-1])).reshape(-1).astype(np.float64)
    if first:
        sums[...] = 0
    ids = choices.reshape(-1, choices.shape[-1])
    sums[:num_experts] += np.bincount(ids.reshape(-1), weights=np.repeat(counts, ids.shape[1]), minlength=num_experts)
    sums[num_experts:-1] += counts @ softmax(logits.reshape(-1, num_experts)).astype(np.float64)
    sums[-1] += counts.sum()


@register("balance_finish", "reference")
def balance_finish(sums: Array, loss: Array, slopes: Array, *, scale: float) -> None:
    """loss = scale E sum_e f_e P_e, f_e choices of expert e per row, P_e its mean probability (Fedus et al., Switch, 2022, equations 4 to 6).

    Args:
        sums: (2 E + 1,) fp64 of `balance`: choices of each expert, probabilities of each expert, rows.
        loss: (1,) fp64.
        slopes: (E,), derivatives of the loss by the probabilities of a row.
    """
    num_experts = slopes.size
    rows = max(float(sums[-1]), 1.0)
    factor = scale * num_experts / rows / rows
    loss[0] = factor * float(sums[:num_experts] @ sums[num_experts:-1])
    slopes[...] = factor * sums[:num_experts]


@register("balance_backward", "reference")
def balance_backward(logits: Array, slopes: Array, *rest: Array) -> None:
    """dlogits of the load-balancing loss; `rest` is [documents,] dlogits."""
    *documents, dlogits = rest
    p = softmax(logits)
    slope = p * (slopes - (p * slopes).sum(axis=-1, keepdims=True))
    dlogits[...] = slope * (documents[0] != 0)[..., None] if documents else slope
