"""bf16 products, conversions, elementwise operations and layer norms by oneDNN, on arrays.

A thread prepares each shape once (0.1 to 0.5 ms) and keeps up to `PREPARED` of them; a call costs 9 us. Products are summed in fp32; the instructions
flush denormal numbers to zero. oneDNN packs operands in buffers of its own, per thread, which no budget counts: at most 1.4 MiB for GPT-2's tiles.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .library import Library, loaded

Array = npt.NDArray[Any]

BF16: Final = np.dtype(ml_dtypes.bfloat16)
PREPARED: Final = 2048
"""Number of shapes that a thread keeps prepared; a training step has some dozens, sampling one per length."""

_FP32: Final = np.dtype(np.float32)
_TYPES: Final = {BF16: 2, _FP32: 3}  # dnnl_data_type_t
_SRC, _SRC_1, _DST, _WEIGHTS, _BIAS, _DIFF_SRC, _DIFF_DST = 1, 2, 17, 33, 41, 129, 145  # DNNL_ARG_*
_MEAN, _VARIANCE, _GAMMA, _BETA, _DIFF_GAMMA, _DIFF_BETA = 49, 50, 51, 52, 255, 256  # DNNL_ARG_*
_TRAINING, _BACKWARD = 64, 128  # dnnl_forward_training, dnnl_backward
_ADD: Final = 0x1FFF0  # dnnl_binary_add
_SCALE_AND_SHIFT: Final = 6  # dnnl_use_scale | dnnl_use_shift
_SHAPE: Final = ctypes.c_int64 * 12  # dnnl_dims_t
ACTIVATIONS: Final = {"gelu_new": 0x2B, "gelu": 0x31, "relu": 0x20, "silu": 0x2C, "tanh": 0x21}
"""Values of dnnl_eltwise_gelu_tanh, gelu_erf, relu, swish, tanh."""


class _Argument(ctypes.Structure):
    _fields_ = (("role", ctypes.c_int), ("memory", ctypes.c_void_p))


class _Primitive:
    """One operation prepared for one thread, so that a call only sets the arrays' addresses. It owns and destroys `description` and the layouts."""

    def __init__(self, library: Library, description: ctypes.c_void_p, layouts: dict[int, ctypes.c_void_p], *passing: ctypes.c_void_p) -> None:
        self._library, self._owned = library, [("memory_desc", layout) for layout in (*layouts.values(), *passing)]
        self._primitive = self._own("primitive", library.make("dnnl_primitive_create", description))
        self._stream = self._own("stream", library.make("dnnl_stream_create", library.engine, 1))
        library.call("dnnl_primitive_desc_destroy", description)
        nowhere = ctypes.c_void_p()
        self._memories = [self._own("memory", library.make("dnnl_memory_create", each, library.engine, nowhere)) for each in layouts.values()]
        self._arguments = (_Argument * len(layouts))(*map(_Argument, layouts, self._memories))

    def _own(self, kind: str, what: ctypes.c_void_p) -> ctypes.c_void_p:
        self._owned.append((kind, what))
        return what

    def __call__(self, *arrays: Array) -> None:
        """Run the operation on arrays, in the order of the layouts."""
        library = self._library
        for memory, array in zip(self._memories, arrays, strict=True):
            library.set_address(memory, array.ctypes.data)
        failed = library.execute(self._primitive, self._stream, len(self._memories), self._arguments)
        library.check(failed or library.wait(self._stream), "dnnl_primitive_execute")

    def __del__(self) -> None:
        for kind, what in reversed(self._owned):
            self._library.call(f"dnnl_{kind}_destroy", what)


class _Thread(threading.local):
    """Operations that one thread has prepared."""

    def __init__(self) -> None:
        self.library = loaded()
        self.library.use_one_thread()
        self.prepared: OrderedDict[tuple[Any, ...], _Primitive] = OrderedDict()


_thread: Final = cache(_Thread)


def _prepared(make: Callable[..., _Primitive], *key: Any) -> _Primitive:
    """Return `make(library, *key)`, which each thread calls once per key."""
    thread = _thread()
    whole = (make, *key)
    primitive = thread.prepared.get(whole)
    if primitive is None:
        primitive = thread.prepared[whole] = make(thread.library, *key)
        if len(thread.prepared) > PREPARED:
            thread.prepared.popitem(last=False)
    return primitive


