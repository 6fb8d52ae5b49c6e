"""Memory budgets are hard: a CPU kernel allocates at most 64 KiB beyond its arguments, whatever the shape of its tiles.

What a kernel needs beyond that it gets as declared SCRATCH, which is one of its arguments. Counted is everything `tracemalloc` sees: NumPy's
arrays, its casting buffers and Python's objects. Not seen are the packing buffers of OpenBLAS, a pool it maps once per thread.
"""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tiles.block_format import BLOCK_FORMATS
from tiles.kernels.catalog import kernel, operations
from tiles.kernels.cpu import blas
from tiles.kernels.cpu.attention_blocks import attention_scratch_nbytes as attention_scratch
from tiles.kernels.cpu.attention_blocks import lse_scratch_nbytes as lse_scratch
from tiles.kernels.cpu.attention_pattern import bias_scratch_nbytes as bias_scratch
from tiles.kernels.cpu.cache import cache_scratch_nbytes as cached_scratch
from tiles.kernels.cpu.experts import expert_scratch_nbytes as expert_scratch
from tiles.kernels.cpu.loss import loss_scratch_nbytes as head_scratch
from tiles.kernels.cpu.norm import norm_scratch_nbytes as norm_scratch
from tiles.kernels.cpu.optimizer import optimizer_scratch_nbytes as update_scratch
from tiles.kernels.cpu.quantised import panel_scratch_nbytes
from tiles.kernels.reference.attention import Pair, Pattern
from tiles.kernels.reference.buckets import Buckets
from tiles.kernels.reference.loss import PLAIN, Head

LIMIT = 64 << 10
WHOLE = 1 << 20
"""A temporary of a tile's size would be at least this large."""

Call = tuple[list[np.ndarray], dict[str, Any]]

SHAPES = {"even": (512, 768), "wide": (6, 50257), "tall": (50257, 6)}
"""Rows and columns. A kernel whose pieces are whole rows fails on the wide ones, one that keeps a number per row on the tall ones."""


class Maker:
    """Arrays of one dtype and shape."""

    def __init__(self, dtype: Any, rows: int, columns: int) -> None:
        self.dtype = np.dtype(dtype)
        self.rows, self.columns = rows, columns
        self.rng = np.random.default_rng(0)

    def __call__(self, *shape: int) -> np.ndarray:
        """Values in (0.5, 1.5)."""
        return (self.rng.random(shape, np.float32) + 0.5).astype(self.dtype)

    def tile(self) -> np.ndarray:
        """(1, rows, columns)."""
        return self(1, self.rows, self.columns)

    def row(self) -> np.ndarray:
        """(columns,)."""
        return self(self.columns)

    def column(self) -> np.ndarray:
        """(1, rows)."""
        return self(1, self.rows)

    def ids(self, high: int) -> np.ndarray:
        """(1, rows) token ids in [0, high)."""
        return self.rng.integers(0, high, (1, self.rows)).astype(np.int32)


KEY = np.array([1, 2], np.uint64)


def _tiles(count: int, **constants: Any) -> list[Callable[[Maker], Call]]:
    return [lambda m: ([m.tile() for _ in range(count)], constants)]


def _attention_sizes(m: Maker) -> tuple[int, int, int, int]:
    """Queries, keys, heads, size of a head: the three shapes are a square pair of tiles, few queries of long keys, and the reverse."""
    return {"even": (768, 768, 6, 64), "wide": (64, 8192, 1, 64), "tall": (8192, 64, 1, 64)}[_name(m)]


def _name(m: Maker) -> str:
    return next(name for name, shape in SHAPES.items() if shape == (m.rows, m.columns))


def _at(m: Maker, p: float) -> Pair:
    tq, tk, num_heads, size = _attention_sizes(m)
    return Pair(size, 0.125, True, max(0, tk - tq), 0, 0, 0, num_heads, max(tq, tk), p, 3)


def _attention(m: Maker, p: float, first: bool, group: int = 1) -> Call:
    tq, tk, g, size = _attention_sizes(m)
    h = g * group
    args = [m(1, tq, h * size), m(1, tk, g * size), m(1, tk, g * size), m(1, tq, h * size), *(m(1, h, tq) for _ in range(3))]
    partials = np.empty(attention_scratch(tq, tk, m.dtype.itemsize, p), np.uint8)
    return [*args, *([KEY] if p else []), partials], {"at": _at(m, p), "first": first, "last": True}


