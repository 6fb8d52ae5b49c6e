"""CUDA kernels without a GPU: their sources run on the CPU beside the reference, and NVRTC compiles them for real devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import cuda_cases
from support.cuda_cases import BF16, LOOSE, ONLY_FLOATS, all_cases, arguments
from support.cuda_emulator import COMPILER, Emulator, on_device
from support.gpu_bench import kernels_in
from support.kernel_cases import PATTERNS, Maker, patterned_attention, patterned_backward
from support.nvrtc import compile_source, instructions, library

from tiles.kernels.catalog import kernel, operations
from tiles.kernels.cpu.loss import loss_scratch_nbytes
from tiles.kernels.cuda import launch, norm, tables
from tiles.kernels.cuda.tables import head_scratch_nbytes
from tiles.kernels.reference.attention import Pair
from tiles.kernels.reference.loss import Head

FLASH = ("flash", "flash_dropout", "flash_options")
"""Sources of bf16 alone, which take 5 to 20 s to compile."""
ORDERS = pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])

REGISTERS = 65536
"""Of a multiprocessor, and so of a block (CUDA C++ Programming Guide, technical specifications)."""
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")


@pytest.fixture(scope="module")
def emulator(cuda_libraries: Path) -> Emulator:
    """The device of these tests."""
    found = Emulator(cuda_libraries, eager=True)
    found.enter(found.stream())
    return found


def check(op: str, args: list[np.ndarray], constants: dict[str, Any], rtol: float, atol: float) -> None:
    """The emulated kernel writes what the reference does in fp64."""
    wide = [arg.astype(np.float64) if arg.dtype in (np.float32, BF16) else arg.copy() for arg in args]
    kernel(op, "reference")(*wide, **constants)
    kernel(op, "cuda")(*map(on_device, args), **constants)
    for want, found in zip(wide, args, strict=True):
        if found.dtype != np.uint8:  # scratch
            np.testing.assert_allclose(found.astype(want.dtype), want, rtol=rtol, atol=atol, equal_nan=False)


@needs_compiler
@ORDERS
@pytest.mark.parametrize(("op", "number"), all_cases(set()))
def test_fp32_is_the_reference(op: str, number: int, backwards: bool, emulator: Emulator) -> None:
    """Whatever the order in which threads run between barriers."""
    emulator.backwards = backwards
    args, constants = arguments(op, number, short=False)
    check(op, args, constants, rtol=2e-4, atol=LOOSE.get(op, 2e-5))


@needs_compiler
@pytest.mark.parametrize(("op", "number"), all_cases(ONLY_FLOATS))
def test_bf16_is_the_reference_within_its_rounding(op: str, number: int, emulator: Emulator) -> None:
    """From the rounded inputs: sums are fp32, and each output is rounded once or twice."""
    emulator.backwards = False
    args, constants = arguments(op, number, short=True)
    check(op, args, constants, rtol=1.6e-2, atol=5e-2 if (op, number) == ("expert_backward", 4) else 1.6e-2)  # one sum of terms of up to 20 is near 0


@needs_compiler
def test_gradients_of_the_rows_of_an_expert_are_rounded_once(emulator: Emulator) -> None:
    """Those of an expert with low-rank updates are sums of three products; an error of all is measured, since a single sum may be near 0."""
    emulator.backwards = False
    errors, squares = np.zeros(2), np.zeros(2)
    for seed in range(40):
        args, constants = arguments("expert_backward", 5, short=True, seed=seed)
        wide = [arg.astype(np.float64) if arg.dtype in (np.float32, BF16) else arg.copy() for arg in args]
        kernel("expert_backward", "reference")(*wide, **constants)
        kernel("expert_backward", "cuda")(*map(on_device, args), **constants)
        for number, place in enumerate((20, 21)):
            errors[number] += np.square(args[place].astype(np.float64) - wide[place]).sum()
            squares[number] += np.square(wide[place]).sum()
    assert (np.sqrt(errors / squares) < 3e-3).all()


def long_pair(make: Maker, *, causal: bool, p: float) -> tuple[list[np.ndarray], Pair]:
    """q, k, v of several blocks of queries and keys, ragged: 70 queries in the middle of 75 keys, two heads of queries for each of keys."""
    return [make(1, 70, 64), make(1, 75, 32), make(1, 75, 32)], Pair(16, 0.3, causal, 5, 0, 1, 2, 8, 90, p, 3)


@needs_compiler
@ORDERS
@pytest.mark.parametrize(("causal", "p"), [(True, 0.0), (False, 0.3)])
def test_attention_over_several_blocks(causal: bool, p: float, backwards: bool, emulator: Emulator) -> None:
    """Forward, onto what an earlier tile left, and backward, from log-sum-exps and from stored weights."""
    emulator.backwards = backwards
    make = Maker(np.float32)
    (q, k, v), at = long_pair(make, causal=causal, p=p)
    key = [np.array([1, 2], np.uint64)] if p else []
    scratch = np.empty(1, np.uint8)
    o, peak, total, lse = make(1, 70, 64), make(1, 4, 70), make.positive(1, 4, 70), make(1, 4, 70)
    check("attention", [q, k, v, o, peak, total, lse, *key, scratch], {"at": at, "first": False, "last": True}, rtol=2e-4, atol=2e-5)
    grads, delta, do = [make(1, 70, 64), make(1, 75, 32), make(1, 75, 32)], make(1, 4, 70), make(1, 70, 64)
    weights = make.positive(1, 4, 70, 75)
    if causal:
        weights[..., np.arange(75)[None, :] > 5 + np.arange(70)[:, None]] = 0
    for kept, stored in ((make.positive(1, 4, 70) * 9, False), (weights, True)):
        args = [q, k, v, do, kept, delta, *(grad.copy() for grad in grads), *key, scratch]
        check("attention_backward", args, {"at": at, "stored": stored, "first_k": False, "first_q": False}, rtol=2e-3, atol=2e-4)


@needs_compiler
@pytest.mark.parametrize(
    ("size", "causal", "p", "backwards"),
    [
        (64, True, 0.0, False),
        (64, False, 0.3, True),
        pytest.param(128, True, 0.0, False, marks=pytest.mark.long),
        pytest.param(128, True, 0.3, True, marks=pytest.mark.long),
    ],
)
def test_attention_on_tensor_cores(size: int, causal: bool, p: float, backwards: bool, emulator: Emulator) -> None:
    """bf16, several blocks of queries and keys, ragged, two heads of queries for each of keys, onto what an earlier tile left; and gradients."""
    emulator.backwards = backwards
    make = Maker(np.float32)
    at = Pair(size, 0.2, causal, 5, 0, 1, 2, 4, 160, p, 3)
    tq, tk = 140, 150
    q, k, v = (make(1, t, heads * size).astype(BF16) for t, heads in ((tq, 2), (tk, 1), (tk, 1)))
    key = [np.array([1, 2], np.uint64)] if p else []
    scratch = np.empty(1, np.uint8)
    for first in (True, False):
        o, peak, total, lse = make(1, tq, 2 * size).astype(BF16), make(1, 2, tq), make.positive(1, 2, tq), make(1, 2, tq)
        args = [q, k, v, o, peak, total, lse, *key, scratch]
        check("attention", args, {"at": at, "first": first, "last": True}, rtol=2e-2, atol=2e-2)
    grads = [make(*shape.shape).astype(BF16) for shape in (q, k, v)]
    delta, do = make(1, 2, tq), make(1, tq, 2 * size).astype(BF16)
    for fresh in (True, False):
        args = [q, k, v, do, lse, delta, *(grad.copy() for grad in grads), *key, scratch]
        check("attention_backward", args, {"at": at, "stored": False, "first_k": fresh, "first_q": fresh}, rtol=3e-2, atol=6e-2)


@needs_compiler
def test_tiles_anywhere_in_memory_have_attention(emulator: Emulator) -> None:
    """Copies of 16 bytes read only tiles that begin at multiples of them; others are computed without tensor cores."""
    emulator.backwards = False
    make, at = Maker(np.float32), Pair(64, 0.2, True, 0, 0, 0, 0, 1, 5, 0.0, 0)
    q, k, v, o = (np.concatenate([make(1).astype(BF16), make(320).astype(BF16)])[1:].reshape(1, 5, 64) for _ in range(4))
    assert q.ctypes.data % 16
    args = [q, k, v, o, make(1, 1, 5), make.positive(1, 1, 5), make(1, 1, 5), np.empty(1, np.uint8)]
    check("attention", args, {"at": at, "first": True, "last": True}, rtol=2e-2, atol=2e-2)


@needs_compiler
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(
    ("dtype", "size", "causal"),
    [
        pytest.param(np.float32, 4, True, id="plain-True"),
        pytest.param(np.float32, 4, False, id="plain-False"),
        pytest.param(BF16, 64, True, id="tensor cores-True"),
        pytest.param(BF16, 64, False, id="tensor cores-False", marks=pytest.mark.long),
    ],
)
def test_patterns_over_several_blocks(dtype: type, size: int, causal: bool, name: str, emulator: Emulator) -> None:
    """75 queries and as many keys: windows, documents, biases and caps, with gradients; on tensor cores without a mask as well (long)."""
    emulator.backwards = causal
    make, loose = Maker(np.float32), dtype != np.float32
    for case in (patterned_attention, patterned_backward):
        more = {} if case is patterned_attention else {"stored": False}
        args, outputs, constants = case(make, name, first=not causal, causal=causal, size=size, tq=75, tk=75, **more)
        floats = (4, 5, 6) if case is patterned_attention else (4, 5, *([len(args) - 2] if "accumulate" in constants else []))
        args = [arg.astype(dtype) if arg.dtype == np.float32 and place not in floats else arg for place, arg in enumerate(args)]
        for place in outputs:
            args[place].fill(np.nan)
        check("attention" if case is patterned_attention else "attention_backward", args, constants, 3e-2 if loose else 2e-3, 8e-2 if loose else 2e-4)


@needs_compiler
@ORDERS
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("width", "accumulate", "most_shared"), [(5, True, 1 << 16), (8, False, 1 << 16), (136, True, 1 << 16), (136, True, 0), (5, False, 0)]
)
def test_sums_over_many_rows(
    width: int, accumulate: bool, most_shared: int, dtype: type, backwards: bool, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays with several pieces of rows: columns one at a time and four at a time, also more than a block of threads or shared memory has."""
    emulator.backwards = backwards
    monkeypatch.setattr(norm, "SHARED_SUMS_NBYTES", most_shared)
    make = Maker(np.float32)
    x, dy, dx, gamma = (make(1, 301, width).astype(dtype) for _ in range(4))
    mean, rstd, first, second = make(1, 301), make.positive(1, 301), make(width), make(width)
    check("column_sums", [dy, first.copy()], {"accumulate": accumulate}, rtol=1e-4, atol=1e-4)
    constants = {"accumulate": accumulate, "residual": False}
    loose = 2e-2 if dtype == BF16 else 1e-4
    check("layer_norm_backward", [x, gamma[0, 0], mean, rstd, dy, dx, first.copy(), second], constants, rtol=loose, atol=loose)
    check("rms_norm_backward", [x, gamma[0, 0], rstd, dy, dx, first], constants, rtol=loose, atol=loose)


