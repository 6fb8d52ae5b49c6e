"""Attention over pairs of tiles on a GPU, with scores in shared memory.

bf16 tiles with heads of 64 and 128 features use tensor cores (`source/flash.cuh`), all others plain arithmetic (`source/attention.cu`). The scratch,
which is sized for the CPU, is used only for a bias: its value at each distance, and partial sums of its gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..cpu.attention import attention_flops
from ..reference import attention as reference
from ..reference.attention import OptionalTiles, optional_tiles
from ..reference.buckets import Buckets
from ..reference.random import threshold
from ..registry import BF16, register
from .array import DeviceArray
from .launch import THREADS, KernelSource, device
from .library_attention import may_take, shape_of

_source = KernelSource("attention")
_flash, _flash_dropout, _flash_options = (KernelSource(name) for name in ("flash", "flash_dropout", "flash_options"))
_norms = KernelSource("norm")
_FLOAT: Final = np.dtype(np.float32)
QUERIES: Final = 32
KEYS: Final = 32
FLASH_SIZES: Final = (64, 128)
"""Head sizes that tensor cores support."""
_FLASH_ALIGNMENT: Final = 16
_PAD: Final = 8


_INTEGERS: Final = ("head_size", "causal", "q_start", "k_start", "b_start", "h_start", "num_heads", "length", "stream")
_PAIR: Final = np.dtype(
    [(name, np.int32) for name in _INTEGERS]
    + [("threshold", np.uint32), ("scale", np.float32), ("p", np.float32)]
    + [(name, np.int32) for name in ("tq", "tk", "heads", "groups", "row", "window", "may_blind")]
    + [("cap", np.float32)]
    + [(name, np.uint64) for name in ("of_queries", "of_keys", "bias")]
)
_MOST_RUNS: Final = 128
_RUNS: Final = np.dtype([("count", np.int32), ("first", np.int32, _MOST_RUNS), ("bucket", np.int32, _MOST_RUNS)])


def _pair(at: reference.Pair, tq: int, tk: int, heads: int, groups: int, addresses: tuple[int, int, int] = (0, 0, 0)) -> Any:
    """Return `struct Pair` of the source; `addresses` are those of the documents of queries and of keys, and of the bias."""
    numbers = (int(getattr(at, name)) for name in _INTEGERS)
    pattern = (at.row, at.pattern.window, at.pattern.may_blind, at.pattern.cap)
    return np.array((*numbers, threshold(at.p), at.scale, at.p, tq, tk, heads, groups, *pattern, *addresses), _PAIR)[()]


def _pair_of(q: DeviceArray, k: DeviceArray, at: reference.Pair, more: OptionalTiles[DeviceArray], scratch: DeviceArray | None) -> Any:
    """Return the `struct Pair` of a task, after starting the kernel that writes its bias, if any, to the beginning of the scratch."""
    heads = q.shape[2] // at.head_size
    plain = (at, q.shape[1], k.shape[1], heads, k.shape[2] // at.head_size)
    documents = (0, 0) if more.of_queries is None or more.of_keys is None else (more.of_queries.address, more.of_keys.address)
    if more.table is None:
        return _pair(*plain, (*documents, 0))
    assert scratch is not None
    assert at.pattern.buckets is not None
    bias = scratch.at(_FLOAT, heads, q.shape[1] + k.shape[1] - 1)
    _source.each("attention_bias", more.table.dtype, bias.size, more.table, bias, _pair(*plain), runs_of(at.pattern.buckets))
    return _pair(*plain, (*documents, bias.address))


def runs_of(buckets: Buckets | None) -> Any:
    """Return `struct Runs` of the sources; it has no runs without buckets."""
    runs = buckets.runs() if buckets else ()
    if len(runs) > _MOST_RUNS:
        raise ValueError(f"attention on a GPU supports biases of at most {_MOST_RUNS} buckets, got {len(runs)}; use fewer, or compute on the CPU")
    result = np.zeros((), _RUNS)
    result["count"] = len(runs)
    result["first"][: len(runs)] = [run.first for run in runs]
    result["bucket"][: len(runs)] = [run.bucket for run in runs]
    return result[()]


def _takes_flash(at: reference.Pair, *tiles: DeviceArray) -> bool:
    """Return whether tensor cores compute a pair: bf16 tiles that 16-byte copies can read, with heads of a supported size."""
    aligned = all(tile.dtype == BF16 and tile.address % _FLASH_ALIGNMENT == 0 for tile in tiles)
    return aligned and at.head_size in FLASH_SIZES and at.scale > 0


def _start_flash(
    kernel: str, block: int, x: DeviceArray, at: reference.Pair, more: OptionalTiles[DeviceArray], *arguments: Any, num_own: int, num_floats: int = 0
) -> None:
    """Start a kernel of `source/flash.cuh`, without passes for options that the pair does not have.

    Args:
        block: number of rows of a head of `x` that a block has.
        num_own: number of tiles of these rows in shared memory, in addition to two stages of two tiles.
        num_floats: number of floats for each row of a stage.
    """
    has_options = at.pattern.window or at.pattern.cap or more.of_queries is not None or more.table is not None
    size, stage = at.head_size, 4096 // at.head_size
    shared = 2 * (num_own * block + 4 * stage) * (size + _PAD) + 2 * 4 * num_floats * stage
    grid = (-(-x.shape[1] // block), x.shape[2] // size, x.shape[0])
    source, ending = (_flash_options, "") if has_options else (_flash_dropout, "_dropout") if at.p else (_flash, "_plain")
    source.start(f"{kernel}_{size}{ending}", x.dtype, *arguments, grid=grid, threads=128, shared=shared)


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
    """Add one key tile to the running attention of a query tile; the last one normalises. `rest` is `OptionalTiles`, lse if last, then scratch."""
    *extra, scratch = rest
    more = optional_tiles(extra, at, has_lse=last)
    lse, key = more.lse, more.key
    pair, size = _pair_of(q, k, at, more, scratch), at.head_size
    if _takes_flash(at, q, k, v, o):
        numbers = (pair, np.int32(first), np.int32(last))
        _start_flash("flash", 128, q, at, more, q, k, v, o, peak, total, lse, key, *numbers, num_own=1)
        return
    grid = (-(-q.shape[1] // QUERIES), q.shape[2] // size, q.shape[0])
    shared = 4 * (2 * QUERIES * size + 2 * KEYS * size + QUERIES * KEYS + 3 * QUERIES)
    flags = (np.int32(first), np.int32(last))
    _source.start("attention", q.dtype, q, k, v, o, peak, total, lse, key, pair, *flags, grid=grid, threads=128, shared=shared)


@register("attention_delta", "cuda")
def attention_delta(o: DeviceArray, do: DeviceArray, delta: DeviceArray, *, head_size: int) -> None:
    """delta = row sums of do * o per head  # (b, h, t)."""
    numbers = (np.int32(o.shape[1]), np.int32(o.shape[2] // head_size), np.int32(head_size), np.int64(delta.size))
    _source.start("attention_delta", o.dtype, o, do, delta, *numbers, grid=(-(-delta.size // (THREADS // 8)), 1, 1))


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
    accumulate: bool | None = None,
    o: DeviceArray | None = None,
) -> None:
    """Compute the contribution of one pair to dq, dk, dv, and to the gradient of a bias. The reference describes the arguments.

    With the attention's result `o`, delta is computed as well.
    """
    *extra, scratch = rest
    more = optional_tiles(extra, at, has_dtable=accumulate is not None)
    key = more.key
    pair, size = _pair_of(q, k, at, more, scratch), at.head_size
    either = (q, k, v, do, kept if stored else None, None if stored else kept, delta)
    takes_flash = not stored and _takes_flash(at, q, k, v, do, dq, dk, dv)
    if o is not None and (more.dtable is not None or not takes_flash):
        attention_delta(o, do, delta, head_size=size)
        o = None
    if more.dtable is not None:
        _add_to_table(either, key, pair, at, more.dtable, scratch, bool(accumulate))
    if takes_flash:
        inputs = (q, k, v, do, kept)
        _start_flash("flash_dq", 8192 // size, q, at, more, *inputs, o, delta, dq, key, pair, np.int32(first_k), num_own=2)
        numbers = (key, pair, np.int32(first_q))
        _start_flash("flash_dkv", 8192 // size, k, at, more, *inputs, delta, dk, dv, *numbers, num_own=2, num_floats=2)
        return
    shared = 4 * (5 * QUERIES * size + 2 * QUERIES * KEYS)
    grid = (-(-q.shape[1] // QUERIES), q.shape[2] // size, q.shape[0])
    _source.start("attention_dq", q.dtype, *either, dq, key, pair, np.int32(first_k), grid=grid, threads=128, shared=shared)
    shared = 4 * (6 * KEYS * size + 2 * QUERIES * KEYS)
    grid = (-(-k.shape[1] // KEYS), k.shape[2] // size, q.shape[0])
    _source.start("attention_dkv", q.dtype, *either, dk, dv, key, pair, np.int32(first_q), grid=grid, threads=128, shared=shared)


def _add_to_table(
    inputs: tuple[DeviceArray | None, ...],
    key: DeviceArray | None,
    pair: Any,
    at: reference.Pair,
    dtable: DeviceArray,
    scratch: DeviceArray,
    accumulate: bool,
) -> None:
    """dtable (+)= sums of the pair's gradients of scores by buckets; `inputs` are those of the other gradients. Partial sums follow the bias."""
    q, k = inputs[:2]
    assert q is not None
    assert k is not None
    assert at.pattern.buckets is not None
    count, heads, num_blocks = dtable.shape[0], q.shape[2] // at.head_size, -(-q.shape[1] // QUERIES)
    begin = heads * (q.shape[1] + k.shape[1] - 1)
    partial = DeviceArray(scratch.address + 4 * begin, (q.shape[0] * num_blocks, heads, count), _FLOAT)
    shared = 4 * (4 * QUERIES * at.head_size + 2 * QUERIES * KEYS + 2 * (QUERIES + KEYS) + count)
    numbers = (pair, runs_of(at.pattern.buckets), np.int32(count))
    grid = (num_blocks, heads, q.shape[0])
    _source.start("attention_dtable", q.dtype, *inputs, key, partial, *numbers, grid=grid, threads=128, shared=shared)
    sizes = (np.int32(partial.shape[0]), np.int32(heads), np.int32(count), np.int32(accumulate))
    _source.each("attention_table_sums", _FLOAT, dtable.size, partial, dtable, *sizes)


@register("whole_attention", "cuda", flops=attention_flops(2.0))
def whole_attention(
    q: DeviceArray, k: DeviceArray, v: DeviceArray, o: DeviceArray, lse: DeviceArray, scratch: DeviceArray, *, at: reference.Pair
) -> None:
    """Compute o and lse of whole sequences in one pair of tiles: by the library if it supports them, else by `attention`."""
    if may_take(q, k, at.head_size) and device().whole_attention(shape_of(q.shape, k.shape, at.head_size, at.scale, at.causal), q, k, v, o, lse):
        return
    peak = scratch.at(_FLOAT, *lse.shape)
    total = DeviceArray(peak.address + peak.nbytes, lse.shape, _FLOAT)
    attention(q, k, v, o, peak, total, lse, scratch, at=at, first=True, last=True)


@register("whole_attention_backward", "cuda", flops=attention_flops(5.0))
def whole_attention_backward(
    q: DeviceArray,
    k: DeviceArray,
    v: DeviceArray,
    o: DeviceArray,
    lse: DeviceArray,
    do: DeviceArray,
    dq: DeviceArray,
    dk: DeviceArray,
    dv: DeviceArray,
    scratch: DeviceArray,
    *,
    at: reference.Pair,
) -> None:
    """Compute dq, dk and dv of `whole_attention`, by the same implementation as its forward pass."""
    shape = shape_of(q.shape, k.shape, at.head_size, at.scale, at.causal)
    if may_take(q, k, at.head_size) and device().whole_attention(shape, q, k, v, o, lse, do, dq, dk, dv):
        return
    delta = scratch.at(_FLOAT, *lse.shape)
    attention_backward(q, k, v, do, lse, delta, dq, dk, dv, scratch, at=at, stored=False, first_k=True, first_q=True, o=o)


@register("attention_scores", "cuda")
def attention_scores(q: DeviceArray, k: DeviceArray, s: DeviceArray, *rest: DeviceArray, at: reference.Pair) -> None:
    """s = masked scores of a pair of tiles, which are kept. `rest` is `OptionalTiles` and scratch, if the pattern needs any."""
    more = optional_tiles(rest, replace(at, p=0.0))
    _source.each("attention_scores", q.dtype, s.size, q, k, s, _pair_of(q, k, at, more, rest[-1] if rest else None))


@register("attention_lse", "cuda")
def attention_lse(s: DeviceArray, peak: DeviceArray, total: DeviceArray, *rest: DeviceArray, first: bool, may_blind: bool = False) -> None:
    """Add one tile of scores to the running row maximum and sum; the last task also gets lse; `rest` is [lse,] scratch."""
    *lse, _ = rest
    if first and may_blind:
        _source.each("attention_begin", _FLOAT, peak.size, peak, total)
    _norms.by_row("softmax_sums", s, s, peak, total, np.int32(s.shape[-1]), np.int32(may_blind or not first))
    if lse and may_blind:
        _source.each("attention_end", _FLOAT, peak.size, peak, total, lse[0])
    elif lse:
        _norms.each("log_sum_exp", _FLOAT, peak.size, peak, total, lse[0])


@register("attention_apply", "cuda")
def attention_apply(
    s: DeviceArray, lse: DeviceArray, v: DeviceArray, o: DeviceArray, *rest: DeviceArray, at: reference.Pair, accumulate: bool
) -> None:
    """s becomes the weights exp(s - lse); o (+)= dropout(weights) @ v; `rest` is [key, scratch]."""
    _source.each("attention_weights", s.dtype, s.size, s, lse, np.int32(s.shape[-1]))
    pair = _pair(at, s.shape[2], s.shape[3], s.shape[1], v.shape[2] // at.head_size)
    _source.each("attention_apply", s.dtype, o.size, s, v, o, rest[0] if at.p else None, pair, np.int32(accumulate))