def _attention_backward(m: Maker, p: float, stored: bool, group: int = 1) -> Call:
    tq, tk, g, size = _attention_sizes(m)
    h = g * group
    q, k, v, do = m(1, tq, h * size), m(1, tk, g * size), m(1, tk, g * size), m(1, tq, h * size)
    kept = m(1, h, tq, tk) if stored else 5 * m(1, h, tq)
    args = [q, k, v, do, kept, m(1, h, tq), np.empty_like(q), np.empty_like(k), np.empty_like(v)]
    partials = np.empty(attention_scratch(tq, tk, m.dtype.itemsize, p), np.uint8)
    return [*args, *([KEY] if p else []), partials], {"at": _at(m, p), "stored": stored, "first_k": True, "first_q": True}


def _patterned(m: Maker, backward: bool) -> Call:
    """Everything a pattern can ask for."""
    args, constants = _attention_backward(m, 0.3, False) if backward else _attention(m, 0.3, True)
    tq, tk, h, _ = _attention_sizes(m)
    at = replace(constants["at"], pattern=Pattern(cap=2.0, buckets=Buckets(32, False, 128), window=5000, documents=2))
    more = [np.ones((1, tq), np.int32), np.arange(tk, dtype=np.int32)[None] % 2, m(32, h), *([m(32, h)] if backward else [])]
    room = attention_scratch(tq, tk, m.dtype.itemsize, 0.3, bias_scratch(1, h, tq, tk, 32, m.dtype.itemsize))
    constants = {**constants, "at": at, **({"accumulate": True} if backward else {})}
    return [*args[:-1], *more, np.empty(room, np.uint8)], constants


def _cached(m: Maker, num_tokens: int, group: int = 1) -> Call:
    _, tk, g, size = _attention_sizes(m)
    tk, h = max(tk, 4096), g * group
    positions = (tk - num_tokens + np.arange(num_tokens)).astype(np.int32)[None]
    args = [m(1, num_tokens, h * size), m(1, tk, g * size), m(1, tk, g * size), positions, m(1, num_tokens, h * size)]
    args += [m(1, h, num_tokens), m(1, h, num_tokens), np.empty(cached_scratch(num_tokens, h, tk, m.dtype.itemsize), np.uint8)]
    return args, {"head_size": size, "scale": 0.125, "start": 0, "first": True, "last": True}


def _append(m: Maker, num_tokens: int) -> Call:
    positions = (np.arange(num_tokens)).astype(np.int32)[None]
    return [m(1, num_tokens, m.columns), m(1, num_tokens, m.columns), positions, m.tile(), m.tile()], {"start": 0}


