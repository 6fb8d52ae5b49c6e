"""Several products of one shape in one launch of cuBLAS, over strict libraries (`support.strict_cuda`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cuda_emulator import COMPILER, Emulator
from support.fake_cuda import FakeCuda
from support.gpu_bench import KernelBench
from support.gpu_training import on_gpus
from support.kernel_cases import Maker
from support.strict_cuda import STRICT_TRAINING, installed, opened

from scheduler.core.errors import DeviceFailed
from tiles.kernels.cuda import batches
from tiles.kernels.registry import BF16

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")
HOW = {"num_a": 1, "num_b": 3, "trans_a": True, "trans_b": False}


@pytest.fixture
def cuda(cuda_libraries: Path, tmp_path: Path) -> Iterator[FakeCuda]:
    """A card behind strict libraries."""
    with installed(cuda_libraries, tmp_path / "code") as found:
        yield found


def gradients(bench: KernelBench, rows: int, inner: int, columns: int, *, accumulate: bool = False, dtype: Any = BF16) -> None:
    """Compute x^T dy for three dy, and compare with the products in fp64."""
    make = Maker(np.float32)
    x, *dys = (make(rows, width).astype(dtype) for width in (inner, columns, columns, columns))
    sums = [make(inner, columns) for _ in dys]
    want = [accumulate * total.astype(np.float64) + x.T.astype(np.float64) @ dy.astype(np.float64) for dy, total in zip(dys, sums, strict=True)]
    bench.run("matmuls", [x, *dys, *sums], **HOW, accumulate=accumulate)
    for expected, total in zip(want, sums, strict=True):
        np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_products_of_one_shape_are_one_call(dtype: Any, accumulate: bool, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products without a call for a single one."""
    (gpu,) = opened(cuda)
    bench = KernelBench(gpu)
    monkeypatch.setattr(gpu._blas._library, "cublasGemmEx", None)
    for _ in range(2):
        gradients(bench, 24, 16, 8, accumulate=accumulate, dtype=dtype)
    assert cuda.found == []


def test_addresses_are_written_once_while_there_is_room(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries stay for graphs that refer to them; others share the last one, which is written before each launch."""
    monkeypatch.setattr(batches, "_ENTRIES", 3)
    (gpu,) = opened(cuda)
    bench = KernelBench(gpu)
    for size in (8, 16, 24, 8, 16, 24, 32):
        gradients(bench, 8 * size, size, size)
    assert sorted(gpu._batches._entries.values()) == [0, 1]
    assert cuda.found == []


@pytest.mark.parametrize("status", [7, 15])
def test_a_refused_batch_is_started_one_by_one(status: int, cuda: FakeCuda) -> None:
    """With one warning for all shapes; the refusal is remembered, and other failures are raised."""
    (gpu,) = opened(cuda)
    bench = KernelBench(gpu)
    library = gpu._blas._library
    library.batch_status = status
    with warnings.catch_warnings(record=True, action="always") as warned:
        for rows in (8, 16, 8):
            gradients(bench, rows, 16, 8)
    (said,) = (str(one.message) for one in warned if one.category is RuntimeWarning)
    assert said.startswith("cuBLAS has no batch of 3 products of 16 by 8 by 8 numbers of bfloat16")
    library.batch_status = 13
    gradients(bench, 8, 16, 8)  # is not asked for again
    with pytest.raises(DeviceFailed, match="EXECUTION_FAILED"):
        gradients(bench, 32, 16, 8)
    assert cuda.found == []


@pytest.mark.parametrize("sizes", [(8, 16, 7), (8, 15, 8), (8, 12, 8)])
def test_rows_that_are_not_aligned_make_no_batch(sizes: tuple[int, int, int], cuda: FakeCuda) -> None:
    """Kernels for tensor cores read 16 bytes at a time."""
    (gpu,) = opened(cuda)
    gradients(KernelBench(gpu), *sizes)
    assert gpu._batches._entries == {}
    assert cuda.found == []


def test_training_has_batches(cuda: FakeCuda) -> None:
    """In steps that are graphs from the third replay on, whose addresses are in entries; refused batches change losses by rounding at most."""
    (gpu,) = opened(cuda)
    losses = STRICT_TRAINING.losses(on_gpus([gpu], 1 << 26, 1 << 27), dtype=BF16)
    assert len(gpu._batches._entries) > 0
    assert cuda.num_graphs > 0
    assert cuda.found == []
    (gpu,) = opened(cuda)
    gpu._blas._library.batch_status = 15
    with warnings.catch_warnings(action="ignore"):
        np.testing.assert_allclose(STRICT_TRAINING.losses(on_gpus([gpu], 1 << 26, 1 << 27), dtype=BF16), losses, rtol=1e-3)


class _RoundsOtherwise(Emulator):
    """A device whose joined products have other bits than single ones, as those of a library may have."""

    def gemms(self, products: Any, **options: Any) -> None:
        super().gemms(products, **options)
        for _, _, out in products:
            self.start_scaled(out)

    def start_scaled(self, out: Any) -> None:
        """Multiply a result by a little more than 1."""
        from support.cuda_emulator import on_host

        def scale() -> None:
            array = on_host(out)
            array[...] = array.astype(np.float32) * np.float32(1.01)

        self.later(scale)

    def gemm_with_gelu_slope(self, a: Any, b: Any, x: Any, out: Any, *, trans_b: bool) -> bool:
        started = super().gemm_with_gelu_slope(a, b, x, out, trans_b=trans_b)
        self.start_scaled(out)
        return started


def test_joined_products_depend_on_no_plan(cuda_libraries: Path) -> None:
    """Whole passes as graphs, single tasks and a budget that does not hold the step join the same products."""
    gpu = _RoundsOtherwise(cuda_libraries)
    whole, single, tight = (
        STRICT_TRAINING.losses(on_gpus([gpu], nbytes, 1 << 27, **more), dtype=BF16)
        for nbytes, more in ((1 << 26, {}), (1 << 26, {"graphs": False}), (3 << 16, {}))
    )
    assert whole == single == tight
    assert whole != STRICT_TRAINING.losses(on_gpus([Emulator(cuda_libraries)], 1 << 26, 1 << 27), dtype=BF16)
