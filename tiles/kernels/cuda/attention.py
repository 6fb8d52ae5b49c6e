"""Attention over pairs of tiles on a device: scores live in shared memory, the scratch that a CPU needs stays unused.

bf16 tiles of heads of 64 and 128 go to tensor cores (`source/flash.cu`), everything else to plain arithmetic (`source/attention.cu`).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..reference import attention as reference
from ..reference.random import threshold
from ..registry import BF16, register
from .array import DeviceArray
from .launch import KernelSource

_source = KernelSource("attention")
_flash = KernelSource("flash")
_norms = KernelSource("norm")
_FLOAT: Final = np.dtype(np.float32)
QUERIES: Final = 32
KEYS: Final = 32
FLASH_SIZES: Final = (64, 128)
"""Heads that tensor cores take."""
_FLASH_ROWS: Final = 64
_PAD: Final = 8
_INTEGERS: Final = ("head_size", "causal", "q_start", "k_start", "b_start", "h_start", "num_heads", "length", "stream")
_PAIR: Final = np.dtype(
    [(name, np.int32) for name in _INTEGERS]
    + [("threshold", np.uint32), ("scale", np.float32), ("p", np.float32)]
    + [(name, np.int32) for name in ("tq", "tk", "heads", "groups")]
)


def _pair(at: reference.Pair, tq: int, tk: int, heads: int, groups: int) -> Any:
    """`struct Pair` of the source."""
    numbers = (int(getattr(at, name)) for name in _INTEGERS)
    return np.array((*numbers, threshold(at.p), at.scale, at.p, tq, tk, heads, groups), _PAIR)[()]


def _pair_of(q: DeviceArray, k: DeviceArray, at: reference.Pair) -> Any:
    return _pair(at, q.shape[1], k.shape[1], q.shape[2] // at.head_size, k.shape[2] // at.head_size)


def _start_flash(kernel: str, x: DeviceArray, size: int, *arguments: Any, num_rows: int, num_turned: int, extra: int = 0) -> None:
    """Start a kernel with a block for each 64 rows of each head of `x`, and shared memory for so many tiles as they are and transposed."""
    grid = (-(-x.shape[1] // _FLASH_ROWS), x.shape[2] // size, x.shape[0])
    shared = 2 * (num_rows * _FLASH_ROWS * (size + _PAD) + num_turned * size * (_FLASH_ROWS + _PAD)) + extra
    _flash.start(kernel, x.dtype, *arguments, grid=grid, threads=128, shared=shared)


@register("attention", "cuda")
def attention(
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    o: DeviceArray,
    peak: DeviceArray,
    total: DeviceArray,
    *rest: DeviceArray,
    at: reference.Pair,
    first: bool,
    last: bool,
) -> None:
    """Add one key tile to the running attention of a query tile; the last one normalises. `rest` is [lse if last,] [key if p,] scratch."""
    optional = list(rest[:-1])
    lse = optional.pop(0) if last else None
    key = optional.pop(0) if at.p else None
    pair, size = _pair_of(q, k, at), at.head_size
    if q.dtype == BF16 and size in FLASH_SIZES:
        numbers = (pair, np.int32(first), np.int32(last))
        _start_flash(f"flash_{size}", q, size, q, k, v, o, peak, total, lse, key, *numbers, num_rows=1, num_turned=1)
        return
    grid = (-(-q.shape[1] // QUERIES), q.shape[2] // size, q.shape[0])
    shared = 4 * (2 * QUERIES * size + 2 * KEYS * size + QUERIES * KEYS + 3 * QUERIES)
    flags = (np.int32(first), np.int32(last))
    _source.start("attention", q.dtype, q, k, v, o, peak, total, lse, key, pair, *flags, grid=grid, threads=128, shared=shared)


@register("attention_delta", "cuda")
def attention_delta(o: DeviceArray, do: DeviceArray, delta: DeviceArray, *, head_size: int) -> None:
    """delta = row sums of do * o per head  # (b, h, t)."""
    numbers = (np.int32(o.shape[1]), np.int32(o.shape[2] // head_size), np.int32(head_size))
    _source.each("attention_delta", o.dtype, delta.size, o, do, delta, *numbers)


@register("attention_backward", "cuda")
def attention_backward(
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    do: DeviceArray,
    kept: DeviceArray,
    delta: DeviceArray,
    dq: DeviceArray,
    dk: DeviceArray,
    dv: DeviceArray,
    *rest: DeviceArray,
    at: reference.Pair,
    stored: bool,
    first_k: bool,
    first_q: bool,
) -> None:
    """One pair's share of dq, dk, dv. `kept` is lse, or with `stored` the weights; `first_k`: first to write dq, `first_q`: dk and dv.

    `rest` is [key,] scratch.
    """
    key = rest[0] if at.p else None
    pair, size = _pair_of(q, k, at), at.head_size
    if q.dtype == BF16 and size in FLASH_SIZES and not stored:
        inputs = (q, k, v, do, kept, delta)
        _start_flash(f"flash_dq_{size}", q, size, *inputs, dq, key, pair, np.int32(first_k), num_rows=2, num_turned=1)
        _start_flash(f"flash_dkv_{size}", k, size, *inputs, dk, dv, key, pair, np.int32(first_q), num_rows=2, num_turned=2, extra=8 * _FLASH_ROWS)
        return
    either = (q, k, v, do, kept if stored else None, None if stored else kept, delta)
    shared = 4 * (5 * QUERIES * size + 2 * QUERIES * KEYS)
    grid = (-(-q.shape[1] // QUERIES), q.shape[2] // size, q.shape[0])
    _source.start("attention_dq", q.dtype, *either, dq, key, pair, np.int32(first_k), grid=grid, threads=128, shared=shared)
    shared = 4 * (6 * KEYS * size + 2 * QUERIES * KEYS)
    grid = (-(-k.shape[1] // KEYS), k.shape[2] // size, q.shape[0])
    _source.start("attention_dkv", q.dtype, *either, dk, dv, key, pair, np.int32(first_q), grid=grid, threads=128, shared=shared)


@register("attention_scores", "cuda")
def attention_scores(q: DeviceArray, k: DeviceArray, s: DeviceArray, *, at: reference.Pair) -> None:
    """s = masked scores of a pair of tiles, to be kept."""
    _source.each("attention_scores", q.dtype, s.size, q, k, s, _pair_of(q, k, at))


@register("attention_lse", "cuda")
def attention_lse(s: DeviceArray, peak: DeviceArray, total: DeviceArray, *rest: DeviceArray, first: bool) -> None:
    """Add one tile of scores to the running row maximum and sum; the last task also gets lse; `rest` is [lse,] scratch."""
    *lse, _ = rest
    _norms.by_row("softmax_sums", s, s, peak, total, np.int32(s.shape[-1]), np.int32(not first))
    if lse:
        _norms.each("log_sum_exp", _FLOAT, peak.size, peak, total, lse[0])


@register("attention_apply", "cuda")
def attention_apply(
    s: DeviceArray, lse: DeviceArray, v: DeviceArray, o: DeviceArray, *rest: DeviceArray, at: reference.Pair, accumulate: bool
) -> None:
    """s becomes the weights exp(s - lse); o (+)= dropout(weights) @ v; `rest` is [key, scratch]."""
    _source.each("attention_weights", s.dtype, s.size, s, lse, np.int32(s.shape[-1]))
    pair = _pair(at, s.shape[2], s.shape[3], s.shape[1], v.shape[2] // at.head_size)
    _source.each("attention_apply", s.dtype, o.size, s, v, o, rest[0] if at.p else None, pair, np.int32(accumulate))


@register("append_to_cache", "cuda")
def append_to_cache(k: DeviceArray, v: DeviceArray, positions: DeviceArray, keys: DeviceArray, values: DeviceArray, *, start: int) -> None:
    """keys[b, positions[b, i] - start] = k[b, i], and values likewise, where that lies in the tile."""
    numbers = (np.int32(start), np.int32(k.shape[1]), np.int32(keys.shape[1]), np.int32(k.shape[2]))
    _source.each("append_to_cache", k.dtype, k.size, k, v, positions, keys, values, *numbers)


@register("cached_attention", "cuda")
def cached_attention(
    q: DeviceArray,
    keys: DeviceArray,
    values: DeviceArray,
    positions: DeviceArray,
    o: DeviceArray,
    peak: DeviceArray,
    total: DeviceArray,
    scratch: DeviceArray,
    *,
    head_size: int,
    scale: float,
    start: int,
    first: bool,
    last: bool,
) -> None:
    """Add one tile of the cache to the running attention of the new tokens, each of which sees positions up to its own; the last one normalises."""
    length, heads, groups = keys.shape[1], q.shape[2] // head_size, keys.shape[2] // head_size
    numbers = (np.float32(scale), *(np.int32(number) for number in (start, length, head_size, heads, groups, first, last)))
    shared = 4 * (128 + head_size + length)
    grid = (q.shape[1], heads, q.shape[0])
    _source.start("cached_attention", q.dtype, q, keys, values, positions, o, peak, total, *numbers, grid=grid, threads=128, shared=shared)