def _table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and pages of rows that have four pages each, of 1024 positions."""
    return np.full((rows, 1), 4095, np.int32), np.arange(4 * rows, dtype=np.int32).reshape(rows, 4)


def _append_pages(m: Maker) -> Call:
    width = max(m.columns, 512)
    return [m(64, 1, width), m(64, 1, width), *_table(64), m(1, 1024, width), m(1, 1024, width)], {"first_page": 255}


def _paged(m: Maker, group: int = 1) -> Call:
    _, _, g, size = _attention_sizes(m)
    h = g * group
    args = [m(2, 1, h * size), m(8, 1024, g * size), m(8, 1024, g * size), *_table(2), m(2, 4, h * size), m(2, 4, h), m(2, 4, h)]
    return [*args, np.empty(cached_scratch(1, h, 1024, m.dtype.itemsize), np.uint8)], {"head_size": size, "scale": 0.125, "first_page": 0}


def _attention_apply(m: Maker, p: float) -> Call:
    tq, tk, h, size = _attention_sizes(m)
    args = [m(1, h, tq, tk), 5 * m(1, h, tq), m(1, tk, h * size), m(1, tq, h * size)]
    partials = np.empty(attention_scratch(tq, tk, m.dtype.itemsize, p), np.uint8)
    return [*args, *([KEY, partials] if p else [])], {"at": _at(m, p), "accumulate": True}


def _attention_lse(m: Maker) -> Call:
    tq, tk, h, _ = _attention_sizes(m)
    partials = np.empty(lse_scratch(h * tq, tk, m.dtype.itemsize), np.uint8)
    return [m(1, h, tq, tk), *(m(1, h, tq) for _ in range(3)), partials], {"first": False}


def _attention_scores(m: Maker) -> Call:
    tq, tk, h, size = _attention_sizes(m)
    return [m(1, tq, h * size), m(1, tk, h * size), m(1, h, tq, tk)], {"at": _at(m, 0.0)}


def _attention_delta(m: Maker) -> Call:
    tq, _, h, size = _attention_sizes(m)
    return [m(1, tq, h * size), m(1, tq, h * size), m(1, h, tq)], {"head_size": size}


def _head(m: Maker, *, backward: bool, how: Head = PLAIN) -> Call:
    """Rows by a vocabulary: the wide shape is a large vocabulary, the tall one many rows of a small one."""
    width, vocab = 512 if m.rows == 512 else 32, m.columns
    x, w, ids = m(1, m.rows, width), m(vocab, width), m.ids(vocab)
    ids[0, 0] = -1
    partials = np.empty(head_scratch(m.rows, vocab, m.dtype.itemsize), np.uint8)
    constants: dict[str, Any] = {"num_c": 1, "v_start": 0, "first": False, **({} if how == PLAIN else {"how": how})}
    given = [x, w, *([m(vocab)] if how.has_bias else []), ids]
    if backward:
        given += [5 * m.column(), *([m(1)] if how.has_factor else []), np.zeros_like(x), np.zeros_like(w), *([m(vocab)] if how.has_dbias else [])]
        return [*given, partials], {**constants, "scale": 0.5, "accumulate": True}
    return [*given, m.column(), m.column(), m.column(), partials], {**constants, "vocab": vocab}


def _choices(m: Maker) -> list[np.ndarray]:
    """Two of eight experts for each row; weights; flags."""
    choices = np.stack([np.zeros(m.rows, np.int32), 1 + np.arange(m.rows, dtype=np.int32) % 7], axis=-1)[None]
    return [choices, m(1, m.rows, 2), np.ones((1, 1, 8), np.uint8)]


def _expert(m: Maker, *, backward: bool, rank: int = 0) -> Call:
    """All rows choose the expert; the wide shape is a large expert."""
    width, inner = (512, 512) if m.rows == 512 else (32, 50257) if m.rows == 6 else (32, 6)
    x, gate, up, down = m(1, m.rows, width), m(inner, width), m(inner, width), m(width, inner)
    room = np.empty(expert_scratch(m.rows, width, inner, m.dtype.itemsize, is_backward=backward, rank=rank), np.uint8)
    factors = [m(rank, width), m(inner, rank), m(inner, rank), m(rank, inner), m(width, rank)] if rank else []
    given, constants = [x, gate, up, down, *_choices(m), *factors], {"num_c": 1, "expert": 0, **({"scale": 0.5} if rank else {})}
    if not backward:
        return [*given, np.zeros_like(x), room], constants
    gradients = [np.zeros_like(array) for array in (x, given[5], *(factors or (gate, up, down)))]
    return [*given, m(1, m.rows, width), *gradients, room], {**constants, "accumulate": True}


def _scores(m: Maker) -> np.ndarray:
    """Scores of 512 experts, or of as many as make the tile large enough."""
    return m(1, max(m.rows, 512), 768 if m.rows < 50257 else 6)


def _routing(m: Maker) -> list[np.ndarray]:
    """Scores, choices of two experts, weights and flags."""
    scores = _scores(m)
    count, experts = scores.shape[1:]
    return [scores, np.zeros((1, count, 2), np.int32), m(1, count, 2), np.zeros((1, 1, experts), np.uint8)]


def _norm_backward(m: Maker, rms: bool, residual: bool = True) -> Call:
    moments = [m.column()] if rms else [m.column(), m.column()]
    args = [m.tile(), m.row(), *moments, m.tile(), *([m.tile()] if residual else []), m.tile(), m.row(), *([] if rms else [m.row()])]
    return args, {"accumulate": False, "residual": residual}


def _shifted(call: Call) -> Call:
    """The same with weights of 1 more, for which there is scratch at the end."""
    args, constants = call
    return [*args, np.empty(8 * max(array.size for array in args if array.ndim == 1), np.uint8)], {**constants, "offset": 1.0}


def _heads(m: Maker, *, backward: bool) -> Call:
    """Heads of 2 or 64 columns."""
    size = 64 if m.columns % 64 == 0 else 2
    heads = m.columns // size
    tiles, gamma, rstd = [m(1, m.rows, heads * size) for _ in range(4)], m(size), m(1, m.rows, heads)
    if not backward:
        return [tiles[0], gamma, tiles[1], rstd], {"eps": 1e-5}
    return [tiles[0], gamma, rstd, *tiles[1:], m(size)], {"accumulate": False, "residual": True}


def _norm_room(m: Maker) -> np.ndarray:
    return np.empty(norm_scratch(m.rows, m.columns, m.dtype.itemsize), np.uint8)


def _norm_backward_apply(m: Maker) -> Call:
    args = [m.tile(), m.row(), m.column(), m.column(), m.tile(), m.column(), m.column(), m.tile(), m.tile(), m.row(), m.row()]
    return args, {"width": 2 * m.columns, "center": True, "residual": True, "accumulate": False}


def _update_room(m: Maker, penalty: bool, clip: bool, nesterov: bool) -> list[np.ndarray]:
    nbytes = update_scratch(m.rows * m.columns, m.dtype.itemsize, penalty, clip, nesterov)
    return [np.empty(nbytes, np.uint8)] if nbytes else []


def _adam(m: Maker, decoupled: bool, clip: bool, master: bool) -> Call:
    hyper = np.array([[0.1, 0.5, 0.3, 0.9, 0.99, 1e-8, 0.1, 3.0]])
    args = [*(m.tile() for _ in range(4)), hyper, *([np.array([1e9])] if clip else []), *([m.tile()] if master else [])]
    constants = {"row": 0, "decoupled": decoupled}
    return [*args, *_update_room(m, not decoupled, clip, False)], {**constants, "max_norm": 1.0, "clip": clip, "master": master}


def _adam8bit(m: Maker, clip: bool, master: bool) -> Call:
    codes, scales = (
        [np.zeros((1, m.rows, m.columns), np.uint8) for _ in range(2)],
        [np.ones(-(-m.rows * m.columns // 256), np.float32) for _ in range(2)],
    )
    hyper = np.array([[0.1, 0.5, 0.3, 0.9, 0.99, 1e-8, 0.1, 3.0]])
    tiles = [m.tile(), m.tile(), codes[0], scales[0], codes[1], scales[1], hyper]
    rest = [*([np.array([1e9])] if clip else []), *([m.tile()] if master else [])]
    return [*tiles, *rest], {"row": 0, "stream": 7, "tile": 2, "max_norm": 1.0, "clip": clip, "master": master}


def _muon(m: Maker, count: int, **constants: Any) -> Call:
    hyper = np.array([[0.1, 0, 0, 0.95, 0, 1e-7, 0.1, 0]])
    return [*(m.tile()[0] for _ in range(count)), hyper], {"row": 0, **constants}


def _sgd(m: Maker, momentum: float, nesterov: bool, clip: bool) -> Call:
    hyper = np.array([[0.1, 0, 0, momentum, 0, 0, 0.1, 0]])
    args = [m.tile(), m.tile(), hyper, *([m.tile()] if momentum else []), *([np.array([1e9])] if clip else []), m.tile()]
    args += _update_room(m, True, clip, nesterov)
    return args, {"row": 0, "has_buffer": momentum > 0, "nesterov": nesterov, "max_norm": 1.0, "clip": clip, "master": True}


def _place(m: Maker, far: bool = False, **more: Any) -> dict[str, Any]:
    """Where the tile lies: at the origin, or so far that element numbers exceed 32 bits."""
    start = (1 << 33) // m.columns if far else 0
    return {"stream": 3, "shape": (1, start + m.rows, m.columns), "origin": (0, start, 0), **more}


def _product(m: Maker, trans_a: bool, trans_b: bool) -> Call:
    """Both operands with 64 along the contracted axis  # (rows, 64) @ (64, columns)."""
    a, b = (64, m.rows) if trans_a else (m.rows, 64), (m.columns, 64) if trans_b else (64, m.columns)
    return [m(*a), m(*b), m(m.rows, m.columns)], {"trans_a": trans_a, "trans_b": trans_b, "alpha": 0.5, "accumulate": True}


