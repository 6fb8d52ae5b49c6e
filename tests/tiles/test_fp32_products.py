"""Who computes fp32 products: the rule, and the same numbers either way."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.deadline import DEADLINE

from tiles.kernels.cpu.blas import fp32_products, gemm, quick_sgemm
from tiles.kernels.cpu.onednn import library as onednn

ROOT = Path(__file__).resolve().parents[2]
ASK = """
from tiles.kernels.cpu.blas import fp32_products, quick_sgemm
print(quick_sgemm() is not None, fp32_products())
"""

needs_onednn = pytest.mark.skipif(onednn.sgemm() is None, reason="needs oneDNN and AVX-512")


def ask(**environment: str) -> tuple[str, str]:
    """What a process with such an environment uses."""
    kept = {name: value for name, value in os.environ.items() if name not in ("OPENBLAS_CORETYPE", "NNTASK_ONEDNN")}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE,
    )
    quick, _, words = done.stdout.strip().partition(" ")
    return quick, words


@needs_onednn
def test_a_call_that_fails_is_named() -> None:
    """With its status, and what to do."""
    library, _ = onednn._load()
    assert library is not None
    with pytest.raises(onednn.OneDnnError, match=r"^dnnl_sgemm of .* failed with status 2; set NNTASK_ONEDNN=off to do without it$"):
        library.check(2, "dnnl_sgemm")


@needs_onednn
def test_narrow_code_on_a_wide_processor_goes_to_onednn() -> None:
    """OpenBLAS is told to run AVX2 code: oneDNN computes, unless it is switched off; OpenBLAS's own AVX-512 code stays."""
    quick, words = ask(OPENBLAS_CORETYPE="Haswell")
    assert quick == "True"
    assert words.startswith("oneDNN 3")
    quick, words = ask(OPENBLAS_CORETYPE="Haswell", NNTASK_ONEDNN="off")
    assert quick == "False"
    assert "Haswell" in words
    quick, words = ask(OPENBLAS_CORETYPE="SkylakeX")
    assert quick == "False"
    assert "SkylakeX" in words


@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 33, 7), (65, 1, 64), (96, 130, 257), (64, 64, 64)])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.5, 1.0), (-2.0, 0.25)])
def test_products_equal_numpy(m: int, n: int, k: int, trans_a: bool, trans_b: bool, alpha: float, beta: float) -> None:
    """Tiles inside wider arrays, transposed or not, scaled and added to; with beta = 0 what was there is never read."""
    rng = np.random.default_rng(m * n + k)
    a = rng.standard_normal((k, m + 3) if trans_a else (m, k + 3), np.float32)[:, : m if trans_a else k]
    b = rng.standard_normal((n, k + 5) if trans_b else (k, n + 5), np.float32)[:, : k if trans_b else n]
    whole = np.full((m, n + 2), np.nan, np.float32)
    out = whole[:, :n]
    if beta:
        out[...] = rng.standard_normal((m, n))
    product = (a.T if trans_a else a).astype(np.float64) @ (b.T if trans_b else b).astype(np.float64)
    expected = alpha * product + (beta * out if beta else 0.0)
    gemm(a, b, out, trans_a=trans_a, trans_b=trans_b, alpha=alpha, beta=beta)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    assert np.isnan(whole[:, n:]).all()


def test_every_thread_has_the_same_bits() -> None:
    """Eight threads, each its first product."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 300, 300), np.float32)

    def product(_: int) -> bytes:
        out = np.empty_like(a)
        gemm(a, b, out)
        return out.tobytes()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(product, range(32)))) == 1
    assert fp32_products()
    assert quick_sgemm() is quick_sgemm()


def test_an_empty_sum_is_zero() -> None:
    """No columns to sum over: the output is cleared, or left as it is."""
    a, b, out = np.empty((3, 0), np.float32), np.empty((0, 4), np.float32), np.full((3, 4), 7.0, np.float32)
    gemm(a, b, out, beta=1.0)
    assert (out == 7).all()
    gemm(a, b, out)
    assert not out.any()


@needs_onednn
def test_one_thread_of_openmp_in_every_thread() -> None:
    """Without OMP_NUM_THREADS in the environment, each thread that multiplies computes alone."""
    code = """
import ctypes, threading
import numpy as np
from tiles.kernels.cpu.onednn import library as onednn
from tiles.kernels.cpu.blas import gemm
found = []
def run():
    a = np.ones((64, 64), np.float32)
    gemm(a, a, np.empty_like(a))
    found.append(ctypes.CDLL(onednn._load()[0].path).omp_get_max_threads())
for _ in range(2):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
run()
assert found == [1, 1, 1], found
"""
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "NNTASK_ONEDNN")}
    subprocess.run([sys.executable, "-c", code], env={**kept, "PYTHONPATH": str(ROOT), "OPENBLAS_CORETYPE": "Haswell"}, check=True, timeout=DEADLINE)


@pytest.mark.parametrize("how", ["reversed rows", "one row for all", "columns apart", "one row of many"])
def test_strides_that_no_leading_dimension_can_say(how: str) -> None:
    """Such operands give the right numbers, too."""
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((20, 24), np.float32)
    a = {
        "reversed rows": whole[::-1, :12],
        "one row for all": np.broadcast_to(whole[0, :12], (20, 12)),
        "columns apart": whole[:, ::2],
        "one row of many": whole[::20, :12],
    }[how]
    b, out = rng.standard_normal((12, 9), np.float32), np.empty((len(a), 9), np.float32)
    gemm(a, b, out)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b, rtol=1e-4, atol=1e-4)
