"""The kernels of a training step, one at a time, on the card: time of a launch in a graph, and what it moves or computes in a second.

Bytes are those of the arguments that a kernel must read or write, once each; a number of them comes from a cache if arguments are small.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

CALLS = 10
ROUNDS = 5


class Bench:
    """Arrays on a device, and times of calls.

    Args:
        device: a `CudaDevice`, for the calling thread from now on.
    """

    def __init__(self, device: Any) -> None:
        from tiles.kernels import BF16

        self.device = device
        self.stream = device.stream()
        device.enter(self.stream)
        self.short, self.single = np.dtype(BF16), np.dtype(np.float32)
        self._values = 0.05 * np.random.default_rng(0).standard_normal(1 << 20, np.float32)

    def array(self, *shape: int, dtype: Any = None, values: np.ndarray | None = None) -> Any:
        """A new array, bf16 unless `dtype` is given, of these values, or of small random ones, which are positive but in bf16."""
        from tiles.kernels import DeviceArray

        dtype = self.short if dtype is None else np.dtype(dtype)
        found = DeviceArray(self.device.reserve(max(1, prod(shape) * dtype.itemsize)), shape, dtype)
        small = self._values if dtype == self.short else np.abs(self._values)
        source = np.ascontiguousarray((small if values is None else values).astype(dtype))
        for offset in range(0, found.nbytes, source.nbytes):
            self.stream.copy(found.address + offset, source.ctypes.data, min(source.nbytes, found.nbytes - offset))
        end = self.device.event()
        self.stream.record(end)
        end.wait()  # the source may be released
        return found

    def seconds(self, call: Callable[[], None]) -> float:
        """Median time of a call within a graph of several."""
        begin, end, found = self.device.event(), self.device.event(), []

        def calls() -> None:
            for _ in range(CALLS):
                call()

        call()  # compiles its source
        graph = self.device.capture(self.stream, calls)
        for number in range(ROUNDS + 1):
            self.stream.record(begin)
            self.stream.start(graph)
            self.stream.record(end)
            end.wait()
            if number:
                found.append(end.seconds_since(begin) / CALLS)
        return statistics.median(found)


Row = tuple[str, Callable[[], None], Sequence[Any], float]
"""Name, call, arrays that it must read or write once, flops."""


def rows(bench: Bench, batch: int, length: int, heads: int, vocab: int) -> Iterator[Row]:
    """The kernels of a layer, of the head and of the update of GPT-2, heads of 64."""
    from tiles.kernels import Pair, head_scratch_nbytes, kernel

    def run(name: str, *arrays: Any, **constants: Any) -> Callable[[], None]:
        return lambda: kernel(name, "cuda")(*arrays, **constants)

    array, width, tokens = bench.array, 64 * heads, batch * length
    x, y, z, u = (array(batch, length, width) for _ in range(4))
    wide, wider, wide_slope = (array(batch, length, 4 * width) for _ in range(3))
    vector, row, long_row, w, wide_w = array(width), array(width), array(4 * width), array(width, width), array(width, 4 * width)
    dq, dk, dv = (array(batch, length, width) for _ in range(3))
    sums, more_sums, column, long_sums = (array(n, dtype=np.float32) for n in (width, width, width, 4 * width))
    mean, rstd = (array(batch, length, dtype=np.float32) for _ in range(2))
    lse, delta, peak, total = (array(batch, heads, length, dtype=np.float32) for _ in range(4))
    at = Pair(64, 64**-0.5, True, 0, 0, 0, 0, heads, length, 0.0, length)
    half = 2.0 * tokens * length * width / 2  # flops of one product of attention, causal
    scratch = array(1, dtype=np.uint8)
    yield "add", run("add", x, y, z), (x, y, z), 0
    yield "layer_norm", run("layer_norm", x, vector, row, y, mean, rstd, eps=1e-5), (x, y), 0
    yield "residual_layer_norm", run("residual_layer_norm", x, y, vector, row, z, u, mean, rstd, eps=1e-5), (x, y, z, u), 0
    arrays, flags = (x, vector, mean, rstd, y, z, u, sums, more_sums), {"accumulate": False, "residual": True}
    yield "layer_norm_backward", run("layer_norm_backward", *arrays, **flags), (x, y, z, u), 0
    chained = run("layer_norm_backward", *arrays, **flags, more=(dq, dk), sums=(column, False))
    yield "layer_norm_backward, three slopes, column_sums", chained, (x, y, z, u, dq, dk), 0
    yield "column_sums", run("column_sums", x, sums, accumulate=False), (x,), 0
    yield "column_sums, wide", run("column_sums", wide, long_sums, accumulate=False), (wide,), 0
    yield "activation_backward", run("activation_backward", wide, wider, wide_slope, kind="gelu_new"), (wide, wider, wide_slope), 0
    product = {"trans_a": False, "trans_b": False, "alpha": 1.0, "accumulate": False}
    yield "matmul", run("matmul", x, w, y, **product), (x, w, y), 2.0 * tokens * width * width
    yield "linear_bias", run("linear_bias", x, w, row, y, trans_b=False), (x, w, y), 2.0 * tokens * width * width
    yield "matmul, wide", run("matmul", x, wide_w, wide, **product), (x, wide_w, wide), 8.0 * tokens * width * width
    yield (
        "linear_activation",
        run("linear_activation", x, wide_w, long_row, wide, wider, kind="gelu_new", trans_b=False, accumulate=False),
        (x, wide_w, wide, wider),
        8.0 * tokens * width * width,
    )
    yield "attention", run("attention", x, y, z, u, peak, total, lse, scratch, at=at, first=True, last=True), (x, y, z, u), 2 * half
    yield "attention_delta", run("attention_delta", x, y, delta, head_size=64), (x, y), 0
    grads = run("attention_backward", x, y, z, u, lse, delta, dq, dk, dv, scratch, at=at, stored=False, first_k=True, first_q=True)
    yield "attention_backward", grads, (x, y, z, u, dq, dk, dv), 5 * half
    table, slope = array(vocab, width), array(vocab, width, dtype=np.float32)
    m, v, master = (array(vocab, width, dtype=np.float32) for _ in range(3))
    hyper, norm = (array(*shape, dtype=np.float64) for shape in ((1, 8), (1,)))
    update = run("adam", table, slope, m, v, hyper, norm, master, row=0, decoupled=True, max_norm=1.0, clip=True, master=True)
    yield "adam", update, (table, slope, m, m, v, v, master, master), 0
    yield "sum_squares", run("sum_squares", slope, norm), (slope,), 0
    ids = array(batch, length, dtype=np.int32, values=np.random.default_rng(0).integers(0, vocab, tokens))
    yield "embedding_backward", run("embedding_backward", ids, x, slope, v_start=0, accumulate=False), (x, slope), 0
    picked, peaks, totals = (array(batch, length, dtype=np.float32) for _ in range(3))
    room = array(head_scratch_nbytes(tokens, vocab, width), dtype=np.uint8)
    forward = run("head_forward", x, table, ids, peaks, totals, picked, room, num_c=1, v_start=0, vocab=vocab, first=True)
    flops = 2.0 * tokens * width * vocab
    yield "head_forward", forward, (x, table), flops
    yield from (*_joined_products(bench, batch, length, width), *_head_products(bench, table, vocab))
    constants = {"num_c": 1, "v_start": 0, "scale": 1 / tokens, "first": True, "accumulate": False}
    yield "head_backward", run("head_backward", x, table, ids, peaks, y, slope, room, **constants), (x, table, y, slope), 3 * flops


def _joined_products(bench: Bench, batch: int, length: int, width: int) -> Iterator[Row]:
    """Products of a backward pass that are one launch, and one of those that they replace."""
    from tiles.kernels import kernel

    array, flops = bench.array, 2.0 * batch * length * width * width
    x, *slopes = (array(batch, length, width) for _ in range(4))
    sums = [array(width, width, dtype=np.float32) for _ in slopes]
    w, pre, out = array(width, 4 * width), array(batch, length, 4 * width), array(batch, length, 4 * width)
    how: dict[str, Any] = {"trans_a": True, "trans_b": False, "accumulate": False}
    yield "matmul, gradient of a weight", lambda: kernel("matmul", "cuda")(x, slopes[0], sums[0], **how, alpha=1.0), (x, slopes[0], sums[0]), flops
    yield "matmuls, of three weights", lambda: kernel("matmuls", "cuda")(x, *slopes, *sums, **how, num_a=1, num_b=3), (x, *slopes, *sums), 3 * flops
    onto = dict(how, trans_a=False, accumulate=True)
    yield (
        "matmul, added to dx",
        lambda: kernel("matmul", "cuda")(slopes[0], w.at(w.dtype, width, width), x, **onto, alpha=1.0),
        (slopes[0], x, x),
        flops,
    )
    slope = kernel("linear_activation_backward", "cuda")
    yield "linear_activation_backward", lambda: slope(x, w, pre, out, kind="gelu_new", trans_b=False), (x, w, pre, out), 4 * flops


def _head_products(bench: Bench, table: Any, vocab: int) -> Iterator[Row]:
    """dx of the head over all columns, which may be odd in number, and over a multiple of 8; rows begin at multiples of 32 bytes in both."""
    rows, width, stride = 2560, table.shape[1], 2 * (-(-vocab // 8) * 8)
    p, dx = bench.array(rows, stride), bench.array(rows, width)
    for columns in (vocab, vocab - vocab % 8):
        part, how = p.at(p.dtype, rows, columns), {"trans_a": False, "trans_b": False, "alpha": 1.0, "accumulate": False, "stride_a": stride}
        call = lambda part=part, w=table[:columns], how=how: bench.device.gemm(part, w, dx, **how)  # noqa: E731
        yield f"matmul, of {columns:,} columns", call, (part, table, dx), 2.0 * rows * columns * width


def measure(device: Any, batch: int, length: int, heads: int, vocab: int) -> dict[str, str]:
    """Time of each kernel in words: microseconds, TFLOP/s where it has products, else GB/s."""
    bench, found = Bench(device), {}
    for name, call, arrays, flops in rows(bench, batch, length, heads, vocab):
        seconds = bench.seconds(call)
        rate = f"{flops / seconds / 1e12:.0f} TFLOP/s" if flops else f"{sum(array.nbytes for array in arrays) / seconds / 1e9:.0f} GB/s"
        found[name] = f"{1e6 * seconds:.1f} us, {rate}"
    return found
