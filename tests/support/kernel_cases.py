"""Arguments for every kernel: small, odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from support.weight_blocks import blocks_of, columns_of

from tiles.block_format import BLOCK_FORMATS, ENCODED_FORMATS
from tiles.kernels.cpu.attention_blocks import attention_scratch_nbytes as attention_scratch
from tiles.kernels.cpu.attention_blocks import lse_scratch_nbytes as lse_scratch
from tiles.kernels.cpu.attention_blocks import whole_scratch_nbytes as whole_scratch
from tiles.kernels.cpu.attention_pattern import bias_scratch_nbytes as bias_scratch
from tiles.kernels.cpu.cache import cache_scratch_nbytes as cached_scratch
from tiles.kernels.cpu.experts import expert_scratch_nbytes as expert_scratch
from tiles.kernels.cpu.loss import loss_scratch_nbytes as head_scratch
from tiles.kernels.cpu.norm import norm_scratch_nbytes as norm_scratch
from tiles.kernels.cpu.quantised import panel_scratch_nbytes
from tiles.kernels.cuda.experts import expert_scratch_nbytes as device_expert_scratch
from tiles.kernels.cuda.tables import head_scratch_nbytes as device_head_scratch
from tiles.kernels.reference.attention import FLOOR, NOTHING, Pair, Pattern, optional_tiles, scores
from tiles.kernels.reference.buckets import Buckets
from tiles.kernels.reference.loss import PLAIN, Head

Case = tuple[list[np.ndarray], list[int], dict[str, Any]]
"""Arguments, which of them are pure outputs (they start as NaN), constants."""


class Maker:
    """Arrays for one case."""

    def __init__(self, dtype: Any, size: int = 1) -> None:
        self.dtype = np.dtype(dtype)
        self.size = size
        self.rng = np.random.default_rng(0)

    def __call__(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(self.dtype)

    def positive(self, *shape: int) -> np.ndarray:
        """Values in (0.5, 1.5)."""
        return (self.rng.random(shape) + 0.5).astype(self.dtype)

    def ids(self, high: int, *shape: int) -> np.ndarray:
        """Token ids in [0, high)."""
        return self.rng.integers(0, high, shape).astype(np.int32)


def _pair(p: float = 0.0, q_start: int = 4, k_start: int = 0, causal: bool = True) -> Pair:
    return Pair(4, 0.5, causal, q_start, k_start, 1, 1, 6, 20, p, 3)


def _attention(make: Maker, *, first: bool, last: bool, p: float = 0.0, group: int = 1) -> Case:
    """Three heads of keys; `group` heads of queries share each."""
    h, width = 3 * group, 12 * group
    q, k, v, o = make(2, 7, width), make(2, 9, 12), make(2, 9, 12), make(2, 7, width)
    peak, total, lse = make(2, h, 7), make.positive(2, h, 7), make(2, h, 7)
    args = [q, k, v, o, peak, total, *([lse] if last else []), *([np.array([1, 2], np.uint64)] if p else [])]
    outputs = ([3, 4, 5] if first else []) + ([6] if last else [])
    return [*args, np.empty(attention_scratch(7, 9, 8, p), np.uint8)], outputs, {"at": _pair(p), "first": first, "last": last}


def _attention_backward(make: Maker, *, first: bool, stored: bool, p: float = 0.0, group: int = 1) -> Case:
    h, width = 3 * group, 12 * group
    q, k, v, do = make(2, 7, width), make(2, 9, 12), make(2, 9, 12), make(2, 7, width)
    kept = make.positive(2, h, 7, 9) if stored else make.positive(2, h, 7) * 5
    if stored:
        kept[:, :, np.arange(9)[None, :] > 4 + np.arange(7)[:, None]] = 0  # weights of masked keys are zero
    grads = [make(2, 7, width), make(2, 9, 12), make(2, 9, 12)]
    args = [q, k, v, do, kept, make(2, h, 7), *grads, *([np.array([1, 2], np.uint64)] if p else [])]
    constants = {"at": _pair(p), "stored": stored, "first_k": first, "first_q": first}
    return [*args, np.empty(attention_scratch(7, 9, 8, p), np.uint8)], [6, 7, 8] if first else [], constants


def _whole_attention(make: Maker, *, backward: bool, causal: bool, group: int = 1, size: int = 4) -> Case:
    """Whole sequences: of one with itself, or of seven queries to nine keys."""
    tk, h, width = 7 if causal else 9, 3 * group, 3 * group * size
    q, k, v, o = make(2, 7, width), make(2, tk, 3 * size), make(2, tk, 3 * size), make(2, 7, width)
    at = Pair(size, size**-0.5, causal, 0, 0, 0, 0, h, 7, num_keys=tk)
    room = np.empty(whole_scratch(2 * h * 7, 7, tk, 8), np.uint8)
    if not backward:
        return [q, k, v, o, make(2, h, 7), room], [3, 4], {"at": at}
    lse = np.log(np.exp(scores(q, k, at, NOTHING)).sum(axis=-1)).astype(q.dtype)
    return [q, k, v, o, lse, make(2, 7, width), make(2, 7, width), make(2, tk, 3 * size), make(2, tk, 3 * size), room], [6, 7, 8], {"at": at}


PATTERNS = {
    "cap": Pattern(cap=0.8),
    "bias": Pattern(buckets=Buckets(8, True, 6)),
    "window": Pattern(window=3),
    "documents": Pattern(documents=2),
    "all": Pattern(cap=0.8, buckets=Buckets(6, False, 7), window=5, documents=1),
}


def _patterned(name: str, p: float, causal: bool) -> Pair:
    return replace(_pair(p, 6, 2, causal), pattern=PATTERNS[name], num_keys=23)


def _pattern_args(make: Maker, at: Pair, b: int, h: int, tq: int, tk: int) -> list[np.ndarray]:
    """Dropout key, documents in which one query of the first sequence is alone, and table."""
    args = [np.array([1, 2], np.uint64)] if at.p else []
    documents = [make.ids(2, b, t) for t in (tq, tk)]
    documents[0][0, 1] = 9
    args += [documents[0], documents[1]][: at.pattern.documents]
    return [*args, make(at.pattern.buckets.count, h)] if at.pattern.buckets else args


def _room(at: Pair, b: int, h: int, tq: int, tk: int) -> np.ndarray:
    bias = bias_scratch(b, h, tq, tk, at.pattern.buckets.count, 8) if at.pattern.buckets else 0
    return np.empty(attention_scratch(tq, tk, 8, at.p, bias), np.uint8)


def patterned_attention(make: Maker, name: str, *, first: bool, p: float = 0.0, causal: bool = True, size: int = 4, tq: int = 7, tk: int = 7) -> Case:
    """Two heads of queries share each of three of keys; of a chain the first task or the last."""
    at = replace(_patterned(name, p, causal), head_size=size, scale=2 / size)
    q, k, v, o = make(2, tq, 6 * size), make(2, tk, 3 * size), make(2, tk, 3 * size), make(2, tq, 6 * size)
    peak, total, lse = make(2, 6, tq), make.positive(2, 6, tq), make(2, 6, tq)
    args = [q, k, v, o, peak, total, lse, *_pattern_args(make, at, 2, 6, tq, tk), _room(at, 2, 6, tq, tk)]
    return args, [3, 4, 5, 6] if first else [6], {"at": at, "first": first, "last": True}


def patterned_backward(
    make: Maker, name: str, *, stored: bool, first: bool, p: float = 0.0, causal: bool = True, size: int = 4, tq: int = 7, tk: int = 7
) -> Case:
    """The gradients of such a task; stored weights are 0 where keys are masked."""
    at = replace(_patterned(name, p, causal), head_size=size, scale=2 / size)
    q, k, v, do = make(2, tq, 6 * size), make(2, tk, 3 * size), make(2, tk, 3 * size), make(2, tq, 6 * size)
    more = _pattern_args(make, at, 2, 6, tq, tk)
    kept = make.positive(2, 6, tq) * 5 + 1
    if stored:
        seen = scores(q, k, at, optional_tiles(more, at)) != -np.inf
        kept = make.positive(2, 6, tq, tk) * seen.astype(make.dtype)
    grads = [make(2, tq, 6 * size), make(2, tk, 3 * size), make(2, tk, 3 * size)]
    args, constants = [q, k, v, do, kept, make(2, 6, tq), *grads, *more], {"at": at, "stored": stored, "first_k": first, "first_q": first}
    outputs = [6, 7, 8] if first else []
    if at.pattern.buckets:
        args.append(make(at.pattern.buckets.count, 6))
        outputs += [len(args) - 1] if first else []
        constants["accumulate"] = not first
    return [*args, _room(at, 2, 6, tq, tk)], outputs, constants


def _patterned_scores(make: Maker, name: str) -> Case:
    at = _patterned(name, 0.3, True)
    more = _pattern_args(make, replace(at, p=0.0), 2, 6, 7, 7)
    return [make(2, 7, 24), make(2, 7, 12), make(2, 6, 7, 7), *more, *([_room(at, 2, 6, 7, 7)] if more else [])], [2], {"at": at}


def _blind_lse(make: Maker, first: bool) -> Case:
    """Scores of which two rows are masked."""
    s = make(2, 3, 7, 9)
    s[0, :, 2:4] = -np.inf
    peak, total = make(2, 3, 7), make.positive(2, 3, 7)
    peak[0, 0, 2], total[0, 0, 2] = FLOOR, 0
    room = np.empty(lse_scratch(42, 9, 8), np.uint8)
    return [s, peak, total, make(2, 3, 7), room], [1, 2, 3] if first else [3], {"first": first, "may_blind": True}


def _cached(make: Maker, *, num_tokens: int, first: bool, last: bool, group: int = 1, pattern: Pattern | None = None) -> Case:
    """Three sequences, the first behind the tile, the last before it unless the tile is the first; three heads of keys."""
    h, start = 3 * group, 0 if first else 9
    positions = (np.array([[start + 9], [start + 4], [0 if first else 2]]) + np.arange(num_tokens)).astype(np.int32)
    keys, values = make(3, 9, 12), make(3, 9, 12)
    args = [make(3, num_tokens, 4 * h), keys, values, positions, make(3, num_tokens, 4 * h), make(3, h, num_tokens), make.positive(3, h, num_tokens)]
    constants: dict[str, Any] = {"head_size": 4, "scale": 0.5, "start": start, "first": first, "last": last}
    has_bias = pattern is not None and pattern.buckets is not None
    if pattern is not None:
        constants["pattern"] = pattern
        args += [make(pattern.buckets.count, h)] if pattern.buckets else []
    return [*args, np.empty(cached_scratch(num_tokens, h, 9, 8, has_bias=has_bias), np.uint8)], [4, 5, 6] if first else [], constants


def _append(make: Maker, num_tokens: int) -> Case:
    """Sequences before, across the ends of, and behind a tile that holds positions 9 to 13."""
    positions = (np.array([[0], [7], [10], [12], [14]]) + np.arange(num_tokens)).astype(np.int32)
    return [make(5, num_tokens, 6), make(5, num_tokens, 6), positions, make(5, 5, 6), make(5, 5, 6)], [], {"start": 9}


def _pages(make: Maker) -> tuple[np.ndarray, np.ndarray]:
    """Positions and pages of six rows, of pages with 5 positions: two rows of one text, a page that two texts have, an idle row."""
    positions = np.array([[7], [8], [0], [14], [11], [0]], np.int32)
    table = np.array([[4, 2, -1], [4, 2, -1], [9, -1, -1], [6, 3, 8], [6, 1, 7], [-1, -1, -1]], np.int32)
    return positions, table


def _append_pages(make: Maker) -> Case:
    """A tile that holds pages 2 to 6."""
    return [make(6, 1, 6), make(6, 1, 6), *_pages(make), make(5, 5, 6), make(5, 5, 6)], [], {"first_page": 2}


def _paged(make: Maker, *, group: int = 1, pattern: Pattern | None = None) -> Case:
    """A tile that holds pages 2 to 6; three heads of keys."""
    h = 3 * group
    args = [make(6, 1, 4 * h), make(5, 5, 12), make(5, 5, 12), *_pages(make), make(6, 3, 4 * h), make(6, 3, h), make.positive(6, 3, h)]
    constants = {"head_size": 4, "scale": 0.5, "first_page": 2, **({} if pattern is None else {"pattern": pattern})}
    return [*args, np.empty(cached_scratch(1, h, 5, 8), np.uint8)], [], constants


def _combined(make: Maker) -> Case:
    return [make(6, 3, 24), make(6, 3, 6), make.positive(6, 3, 6), *_pages(make), make(6, 1, 24)], [5], {"length": 5}


def _head(make: Maker, *, backward: bool, first: bool, has_dw: bool = True, how: Head = PLAIN) -> Case:
    xs, ws = [make(2, 5, 3), make(2, 5, 4)], [make(11, 3), make(11, 4)]
    targets = make.ids(30, 2, 5)
    targets[1, 3], targets[0, 0], targets[0, 1] = -1, 10, 20
    partials = np.empty(max(head_scratch(10, 11, 8), device_head_scratch(10, 11, 7)), np.uint8)
    given, more = [*xs, *ws, *([make(11)] if how.has_bias else []), targets], {} if how == PLAIN else {"how": how}
    start = len(given)
    if not backward:
        constants = {"num_c": 2, "v_start": 10, "vocab": 30, "first": first, **more}
        return [*given, make(2, 5), make.positive(2, 5), make(2, 5), partials], [start, start + 1, start + 2] if first else [], constants
    grads = [make(2, 5, 3), make(2, 5, 4), *([make(11, 3), make(11, 4)] if has_dw else [])]
    constants = {"num_c": 2, "v_start": 10, "scale": 0.5, "first": first, "accumulate": has_dw and not first, **more}
    given += [make.positive(2, 5) * 3, *([make.positive(1)] if how.has_factor else []), *grads]
    outputs = list(range(len(given) - len(grads), len(given))) if first else []
    if how.has_dbias:
        outputs.append(len(given))
        given.append(make(11))
    return [*given, partials], outputs, constants


def _choices(make: Maker) -> list[np.ndarray]:
    """Three of six experts for ten rows, of which no row chooses the last; weights; flags."""
    choices = np.stack([make.rng.permutation(5)[:3] for _ in range(10)]).astype(np.int32)
    return [choices.reshape(2, 5, 3), make.positive(2, 5, 3), (np.bincount(choices.reshape(-1), minlength=6) > 0).astype(np.uint8).reshape(1, 1, 6)]


def _expert(make: Maker, *, expert: int, backward: bool, first: bool = False, is_frozen: bool = False, rank: int = 0) -> Case:
    """One expert with seven features inside; the features of rows are in two tiles. With a rank, low-rank updates are learnt."""
    xs, gates, ups, downs = ([make(*shape) for shape in pair] for pair in (((2, 5, 3), (2, 5, 4)), *[((7, 3), (7, 4))] * 2, ((3, 7), (4, 7))))
    shapes = ((rank, 3), (rank, 4), (7, rank), (7, rank), (rank, 7), (3, rank), (4, rank)) if rank else ()
    factors, how = [make(*shape) * make.dtype.type(0.25) for shape in shapes], {"scale": 0.5} if rank else {}
    given = [*xs, *gates, *ups, *downs, *_choices(make), *factors]
    sizes = expert_scratch(10, 7, 7, 8, is_backward=backward, rank=rank), device_expert_scratch(10, 4, 7, 4, is_backward=backward, rank=rank)
    room = np.empty(max(sizes), np.uint8)
    if not backward:
        return [*given, make(2, 5, 3), make(2, 5, 4), room], [], {"num_c": 2, "expert": expert, **how}
    given += [make(2, 5, 3), make(2, 5, 4), make(2, 5, 3), make(2, 5, 4), make(2, 5, 3)]
    grads = [make(*w.shape) for w in factors or ([] if is_frozen else (*gates, *ups, *downs))]
    outputs = list(range(len(given), len(given) + len(grads))) if first else []
    return [*given, *grads, room], outputs, {"num_c": 2, "expert": expert, "accumulate": not first, **how}


HEADS = (Head(True, True, True), Head(cap=1.5), Head(has_factor=True), Head(True, True, True, 1.5), Head(has_bias=True))
"""Ways of a head beyond the plain one."""


def _norm_backward(make: Maker, rms: bool, residual: bool, accumulate: bool) -> Case:
    x, dy = make(2, 9, 33), make(2, 9, 33)
    moments = [make.positive(2, 9)] if rms else [make(2, 9), make.positive(2, 9)]
    args = [x, make(33), *moments, dy, *([make(2, 9, 33)] if residual else []), make(2, 9, 33), make(33), *([] if rms else [make(33)])]
    first = len(moments) + 3 + residual
    return args, list(range(first, len(args))) if not accumulate else [first], {"accumulate": accumulate, "residual": residual}


def _shifted(case: Case) -> Case:
    """The same with weights of 1 more, for which there is scratch at the end."""
    args, outputs, constants = case
    width = max(array.shape[0] for array in args if array.ndim == 1)
    return [*args, np.empty(8 * width, np.uint8)], outputs, {**constants, "offset": 1.0}


def _head_norm(make: Maker) -> Case:
    return [make(2, 9, 33), make(11), make(2, 9, 33), make(2, 9, 3)], [2, 3], {"eps": 1e-5}


def _head_norm_backward(make: Maker, residual: bool, accumulate: bool) -> Case:
    args = [make(2, 9, 33), make(11), make.positive(2, 9, 3), make(2, 9, 33), *([make(2, 9, 33)] if residual else []), make(2, 9, 33), make(11)]
    return args, [len(args) - 2] + ([] if accumulate else [len(args) - 1]), {"accumulate": accumulate, "residual": residual}


def _norm_room(make: Maker) -> np.ndarray:
    return np.empty(norm_scratch(18, 33, make.dtype.itemsize), np.uint8)


def _apply_backward(make: Maker, center: bool, accumulate: bool) -> Case:
    args = [make(2, 9, 33), make(33), make(2, 9), make.positive(2, 9), make(2, 9, 33), make(2, 9), make(2, 9)]
    args += [make(2, 9, 33), make(2, 9, 33), make(33), *([make(33)] if center else [])]
    constants = {"width": 70, "center": center, "residual": True, "accumulate": accumulate}
    return args, [8] if accumulate else list(range(8, len(args))), constants


def _adam(make: Maker, decoupled: bool, clip: bool) -> Case:
    args = [make(31, 300), make(31, 300), make(31, 300), make.positive(31, 300), np.array([[9.0] * 8, [0.1, 0.5, 0.3, 0.9, 0.99, 1e-8, 0.1, 0.0]])]
    args += [np.array([400.0])] if clip else []
    return args, [], {"row": 1, "decoupled": decoupled, "max_norm": 1.0, "clip": clip, "master": False}


def _adam8bit(make: Maker, clip: bool) -> Case:
    """36 blocks and a short one."""
    m, v = (make.rng.integers(0, 256, (31, 300)).astype(np.uint8) for _ in range(2))
    scales = [(make.rng.random(37) + 0.5).astype(np.float32) for _ in range(2)]
    hyper = np.array([[9.0] * 8, [0.1, 0.5, 0.3, 0.9, 0.99, 1e-8, 0.1, 3.0]])
    args = [make(31, 300), make(31, 300), m, scales[0], v, scales[1], hyper, *([np.array([400.0])] if clip else [])]
    return args, [], {"row": 1, "stream": 7, "tile": 2, "max_norm": 1.0, "clip": clip, "master": False}


def _gram_in_bands(make: Maker) -> Case:
    """A sum of more rows than one product computes."""
    total = make(400, 400)
    return [make(400, 5), total + total.T], [], {"trans": False, "alpha": 0.5, "accumulate": True}


def _gram_of_two(make: Maker, trans: bool) -> Case:
    """Two polynomials of a symmetric matrix, whose product is symmetric."""
    total = make(400, 400)
    x = (total + total.T) / 20
    return [x, x @ x - 2 * x, make(400, 400)], [2], {"trans": trans, "alpha": 0.5, "accumulate": False}


_MUON = np.array([[9.0] * 8, [0.1, 0, 0, 0.95, 0, 1e-7, 0.1, 0]])


def _muon_momentum(make: Maker, nesterov: bool, clip: bool) -> Case:
    args = [make(31, 300), make(31, 300), make(31, 300), _MUON.copy(), *([np.array([400.0])] if clip else [])]
    return args, [2], {"row": 1, "nesterov": nesterov, "max_norm": 1.0, "clip": clip}


def _sgd(make: Maker, momentum: float, nesterov: bool) -> Case:
    hyper = np.array([[9.0] * 8, [0.1, 0, 0, momentum, 0, 0, 0.1, 0]])
    args = [make(31, 300), make(31, 300), hyper, *([make(31, 300)] if momentum else []), make(31, 300)]
    constants = {"row": 1, "has_buffer": momentum > 0, "nesterov": nesterov, "max_norm": 0.0, "clip": False, "master": True}
    return args, [0], constants


def _place(**more: Any) -> dict[str, Any]:
    return {"stream": 3, "shape": (9, 8, 50), "origin": (2, 4, 7), **more}


def _product(trans_a: bool, trans_b: bool, accumulate: bool) -> dict[str, Any]:
    return {"trans_a": trans_a, "trans_b": trans_b, "alpha": 0.5, "accumulate": accumulate}


_PRODUCTS = ((True, False, False), (True, True, False), (True, False, True), (False, False, False), (False, False, True))
"""(trans_b, bias, accumulate); of formats that nothing encodes the second and the last."""


def quantised_linear(make: Maker, block_format: str, num_rows: int, *, trans_b: bool, bias: bool = False, accumulate: bool = False) -> Case:
    """x (R, C) @ (70, C)^T, or (R, 70) @ (70, C), with C = 96 or one block."""
    named = BLOCK_FORMATS[block_format]
    columns = columns_of(named, 96)
    w, (inner, outer) = blocks_of(make(70, columns) / 8, named), (columns, 70) if trans_b else (70, columns)
    room = panel_scratch_nbytes((1, num_rows, inner), w.shape, named, make.dtype.itemsize, trans_b=trans_b)
    args = [make(1, num_rows, inner), w, *([make(outer)] if bias else []), make(1, num_rows, outer), *([np.empty(room, np.uint8)] if room else [])]
    constants = {"block_format": block_format, "trans_b": trans_b, "has_bias": bias, "accumulate": accumulate}
    return args, [] if accumulate else [2 + bias], constants


def decoded_blocks(make: Maker, block_format: str, *, has_flags: bool) -> Case:
    """Seven rows of one or three blocks, for an expert or another layer."""
    named = BLOCK_FORMATS[block_format]
    values, flags = make(7, columns_of(named, 96)), [np.ones((1, 3), np.uint8)] if has_flags else []
    return [blocks_of(values, named), make(*values.shape), *flags], [1], {"block_format": block_format}


def quantised_embedding(make: Maker, block_format: str, rows: int, first: int, accumulate: bool) -> Case:
    """A tile of some rows from `first` of a table of 20."""
    named = BLOCK_FORMATS[block_format]
    columns = columns_of(named, 64)
    table = blocks_of(make(rows, columns), named)
    constants = {"block_format": block_format, "v_start": first, "vocab": 20, "accumulate": accumulate}
    return [make.ids(20, 3, 4), table, make(3, 4, columns)], [] if accumulate else [2], constants


KINDS = ("gelu_new", "gelu", "relu", "silu", "tanh")

CASES: dict[str, list[Callable[[Maker], Case]]] = {
    "accumulate": [lambda m: ([m(5, 7), m(5, 7)], [], {})],
    "activation": [lambda m, k=k: ([m(9, 3000), m(9, 3000)], [1], {"kind": k}) for k in KINDS],
    "activation_backward": [lambda m, k=k: ([m(9, 3000), m(9, 3000), m(9, 3000)], [2], {"kind": k}) for k in KINDS],
    "adam": [lambda m, d=d, c=c: _adam(m, d, c) for d in (False, True) for c in (False, True)],
    "adam8bit": [lambda m, c=c: _adam8bit(m, c) for c in (False, True)],
    "add": [lambda m: ([m(5, 7), m(5, 7), m(5, 7)], [2], {})],
    "add_into": [lambda m: ([m(5, 7), m(5, 7)], [1], {"accumulate": False}), lambda m: ([m(5, 7), m(5, 7)], [], {"accumulate": True})],
    "add_rows": [lambda m: ([m(3, 5, 7), m(6, 7), m(3, 5, 7)], [2], {})],
    "add_rows_backward": [
        lambda m: ([m(3, 5, 7), m(6, 7)], [1], {"accumulate": False}),
        lambda m: ([m(3, 5, 7), m(6, 7)], [], {"accumulate": True}),
    ],
    "append_to_cache": [lambda m, w=w: _append(m, w) for w in (1, 3, 8)],
    "append_to_pages": [_append_pages],
    "attention": [
        *[lambda m, f=f, e=e, p=p: _attention(m, first=f, last=e, p=p) for f in (0, 1) for e in (0, 1) for p in (0.0, 0.3)],
        *[lambda m, p=p, g=g: _attention(m, first=False, last=True, p=p, group=g) for p in (0.0, 0.3) for g in (2, 3)],
        *[lambda m, n=n, f=f, p=p: patterned_attention(m, n, first=f, p=p) for n in PATTERNS for f, p in ((True, 0.0), (False, 0.3))],
        *[lambda m, n=n: patterned_attention(m, n, first=True, causal=False) for n in ("cap", "bias", "documents")],
    ],
    "gram": [
        lambda m, t=t, a=a: ([m(20, 33), m(33, 33) if t else m(20, 20)], [] if a else [1], {"trans": t, "alpha": 0.5, "accumulate": a})
        for t in (False, True)
        for a in (False, True)
    ]
    + [_gram_in_bands, *(lambda m, t=t: _gram_of_two(m, t) for t in (False, True))],
    "muon_momentum": [lambda m, n=n, c=c: _muon_momentum(m, n, c) for n in (False, True) for c in (False, True)],
    "muon_normalise": [lambda m, t=t: ([m(31, 300), np.array([t]), _MUON.copy()], [], {"row": 1}) for t in (0.0, 9.0)],
    "muon_polynomial": [
        lambda m: ([m(31, 31), m(31, 31)], [1], {"a": 3.4, "b": -4.8, "diagonal": True}),
        lambda m: ([m(31, 20), m(31, 20)], [1], {"a": 3.4, "b": -4.8, "diagonal": False}),
    ],
    "muon_update": [
        lambda m: ([m(31, 300), m(31, 300), _MUON.copy()], [], {"row": 1, "ratio": 1.5, "master": False}),
        lambda m: ([m(31, 300), m(31, 300), _MUON.copy(), m(31, 300)], [0], {"row": 1, "ratio": 1.5, "master": True}),
    ],
    "whole_attention": [lambda m, c=c, g=g: _whole_attention(m, backward=False, causal=c, group=g) for c in (False, True) for g in (1, 3)],
    "whole_attention_backward": [lambda m, c=c, g=g: _whole_attention(m, backward=True, causal=c, group=g) for c in (False, True) for g in (1, 3)],
    "attention_apply": [
        lambda m, a=a, p=p: (
            [
                m(2, 3, 7, 9),
                m.positive(2, 3, 7) * 3,
                m(2, 9, 12),
                m(2, 7, 12),
                *([np.array([1, 2], np.uint64), np.empty(attention_scratch(7, 9, 8, p), np.uint8)] if p else []),
            ],
            [] if a else [3],
            {"at": _pair(p), "accumulate": a},
        )
        for a in (False, True)
        for p in (0.0, 0.3)
    ]
    + [lambda m: ([m(2, 6, 7, 9), m.positive(2, 6, 7) * 3, m(2, 9, 12), m(2, 7, 24)], [3], {"at": _pair(), "accumulate": False})],
    "attention_backward": [
        *[lambda m, f=f, p=p, s=s: _attention_backward(m, first=f, stored=s, p=p) for f in (False, True) for p in (0.0, 0.3) for s in (False, True)],
        *[lambda m, s=s, g=g: _attention_backward(m, first=s, stored=s, p=0.3, group=g) for s in (False, True) for g in (2, 3)],
        *[lambda m, n=n, s=s, p=p: patterned_backward(m, n, stored=s, first=not p, p=p) for n in PATTERNS for s in (False, True) for p in (0.0, 0.3)],
        *[lambda m, n=n: patterned_backward(m, n, stored=False, first=True, causal=False) for n in ("cap", "bias", "documents")],
    ],
    "attention_delta": [lambda m: ([m(2, 7, 12), m(2, 7, 12), m(2, 3, 7)], [2], {"head_size": 4})],
    "attention_lse": [
        lambda m: ([m(2, 3, 7, 9), m(2, 3, 7), m.positive(2, 3, 7), np.empty(lse_scratch(42, 9, 8), np.uint8)], [1, 2], {"first": True}),
        lambda m: ([m(2, 3, 7, 9), m(2, 3, 7), m.positive(2, 3, 7), m(2, 3, 7), np.empty(lse_scratch(42, 9, 8), np.uint8)], [3], {"first": False}),
        *[lambda m, f=f: _blind_lse(m, f) for f in (False, True)],
    ],
    "attention_scores": [
        *[lambda m, g=g: ([m(2, 7, 12 * g), m(2, 9, 12), m(2, 3 * g, 7, 9)], [2], {"at": _pair()}) for g in (1, 2)],
        *[lambda m, n=n: _patterned_scores(m, n) for n in PATTERNS],
    ],
    "batched_matmul": [
        lambda m: ([m(2, 3, 4, 5), m(2, 3, 5, 6), m(2, 3, 4, 6)], [2], _product(False, False, False)),
        lambda m: ([m(2, 3, 5, 4), m(2, 3, 6, 5), m(2, 3, 4, 6)], [], _product(True, True, True)),
    ],
    "cached_attention": [
        *[
            lambda m, n=n, w=w, f=f: _cached(m, num_tokens=w, first=f, last=not f, group=2, pattern=replace(PATTERNS[n], documents=0))
            for n in ("cap", "bias", "window", "all")
            for w in (1, 5)
            for f in (False, True)
        ],
    ]
    + [
        lambda m, w=w, f=f, e=e, g=g: _cached(m, num_tokens=w, first=f, last=e, group=g)
        for w in (1, 5)
        for f in (False, True)
        for e in (False, True)
        for g in (1, 2)
    ],
    "cap": [lambda m: ([m(9, 3000), m(9, 3000)], [1], {"most": 1.5})],
    "clamp": [lambda m: ([m(9, 3000), m(9, 3000)], [1], {"most": 0.75})],
    "clamp_backward": [lambda m: ([m(9, 3000), m(9, 3000), m(9, 3000)], [2], {"most": 0.75})],
    "cap_backward": [lambda m: ([m(9, 3000), m(9, 3000), m(9, 3000)], [2], {"most": 5.0})],
    "column_sums": [
        lambda m: ([m(3, 50, 700), m(700)], [1], {"accumulate": False}),
        lambda m: ([m(3, 50, 700), m(700)], [], {"accumulate": True}),
    ],
    "combine_pages": [_combined],
    "copy": [lambda m: ([m(5, 7), np.empty((5, 7), np.float32)], [1], {})],
    "decode_blocks": [lambda m, f=f, g=g: decoded_blocks(m, f, has_flags=g) for f in BLOCK_FORMATS for g in (False, True)],
    "dropout": [lambda m: ([m(3, 4, 20), np.array([1, 2], np.uint64), m(3, 4, 20)], [2], _place(p=0.3))],
    "embedding": [
        lambda m: ([m.ids(20, 3, 4), m(20, 6), m(3, 4, 6)], [2], {"v_start": 0, "vocab": 20, "accumulate": False}),
        lambda m: ([m.ids(20, 3, 4), m(8, 6), m(3, 4, 6)], [2], {"v_start": 0, "vocab": 20, "accumulate": False}),
        lambda m: ([m.ids(20, 3, 4), m(8, 6), m(3, 4, 6)], [], {"v_start": 8, "vocab": 20, "accumulate": True}),
        lambda m: ([m.ids(18, 3, 4), m(8, 6), m(3, 4, 6)], [2], {"v_start": -2, "vocab": 18, "accumulate": False}),
        lambda m: ([m.ids(18, 3, 4), m(20, 6), m(3, 4, 6)], [2], {"v_start": -2, "vocab": 18, "accumulate": False}),
        lambda m: ([m.ids(18, 3, 4), m(18, 6), m(3, 4, 6)], [2], {"v_start": -2, "vocab": 18, "accumulate": False}),
    ],
    "embedding_backward": [
        lambda m: ([m.ids(18, 3, 4), m(3, 4, 6), m(8, 6)], [2], {"v_start": -2, "accumulate": False}),
        lambda m: ([m.ids(20, 3, 4), m(3, 4, 6), m(8, 6)], [2], {"v_start": 8, "accumulate": False}),
        lambda m: ([m.ids(20, 3, 4), m(3, 4, 6), m(8, 6)], [], {"v_start": 8, "accumulate": True}),
    ],
    "fill": [lambda m: ([m(5, 7)], [0], {"value": 2.5})],
    "first_token": [lambda m: ([m(3, 5, 7), m(3, 1, 7)], [1], {})],
    "first_token_backward": [lambda m: ([m(3, 1, 7), m(3, 5, 7)], [1], {})],
    "gate": [lambda m, k=k: ([m(9, 3000), m(9, 3000), m(9, 3000)], [2], {"kind": k}) for k in KINDS],
    "balance": [
        lambda m: ([m(2, 5, 6), _choices(m)[0], np.empty(13)], [2], {"first": True}),
        lambda m: ([m(2, 5, 6), _choices(m)[0], m.ids(3, 2, 5), np.arange(13.0)], [], {"first": False}),
    ],
    "balance_backward": [
        lambda m: ([m(2, 5, 6), m(6), m(2, 5, 6)], [2], {}),
        lambda m: ([m(2, 5, 6), m(6), m.ids(3, 2, 5), m(2, 5, 6)], [3], {}),
    ],
    "balance_finish": [lambda m: ([np.arange(1.0, 14.0), np.empty(1), m(6)], [1, 2], {"scale": 0.3})],
    "expert_backward": [
        *[
            lambda m, e=e, f=f, z=z: _expert(m, expert=e, backward=True, first=f, is_frozen=z)
            for e, f, z in ((1, True, False), (1, False, False), (5, True, False), (2, False, True))
        ],
        *[lambda m, e=e, f=f: _expert(m, expert=e, backward=True, first=f, rank=2) for e, f in ((1, True), (2, False), (5, True))],
    ],
    "expert_forward": [lambda m, e=e, r=r: _expert(m, expert=e, backward=False, rank=r) for e, r in ((1, 0), (5, 0), (1, 2), (5, 2))],
    "gate_backward": [lambda m, k=k: ([m(9, 3000), m(9, 3000), m(9, 3000), m(9, 3000), m(9, 3000)], [3, 4], {"kind": k}) for k in KINDS],
    "gather_rows": [lambda m: ([m(3, 4, 6), np.array([5, 7, 5, 6, 6], np.int32), m(5, 4, 6)], [2], {"start": 5})],
    "head_backward": [
        *[lambda m, f=f, w=w: _head(m, backward=True, first=f, has_dw=w) for f in (False, True) for w in (False, True)],
        *[lambda m, f=f, h=h: _head(m, backward=True, first=f, has_dw=f, how=h) for f in (False, True) for h in HEADS],
        lambda m: _head(m, backward=True, first=False, how=HEADS[0]),
    ],
    "head_finish": [
        lambda m: ([m.ids(9, 2, 5) - 1, m(2, 5), m.positive(2, 5), m(2, 5), m(2, 5), np.empty(1)], [4, 5], {"scale": 0.5}),
        lambda m: ([m.ids(9, 2, 5) - 1, m(2, 5), m.positive(2, 5), m(2, 5), m.positive(1), m(2, 5), np.empty(1)], [5, 6], {"scale": 0.5}),
    ],
    "head_forward": [
        *[lambda m, f=f: _head(m, backward=False, first=f) for f in (False, True)],
        *[
            lambda m, f=f, h=h: _head(m, backward=False, first=f, how=h)
            for f in (False, True)
            for h in (Head(True), Head(cap=1.5), Head(True, cap=1.5))
        ],
    ],
    "head_norm": [_head_norm, lambda m: _shifted(_head_norm(m))],
    "head_norm_backward": [
        *[lambda m, r=r, a=a: _head_norm_backward(m, r, a) for r in (False, True) for a in (False, True)],
        *[lambda m, r=r: _shifted(_head_norm_backward(m, r, r)) for r in (False, True)],
    ],
    "keyed_uniform": [lambda m: ([np.array([1, 2], np.uint64), m(3, 4, 20)], [1], {"stream": 5})],
    "layer_norm": [lambda m: ([m(2, 9, 333), m(333), m(333), m(2, 9, 333), m(2, 9), m(2, 9)], [3, 4, 5], {"eps": 1e-5})],
    "layer_norm_backward": [lambda m, r=r, a=a: _norm_backward(m, False, r, a) for r in (False, True) for a in (False, True)],
    "linear_activation": [
        lambda m: ([m(2, 5, 6), m(6, 7), m(7), m(2, 5, 7), m(2, 5, 7)], [3, 4], {"kind": "gelu_new", "trans_b": False, "accumulate": False}),
        lambda m: ([m(2, 5, 6), m(7, 6), m(2, 5, 7), m(2, 5, 7)], [3], {"kind": "relu", "trans_b": True, "accumulate": True}),
    ],
    "linear_activation_backward": [
        lambda m, k=k, t=t: ([m(2, 5, 16), m(*(8, 16) if t else (16, 8)), m(2, 5, 8), m(2, 5, 8)], [3], {"kind": k, "trans_b": t})
        for k in KINDS
        for t in (False, True)
    ],
    "linear_bias": [
        lambda m: ([m(2, 5, 6), m(6, 7), m(7), m(2, 5, 7)], [3], {"trans_b": False}),
        lambda m: ([m(2, 5, 6), m(7, 6), m(7), m(2, 5, 7)], [3], {"trans_b": True}),
    ],
    "matmul": [
        lambda m: ([m(2, 5, 6), m(6, 7), m(2, 5, 7)], [2], _product(False, False, False)),
        lambda m: ([m(2, 5, 6), m(2, 5, 7), m(6, 7)], [], _product(True, False, True)),
        lambda m: ([m(2, 5, 6), m(7, 6), m(2, 5, 7)], [2], _product(False, True, False)),
    ],
    "matmuls": [
        lambda m: (
            [m(2, 5, 6), m(2, 5, 7), m(2, 5, 7), m(6, 7), m(6, 7)],
            [],
            {"num_a": 1, "num_b": 2, "trans_a": True, "trans_b": False, "accumulate": True},
        ),
        lambda m: (
            [m(2, 8, 16), m(2, 8, 16), m(2, 8, 24), m(16, 24), m(16, 24)],
            [3, 4],
            {"num_a": 2, "num_b": 1, "trans_a": True, "trans_b": False, "accumulate": False},
        ),
        lambda m: (
            [*(m(2, 8, 16) for _ in range(3)), *(m(24, 16) for _ in range(3)), *(m(2, 8, 24) for _ in range(3))],
            [6, 7, 8],
            {"num_a": 3, "num_b": 3, "trans_a": False, "trans_b": True, "accumulate": False},
        ),
    ],
    "mean_tokens": [
        lambda m: ([m(3, 5, 70), m(3, 70), m(3, 1, 70)], [1, 2], {"first": True, "length": 5}),
        lambda m: ([m(3, 5, 70), m(3, 70)], [1], {"first": True, "length": 9}),
        lambda m: ([m(3, 5, 70), m(3, 70), m(3, 1, 70)], [2], {"first": False, "length": 9}),
    ],
    "mean_tokens_backward": [lambda m: ([m(3, 1, 7), m(3, 5, 7)], [1], {"length": 9})],
    "norm_apply": [
        lambda m: ([m(2, 9, 33), m(2, 9), m(2, 9), m(33), m(33), m(2, 9, 33)], [5], {}),
        lambda m: ([m(2, 9, 33), m(2, 9), m(2, 9), m(33), m(2, 9, 33)], [4], {}),
        lambda m: _shifted(([m(2, 9, 33), m(2, 9), m(2, 9), m(33), m(2, 9, 33)], [4], {})),
    ],
    "norm_backward_apply": [
        *[lambda m, c=c, a=a: _apply_backward(m, c, a) for c in (False, True) for a in (False, True)],
        lambda m: _shifted(_apply_backward(m, False, True)),
    ],
    "norm_backward_sums": [
        lambda m: (
            [m(2, 9, 33), m(33), m(2, 9), m.positive(2, 9), m(2, 9, 33), m(2, 9), m(2, 9), _norm_room(m)],
            [5, 6],
            {"accumulate": False},
        ),
        lambda m: ([m(2, 9, 33), m(33), m(2, 9), m.positive(2, 9), m(2, 9, 33), m(2, 9), m(2, 9), _norm_room(m)], [], {"accumulate": True}),
        lambda m: (
            [m(2, 9, 33), m(33), m(2, 9), m.positive(2, 9), m(2, 9, 33), m(2, 9), m(2, 9), _norm_room(m), np.empty(8 * 33, np.uint8)],
            [5, 6],
            {"accumulate": False, "offset": 1.0},
        ),
    ],
    "norm_finish": [lambda m: ([m(2, 9), m.positive(2, 9), m(2, 9), m(2, 9)], [2, 3], {"width": 70, "eps": 1e-5})],
    "paged_attention": [
        *[lambda m, g=g: _paged(m, group=g) for g in (1, 2)],
        *[lambda m, c=c, w=w: _paged(m, group=2, pattern=Pattern(cap=c, window=w)) for c, w in ((1.5, 0), (0.0, 4), (1.5, 8))],
    ],
    "quantised_embedding": [
        lambda m, f=f, r=r, v=v, a=a: quantised_embedding(m, f, r, v, a) for f in BLOCK_FORMATS for r, v, a in ((20, 0, False), (8, 8, True))
    ],
    "quantised_linear": [
        lambda m, f=f, r=r, t=t, b=b, a=a: quantised_linear(m, f, r, trans_b=t, bias=b, accumulate=a)
        for f in BLOCK_FORMATS
        for r in ((1, 3, 9) if f in ENCODED_FORMATS else (3, 9))
        for t, b, a in (_PRODUCTS if f in ENCODED_FORMATS else _PRODUCTS[1::3])
    ],
    "random_normal": [lambda m: ([m(3, 4, 20)], [0], _place(std=0.02, seed=5))],
    "random_uniform": [lambda m: ([m(3, 4, 20)], [0], _place(low=-1.0, high=2.0, seed=5))],
    "residual_layer_norm": [
        lambda m: ([m(2, 9, 333), m(2, 9, 333), m(333), m(333), m(2, 9, 333), m(2, 9, 333), m(2, 9), m(2, 9)], [4, 5, 6, 7], {"eps": 1e-5})
    ],
    "residual_rms_norm": [
        lambda m: ([m(2, 9, 333), m(2, 9, 333), m(333), m(2, 9, 333), m(2, 9, 333), m(2, 9)], [3, 4, 5], {"eps": 1e-5}),
        lambda m: _shifted(([m(2, 9, 333), m(2, 9, 333), m(333), m(2, 9, 333), m(2, 9, 333), m(2, 9)], [3, 4, 5], {"eps": 1e-5})),
    ],
    "rms_norm": [
        lambda m: ([m(2, 9, 333), m(333), m(2, 9, 333), m(2, 9)], [2, 3], {"eps": 1e-5}),
        lambda m: _shifted(([m(2, 9, 333), m(333), m(2, 9, 333), m(2, 9)], [2, 3], {"eps": 1e-5})),
    ],
    "rms_norm_backward": [
        *[lambda m, r=r, a=a: _norm_backward(m, True, r, a) for r in (False, True) for a in (False, True)],
        *[lambda m, r=r: _shifted(_norm_backward(m, True, r, not r)) for r in (False, True)],
    ],
    "rotary": [
        lambda m, i=i, at=at, d=d: ([m(2, 5, 3 * d), m(*at, 2), m(*at, 2), m(2, 5, 3 * d)], [3], {"head_size": d, "inverse": i})
        for i in (False, True)
        for at in ((5,), (2, 5))
        for d in (4, 7)
    ],
    "rotary_angles": [lambda m, t=t: ([m.positive(5), m(t, 5), m(t, 5)], [1, 2], {"start": 7}) for t in (4, 1100)],
    "rotary_angles_at": [lambda m, t=t: ([m.positive(5), m.ids(900, 2, t), m(2, t, 5), m(2, t, 5)], [2, 3], {}) for t in (4, 1100)],
    "row_squares": [
        lambda m: ([m(2, 9, 33), m(2, 9), m(2, 9), _norm_room(m)], [2], {"width": 70, "accumulate": False}),
        lambda m: ([m(2, 9, 33), m(2, 9), m(2, 9), _norm_room(m)], [], {"width": 70, "accumulate": True}),
    ],
    "route": [lambda m, n=n: ([m(2, 5, 6), *(np.empty_like(each) for each in _choices(m))], [2], {"renormalises": n}) for n in (False, True)],
    "route_backward": [lambda m, n=n: ([m(2, 5, 6), _choices(m)[0], m(2, 5, 3), m(2, 5, 6)], [3], {"renormalises": n}) for n in (False, True)],
    "row_gate": [lambda m: ([m(2, 5, 1), m(2, 5, 33), m(2, 5, 33)], [2], {})],
    "row_gate_backward": [
        lambda m, f=f: ([m(2, 5, 1), m(2, 5, 33), m(2, 5, 33), m(2, 5, 33), m(2, 5, 1)], [3, 4] if f else [3], {"first": f}) for f in (True, False)
    ],
    "row_sums": [lambda m: ([m(2, 9, 33), m(2, 9)], [1], {"accumulate": False}), lambda m: ([m(2, 9, 33), m(2, 9)], [], {"accumulate": True})],
    "scale": [lambda m: ([m(5, 7), m(5, 7)], [1], {"alpha": 0.25})],
    "select_rows": [lambda m: ([m(3, 4, 6), m.ids(4, 3) + 4, m(3, 1, 6)], [], {"start": 4, "length": 10})],
    "sgd": [lambda m: _sgd(m, 0.0, False), lambda m: _sgd(m, 0.9, False), lambda m: _sgd(m, 0.9, True)],
    "silu_gate": [lambda m: ([m(9, 3000), m(9, 3000), m(9, 3000)], [2], {})],
    "silu_gate_backward": [lambda m: ([m(9, 3000), m(9, 3000), m(9, 3000), m(9, 3000), m(9, 3000)], [3, 4], {})],
    "sum_scalars": [lambda m: ([np.array([1.5]), np.array([2.5]), np.empty(1)], [2], {})],
    "sum_squares": [lambda m: ([m(9, 3000), np.empty(1)], [1], {})],
    "swap_tokens": [lambda m, t=t, c=c: ([m(2, t, c), m(2, c, t)], [1], {}) for t, c in ((5, 7), (1, 40), (65, 33))],
    "zero_sums": [lambda m, f=f: ([np.ones((1, 6), np.uint8), m(5, 7), m(3)], [1, 2] if f else [], {"accumulate": not f}) for f in (True, False)],
}