def _layout(library: Library, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> ctypes.c_void_p:
    """Return a memory descriptor; strides in elements."""
    return library.make("dnnl_memory_desc_create_with_strides", len(shape), _SHAPE(*shape), _TYPES[dtype], _SHAPE(*strides))


def _flat(library: Library, size: int, dtype: np.dtype[Any]) -> ctypes.c_void_p:
    return _layout(library, (size,), (1,), dtype)


def _row_step(x: Array) -> int:
    """Return the number of elements from row to row; a matrix of one row may have any stride."""
    return max(int(x.strides[-2]) // x.itemsize, int(x.shape[-1]))


def _matmul(
    library: Library,
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    dtypes: tuple[np.dtype[Any], ...],
    accumulate: bool,
) -> _Primitive:
    """(.., m, k) @ (.., k, n) [+ (1, n)] -> (.., m, n); shapes, strides and dtypes of a, b, out and the bias, if there is one."""
    a, b, out, *bias = (_layout(library, *each) for each in zip(shapes, strides, dtypes, strict=True))
    steps = library.make("dnnl_post_ops_create")
    if accumulate:
        library.call("dnnl_post_ops_append_sum", steps, ctypes.c_float(1.0), ctypes.c_int32(0), 0)
    attributes = library.make("dnnl_primitive_attr_create")
    library.call("dnnl_primitive_attr_set_post_ops", attributes, steps)
    description = library.make("dnnl_matmul_primitive_desc_create", library.engine, a, b, bias[0] if bias else None, out, attributes)
    library.call("dnnl_post_ops_destroy", steps)
    library.call("dnnl_primitive_attr_destroy", attributes)
    return _Primitive(library, description, {_SRC: a, _WEIGHTS: b, _DST: out} | ({_BIAS: bias[0]} if bias else {}))


def gemm(
    a: Array,
    b: Array,
    out: Array,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    accumulate: bool = False,
    bias: Array | None = None,
) -> None:
    """out = op(a) @ op(b) + bias [+ out], summed in fp32 and rounded once. There is no factor: with accumulation oneDNN would use its slow loops.

    Ladder (1024 x 768 x 768, one core with AVX512-BF16): OpenBLAS sgemm 9.6 ms (OPENBLAS_CORETYPE=Haswell) and 4.9 ms (its AVX-512 code), oneDNN's
    fp32 matmul 4.9 ms, bf16 2.48 ms into fp32, 2.50 ms rounded to bf16, 2.62 ms added to fp32. With weights reordered to oneDNN's blocks it takes
    2.39 ms, and reordering 0.03 to 0.15 ms, so tiles are not reordered. Transposed operands 2.5 to 2.6 ms. Two cores together reach 916 GF/s in bf16,
    one 491; in fp32 427 with AVX-512 code and 222 with AVX2 code, one 238 and 126.

    Args:
        a: (M, K), or (K, M) with `trans_a`; bf16, the last axis contiguous, any stride between rows. Or a stack of such matrices, (S, M, K).
        b: (K, N), or (N, K) with `trans_b`; type and strides as for `a`.
        out: (M, N), bf16 or fp32, strides as for `a`; read only with `accumulate`.
        bias: (N,) contiguous, bf16 or fp32; not with stacks.
    """
    shapes: tuple[Any, ...] = (_described(a, trans_a), _described(b, trans_b), _described(out, False))
    arrays: tuple[Array, ...] = (a, b, out)
    if bias is not None:
        shapes, arrays = (*shapes, ((1, bias.size), (bias.size, 1))), (*arrays, bias)
    run = _prepared(_matmul, tuple(s for s, _ in shapes), tuple(s for _, s in shapes), tuple(array.dtype for array in arrays), accumulate)
    run(*arrays)


def _described(x: Array, transposed: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides (in elements) of op(x) for a matrix, or for a stack of matrices."""
    if x.strides[-1] != x.itemsize or (x.shape[-2] > 1 and x.strides[-2] < x.shape[-1] * x.itemsize):
        raise ValueError(f"rows must be contiguous and must not overlap, got shape {x.shape} with strides {x.strides} of {x.itemsize} B each")
    shape, steps = x.shape, (*(int(stride) // x.itemsize for stride in x.strides[:-2]), _row_step(x), 1)
    if not transposed:
        return shape, steps
    return (*shape[:-2], shape[-1], shape[-2]), (*steps[:-2], 1, steps[-2])


def _reorder(
    library: Library, shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...], types: tuple[np.dtype[Any], np.dtype[Any]]
) -> _Primitive:
    layouts = {_SRC: _layout(library, shape, source, types[0]), _DST: _layout(library, shape, target, types[1])}
    ends = (layouts[_SRC], library.engine, layouts[_DST], library.engine)
    return _Primitive(library, library.make("dnnl_reorder_primitive_desc_create", *ends, None), layouts)


def convert(x: Array, out: Array) -> None:
    """out = x between bf16 and fp32, rounded to nearest, ties to even. Arrays are contiguous, or matrices or stacks of them with contiguous rows.

    Ladder (1024 x 768, one core): to bf16 by ml_dtypes 0.26 ms, by integer passes of NumPy in blocks 0.42 ms, by oneDNN 0.04 ms; from bf16 by
    ml_dtypes 0.05 ms, by a shift of NumPy 0.08 ms, by oneDNN 0.04 ms.
    """
    types = (x.dtype, out.dtype)
    if x.flags.c_contiguous and out.flags.c_contiguous:
        _prepared(_reorder, (x.size,), (1,), (1,), types)(x, out)
    else:
        _prepared(_reorder, x.shape, _described(x, False)[1], _described(out, False)[1], types)(x, out)


def _add(library: Library, size: int) -> _Primitive:
    a, b, out = (_flat(library, size, BF16) for _ in range(3))
    description = library.make("dnnl_binary_primitive_desc_create", library.engine, _ADD, a, b, out, None)
    return _Primitive(library, description, {_SRC: a, _SRC_1: b, _DST: out})


def add(a: Array, b: Array, out: Array) -> None:
    """out = a + b for contiguous bf16 arrays of one size."""
    _prepared(_add, a.size)(a, b, out)


def _activation_forward(library: Library, kind: str, x: ctypes.c_void_p, y: ctypes.c_void_p) -> ctypes.c_void_p:
    alpha, beta = ctypes.c_float(1.0 if kind == "silu" else 0.0), ctypes.c_float(0.0)
    return library.make("dnnl_eltwise_forward_primitive_desc_create", library.engine, _TRAINING, ACTIVATIONS[kind], x, y, alpha, beta, None)


def _activation(library: Library, size: int, kind: str) -> _Primitive:
    x, y = (_flat(library, size, BF16) for _ in range(2))
    return _Primitive(library, _activation_forward(library, kind, x, y), {_SRC: x, _DST: y})


def activation(x: Array, y: Array, kind: str) -> None:
    """y = activation(x) for contiguous bf16 arrays; `kind` is a key of `ACTIVATIONS`."""
    _prepared(_activation, x.size, kind)(x, y)


def _activation_backward(library: Library, size: int, kind: str) -> _Primitive:
    x, dy, dx = (_flat(library, size, BF16) for _ in range(3))
    forward = _activation_forward(library, kind, x, x)
    alpha, beta = ctypes.c_float(1.0 if kind == "silu" else 0.0), ctypes.c_float(0.0)
    what = (library.engine, ACTIVATIONS[kind], dx, dy, x, alpha, beta, forward, None)
    description = library.make("dnnl_eltwise_backward_primitive_desc_create", *what)
    library.call("dnnl_primitive_desc_destroy", forward)
    return _Primitive(library, description, {_SRC: x, _DIFF_DST: dy, _DIFF_SRC: dx})


def activation_backward(x: Array, dy: Array, dx: Array, kind: str) -> None:
    """dx = dy * activation'(x) for contiguous bf16 arrays."""
    _prepared(_activation_backward, x.size, kind)(x, dy, dx)


def _layer_norm(library: Library, num_rows: int, width: int, eps: float) -> _Primitive:
    x, y = (_layout(library, (num_rows, width), (width, 1), BF16) for _ in range(2))
    mean, variance = (_flat(library, num_rows, _FP32) for _ in range(2))
    gamma, beta = (_flat(library, width, _FP32) for _ in range(2))
    what = (library.engine, _TRAINING, x, y, mean, ctypes.c_float(eps), _SCALE_AND_SHIFT, None)
    description = library.make("dnnl_layer_normalization_forward_primitive_desc_create", *what)
    return _Primitive(library, description, {_SRC: x, _GAMMA: gamma, _BETA: beta, _DST: y, _MEAN: mean, _VARIANCE: variance})


def layer_norm(x: Array, gamma: Array, beta: Array, y: Array, mean: Array, variance: Array, eps: float) -> None:
    """y = (x - mean) / sqrt(variance + eps) * gamma + beta over rows of contiguous bf16 (R, C); the other arrays are fp32, (C,) and (R,)."""
    _prepared(_layer_norm, *x.shape, eps)(x, gamma, beta, y, mean, variance)


def _layer_norm_backward(library: Library, num_rows: int, width: int) -> _Primitive:
    x, dy = (_layout(library, (num_rows, width), (width, 1), BF16) for _ in range(2))
    dx = _layout(library, (num_rows, width), (width, 1), _FP32)
    mean, variance = (_flat(library, num_rows, _FP32) for _ in range(2))
    gamma, beta, dgamma, dbeta = (_flat(library, width, _FP32) for _ in range(4))
    eps, name = ctypes.c_float(0.0), "dnnl_layer_normalization_{}_primitive_desc_create"
    forward = library.make(name.format("forward"), library.engine, _TRAINING, x, x, mean, eps, _SCALE_AND_SHIFT, None)
    description = library.make(name.format("backward"), library.engine, _BACKWARD, dx, dy, x, mean, eps, _SCALE_AND_SHIFT, forward, None)
    library.call("dnnl_primitive_desc_destroy", forward)
    layouts = {_SRC: x, _GAMMA: gamma, _BETA: beta, _MEAN: mean, _VARIANCE: variance, _DIFF_DST: dy}
    return _Primitive(library, description, layouts | {_DIFF_SRC: dx, _DIFF_GAMMA: dgamma, _DIFF_BETA: dbeta})


def layer_norm_backward(x: Array, gamma: Array, mean: Array, variance: Array, dy: Array, dx: Array, dgamma: Array, dbeta: Array) -> None:
    """Gradients of `layer_norm` with eps = 0; x and dy are contiguous bf16 (R, C), all others fp32; outputs are overwritten."""
    _prepared(_layer_norm_backward, *x.shape)(x, gamma, gamma, mean, variance, dy, dx, dgamma, dbeta)
