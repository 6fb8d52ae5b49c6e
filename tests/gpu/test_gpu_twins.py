"""Kernels on the device beside PyTorch's on the same card."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from support.gpu_bench import KernelBench  # noqa: E402
from support.torch_twins import TWINS, compare_with_torch  # noqa: E402


@pytest.fixture(scope="module")
def bench(open_gpus: Any) -> KernelBench:
    """On one device."""
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA; its CPU is compared with our references by tests/tiles/test_torch_twins.py")
    return KernelBench(open_gpus(1)[0])


@pytest.mark.parametrize("op", TWINS)
def test_kernels_compute_what_pytorchs_do(op: str, bench: KernelBench) -> None:
    """Within the rounding of fp32."""
    compare_with_torch(op, bench.run, "cuda")
