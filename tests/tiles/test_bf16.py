"""Kernels that take bf16 tiles as they are, beside the same tasks on fp32 copies; and when which of them runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.deadline import DEADLINE
from support.processor import needs_avx512

from scheduler import InlineRuntime, R, W
from tiles import TileTensor
from tiles.emission import emit, native_for
from tiles.kernels.catalog import bf16_kernel, kernel, operations
from tiles.kernels.cpu.attention_blocks import attention_scratch_nbytes as attention_scratch
from tiles.kernels.cpu.loss import loss_scratch_nbytes as head_scratch
from tiles.kernels.cpu.onednn import library as onednn
from tiles.kernels.cpu.onednn import operations as on_arrays
from tiles.kernels.cpu.onednn.bf16_attention import _blocks, _sizes
from tiles.kernels.reference.attention import Pair
from tiles.kernels.reference.loss import PLAIN, Head
from tiles.kernels.registry import BF16, registered_bf16_operations

ROOT = Path(__file__).parents[2]
Case = tuple[list[np.ndarray], list[int], dict[str, Any]]
"""Arguments, which of them are outputs, constants."""

needs_onednn = pytest.mark.skipif(not onednn.has_bf16_products(), reason=onednn.bf16_products())


class Maker:
    """Arrays for one case."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, *shape: int) -> np.ndarray:
        """bf16 normal numbers."""
        return self.wide(*shape).astype(BF16)

    def wide(self, *shape: int) -> np.ndarray:
        """fp32 normal numbers."""
        return self.rng.standard_normal(shape, np.float32)

    def positive(self, *shape: int) -> np.ndarray:
        """fp32 in (0.5, 1.5)."""
        return self.rng.random(shape, np.float32) + np.float32(0.5)

    def ids(self, high: int, *shape: int) -> np.ndarray:
        """Token ids in [0, high)."""
        return self.rng.integers(0, high, shape).astype(np.int32)


def _product(trans_a: bool, trans_b: bool, accumulate: bool) -> dict[str, Any]:
    return {"trans_a": trans_a, "trans_b": trans_b, "alpha": 1.0, "accumulate": accumulate}


def _matmuls(m: Maker, trans_a: bool, trans_b: bool, accumulate: bool, wide: bool) -> Case:
    """Of (2 * 37, 53) @ (53, 41), all of them odd."""
    a, b = (53, 74) if trans_a else (2, 37, 53), (41, 53) if trans_b else (53, 41)
    out = (74, 41) if trans_a else (2, 37, 41)
    return [m(*a), m(*b), m.wide(*out) if wide else m(*out)], [2], _product(trans_a, trans_b, accumulate)


def _attention(m: Maker, tq: int, tk: int, causal: bool, first: bool, last: bool, p: float = 0.0, group: int = 1) -> Case:
    """Two heads of 12 features, `group` heads of queries for each, the query tile behind the key tile."""
    h = 2 * group
    at = Pair(12, 0.3, causal, max(0, tk - 20) if causal else 5, 0, 1, 1, 6, 300, p, 3)
    args = [m(2, tq, 12 * h), m(2, tk, 24), m(2, tk, 24), m(2, tq, 12 * h)]
    args += [m.wide(2, h, tq), m.positive(2, h, tq), *([m.wide(2, h, tq)] if last else [])]
    args += [*([np.array([1, 2], np.uint64)] if p else []), np.empty(attention_scratch(tq, tk, 4, p), np.uint8)]
    return args, [3, 4, 5, *([6] if last else [])], {"at": at, "first": first, "last": last}


def _attention_backward(m: Maker, tq: int, tk: int, first_k: bool, first_q: bool, p: float = 0.0, group: int = 1) -> Case:
    h = 2 * group
    at = Pair(12, 0.3, True, max(0, tk - 20), 0, 1, 1, 6, 300, p, 3)
    inputs = [m(2, tq, 12 * h), m(2, tk, 24), m(2, tk, 24), m(2, tq, 12 * h), m.positive(2, h, tq) * 5, m.wide(2, h, tq)]
    args = [*inputs, m(2, tq, 12 * h), m(2, tk, 24), m(2, tk, 24), *([np.array([1, 2], np.uint64)] if p else [])]
    constants = {"at": at, "stored": False, "first_k": first_k, "first_q": first_q}
    return [*args, np.empty(attention_scratch(tq, tk, 4, p), np.uint8)], [6, 7, 8], constants


