"""Attention of one layer, causal and bf16, forward and backward, on the card: our kernels, cuDNN behind `--attention cudnn`, and PyTorch's
scaled_dot_product_attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

ROUNDS = 5


def ours_seconds(device: Any, batch: int, length: int, heads: int, size: int) -> dict[str, float]:
    """Median seconds of the forward kernel and of the two backward ones, on tiles of a whole layer."""
    from tiles.kernels import BF16, DeviceArray, Pair, kernel

    stream = device.stream()
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

    found = {"forward": _seconds(device, stream, forward), "backward": _seconds(device, stream, backward)}
    for each in (q, k, v, o, grad, dq, dk, dv, peak, total, lse, delta):
        device.release(each.address)
    return found


def _seconds(device: Any, stream: Any, call: Callable[[], None]) -> float:
    begin, end, found = device.event(), device.event(), []
    for _ in range(ROUNDS):
        stream.record(begin)
        call()
        stream.record(end)
        end.wait()
        found.append(end.seconds_since(begin))
    return statistics.median(found)


def cudnn_seconds(device: Any, batch: int, length: int, heads: int, size: int) -> dict[str, Any]:
    """The same of cuDNN, gradients by its deterministic algorithm; the largest difference of o and dq from our kernels', and whether every round has
    left the same bits; why there is nothing where it is not installed, or leaves the shape to our kernels. The device has not opened it yet."""
    from tiles.kernels import BF16, DeviceArray, Pair, kernel

    stream = device.stream()
    device.enter(stream)
    short, single = np.dtype(BF16), np.dtype(np.float32)
    wide, rows = (batch, length, heads * size), (batch, heads, length)
    rng, reserved = np.random.default_rng(0), []

    def array(shape: tuple[int, ...], dtype: np.dtype[Any], *, filled: bool = False) -> DeviceArray:
        reserved.append(device.reserve(prod(shape) * dtype.itemsize))
        if filled:
            values = rng.standard_normal(prod(shape), np.float32).astype(dtype)
            stream.copy(reserved[-1], values.ctypes.data, values.nbytes)
        return DeviceArray(reserved[-1], shape, dtype)

    q, k, v, grad = (array(wide, short, filled=True) for _ in range(4))
    o, dq, dk, dv = (array(wide, short) for _ in range(4))
    lse, scratch = array(rows, single), array((2, *rows), single)
    at, event = Pair(size, size**-0.5, True, 0, 0, 0, 0, heads, length, 0.0, 0), device.event()

    def read(x: DeviceArray) -> np.ndarray:
        found = np.empty(x.shape, x.dtype)
        stream.copy(found.ctypes.data, x.address, found.nbytes)
        stream.record(event)
        event.wait()
        return found

    def forward() -> None:
        kernel("whole_attention", "cuda")(q, k, v, o, lse, scratch, at=at)

    def backward() -> None:
        kernel("whole_attention_backward", "cuda")(q, k, v, o, lse, grad, dq, dk, dv, scratch, at=at)

    try:
        return _of_library(device, stream, (forward, backward), read, (o, dq, dk, dv))
    finally:
        for address in reserved:
            device.release(address)


def _of_library(
    device: Any, stream: Any, passes: Sequence[Callable[[], None]], read: Callable[[Any], np.ndarray], outputs: Sequence[Any]
) -> dict[str, Any]:
    """Run both passes by our kernels, then by cuDNN, and compare the outputs; the reason if cuDNN does not run them."""
    forward, backward = passes
    forward()
    backward()
    ours = [read(x).astype(np.float32) for x in outputs[:2]]
    declined: list[str] = []
    try:
        device.open_attention(declined.append)
    except ImportError as error:
        return {"not there": str(error)}
    device.enter(stream)
    forward()
    backward()
    if declined:
        return {"not there": declined[0]}
    found: dict[str, Any] = {"forward": _seconds(device, stream, forward), "backward": _seconds(device, stream, backward)}
    first = [read(x) for x in outputs]
    found["away"] = float(max(np.abs(x.astype(np.float32) - y).max() for x, y in zip(first, ours, strict=False)))
    backward()
    found["same bits"] = all(np.array_equal(x, read(y)) for x, y in zip(first, outputs, strict=True))
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
