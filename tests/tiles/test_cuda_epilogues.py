"""Products with a bias on a GPU: by cuBLASLt where it has one (`support.strict_cublas_lt`), else by a product and a kernel."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cuda_emulator import COMPILER, Emulator, on_device
from support.fake_cuda import FakeCuda
from support.gpu_bench import KernelBench
from support.gpu_training import on_gpus
from support.kernel_cases import Maker
from support.strict_cublas_lt import Refuses
from support.strict_cuda import STRICT_TRAINING, installed, opened

from scheduler.core.errors import DeviceFailed
from tiles.kernels.catalog import kernel
from tiles.kernels.cuda.products import CublasError
from tiles.kernels.reference.elementwise import slope
from tiles.kernels.registry import BF16

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")
SIZES = [(3, 5, 7), (8, 16, 24), (33, 65, 127)]
"""Rows, inner and columns of products."""


class Status:
    """A `Refuses` that can be changed: 0 takes every shape."""

    def __init__(self) -> None:
        self.value = 0

    def __call__(self, m: int, n: int, k: int) -> int:
        return self.value


@pytest.fixture
def status() -> Status:
    """What the heuristic answers."""
    return Status()


@pytest.fixture
def cuda(cuda_libraries: Path, tmp_path: Path, status: Refuses) -> Iterator[FakeCuda]:
    """A card behind strict libraries."""
    with installed(cuda_libraries, tmp_path / "code", refuses=status) as found:
        yield found


def arrays(size: tuple[int, int, int], dtype: Any, trans_b: bool) -> list[np.ndarray]:
    """x, w, bias and room for the result."""
    (rows, inner, columns), make = size, Maker(np.float32)
    w = make(columns, inner) if trans_b else make(inner, columns)
    return [array.astype(dtype) for array in (make(rows, inner), w, make(columns), np.full((rows, columns), np.nan))]


def exact(x: np.ndarray, w: np.ndarray, trans_b: bool) -> np.ndarray:
    """The product in fp64."""
    return x.astype(np.float64) @ (w.T if trans_b else w).astype(np.float64)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("trans_b", [False, True])
def test_a_bias_is_added_before_rounding(dtype: Any, trans_b: bool, cuda: FakeCuda) -> None:
    """Each result is the exact one rounded once, up to the order of sums in fp32; a shape is planned once, and plans end with the device."""
    (gpu,) = opened(cuda)
    bench, library = KernelBench(gpu), gpu._products._library
    for size in [*SIZES, *SIZES]:
        x, w, bias, y = arrays(size, dtype, trans_b)
        bench.run("linear_bias", [x, w, bias, y], trans_b=trans_b)
        want = exact(x, w, trans_b) + bias.astype(np.float64)
        np.testing.assert_allclose(y.astype(np.float64), want, rtol=2.0**-8 if dtype == BF16 else 1e-5, atol=1e-5)
    assert len(gpu._products._plans) == len(SIZES)
    assert len(library.described) == 4 * len(SIZES)
    gpu.close()
    assert library.described == {}
    assert cuda.found == []


@pytest.mark.parametrize("trans_b", [False, True])
def test_the_slope_of_gelu_is_applied_before_rounding(trans_b: bool, cuda: FakeCuda, status: Status) -> None:
    """In bf16, of a shape that is planned and of one whose rows cuBLASLt does not take; a refused shape is rounded twice."""
    (gpu,) = opened(cuda)
    bench, make = KernelBench(gpu), Maker(np.float32)
    for rows, inner, columns, is_refused in ((33, 65, 128, False), (33, 65, 128, False), (33, 65, 64, True), (5, 8, 15, True)):
        status.value = 15 if columns == 64 else 0
        w = make(columns, inner) if trans_b else make(inner, columns)
        dy, w, pre, dpre = (array.astype(BF16) for array in (make(rows, inner), w, make(rows, columns), np.full((rows, columns), np.nan)))
        with warnings.catch_warnings(record=True, action="always") as warned:
            bench.run("linear_activation_backward", [dy, w, pre, dpre], kind="gelu_new", trans_b=trans_b)
        want = exact(dy, w, trans_b) * slope(pre.astype(np.float64), "gelu_new")
        np.testing.assert_allclose(dpre.astype(np.float64), want, rtol=2.0**-7 if is_refused else 2.0**-8, atol=1e-4)
        assert [str(one.message).partition(" for ")[0] for one in warned] == ["cuBLASLt has no product with the slope of GELU"] * (columns == 64)
    assert sum(plan is not None for plan in gpu._products._plans.values()) == 1
    gpu.close()
    assert cuda.found == []


@pytest.mark.parametrize("answer", [-1, 7, 15])
def test_a_shape_without_algorithm_is_computed_by_two_kernels(answer: int, cuda: FakeCuda, status: Status) -> None:
    """Rounded twice, with one warning for all shapes; the refusal is remembered, and other failures are raised."""
    (gpu,) = opened(cuda)
    bench, status.value = KernelBench(gpu), answer
    with warnings.catch_warnings(record=True, action="always") as warned:
        for size in [*SIZES, *SIZES]:
            x, w, bias, y = arrays(size, BF16, False)
            bench.run("linear_bias", [x, w, bias, y], trans_b=False)
            want = exact(x, w, False).astype(BF16).astype(np.float32) + bias.astype(np.float32)
            np.testing.assert_allclose(y.astype(np.float32), want, rtol=2.0**-8)
    (said,) = (str(one.message) for one in warned if one.category is RuntimeWarning)
    assert said.startswith("cuBLASLt has no product with a bias for 3 rows of 5 numbers by 7 columns of bfloat16")
    assert [*gpu._products._plans.values()] == [None] * len(SIZES)
    assert gpu._products._library.described == {}
    status.value = 13
    with pytest.raises(DeviceFailed, match="EXECUTION_FAILED"):
        bench.run("linear_bias", arrays((4, 4, 4), BF16, False), trans_b=False)
    assert cuda.found == []


def test_a_start_that_is_refused_is_replaced(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planned product that cuBLASLt does not start is computed by two kernels, also later."""
    (gpu,) = opened(cuda)
    bench = KernelBench(gpu)
    monkeypatch.setattr(gpu._products._library, "cublasLtMatmul", lambda *_: 15)
    for _ in range(2):
        x, w, bias, y = arrays(SIZES[0], np.float32, False)
        with warnings.catch_warnings(action="ignore"):
            bench.run("linear_bias", [x, w, bias, y], trans_b=False)
        np.testing.assert_allclose(y, exact(x, w, False) + bias, rtol=1e-5, atol=1e-5)
    assert gpu._products._library.described == {}
    assert [*gpu._products._plans.values()] == [None]