def _head(m: Maker, num_c: int, first: bool, backward: bool, has_dw: bool = True, how: Head = PLAIN) -> Case:
    """35 tokens, a tile of 1,100 of 3,000 words: two blocks of columns, the second one short."""
    xs, ws = [m(5, 7, 13) for _ in range(num_c)], [m(1100, 13) for _ in range(num_c)]
    targets = m.ids(3000, 5, 7)
    targets[1, 3], targets[0, 0], targets[0, 1] = -1, 500, 1599
    partials = np.empty(head_scratch(35, 1100, 4), np.uint8)
    given, more = [*xs, *ws, *([m(1100)] if how.has_bias else []), targets], {} if how == PLAIN else {"how": how}
    if not backward:
        args = [*given, m.wide(5, 7), m.positive(5, 7), m.wide(5, 7), partials]
        return args, list(range(len(given), len(given) + 3)), {"num_c": num_c, "v_start": 500, "vocab": 3000, "first": first, **more}
    grads = [*(m(5, 7, 13) for _ in range(num_c)), *(m.wide(1100, 13) for _ in range(num_c * has_dw)), *([m.wide(1100)] if how.has_dbias else [])]
    given += [m.positive(5, 7) * 12, *([m.positive(1)] if how.has_factor else [])]
    constants = {"num_c": num_c, "v_start": 500, "scale": 0.5, "first": first, "accumulate": has_dw and not first, **more}
    return [*given, *grads, partials], list(range(len(given), len(given) + len(grads))), constants


def _norm_backward(m: Maker, residual: bool, accumulate: bool) -> Case:
    args = [m(2, 41, 333), m(333), m.wide(2, 41), m.positive(2, 41), m(2, 41, 333), *([m(2, 41, 333)] if residual else [])]
    first = len(args)
    args += [m(2, 41, 333), m.wide(333), m.wide(333)]
    return args, list(range(first, first + 3)), {"accumulate": accumulate, "residual": residual}


def _adam(m: Maker, clip: bool, decoupled: bool) -> Case:
    constants = {"row": 1, "max_norm": 1.0}
    args = [m(31, 300), m.wide(31, 300), m.wide(31, 300), m.positive(31, 300), np.array([[9.0] * 8, [0.1, 0.5, 0.3, 0.9, 0.99, 1e-8, 0.1, 0.0]])]
    args += [*([np.array([400.0])] if clip else []), m.wide(31, 300)]
    return args, [0, 2, 3, len(args) - 1], {**constants, "clip": clip, "decoupled": decoupled, "master": True}


def _adam8bit(m: Maker, clip: bool) -> Case:
    codes, scales = [m.rng.integers(0, 256, (31, 300)).astype(np.uint8) for _ in range(2)], [m.positive(37) for _ in range(2)]
    hyper = np.array([[9.0] * 8, [0.1, 0.5, 0.3, 0.9, 0.99, 1e-8, 0.1, 3.0]])
    args = [m(31, 300), m.wide(31, 300), codes[0], scales[0], codes[1], scales[1], hyper, *([np.array([400.0])] if clip else []), m.wide(31, 300)]
    return args, [0, 2, 3, 4, 5, len(args) - 1], {"row": 1, "stream": 7, "tile": 2, "max_norm": 1.0, "clip": clip, "master": True}


def _muon_update(m: Maker) -> Case:
    args = [m(31, 300), m.wide(31, 300), np.array([[9.0] * 8, [0.1, 0, 0, 0.95, 0, 1e-7, 0.1, 0]]), m.wide(31, 300)]
    return args, [0, 3], {"row": 1, "ratio": 1.5, "master": True}


def _sgd(m: Maker, momentum: float, clip: bool) -> Case:
    args = [m(31, 300), m.wide(31, 300), np.array([[9.0] * 8, [0.1, 0, 0, momentum, 0, 0, 0.1, 0]]), *([m.wide(31, 300)] if momentum else [])]
    args += [*([np.array([400.0])] if clip else []), m.wide(31, 300)]
    constants = {"row": 1, "has_buffer": momentum > 0, "nesterov": False, "max_norm": 1.0, "clip": clip, "master": True}
    return args, [0, *([3] if momentum else []), len(args) - 1], constants


