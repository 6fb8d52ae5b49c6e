"""Compiled loops (`tiles.kernels.cpu.numba.loops`): accuracy of exp, exact conversions, compiled once a machine, same bits wherever arrays lie."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from support.deadline import DEADLINE

from tiles.kernels.catalog import kernel
from tiles.kernels.cpu.elementwise import convert
from tiles.kernels.cpu.numba import block_loops, compiler_memory, exp_loops, loops, moment_loops, routing_loops, row_loops, score_loops
from tiles.kernels.cpu.numba.compiled import EXACT, compiled
from tiles.kernels.reference.elementwise import erf as reference_erf
from tiles.kernels.registry import BF16

ROOT = Path(__file__).resolve().parents[2]


def test_exp_is_within_two_ulp() -> None:
    """Over the range where it is not cut off, beside fp64; below it is 0, and -inf is."""
    x = np.linspace(-86, 60, 1 << 20, dtype=np.float32).reshape(1, -1)
    want, found = np.exp(x.astype(np.float64)), x.copy()
    exp_loops.scaled_exp(found, np.zeros(1, np.float32), np.float32(1))
    assert float((np.abs(found - want) / want).max()) < 2 * 2.0**-23
    low = np.array([[-np.inf, -1000, -87, 0]], np.float32)
    exp_loops.scaled_exp(low, np.zeros(1, np.float32), np.float32(1))
    assert low.tolist() == [[0, 0, 0, 1]]


def test_erf_has_the_bits_of_python() -> None:
    """The C library's erf in fp64, rounded to fp32: over all exponents, NaN and infinities, as `math.erf` number by number."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32), rng.standard_normal(1 << 16, np.float32)])
    with np.errstate(invalid="ignore"):
        want = reference_erf(x)
    exp_loops.erf_of_all(x)
    np.testing.assert_array_equal(x, want)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages are of a file alone")
def test_memory_of_the_compiler_is_given_back() -> None:
    """Pages of LLVM go, and loops compile and run as before."""
    x = np.ones((1, 8), np.float32)
    loops.rms_norm(x, x[0], x.copy(), np.empty(1, np.float32), np.float32(0))
    assert compiler_memory.give_back() > 1 << 20
    fresh = compiled(EXACT)(lambda a, b: a + 2 * b)
    assert fresh(1.0, 2.0) == 5.0


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC001FF, 0xFFC00001])
def test_nan_stays_nan(bits: int) -> None:
    """One NaN in a tile reaches the outputs that depend on it: a loss that diverged must show."""
    x = np.random.default_rng(0).standard_normal((4, 100), np.float32)
    x.view(np.uint32)[2, 37] = bits
    y, mean, rstd = np.empty_like(x), np.empty(4, np.float32), np.empty(4, np.float32)
    numbers = np.ones(100, np.float32)
    kernel("layer_norm", "cpu")(x, numbers, numbers, y, mean, rstd, eps=1e-5)
    assert np.isnan(y[2]).all()
    assert np.isfinite(y[[0, 1, 3]]).all()
    kernel("activation", "cpu")(x, y, kind="gelu_new")
    assert np.argwhere(np.isnan(y)).tolist() == [[2, 37]]
    peak, total = np.full(4, -np.inf, np.float32), np.zeros(4, np.float32)
    exp_loops.add_to_lse(x, peak, total)
    assert np.isnan(total).tolist() == [False, False, True, False]
    s, shrink = x.copy(), np.empty(4, np.float32)
    exp_loops.attention_weights(s, 100, peak, total, shrink, True)
    assert np.isnan(total).tolist() == [False, False, True, False]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_conversions_are_exact() -> None:
    """bf16 to fp32 over all its values, and fp32 to bf16 with ties, overflow, denormals, infinities and NaN, as ml_dtypes has them."""
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    wide = np.empty(every.shape, np.float32)
    kernel("copy", "cpu")(every, wide)
    np.testing.assert_array_equal(wide, every.astype(np.float32))
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    single = (upper | lower).view(np.float32)
    short = np.empty(single.shape, ml_dtypes.bfloat16)
    kernel("copy", "cpu")(single, short)
    want = single.astype(ml_dtypes.bfloat16)
    number = ~np.isnan(single)
    np.testing.assert_array_equal(short.view(np.uint16)[number], want.view(np.uint16)[number])
    assert np.isnan(short.astype(np.float32)).tolist() == (~number).tolist()


