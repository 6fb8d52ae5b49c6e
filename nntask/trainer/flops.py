"""Floating-point operations of a GPT-2, counted in the two usual ways, and the peak they are compared with.

n: tokens per sequence, d: width, i: inner width, L: layers, V: vocabulary, N: parameters.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

_PEAK_SIZE: Final = 512
_PEAK_SECONDS: Final = 0.06
_PEAK_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class FlopCounts:
    """What one sequence costs.

    Args:
        forward: of a forward pass, NNTile's formula (counts its recomputation in attention, ignores causality).
        backward: of a backward pass, NNTile's formula.
        model: 6N + 12Ldn per token (Chowdhery et al., PaLM, 2022, appendix B), times n: forward and backward, nothing recomputed.
    """

    forward: float
    backward: float
    model: float


def flop_counts(*, n: int, d: int, i: int, layers: int, vocab: int, num_parameters: int, flash: bool) -> FlopCounts:
    """Counts for one sequence of n tokens."""
    forward = layers * (4 * n * d * i + 8 * n * d**2 + (6 if flash else 4) * n**2 * d) + 2 * n * d * vocab
    backward = layers * (8 * n * d * i + 16 * n * d**2 + (14 if flash else 8) * n**2 * d) + 4 * n * d * vocab
    return FlopCounts(float(forward), float(backward), float(n * (6 * num_parameters + 12 * layers * d * n)))


def gemm_peak(num_workers: int) -> float:
    """Flop/s of fp32 matrix products on `num_workers` threads at once, the best of three tries: what no step on them can beat. Takes 0.2 s."""
    from tiles.kernels.cpu.blas import gemm

    counts = [0] * num_workers
    start = threading.Barrier(num_workers + 1)

    def work(worker: int) -> None:
        a = np.ones((_PEAK_SIZE, _PEAK_SIZE), np.float32)
        out = np.empty_like(a)
        gemm(a, a, out)
        for _ in range(_PEAK_TRIES):
            start.wait()
            until = time.perf_counter() + _PEAK_SECONDS
            while time.perf_counter() < until:
                gemm(a, a, out)
                counts[worker] += 1
            start.wait()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(num_workers)]
    for thread in threads:
        thread.start()
    best = 0.0
    for _ in range(_PEAK_TRIES):
        before = sum(counts)
        start.wait()
        begin = time.perf_counter()
        start.wait()
        best = max(best, (sum(counts) - before) * 2.0 * _PEAK_SIZE**3 / (time.perf_counter() - begin))
    for thread in threads:
        thread.join()
    return best