KINDS = ("gelu_new", "gelu", "relu", "silu", "tanh")
BOTH = (False, True)
CASES: dict[str, list[Callable[[Maker], Case]]] = {
    "activation": [lambda m, k=k: ([m(9, 301), m(9, 301)], [1], {"kind": k}) for k in KINDS],
    "activation_backward": [lambda m, k=k: ([m(9, 301), m(9, 301), m(9, 301)], [2], {"kind": k}) for k in KINDS],
    "adam": [lambda m, c=c, d=d: _adam(m, c, d) for c in BOTH for d in BOTH],
    "adam8bit": [lambda m, c=c: _adam8bit(m, c) for c in BOTH],
    "add": [lambda m: ([m(5, 77), m(5, 77), m(5, 77)], [2], {})],
    "append_to_cache": [
        lambda m: ([m(2, 5, 6), m(2, 5, 6), np.tile(np.arange(9, 14, dtype=np.int32), (2, 1)), m(2, 5, 6), m(2, 5, 6)], [3, 4], {"start": 9})
    ],
    "append_to_pages": [
        lambda m: (
            [m(2, 1, 6), m(2, 1, 6), np.array([[2], [3]], np.int32), np.array([[5, 7], [5, 7]], np.int32), m(1, 2, 6), m(1, 2, 6)],
            [4, 5],
            {"first_page": 7},
        )
    ],
    "attention": [
        *(lambda m, f=f, e=e: _attention(m, 131, 150, True, f, e) for f in BOTH for e in BOTH),
        lambda m: _attention(m, 33, 47, False, True, True),
        lambda m: _attention(m, 131, 150, True, False, True, 0.3),
        lambda m: _attention(m, 33, 47, True, True, True, 0.3),
        *(lambda m, g=g: _attention(m, 131, 150, True, False, True, 0.3, g) for g in (2, 3)),
    ],
    "attention_backward": [
        *(lambda m, k=k, q=q: _attention_backward(m, 131, 150, k, q) for k in BOTH for q in BOTH),
        lambda m: _attention_backward(m, 33, 47, True, True),
        lambda m: _attention_backward(m, 131, 150, True, False, 0.3),
        lambda m: _attention_backward(m, 33, 47, True, True, 0.3),
        *(lambda m, g=g, q=q: _attention_backward(m, 131, 150, True, q, 0.3, g) for g in (2, 3) for q in BOTH),
    ],
    "batched_matmul": [
        lambda m: ([m(2, 3, 4, 5), m(2, 3, 5, 6), m(2, 3, 4, 6)], [2], _product(False, False, False)),
        lambda m: ([m(2, 3, 5, 4), m(2, 3, 6, 5), m(2, 3, 4, 6)], [2], _product(True, True, True)),
    ],
    "column_sums": [lambda m, a=a: ([m(3, 1000, 70), m.wide(70)], [1], {"accumulate": a}) for a in BOTH],
    "copy": [
        lambda m: ([m(5, 7), m.wide(5, 7)], [1], {}),
        lambda m: ([m.wide(5, 7), m(5, 7)], [1], {}),
        lambda m: ([m(5, 7), m(5, 7)], [1], {}),
    ],
    "embedding": [
        lambda m: ([m.ids(20, 3, 4), m(20, 6), m(3, 4, 6)], [2], {"v_start": 0, "vocab": 20, "accumulate": False}),
        lambda m: ([m.ids(20, 3, 4), m(8, 6), m(3, 4, 6)], [2], {"v_start": 8, "vocab": 20, "accumulate": True}),
    ],
    "first_token": [lambda m: ([m(3, 5, 7), m(3, 1, 7)], [1], {})],
    "first_token_backward": [lambda m: ([m(3, 1, 7), m(3, 5, 7)], [1], {})],
    "gather_rows": [lambda m: ([m(3, 4, 6), np.array([5, 7, 5, 6, 6], np.int32), m(5, 4, 6)], [2], {"start": 5})],
    "head_backward": [
        *[lambda m, n=n, f=f, w=w: _head(m, n, f, True, w) for n in (1, 2) for f in BOTH for w in BOTH],
        *[lambda m, f=f, h=h: _head(m, 2, f, True, f, h) for f in BOTH for h in (Head(True, True, True), Head(True, True, True, 2.5), Head(cap=2.5))],
    ],
    "head_forward": [
        *[lambda m, n=n, f=f: _head(m, n, f, False) for n in (1, 2) for f in BOTH],
        *[lambda m, h=h: _head(m, 2, False, False, how=h) for h in (Head(True), Head(True, cap=2.5))],
    ],
    "layer_norm": [lambda m: ([m(2, 9, 333), m(333), m(333), m(2, 9, 333), m.wide(2, 9), m.wide(2, 9)], [3, 4, 5], {"eps": 1e-5})],
    "layer_norm_backward": [lambda m, r=r, a=a: _norm_backward(m, r, a) for r in BOTH for a in BOTH],
    "linear_activation": [
        lambda m: ([m(2, 5, 6), m(6, 7), m(7), m(2, 5, 7), m(2, 5, 7)], [3, 4], {"kind": "gelu_new", "trans_b": False, "accumulate": False}),
        lambda m: ([m(2, 5, 6), m(7, 6), m(7), m(2, 5, 7), m(2, 5, 7)], [3, 4], {"kind": "gelu", "trans_b": True, "accumulate": True}),
        lambda m: ([m(2, 5, 6), m(7, 6), m(2, 5, 7), m(2, 5, 7)], [2, 3], {"kind": "relu", "trans_b": True, "accumulate": True}),
    ],
    "linear_bias": [
        lambda m: ([m(2, 5, 6), m(6, 7), m(7), m(2, 5, 7)], [3], {"trans_b": False}),
        lambda m: ([m(2, 5, 6), m(7, 6), m(7), m(2, 5, 7)], [3], {"trans_b": True}),
    ],
    "matmul": [lambda m, a=a, b=b, c=c, w=w: _matmuls(m, a, b, c, w) for a in BOTH for b in BOTH for c in BOTH for w in BOTH],
    "muon_update": [_muon_update],
    "residual_layer_norm": [
        lambda m: ([m(2, 9, 333), m(2, 9, 333), m(333), m(333), m(2, 9, 333), m(2, 9, 333), m.wide(2, 9), m.wide(2, 9)], [4, 5, 6, 7], {"eps": 1e-5})
    ],
    "sgd": [lambda m, o=o, c=c: _sgd(m, o, c) for o in (0.0, 0.9) for c in BOTH],
    "swap_tokens": [lambda m: ([m(2, 65, 33), m(2, 33, 65)], [1], {})],
}