def test_dropout_across_32_bits() -> None:
    """Rows whose element numbers pass 2^32 drop what the reference drops."""
    x, shape = np.ones((3, 1000), np.float32), (1 << 23, 1000)
    key, place = np.array([3, 4], np.uint64), {"p": 0.4, "stream": 1, "shape": shape, "origin": (2**32 // 1000 - 1, 0)}
    want, found = np.empty_like(x), np.empty_like(x)
    kernel("dropout", "reference")(x, key, want, **place)
    kernel("dropout", "cpu")(x, key, found, **place)
    np.testing.assert_allclose(found, want, rtol=1e-6)
    assert 0.35 < float((found == 0).mean()) < 0.45


@pytest.mark.parametrize("offset", [1, 5, 16])
def test_bits_do_not_depend_on_addresses(offset: int) -> None:
    """The same values at another alignment give the same bits: sums are taken in one order."""
    rng = np.random.default_rng(0)

    def placed(*shape: int, shift: int) -> np.ndarray:
        size = int(np.prod(shape))
        return np.empty(size + shift, np.float32)[shift:].reshape(shape)

    values = [rng.standard_normal(shape, np.float32) for shape in ((37, 771), (771,), (771,))]
    found = []
    for shift in (0, offset):
        x, gamma, beta = (placed(*value.shape, shift=shift) for value in values)
        for array, value in zip((x, gamma, beta), values, strict=True):
            array[...] = value
        y, mean, rstd = placed(37, 771, shift=shift), placed(37, shift=shift), placed(37, shift=shift)
        kernel("layer_norm", "cpu")(x, gamma, beta, y, mean, rstd, eps=1e-5)
        dx, dgamma, dbeta = placed(37, 771, shift=shift), placed(771, shift=shift), placed(771, shift=shift)
        kernel("layer_norm_backward", "cpu")(x, gamma, mean, rstd, y, dx, dgamma, dbeta, accumulate=False, residual=False)
        found.append([array.tobytes() for array in (y, mean, rstd, dx, dgamma, dbeta)])
    assert found[0] == found[1]


def test_a_machine_compiles_once(tmp_path: Path) -> None:
    """A second process finds the loop on disk."""
    code = (
        "import numpy as np\nfrom tiles.kernels.cpu.numba.exp_loops import capped as loop\nloop(np.ones((1, 8), np.float32), np.float32(1))\n"
        "print(len(loop.stats.cache_hits), len(loop.stats.cache_misses))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False) for _ in range(2)
    ]
    assert [done.stdout.split() for done in runs] == [["0", "1"], ["1", "0"]], runs[0].stderr + runs[1].stderr


def test_bits_do_not_depend_on_who_compiled_or_what_was_loaded_first(tmp_path: Path) -> None:
    """Two loops that share parts, run by the process that compiles them and, in the other order, by one that finds them on disk."""
    code = (
        "import sys, hashlib, numpy as np\nfrom tiles.kernels.catalog import kernel\nimport tiles.kernels.cpu\n"
        "x = np.random.default_rng(0).standard_normal((64, 768), np.float32)\nones, out = np.ones(768, np.float32), {}\n"
        "for op in sys.argv[1:]:\n"
        "    y, s, mean, rstd = np.empty_like(x), np.empty_like(x), np.empty(64, np.float32), np.empty(64, np.float32)\n"
        "    first = (x,) if op == 'layer_norm' else (x, x)\n"
        "    last = (y, mean, rstd) if op == 'layer_norm' else (s, y, mean, rstd)\n"
        "    kernel(op, 'cpu')(*first, ones, ones, *last, eps=1e-5)\n"
        "    out[op] = hashlib.md5(b''.join(each.tobytes() for each in last)).hexdigest()\n"
        "print(sorted(out.items()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}
    ops = ["layer_norm", "residual_layer_norm"]
    found = []
    for order in (ops, ops, ops[::-1]):
        done = subprocess.run([sys.executable, "-c", code, *order], env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert found[0] == found[1] == found[2]


LOOPS = (block_loops, exp_loops, loops, moment_loops, routing_loops, row_loops, score_loops)


@pytest.mark.parametrize("module", LOOPS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_loops_call_no_other_loop(module: ModuleType) -> None:
    """What loops share becomes part of each of them (`compiled.inlined`): a name that two files of code define runs whichever was loaded first."""
    parts = {name: part for name, part in vars(module).items() if hasattr(part, "py_func")}
    assert all(bool(part.targetoptions.get("forceinline")) == name.startswith("_") for name, part in parts.items())
    whole = {name for name in parts if not name.startswith("_")}
    assert whole
    assert not [(name, used) for name, part in parts.items() for used in whole & set(part.py_func.__code__.co_names)]


def test_nothing_is_compiled_before_a_kernel_runs() -> None:
    """Importing the kernels, as `nntask plan` and `--help` may, does not import Numba."""
    code = "import sys, wrappers.cli, tiles.kernels.cpu; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=DEADLINE, check=False).returncode == 0


@pytest.mark.parametrize(("x", "out"), [(BF16, np.float32), (np.float32, BF16)])
def test_conversion_of_strided_tiles_reaches_the_output(x: type, out: type) -> None:
    """A column of a matrix is no flat array: it is converted in place, not in a copy."""
    source, target = np.arange(12, dtype=np.float32).reshape(3, 4).astype(x), np.zeros((3, 4), out)
    convert(source[:, 1:3], target[:, 1:3])
    np.testing.assert_array_equal(target.astype(np.float32), [[0, 1, 2, 0], [0, 5, 6, 0], [0, 9, 10, 0]])