@needs_compiler
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("columns", "least_rows"), [(50264, 1024), (19400, 48), (8192, 1024)])
def test_the_gradient_of_a_large_vocabulary_is_rounded_once(
    columns: int, least_rows: int, first: bool, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16, logits of all, of some rows or of some columns, weights with a mean. The error of dx is about that of its rounding; sums are right."""
    emulator.backwards = False
    monkeypatch.setattr(tables, "COLUMNS", columns)
    monkeypatch.setattr(tables, "LEAST_ROWS", least_rows)
    monkeypatch.setattr(tables, "_ROWS", 16)
    rng, num_rows, vocab, width = np.random.default_rng(0), 130, 50257, 16
    x = rng.standard_normal((1, num_rows, width)).astype(BF16)
    w, bias = (rng.normal(0.02, 0.02, shape).astype(BF16) for shape in ((vocab, width), (vocab,)))
    targets, dx = rng.integers(0, vocab, (1, num_rows)).astype(np.int32), (rng.standard_normal((1, num_rows, width)) / 1e3).astype(BF16)
    z = x[0].astype(np.float64) @ w.T.astype(np.float64) + bias.astype(np.float64)
    lse = np.log(np.exp(z).sum(axis=1))
    p = np.exp(z - lse[:, None])
    p[np.arange(num_rows), targets[0]] -= 1
    exact = p @ w.astype(np.float64) + (0 if first else dx[0].astype(np.float64))
    scratch, dbias = np.empty(head_scratch_nbytes(num_rows, vocab, width), np.uint8), np.zeros(vocab, np.float32)
    arrays = [x, w, bias, targets, lse[None].astype(np.float32), dx, dbias, scratch]
    constants = {"num_c": 1, "v_start": 0, "scale": 1.0, "first": first, "accumulate": False, "how": Head(has_bias=True, has_dbias=True)}
    kernel("head_backward", "cuda")(*map(on_device, arrays), **constants)
    rounding = np.linalg.norm(exact.astype(BF16).astype(np.float64) - exact)
    assert np.linalg.norm(dx[0].astype(np.float64) - exact) <= 1.3 * rounding
    np.testing.assert_allclose(dbias, p.sum(axis=0), atol=1e-3)


def wide_cases(make: Maker) -> Iterator[tuple[str, list[np.ndarray], dict[str, Any]]]:
    """(operation, arguments, constants) of rows that 16 bytes divide, those of one row's threads and more."""
    for width in (16, 328):
        x, y, z, row, more = make(3, 5, width), make(3, 5, width), make(3, 5, width), make(width), make(width)
        eps, statistics = {"eps": 1e-5}, [np.empty((3, 5), np.float32), np.empty((3, 5), np.float32)]
        yield "add_rows", [x, make(6, width), y], {}
        yield "gate_backward", [x, y, z, make(3, 5, width), make(3, 5, width)], {"kind": "gelu_new"}
        yield "activation_backward", [x, y, z], {"kind": "gelu_new"}
        yield "linear_bias", [make(3, 5, 6), make(6, width), row, y], {"trans_b": False}
        yield "linear_activation", [make(3, 5, 6), make(6, width), row, y, z], {"kind": "gelu_new", "trans_b": False, "accumulate": False}
        yield "layer_norm", [x, row, more, y, *statistics], eps
        yield "residual_rms_norm", [x, y, row, z, make(3, 5, width), statistics[0]], eps
        yield "layer_norm_backward", [x, row, *statistics, y, z, make(3, 5, width), row * 0, row * 0], {"accumulate": False, "residual": True}
        yield "attention_delta", [x, y, np.empty((3, width // 8, 5), np.float32)], {"head_size": 8}
        yield "attention_delta", [x, y, np.empty((3, 1, 5), np.float32)], {"head_size": width}
        place = {"shape": (9, 7, 2 * width), "origin": (3, 1, width)}
        yield "dropout", [x, np.array([1, 2], np.uint64), y], {"p": 0.3, "stream": 4, **place}


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["fp32", "bf16"])
def test_wide_rows(dtype: type, emulator: Emulator) -> None:
    """Kernels that read and write 16 bytes at a time where rows allow that."""
    emulator.backwards = False
    for op, args, constants in wide_cases(Maker(np.float32)):
        kept = cuda_cases.FLOATS.get(op, ())
        args = [arg if place in kept or place - len(args) in kept or arg.dtype == np.uint64 else arg.astype(dtype) for place, arg in enumerate(args)]
        check(op, args, constants, rtol=3e-2 if dtype == BF16 else 2e-4, atol=3e-2 if dtype == BF16 else 2e-5)


@needs_compiler
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("width", [20, 6])
def test_gradients_of_a_table_over_many_tokens(width: int, accumulate: bool, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that occur often, in several pieces of the search, once, or in other tiles; rows nobody names are cleared or kept."""
    emulator.backwards = False
    monkeypatch.setattr(tables, "THREADS", 32)
    rng = np.random.default_rng(0)
    tokens = rng.choice([3, 5, 6, 17, 30], (1, 700)).astype(np.int32)
    tokens[0, 299] = 9
    dy, table = rng.standard_normal((1, 700, width)).astype(np.float32), rng.standard_normal((16, width)).astype(np.float32)
    check("embedding_backward", [tokens, dy, table], {"v_start": 2, "accumulate": accumulate}, rtol=2e-5, atol=2e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["fp32", "bf16"])
def test_a_limit_is_compared_in_the_type_of_its_numbers(dtype: Any, emulator: Emulator) -> None:
    """0.3 is rounded up in bf16, and is within the limit; slopes beyond it are 0, whatever they would be multiplied by."""
    emulator.backwards = False
    limit = np.asarray(0.3, dtype)
    beyond = np.nextafter(limit, np.asarray(1, dtype))
    x, dy = np.array([limit, -limit, beyond, -beyond, beyond], dtype), np.array([2, 3, 4, np.inf, np.nan], dtype)
    dx = np.empty(5, dtype)
    kernel("clamp_backward", "cuda")(*map(on_device, (x, dy, dx)), most=0.3)
    assert dx.tolist() == [2, 3, 0, 0, 0]


@needs_compiler
def test_nan_is_kept(emulator: Emulator) -> None:
    """One NaN in a row of scores reaches the row's statistics, weights and gradients, whatever comes after it."""
    s, peak, total = np.zeros((1, 1, 2, 40), np.float32), np.zeros((1, 1, 2), np.float32), np.zeros((1, 1, 2), np.float32)
    s[..., 1, 7] = np.nan
    for first in (True, False):
        kernel("attention_lse", "cuda")(*map(on_device, (s, peak, total, np.empty(1, np.uint8))), first=first)
        s[..., 1, :] = 0
        assert np.isnan(total).tolist() == [[[False, True]]]
    logits, choices, weights = np.zeros((1, 6), np.float32), np.zeros((1, 3), np.int32), np.zeros((1, 3), np.float32)
    logits[0, 5], slopes = np.nan, np.zeros_like(logits)
    for renormalises in (True, False):
        kernel("route", "cuda")(*map(on_device, (logits, choices, weights, np.empty((1, 6), np.uint8))), renormalises=renormalises)
        kernel("route_backward", "cuda")(*map(on_device, (logits, choices, np.ones_like(weights), slopes)), renormalises=renormalises)
        assert np.isnan(weights).all()
        assert np.isnan(slopes).all()


@needs_compiler
@pytest.mark.parametrize(("width", "masked"), [(11, slice(3, 4)), (16, slice(8, 16))])
@pytest.mark.parametrize("first", [True, False])
def test_masked_classes_have_no_weight(width: int, masked: slice, first: bool, emulator: Emulator) -> None:
    """A bias of -inf excludes a class: sums of exponentials count the others, also if a thread reads masked ones alone."""
    emulator.backwards = False
    make = Maker(np.float32)
    bias = make(width)
    bias[masked] = -np.inf
    args = [make(1, 3, 4), make(width, 4), bias, np.zeros((1, 3), np.int32), make(1, 3), make.positive(1, 3), make(1, 3)]
    scratch = np.empty(max(loss_scratch_nbytes(3, width, 8), head_scratch_nbytes(3, width, 0)), np.uint8)
    check("head_forward", [*args, scratch], {"num_c": 1, "v_start": 0, "vocab": width, "first": first, "how": Head(True)}, rtol=2e-5, atol=2e-5)


def test_every_operation_has_a_kernel() -> None:
    """None falls back to the CPU."""
    assert operations("cuda") == operations("reference")


@pytest.mark.skipif(library() is None, reason="the NVRTC wheel is not installed")
@pytest.mark.parametrize(
    ("source", "element", "architecture"),
    [
        pytest.param(name, element, number, marks=[] if number == 90 and name not in FLASH else pytest.mark.long)
        for name in launch.NAMES
        for element in (["bf16"] if name in FLASH else launch.ELEMENTS.values())
        for number in (80, 90, 100)
    ],
)
def test_sources_compile_for_devices(source: str, element: str, architecture: int) -> None:
    """Ampere, Hopper, Blackwell; and blocks of as many threads as kernels are started with find registers for all of them."""
    compiles, log = compile_source(source, element, architecture)
    assert compiles, log
    taken = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    assert taken
    assert max(taken) * (128 if source in (*FLASH, "attention") else 1024) <= REGISTERS


@pytest.mark.skipif(library() is None, reason="the NVRTC wheel is not installed")
@pytest.mark.parametrize("source", [pytest.param(name, marks=pytest.mark.long if name in FLASH else ()) for name in launch.NAMES])
def test_a_card_is_asked_for_all_kernels_of_a_source(source: str) -> None:
    """`make first-card` loads each kernel by its name in the machine code."""
    assert sorted(kernels_in(source)) == sorted(instructions(source, "bf16", 90))


PRODUCT = 0x23C
"""Operation code of HMMA, a product on tensor cores, in machine code of sm_90."""


@pytest.mark.long
@pytest.mark.skipif(library() is None, reason="the NVRTC wheel is not installed")
def test_attention_spends_its_time_in_products() -> None:
    """Kernels of attention without options have at most 22 instructions for each product on tensor cores, with all that is outside their loops."""
    kernels = instructions("flash", "bf16", 90)
    assert len(kernels) == 6
    assert {name: len(codes) for name, codes in kernels.items() if len(codes) > 22 * codes.count(PRODUCT)} == {}