BANDS = {"attention": 2.0, "attention_backward": 4.0, "residual_layer_norm": 2.0}
"""Units of 2^-8; elsewhere 1. Attention rounds weights, and the gradients of scores, before their terms cancel; the norm sees the rounded sum."""


def through_copies(op: str, args: list[np.ndarray], constants: dict[str, Any]) -> list[np.ndarray]:
    """What the fp32 kernel makes of the arguments, widened and unrounded."""
    wide = [array.astype(np.float32) if array.dtype == BF16 else array.copy() for array in args]
    kernel(op, "cpu")(*wide, **constants)
    return wide


def natively(op: str, args: list[np.ndarray], constants: dict[str, Any]) -> list[np.ndarray]:
    """What the bf16 kernel makes of them."""
    native, own = bf16_kernel(op), [array.copy() for array in args]
    assert native.takes(own, constants)
    nbytes = native.scratch_nbytes(own, constants)
    native.kernel(*own, *([np.full(nbytes, 255, np.uint8)] if nbytes else []), **constants)
    return own


def test_every_bf16_kernel_has_a_case() -> None:
    """No kernel for bf16 tiles without an fp32 twin and a case here."""
    assert registered_bf16_operations() == sorted(CASES)


@needs_onednn
@pytest.mark.parametrize(("op", "number"), [(op, i) for op, cases in CASES.items() for i in range(len(cases))])
def test_bf16_kernels_stay_near_fp32(op: str, number: int) -> None:
    """Each output is within its band of the fp32 kernel's: so many units of bf16's last place, 2^-8 of the number and the tensor's scale together."""
    args, outputs, constants = CASES[op][number](Maker())
    expected, found = through_copies(op, args, constants), natively(op, args, constants)
    for at, (before, wide, own) in enumerate(zip(args, expected, found, strict=True)):
        if at not in outputs:
            assert before.dtype == np.uint8 or np.array_equal(before, own), f"argument {at} is an input and changed"
            continue
        unit = 2.0**-8 * BANDS.get(op, 1.0)
        scale = np.sqrt(np.mean(np.square(wide.astype(np.float64))))
        np.testing.assert_allclose(own.astype(np.float64), wide, rtol=unit, atol=unit * scale, err_msg=f"argument {at}")


