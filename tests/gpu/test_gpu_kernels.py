"""Every kernel on the device against its readable twin: fp32 and bf16, the cases of the CPU's tests, and products of ragged sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.cuda_cases import BF16, LOOSE, ONLY_FLOATS, all_cases, arguments
from support.gpu_bench import KernelBench
from support.kernel_cases import Maker


@pytest.fixture(scope="module")
def bench(open_gpus: Any) -> KernelBench:
    """On one device."""
    return KernelBench(open_gpus(1)[0])


@pytest.mark.parametrize(("op", "number"), all_cases(set()))
def test_fp32_is_the_reference(op: str, number: int, bench: KernelBench) -> None:
    """Within the rounding of fp32."""
    args, constants = arguments(op, number, short=False)
    bench.check(op, args, constants, rtol=2e-4, atol=LOOSE.get(op, 2e-5))


@pytest.mark.parametrize(("op", "number"), all_cases(ONLY_FLOATS))
def test_bf16_is_the_reference_within_its_rounding(op: str, number: int, bench: KernelBench) -> None:
    """From the rounded inputs."""
    args, constants = arguments(op, number, short=True)
    bench.check(op, args, constants, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 1, 1), (33, 65, 127), (256, 512, 384), (1000, 77, 513)])
def test_products(rows: int, inner: int, columns: int, trans_a: bool, trans_b: bool, dtype: Any, bench: KernelBench) -> None:
    """Each way of transposing, onto something and over garbage."""
    make = Maker(np.float32)
    a, b = (
        make(*((inner, rows) if trans_a else (rows, inner))).astype(dtype),
        make(*((columns, inner) if trans_b else (inner, columns))).astype(dtype),
    )
    for accumulate in (False, True):
        out = make(rows, columns)
        args = [a, b, out if accumulate else np.full_like(out, np.nan)]
        options = {"trans_a": trans_a, "trans_b": trans_b, "alpha": 0.5, "accumulate": accumulate}
        bench.check("matmul", args, options, rtol=1e-4, atol=1e-4 * inner**0.5)


def test_tf32_rounds_its_factors(open_gpus: Any) -> None:
    """Products are less exact than in fp32, by no more than 10 bits of mantissa explain; fp32 is exact on the same card."""
    make = Maker(np.float32)
    a, b = make(256, 256), make(256, 256)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    errors = []
    for tf32 in (False, True):
        out = np.empty((256, 256), np.float32)
        KernelBench(open_gpus(1, tf32=tf32)[0]).run("matmul", [a, b, out], trans_a=False, trans_b=False, alpha=1.0, accumulate=False)
        errors.append(float(np.abs(out - exact).max()))
    assert errors[0] < 1e-4 < errors[1] < 0.1
