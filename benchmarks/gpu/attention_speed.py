"""Attention of one layer, causal and bf16, forward and backward: our kernels and PyTorch's scaled_dot_product_attention, on the card."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

ROUNDS = 5


def ours_seconds(device: Any, batch: int, length: int, heads: int, size: int) -> dict[str, float]:
    """Median seconds of the forward kernel and of the two backward ones, on tiles of a whole layer."""
    from tiles.kernels import BF16, DeviceArray, Pair, kernel

    stream, begin, end = device.stream(), device.event(), device.event()
    device.enter(stream)
    short, single = np.dtype(BF16), np.dtype(np.float32)
    wide, rows = (batch, length, heads * size), (batch, heads, length)
    values = np.random.default_rng(0).standard_normal(prod(wide), np.float32).astype(short)

    def array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        address = device.reserve(prod(shape) * dtype.itemsize)
        if dtype == short:
            stream.copy(address, values.ctypes.data, values.nbytes)
        return DeviceArray(address, shape, dtype)

    q, k, v, o, grad, dq, dk, dv = (array(wide, short) for _ in range(8))
    peak, total, lse, delta = (array(rows, single) for _ in range(4))
    at = Pair(size, size**-0.5, True, 0, 0, 0, 0, heads, length, 0.0, 0)

    def forward() -> None:
        kernel("attention", "cuda")(q, k, v, o, peak, total, lse, o, at=at, first=True, last=True)

    def backward() -> None:
        kernel("attention_delta", "cuda")(o, grad, delta, head_size=size)
        kernel("attention_backward", "cuda")(q, k, v, grad, lse, delta, dq, dk, dv, o, at=at, stored=False, first_k=True, first_q=True)

    def seconds(call: Callable[[], None]) -> float:
        found = []
        for _ in range(ROUNDS):
            stream.record(begin)
            call()
            stream.record(end)
            end.wait()
            found.append(end.seconds_since(begin))
        return statistics.median(found)

    found = {"forward": seconds(forward), "backward": seconds(backward)}
    for each in (q, k, v, o, grad, dq, dk, dv, peak, total, lse, delta):
        device.release(each.address)
    return found


def torch_seconds(batch: int, length: int, heads: int, size: int) -> dict[str, float]:
    """The same of PyTorch; nothing where it has no CUDA."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    shape = (batch, heads, length, size)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad, found = torch.randn(shape, device="cuda", dtype=torch.bfloat16), dict[str, list[float]](forward=[], backward=[])
    for _ in range(ROUNDS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        marks[1].record()
        o.backward(grad)
        marks[2].record()
        marks[2].synchronize()
        found["forward"].append(1e-3 * marks[0].elapsed_time(marks[1]))
        found["backward"].append(1e-3 * marks[1].elapsed_time(marks[2]))
    return {name: statistics.median(each) for name, each in found.items()}