@needs_onednn
@pytest.mark.parametrize("op", CASES)
def test_pure_outputs_are_not_read(op: str) -> None:
    """First writes over NaN leave none."""
    for make in CASES[op]:
        args, outputs, constants = make(Maker())
        first = constants.get("first", constants.get("first_k", True)) and constants.get("first_q", True) and not constants.get("accumulate", False)
        if not first or op in ("adam", "adam8bit", "muon_update", "sgd"):
            continue
        for at in outputs:
            args[at].fill(np.nan)
        found = natively(op, args, constants)
        assert not any(np.isnan(found[at].astype(np.float32)).any() for at in outputs)


@needs_onednn
@pytest.mark.parametrize("op", ["layer_norm_backward", "attention_backward", "head_backward", "column_sums", "adam"])
def test_no_big_temporaries(op: str) -> None:
    """What a bf16 kernel makes for itself stays within 64 KiB."""
    args, _, constants = CASES[op][0](Maker())
    natively(op, args, constants)  # prepares the primitives
    native = bf16_kernel(op)
    nbytes = native.scratch_nbytes(args, constants)
    partials = [np.empty(nbytes, np.uint8)] if nbytes else []
    tracemalloc.start()
    native.kernel(*args, *partials, **constants)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 10, f"{op} allocated {peak >> 10} KiB"


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 900), st.integers(1, 3000), st.integers(1, 30), st.booleans(), st.floats(0, 1))
def test_blocks_of_attention_fit_their_room(tq: int, tk: int, num_heads: int, causal: bool, start: float) -> None:
    """No block of scores is larger than the scratch declared for it, and every head's queries are there once."""
    at = Pair(2, 1.0, causal, int(start * tk), 0, 0, 0, num_heads, tq + tk, 0.0, 0)
    views = [np.empty((1, t, 2 * num_heads), np.uint8) for t in (tq, tk)]
    *_, most = _sizes(views, at)
    blocks = list(_blocks(0, num_heads, tq, tk, at))
    assert max(np.prod(block.shape) for block in blocks) <= most
    assert sum((block.g - block.h) * (block.last - block.first) for block in blocks) == num_heads * tq


@needs_onednn
def test_products_of_views() -> None:
    """Operands and results may be columns of wider matrices; a single row may have any stride."""
    m = Maker()
    a, b, out = m(40, 100)[:, 7:40], m(90, 33)[3:60], m.wide(40, 200)[:, 11:68]
    on_arrays.gemm(a, b, out, trans_b=True)
    np.testing.assert_allclose(out, a.astype(np.float32) @ b.astype(np.float32).T, rtol=1e-4, atol=1e-4)
    row, total = m(3, 40)[::3], m.wide(1, 33)
    on_arrays.gemm(row, a.copy(), total)
    np.testing.assert_allclose(total, row.astype(np.float32) @ a.astype(np.float32), rtol=1e-4, atol=1e-4)