def test_a_bias_that_is_not_aligned_has_no_plan(cuda: FakeCuda) -> None:
    """Kernels of cuBLASLt may read 16 bytes of a bias at a time."""
    (gpu,) = opened(cuda)
    bench, (x, w, bias, y) = KernelBench(gpu), arrays(SIZES[0], np.float32, False)
    addresses = [gpu.reserve(array.nbytes + 16) + 4 * (array is bias) for array in (x, w, bias, y)]
    views = [on_device(array).__class__(address, array.shape, array.dtype) for address, array in zip(addresses, (x, w, bias, y), strict=True)]
    with pytest.warns(RuntimeWarning, match=r"^cuBLASLt reads 16 bytes at a time, and an operand begins at a multiple of 4; such biases are added"):
        assert not gpu.gemm_with_bias(*views[:2], views[2], views[3], trans_b=False)
    bench.wait()
    assert cuda.found == []


@pytest.mark.parametrize("has_epilogues", [False, True])
def test_an_activation_is_that_of_the_stored_sums(has_epilogues: bool, cuda_libraries: Path) -> None:
    """Recomputation starts from them, so its bits are those of the product's task."""
    emulator = Emulator(cuda_libraries, eager=True)
    emulator.enter(emulator.stream())
    emulator.has_epilogues = has_epilogues
    x, w, bias, pre = arrays((33, 65, 127), BF16, False)
    y, again = pre.copy(), pre.copy()
    kernel("linear_activation", "cuda")(*map(on_device, (x, w, bias, pre, y)), kind="gelu_new", trans_b=False, accumulate=False)
    kernel("activation", "cuda")(on_device(pre), on_device(again), kind="gelu_new")
    assert y.tobytes() == again.tobytes()


def test_a_creation_that_fails_leaves_no_descriptions(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third matrix of a plan has no memory."""
    (gpu,) = opened(cuda)
    bench, library, numbers = KernelBench(gpu), gpu._products._library, count()
    create = library.cublasLtMatrixLayoutCreate
    monkeypatch.setattr(library, "cublasLtMatrixLayoutCreate", lambda *arguments: 3 if next(numbers) == 2 else create(*arguments))
    monkeypatch.setattr(gpu, "_try", lambda call: call())
    with pytest.raises(CublasError, match="ALLOC_FAILED"):
        bench.run("linear_bias", arrays(SIZES[0], np.float32, False), trans_b=False)
    assert library.described == {}


def test_a_missing_library_is_named(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """All biases are then added by kernels."""
    (gpu,) = opened(cuda)
    bench, (x, w, bias, y) = KernelBench(gpu), arrays(SIZES[0], np.float32, False)
    monkeypatch.setattr(gpu._products, "_library", None)
    with pytest.warns(RuntimeWarning, match=r"^cuBLASLt was not found; such biases are added"):
        bench.run("linear_bias", [x, w, bias, y], trans_b=False)
    np.testing.assert_allclose(y, exact(x, w, False) + bias, rtol=1e-5, atol=1e-5)


def test_training_goes_on_without_biased_products(cuda: FakeCuda, status: Status, cuda_libraries: Path) -> None:
    """With graphs: losses are those of the emulation without such products."""
    (gpu,) = opened(cuda)
    status.value = 15
    with pytest.warns(RuntimeWarning, match="no product with a bias"), pytest.warns(RuntimeWarning, match="no product with the slope of GELU"):
        found = STRICT_TRAINING.losses(on_gpus([gpu], 1 << 26, 1 << 27), dtype=BF16)
    assert cuda.found == []
    emulator = Emulator(cuda_libraries)
    emulator.has_epilogues = False
    np.testing.assert_array_equal(found, STRICT_TRAINING.losses(on_gpus([emulator], 1 << 26, 1 << 27), dtype=BF16))
