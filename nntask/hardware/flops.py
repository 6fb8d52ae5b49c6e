"""Floating-point operations of a model, counted in the two usual ways, and the peak rate of the machine to compare them with.

n: tokens per sequence, d: width, i: inner width, m: matrices of a feed-forward layer, a: width of all heads of queries together, k: of all heads of
keys, L: layers, V: vocabulary, N: parameters, A: weights of adapters. A GPT-2 has m = 2 and a = k = d, a LLaMA m = 3, and k < a if queries share
keys.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..architecture.family_config import ModelConfig

Array = npt.NDArray[Any]

_PEAK_SIZES: Final = (512, 1024)
_PEAK_SECONDS: Final = 0.06
_PEAK_TRIES: Final = 2


@dataclass(frozen=True, slots=True)
class FlopCounts:
    """Floating-point operations for one sequence.

    Args:
        forward: operations of a forward pass by NNTile's formula, which counts its recomputation in attention and ignores causality. Per layer: 2mndi
            for the feed-forward layer, 4nd(a + k) for the projections of attention, (6 flash | 4) n^2 a for attention itself. The head: 2ndV, or for
            a classifier its one token and its number of classes in place of n and V.
        backward: operations of a backward pass: twice the products with weights, (14 flash | 8) n^2 a.
        model: 6N + 12Lan per token (Chowdhery et al., PaLM, 2022, appendix B), times n: forward and backward, nothing recomputed. With adapters, the
            N are frozen and have no gradient, which leaves 4N + 6A + 12Lan, and one of the two products with each weight in `backward`. Weights
            count with the tokens that they meet: an encoder's, and those of a decoder's keys and values of the source, with the input's.
        formula: text of the formula of `model`.
    """

    forward: float
    backward: float
    model: float
    formula: str


def flop_counts(
    *,
    n: int,
    d: int,
    i: float,
    layers: int,
    vocab: int,
    num_parameters: int,
    flash: bool,
    a: int | None = None,
    k: int | None = None,
    m: int = 2,
    scored: int | None = None,
    num_source: int = 0,
    num_adapter_weights: int = 0,
) -> FlopCounts:
    """Return the counts for one sequence of n tokens. If there are adapters, only they are trained.

    Args:
        a, k: width of all heads of queries together, and of all heads of keys; None for the width d.
        scored: number of tokens that the head scores; None for n.
        num_source: number of an encoder's tokens that each layer also attends to; their keys and values are not counted here.
    """
    a, k = d if a is None else a, d if k is None else k
    pairs = layers * (n**2 + n * num_source)  # pairs of a token and one that it attends to
    products = layers * (2 * m * n * d * i + 4 * n * d * (a + k)) + 2 * (n if scored is None else scored) * d * vocab
    products += layers * 4 * n * d * a if num_source else 0
    beside = 2 * n * num_adapter_weights
    forward = products + beside + (6 if flash else 4) * pairs * a
    backward = (products if num_adapter_weights else 2 * products) + 2 * beside + (14 if flash else 8) * pairs * a
    weights = (4 if num_adapter_weights else 6) * num_parameters + 6 * num_adapter_weights
    formula = f"{'4N + 6A' if num_adapter_weights else '6N'} + 12Ldn"
    return FlopCounts(float(forward), float(backward), float(n * weights + 12 * pairs * a), formula)


def flop_counts_of(config: ModelConfig, seq_len: int, *, flash: bool, num_adapter_weights: int = 0, target_len: int | None = None) -> FlopCounts:
    """Return the counts for one sequence of a model, as in `flop_counts`; the config of a model without attention has its number of products.

    Args:
        target_len: number of tokens of a decoder whose encoder reads `seq_len`; None for `seq_len`.
    """
    products = getattr(config, "products_per_sequence", None)
    if products is not None:
        beside = 2.0 * seq_len * num_adapter_weights
        backward = (2.0 if num_adapter_weights else 4.0) * products + 2 * beside
        return FlopCounts(2.0 * products + beside, backward, 2.0 * products + beside + backward, "products, forward and backward")
    described = config.description
    vocab, scored = (config.num_labels, 1) if config.num_labels else (config.vocab_size, None)
    count = partial(
        flop_counts,
        d=config.n_embd,
        i=_inner_size(config),
        a=config.n_head * config.head_size,
        k=config.n_kv_head * config.head_size,
        m=config.num_inner_matrices,
        flash=flash,
    )
    layers, total, adapters = len(described.stack.blocks), config.num_active_parameters, num_adapter_weights
    if described.encoder is None:
        return count(n=seq_len, layers=layers, vocab=vocab, scored=scored, num_parameters=total, num_adapter_weights=adapters)
    of_source = layers * 2 * config.n_embd * config.n_kv_head * config.head_size  # weights for keys and values of the encoder's output
    weights = described.encoder.num_parameters(config.n_embd) + of_source
    beside = adapters * weights // total  # in proportion to the weights, because a config does not say where adapters are
    read = count(n=seq_len, layers=len(described.encoder.blocks), vocab=0, num_parameters=weights, num_adapter_weights=beside)
    said = count(
        n=target_len or seq_len,
        layers=layers,
        vocab=vocab,
        num_source=seq_len,
        num_parameters=total - weights,
        num_adapter_weights=adapters - beside,
    )
    products = 2.0 * seq_len * of_source
    backward = read.backward + said.backward + (products if adapters else 2 * products)
    return FlopCounts(read.forward + said.forward + products, backward, read.model + said.model, said.formula)


def _inner_size(config: ModelConfig) -> float:
    """Return the width inside the feed-forward layers that a token passes through, on average over blocks if some have experts."""
    blocks, width = config.description.stack.blocks, config.n_embd
    if not config.description.stack.num_idle(width):
        return config.inner_size
    weights = sum(block.feed_forward.num_parameters(width) - block.feed_forward.num_idle(width) for block in blocks)
    return weights / (len(blocks) * config.num_inner_matrices * width)


@cache
def known_gemm_peak(num_workers: int, dtype: str = "fp32") -> float:
    """Return `gemm_peak`, measured once in a process."""
    return gemm_peak(num_workers, dtype)


def gemm_peak(num_workers: int, dtype: str = "fp32") -> float:
    """Return the flop/s of matrix products on `num_workers` threads at once, the best rate of two sizes and two tries of each. Takes 0.3 s.

    Args:
        dtype: value of --dtype. For bf16, products of bf16 matrices are measured if CPU workers compute them directly, else products of fp32 copies.
    """
    counts = [0] * num_workers
    start = threading.Barrier(num_workers + 1)
    multiply, element = _product(dtype)

    def work(worker: int) -> None:
        for size in _PEAK_SIZES:
            a = np.ones((size, size), element)
            out = np.empty_like(a)
            multiply(a, out)
            for _ in range(_PEAK_TRIES):
                start.wait()
                until = time.perf_counter() + _PEAK_SECONDS
                while time.perf_counter() < until:
                    multiply(a, out)
                    counts[worker] += 1
                start.wait()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(num_workers)]
    for thread in threads:
        thread.start()
    best = 0.0
    for size in _PEAK_SIZES:
        for _ in range(_PEAK_TRIES):
            before = sum(counts)
            start.wait()
            begin = time.perf_counter()
            start.wait()
            best = max(best, (sum(counts) - before) * 2.0 * size**3 / (time.perf_counter() - begin))
    for thread in threads:
        thread.join()
    return best


def _product(dtype: str) -> tuple[Callable[[Array, Array], None], np.dtype[Any]]:
    """Return the function a @ a -> out with which CPU workers compute products of `dtype`, and the type of the matrices that it takes."""
    from tiles.kernels import BF16, bf16_kernel, gemm, has_bf16_products

    native = bf16_kernel("matmul") if dtype == "bf16" and has_bf16_products() else None
    if native is None:
        return lambda a, out: gemm(a, a, out), np.dtype(np.float64 if dtype == "fp64" else np.float32)
    product = native.kernel
    return lambda a, out: product(a, a, out, trans_a=False, trans_b=False, alpha=1.0, accumulate=False), BF16