@needs_onednn
def test_conversion_rounds_to_nearest_even() -> None:
    """The same bits as ml_dtypes: ties, infinities, NaN, strided rows."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32)
    bits[:64] = (bits[:64] & 0xFFFF0000) | 0x8000  # ties
    x = bits.view(np.float32)
    x[np.abs(x) < 2.0**-126] = 0.0  # the instructions flush numbers below the normal ones
    x[64:67] = np.inf, -np.inf, np.nan
    x = x.reshape(64, 64)
    with np.errstate(invalid="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
    for out in (np.empty((64, 64), BF16), np.empty((64, 100), BF16)[:, 10:74]):
        on_arrays.convert(x, out)
        same = (out.view(np.uint16) == expected.view(np.uint16)) | (np.isnan(out.astype(np.float32)) & np.isnan(x))
        assert same.all()
        back = np.empty_like(x)
        on_arrays.convert(out, back)
        np.testing.assert_array_equal(back, out.astype(np.float32))


@needs_onednn
def test_threads_give_the_same_bits() -> None:
    """Every thread prepares its own primitives, and all of them sum alike."""
    args, outputs, constants = CASES["head_backward"][0](Maker())
    found: list[list[np.ndarray]] = []
    threads = [threading.Thread(target=lambda: found.append(natively("head_backward", args, constants))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = natively("head_backward", args, constants)
    assert len(found) == 4
    assert all(np.array_equal(each[at].view(np.uint8), expected[at].view(np.uint8)) for each in found for at in outputs)


@needs_onednn
@pytest.mark.parametrize(
    ("a", "b", "alpha", "taken"),
    [(BF16, BF16, 1.0, True), (BF16, BF16, 0.5, False), (BF16, np.float32, 1.0, False), (np.float16, np.float16, 1.0, False)],
)
def test_when_tiles_are_taken_as_they_are(a: Any, b: Any, alpha: float, taken: bool) -> None:
    """bf16 on both sides and no factor; everything else is widened. Both give the product."""
    runtime = InlineRuntime()
    views = [np.empty((4, 4), dtype) for dtype in (a, b, a)]
    assert (native_for("matmul", views, {**_product(False, False, False), "alpha": alpha}) is not None) == taken
    x, y, z = (TileTensor(runtime, (4, 4), (4, 4), dtype) for dtype in (a, b, a))
    x.write(np.full((4, 4), 2.0))
    y.write(np.eye(4))
    emit(runtime, "matmul", [(x.handles[0], R), (y.handles[0], R), (z.handles[0], W)], **{**_product(False, False, False), "alpha": alpha})
    np.testing.assert_array_equal(z.read().astype(np.float32), 2.0 * alpha)


TRAIN = """
import json, sys
import ml_dtypes, numpy as np
from nntask import GPT2, AdamW, GPT2Config, default_tiling
from scheduler import Runtime
from tiles.kernels.cpu.onednn import library as onednn
config = GPT2Config(vocab_size=300, n_positions=64, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
losses = []
with Runtime(cpu_workers=int(sys.argv[1]), ram=1 << 28) as runtime:
    model = GPT2(config, default_tiling(config, 3, 50), runtime, dtype=ml_dtypes.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    given = model.input_tensors(3, 50)
    ids = np.random.default_rng(0).integers(0, 300, (3, 51))
    given[0].write(ids[:, :-1]); given[1].write(ids[:, 1:])
    for step in range(1, 7):
        optimizer.prepare(step)
        loss = model(*given)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.read()[0]))
print(json.dumps({"available": onednn.has_bf16_products(), "status": onednn.bf16_products(), "losses": losses}))
"""


@cache
def _train(workers: int, **environment: str) -> dict[str, Any]:
    whole = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", TRAIN, str(workers)], env=whole, capture_output=True, text=True, timeout=DEADLINE, check=True)
    return dict(json.loads(done.stdout))


def test_without_the_library_tiles_are_widened() -> None:
    """NNTASK_ONEDNN=off, or a file that is no oneDNN: the status says so and training goes on in fp32 copies, at losses near the native ones."""
    off, wrong = _train(1, NNTASK_ONEDNN="off"), _train(1, NNTASK_ONEDNN="/nowhere/libdnnl.so")
    assert not off["available"]
    assert off["status"] == "switched off by NNTASK_ONEDNN"
    assert not wrong["available"]
    assert "/nowhere/libdnnl.so cannot be used" in wrong["status"]
    assert wrong["losses"] == off["losses"]
    assert off["losses"][-1] < off["losses"][0] - 0.5
    if onednn.has_bf16_products():
        native = _train(1)
        assert native["available"]
        assert native["losses"] == pytest.approx(off["losses"], rel=2e-2)
        assert native["losses"] != off["losses"]


@needs_onednn
def test_workers_do_not_change_the_bits() -> None:
    """One worker and two give the same losses, bit by bit."""
    assert _train(1)["losses"] == _train(2)["losses"]


@needs_avx512
def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    """Importing the kernels does not load the library, nor does fp32 where OpenBLAS has AVX-512 code."""
    code = (
        "import numpy as np, threadpoolctl; from scheduler import InlineRuntime; from tiles import TileTensor; from tiles.ops import matmul; "
        "from tiles.kernels.cpu.onednn import library as onednn; r = InlineRuntime(); "
        "a, b = (TileTensor(r, (4, 4), (2, 2), np.float32) for _ in range(2)); "
        "a.write(np.eye(4)); b.write(np.eye(4)); "
        "wide = {'SkylakeX'} & {i.get('architecture') for i in threadpoolctl.threadpool_info()}; wide and matmul.matmul(a, b).read(); "
        "assert 'dnnl' not in open('/proc/self/maps').read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_CORETYPE": "SkylakeX"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=DEADLINE)


def test_registry_forgets_nothing() -> None:
    """Operations with a bf16 kernel have a plain one too, which is what fp32 tiles and machines without the instructions use."""
    assert set(registered_bf16_operations()) <= set(operations("cpu"))