def _deep_product(m: Maker, trans_b: bool) -> Call:
    """The first write of a result that sums over all columns  # (rows, columns) @ (columns, 64)."""
    args = [m(m.rows, m.columns), m(64, m.columns) if trans_b else m(m.columns, 64), m(m.rows, 64)]
    return args, {"trans_a": False, "trans_b": trans_b, "alpha": 0.5, "accumulate": False}


def _batched(m: Maker) -> Call:
    args, constants = _product(m, False, False)
    return [np.stack([a, a]) for a in args], constants


def _linear(m: Maker) -> list[np.ndarray]:
    return [m(1, m.rows, 64), m(64, m.columns), m.row(), m.tile()]


def _embedding(m: Maker, *, part: bool) -> Call:
    vocab = 200
    return [m.ids(vocab), m(50 if part else vocab, m.columns), m.tile()], {"v_start": 0, "vocab": vocab, "accumulate": part}


def _rotary(m: Maker, sequences: int, partial: bool = False) -> Call:
    """`sequences` short sequences, or one long one, of heads of 2 or 64 columns, or of 6 or 192 of which so many turn."""
    turning = 64 if m.columns % 64 == 0 else 2
    size = 3 * turning if partial else turning
    t, columns = m.rows // sequences, m.columns - m.columns % size
    x = m(sequences, t, columns)
    return [x, m(t, turning // 2), m(t, turning // 2), np.empty_like(x)], {"head_size": size, "inverse": False}


def _gather(m: Maker, num_rows: int) -> Call:
    x = m(num_rows, m.rows, m.columns)
    return [x, np.zeros(num_rows, np.int32), np.empty_like(x)], {"start": 0}


def _select(m: Maker, rows: int) -> Call:
    x = m(m.rows // rows, rows, m.columns)
    return [x, np.zeros(x.shape[0], np.int32), m(x.shape[0], 1, m.columns)], {"start": 0, "length": 2 * rows}


def _each(kinds: tuple[str, ...], count: int) -> list[Callable[[Maker], Call]]:
    return [case for kind in kinds for case in _tiles(count, kind=kind)]


KINDS = ("gelu_new", "gelu", "relu", "silu", "tanh")


def _blocks(m: Maker, block_format: str, rows: int) -> np.ndarray:
    """(rows, bytes) of about as many columns as the shape has."""
    size = BLOCK_FORMATS[block_format].block_values
    row_bytes = BLOCK_FORMATS[block_format].row_bytes(max(size, m.columns // size * size))
    return np.tile(np.arange(row_bytes, dtype=np.uint8) % 60, (rows, 1))


def _decode(m: Maker, block_format: str) -> Call:
    w = _blocks(m, block_format, m.rows)
    return [w, m(m.rows, BLOCK_FORMATS[block_format].columns(w.shape[1]))], {"block_format": block_format}


def _quantised_embedding(m: Maker, block_format: str) -> Call:
    table = _blocks(m, block_format, 50)
    constants = {"block_format": block_format, "v_start": 0, "vocab": 200, "accumulate": False}
    return [m.ids(200), table, m(1, m.rows, BLOCK_FORMATS[block_format].columns(table.shape[1]))], constants


def _quantised_linear(m: Maker, block_format: str, trans_b: bool) -> Call:
    named, rows = BLOCK_FORMATS[block_format], 300
    w = _blocks(m, block_format, rows)
    wide, narrow = m(1, m.rows, named.columns(w.shape[1])), m(1, m.rows, rows)
    room = np.empty(panel_scratch_nbytes(wide.shape, w.shape, named, m.dtype.itemsize, trans_b=trans_b), np.uint8)
    constants = {"block_format": block_format, "trans_b": trans_b, "has_bias": False, "accumulate": False}
    return [*((wide, w, narrow) if trans_b else (narrow, w, wide)), room], constants


CASES: dict[str, list[Callable[[Maker], Call]]] = {
    "accumulate": _tiles(2),
    "activation": _each(KINDS, 2),
    "activation_backward": _each(KINDS, 3),
    "adam": [lambda m, d=d, c=c, w=w: _adam(m, d, c, w) for d in (False, True) for c in (False, True) for w in (False, True)],
    "adam8bit": [lambda m, c=c, w=w: _adam8bit(m, c, w) for c in (False, True) for w in (False, True)],
    "add": _tiles(3),
    "add_into": [*_tiles(2, accumulate=False), *_tiles(2, accumulate=True)],
    "add_rows": [lambda m: ([m.tile(), m(m.rows, m.columns), m.tile()], {})],
    "add_rows_backward": [lambda m, a=a: ([m(2, m.rows, m.columns), m(m.rows + 1, m.columns)], {"accumulate": a}) for a in (False, True)],
    "append_to_cache": [lambda m: _append(m, 1), lambda m: _append(m, m.rows)],
    "append_to_pages": [_append_pages],
    "attention": [
        *[lambda m, p=p, f=f, g=1 + f: _attention(m, p, f, g) for p in (0.0, 0.3) for f in (False, True)],
        lambda m: _patterned(m, False),
    ],
    "attention_apply": [lambda m, p=p: _attention_apply(m, p) for p in (0.0, 0.3)],
    "attention_backward": [
        *[lambda m, p=p, s=s, g=2 - s: _attention_backward(m, p, s, g) for p in (0.0, 0.3) for s in (False, True)],
        lambda m: _patterned(m, True),
    ],
    "attention_delta": [_attention_delta],
    "attention_lse": [_attention_lse],
    "attention_scores": [_attention_scores],
    "batched_matmul": [_batched],
    "cached_attention": [lambda m, w=w, g=g: _cached(m, w, g) for w in (1, 200) for g in (1, 2)],
    "cap": _tiles(2, most=1.5),
    "cap_backward": _tiles(3, most=1.5),
    "clamp": _tiles(2, most=1.5),
    "clamp_backward": _tiles(3, most=1.5),
    "column_sums": [lambda m, a=a: ([m.tile(), m.row()], {"accumulate": a}) for a in (False, True)],
    "combine_pages": [lambda m: ([m(64, 4, 6 * 512), m(64, 4, 6), m(64, 4, 6), *_table(64), m(64, 1, 6 * 512)], {"length": 1024})],
    "copy": [*_tiles(2), lambda m: ([m.tile(), m.tile().astype(np.float32)], {}), lambda m: ([m.tile().astype(np.float32), m.tile()], {})],
    "decode_blocks": [lambda m, f=f: _decode(m, f) for f in BLOCK_FORMATS],
    "dropout": [lambda m, f=f: ([m.tile(), KEY, m.tile()], _place(m, f, p=0.3)) for f in (False, True)],
    "embedding": [lambda m, p=p: _embedding(m, part=p) for p in (False, True)],
    "embedding_backward": [lambda m: ([m.ids(200), m.tile(), m(50, m.columns)], {"v_start": 0, "accumulate": False})],
    "fill": _tiles(1, value=2.5),
    "first_token": [lambda m: ([m.tile(), m(1, 1, m.columns)], {})],
    "first_token_backward": [lambda m: ([m(1, 1, m.columns), m.tile()], {})],
    "gate": _each(KINDS, 3),
    "gate_backward": _each(KINDS, 5),
    "gather_rows": [lambda m, n=n: _gather(m, n) for n in (1, 2)],
    "balance": [lambda m: ([*_routing(m)[:2], np.zeros(2 * _scores(m).shape[-1] + 1)], {"first": False})],
    "balance_backward": [lambda m: ([_scores(m), m(_scores(m).shape[-1]), _scores(m)], {})],
    "balance_finish": [lambda m: ([np.ones(2 * m.columns + 1), np.empty(1), m.row()], {"scale": 0.5})],
    "expert_backward": [lambda m, r=r: _expert(m, backward=True, rank=r) for r in (0, 2)],
    "expert_forward": [lambda m, r=r: _expert(m, backward=False, rank=r) for r in (0, 2)],
    "gram": [
        lambda m, t=t, n=n: ([m(512, 512) for _ in range(n)], {"trans": t, "alpha": 1.0, "accumulate": False}) for t in (False, True) for n in (2, 3)
    ],
    "head_backward": [lambda m, h=h: _head(m, backward=True, how=h) for h in (PLAIN, Head(True, True, True, 1.5))],
    "head_finish": [lambda m: ([m.ids(9) - 1, *(m.column() for _ in range(4)), np.empty(1)], {"scale": 0.5})],
    "head_forward": [lambda m, h=h: _head(m, backward=False, how=h) for h in (PLAIN, Head(True, cap=1.5))],
    "head_norm": [lambda m: _heads(m, backward=False), lambda m: _shifted(_heads(m, backward=False))],
    "head_norm_backward": [lambda m: _heads(m, backward=True), lambda m: _shifted(_heads(m, backward=True))],
    "keyed_uniform": [lambda m: ([KEY, m.tile()], {"stream": 5})],
    "layer_norm": [lambda m: ([m.tile(), m.row(), m.row(), m.tile(), m.column(), m.column()], {"eps": 1e-5})],
    "layer_norm_backward": [lambda m, r=r: _norm_backward(m, False, r) for r in (False, True)],
    "linear_activation": [lambda m: ([*_linear(m), m.tile()], {"kind": "gelu_new", "trans_b": False, "accumulate": False})],
    "linear_activation_backward": [
        lambda m: ([m.tile(), m(m.columns, 64), m(1, m.rows, 64), m(1, m.rows, 64)], {"kind": "gelu_new", "trans_b": False})
    ],
    "linear_bias": [
        lambda m: (_linear(m), {"trans_b": False}),
        lambda m: ([m.tile(), m(m.columns, 64), m(64), m(1, m.rows, 64)], {"trans_b": False}),
    ],
    "matmul": [
        *(lambda m, a=a, b=b: _product(m, a, b) for a in (False, True) for b in (False, True)),
        *(lambda m, b=b: _deep_product(m, b) for b in (False, True)),
    ],
    "matmuls": [
        lambda m: (
            [m.tile(), m(1, m.rows, 64), m(1, m.rows, 64), m(m.columns, 64), m(m.columns, 64)],
            {"num_a": 1, "num_b": 2, "trans_a": True, "trans_b": False, "accumulate": True},
        ),
    ],
    "mean_tokens": [lambda m, f=f: ([m.tile(), m(1, m.columns), m(1, 1, m.columns)], {"first": f, "length": m.rows}) for f in (False, True)],
    "mean_tokens_backward": [lambda m: ([m(1, 1, m.columns), m.tile()], {"length": m.rows})],
    "muon_momentum": [lambda m, n=n: _muon(m, 3, nesterov=n, max_norm=0.0, clip=False) for n in (False, True)],
    "muon_normalise": [lambda m: ([m.tile(), np.ones(1), np.array([[0.1, 0, 0, 0.95, 0, 1e-7, 0.1, 0]])], {"row": 0})],
    "muon_polynomial": [lambda m: ([m(768, 768), m(768, 768)], {"a": 1.0, "b": 2.0, "diagonal": True})],
    "muon_update": [lambda m: _muon(m, 2, ratio=1.0, master=False)],
    "norm_apply": [lambda m: ([m.tile(), m.column(), m.column(), m.row(), m.row(), m.tile()], {})],
    "norm_backward_apply": [_norm_backward_apply],
    "norm_backward_sums": [
        lambda m: ([m.tile(), m.row(), m.column(), m.column(), m.tile(), m.column(), m.column(), _norm_room(m)], {"accumulate": True})
    ],
    "norm_finish": [lambda m: ([m.column() for _ in range(4)], {"width": 70, "eps": 1e-5})],
    "paged_attention": [lambda m, g=g: _paged(m, g) for g in (1, 2)],
    "quantised_embedding": [lambda m, f=f: _quantised_embedding(m, f) for f in BLOCK_FORMATS],
    "quantised_linear": [lambda m, f=f, t=t: _quantised_linear(m, f, t) for f in BLOCK_FORMATS for t in (False, True)],
    "random_normal": [lambda m, f=f: ([m.tile()], _place(m, f, std=0.02, seed=5)) for f in (False, True)],
    "random_uniform": [lambda m, f=f: ([m.tile()], _place(m, f, low=-1.0, high=2.0, seed=5)) for f in (False, True)],
    "residual_layer_norm": [lambda m: ([m.tile(), m.tile(), m.row(), m.row(), m.tile(), m.tile(), m.column(), m.column()], {"eps": 1e-5})],
    "residual_rms_norm": [lambda m: ([m.tile(), m.tile(), m.row(), m.tile(), m.tile(), m.column()], {"eps": 1e-5})],
    "rms_norm": [
        lambda m: ([m.tile(), m.row(), m.tile(), m.column()], {"eps": 1e-5}),
        lambda m: _shifted(([m.tile(), m.row(), m.tile(), m.column()], {"eps": 1e-5})),
    ],
    "rms_norm_backward": [lambda m: _norm_backward(m, True), lambda m: _shifted(_norm_backward(m, True))],
    "rotary": [lambda m, p=p, n=n: _rotary(m, n or m.rows, p) for p in (False, True) for n in (1, 0)],
    "rotary_angles": [lambda m: ([m.row(), m(m.rows, m.columns), m(m.rows, m.columns)], {"start": 5})],
    "rotary_angles_at": [lambda m: ([m.row(), m.ids(5), m(1, m.rows, m.columns), m(1, m.rows, m.columns)], {})],
    "row_squares": [lambda m: ([m.tile(), m.column(), m.column(), _norm_room(m)], {"width": 70, "accumulate": True})],
    "route": [lambda m: (_routing(m), {"renormalises": True})],
    "route_backward": [lambda m: ([*_routing(m)[:3], _scores(m)], {"renormalises": True})],
    "row_gate": [lambda m: ([m.column()[..., None], m.tile(), m.tile()], {})],
    "row_gate_backward": [lambda m: ([m.column()[..., None], *(m.tile() for _ in range(3)), m.column()[..., None]], {"first": False})],
    "row_sums": [lambda m, a=a: ([m.tile(), m.column()], {"accumulate": a}) for a in (False, True)],
    "scale": _tiles(2, alpha=0.25),
    "select_rows": [lambda m: _select(m, 1), lambda m: _select(m, m.rows)],
    "sgd": [lambda m, a=a, n=n, c=c: _sgd(m, a, n, c) for a, n in ((0.0, False), (0.9, False), (0.9, True)) for c in (False, True)],
    "silu_gate": _tiles(3),
    "silu_gate_backward": _tiles(5),
    "sum_scalars": [lambda m: ([np.array([1.5]), np.array([2.5]), np.empty(1)], {})],
    "sum_squares": [lambda m: ([m.tile(), np.empty(1)], {})],
    "swap_tokens": [lambda m: ([m.tile(), m(1, m.columns, m.rows)], {})],
    "zero_sums": [lambda m: ([np.ones((1, 1, 8), np.uint8), m.tile()], {"accumulate": False})],
}


SMALL = {"balance_finish", "sum_scalars", "norm_finish", "head_finish", "attention_delta"}
"""Operations on numbers or on rows only: in some shapes all their tiles stay below `WHOLE`."""


def measure(run: Callable[[], None]) -> tuple[int, int]:
    """(bytes that a thread's first call leaves behind, peak bytes of a later call beyond what was there before it)."""
    found: list[int] = []

    def both() -> None:
        np.seterr(all="ignore")  # the thread's own setting
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            run()
            kept, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            run()
            _, peak = tracemalloc.get_traced_memory()
            found.extend((kept - before, peak - kept))
        finally:
            tracemalloc.stop()

    run()  # what is made once in the process, such as imports, is not the thread's
    thread = threading.Thread(target=both)
    thread.start()
    thread.join()
    assert len(found) == 2, "the kernel failed in its thread; its traceback is above"
    return found[0], found[1]


def test_every_kernel_has_a_case() -> None:
    """No kernel escapes the budget."""
    assert operations("cpu") == sorted(CASES)


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.long)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", operations("cpu"))
def test_temporaries_stay_small(op: str, shape: str, dtype: type) -> None:
    """Beyond arguments and declared scratch a call allocates at most 64 KiB, and leaves at most that with its thread."""
    assert op in CASES, f"{op} has no case here; add one, so that its memory is measured"
    over = []
    for number, case in enumerate(CASES[op]):
        args, constants = case(Maker(dtype, *SHAPES[shape]))
        assert op in SMALL or max(array.nbytes for array in args if array.dtype != np.uint8) >= WHOLE, "too small to show a tile's copy"
        fast = kernel(op, "cpu")
        with np.errstate(all="ignore"):
            kept, peak = measure(lambda fast=fast, args=args, constants=constants: fast(*args, **constants))
        if max(kept, peak) > LIMIT:
            over.append(f"case {number}: peak {peak / 1024:.1f} KiB, kept by its thread {kept / 1024:.1f} KiB")
    assert not over, f"{op} exceeds {LIMIT >> 10} KiB beyond its arguments; use smaller pieces or declare SCRATCH: {'; '.join(over)}"


def test_a_thread_keeps_little_of_all_kernels_together() -> None:
    """A worker that has run every operation holds at most 64 KiB more than one that has run none."""
    calls = [(op, *case(Maker(np.float32, *SHAPES["even"]))) for op, cases in CASES.items() for case in cases[:1]]

    def everything() -> None:
        with np.errstate(all="ignore"):
            for op, args, constants in calls:
                kernel(op, "cpu")(*args, **constants)

    kept, _ = measure(everything)
    assert kept <= LIMIT, f"all kernels together leave {kept / 1024:.1f} KiB with a thread"


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.long)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("trans", [(False, False), (False, True), (True, False)])
def test_products_without_a_blas_stay_small(monkeypatch: pytest.MonkeyPatch, trans: tuple[bool, bool], shape: str, dtype: type) -> None:
    """Where there is no BLAS that can be called, products through `np.matmul` keep the same budget."""
    monkeypatch.setattr(blas, "_prepared", lambda *_: None)
    monkeypatch.setattr(blas, "_quick_call", lambda *_: None)
    args, constants = _product(Maker(dtype, *SHAPES[shape]), *trans)
    _, peak = measure(lambda: kernel("matmul", "cpu")(*args, **constants))
    assert peak <= LIMIT, f"a product allocated {peak / 1024:.1f} KiB"


def test_an_allocation_over_the_limit_is_seen() -> None:
    """The measurement itself: temporaries, casting buffers and what a thread keeps are counted."""
    held = threading.local()
    x = np.ones(1 << 16)

    def keep() -> None:
        if not hasattr(held, "room"):
            held.partials = np.empty(LIMIT, np.uint8)

    assert measure(lambda: None)[1] < 4 << 10
    assert measure(lambda: np.copyto(x, x * 2))[1] >= x.nbytes
    assert measure(lambda: np.add(x, np.ones(x.size, np.float32), out=x))[1] > x.nbytes // 2
    assert measure(keep)[0] >= LIMIT
