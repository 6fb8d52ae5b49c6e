"""The Python frontend of cuDNN (`cudnn`, nvidia-cudnn-frontend 1.27), on the CPU and strict: attention graphs, and nothing else.

`installed` puts it where our code imports it, over the runtime of `strict_cuda`. It takes the arguments that the frontend takes, by name, and refuses
what is refused there or undefined: types, extents and strides that do not fit together, addresses that are not aligned or reach beyond their memory,
a workspace that is too small, a handle of another device, plans made while a graph is recorded, gradients that may differ from run to run. It
computes with NumPy in fp32, rounds as bf16, and asks for as much workspace as Hopper's deterministic gradients.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from math import prod
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from support.fake_cuda import FakeCuda
from support.hazards import Access

from tiles.kernels.cuda import library_attention

NAMES = (
    "create_handle", "cudnnGraphNotSupportedError", "data_type", "destroy_handle", "diagonal_alignment", "heur_mode", "pygraph", "set_stream"
)  # fmt: skip
"""Of the frontend, that are here."""
ALIGNMENT = 16
"""Of addresses, as the backend takes them for bf16 (cuDNN, tensor descriptors)."""


class DataType(Enum):
    """`cudnn.data_type`."""

    BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
    FLOAT = np.dtype(np.float32)


class HeuristicMode(Enum):
    """`cudnn.heur_mode`."""

    A = 0
    FALLBACK = 2


class DiagonalAlignment(Enum):
    """`cudnn.diagonal_alignment`."""

    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


class cudnnGraphNotSupportedError(Exception):
    """A graph that no engine supports."""


@dataclass(eq=False)
class GraphTensor:
    """`cudnn.tensor`."""

    name: str
    dim: list[int]
    stride: list[int]
    data_type: DataType | None
    is_output: bool = False

    def set_output(self, value: bool) -> GraphTensor:
        self.is_output = value
        return self

    def set_dim(self, dim: list[int]) -> GraphTensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> GraphTensor:
        self.stride = stride
        return self

    def set_data_type(self, data_type: DataType) -> GraphTensor:
        self.data_type = data_type
        return self

    def array(self, address: int) -> np.ndarray:
        """What lies there."""
        assert self.data_type is not None
        kind = self.data_type.value
        flat = np.frombuffer((ctypes.c_char * self.nbytes).from_address(address), kind)
        return np.lib.stride_tricks.as_strided(flat, self.dim, [step * kind.itemsize for step in self.stride])

    @property
    def nbytes(self) -> int:
        """From the first element to the last."""
        assert self.data_type is not None
        return (sum((extent - 1) * step for extent, step in zip(self.dim, self.stride, strict=True)) + 1) * self.data_type.value.itemsize


class StrictCudnn:
    """The module.

    Args:
        cuda: the runtime below.
        declines: from the numbers of a graph, the extents of its queries, to whether no engine supports it.
        idle: pieces of work that do nothing, behind each graph: they take as long as kernels do.

    Attributes:
        num_planned, num_started: graphs.
    """

    data_type, heur_mode, diagonal_alignment = DataType, HeuristicMode, DiagonalAlignment
    cudnnGraphNotSupportedError = cudnnGraphNotSupportedError

    def __init__(self, cuda: FakeCuda, declines: Callable[[Sequence[int]], bool], idle: int) -> None:
        self.cuda, self.declines, self.idle = cuda, declines, idle
        self.num_planned = self.num_started = 0
        self._handles: dict[int, tuple[int, int]] = {}

    def create_handle(self) -> int:
        self.cuda._unsafe("cudnnCreate")
        number = 0x700_0000_0000 + len(self._handles)
        self._handles[number] = self.cuda.getDevice(), 0
        return number

    def of(self, handle: object) -> tuple[int, int]:
        """Device and stream of a handle."""
        if type(handle) is not int or handle not in self._handles:
            raise self.cuda.refuse(f"{handle!r} is no handle of cuDNN, or one that was destroyed")
        if self._handles[handle][0] != self.cuda.getDevice():
            raise self.cuda.refuse(f"a handle of device {self._handles[handle][0]} is used while device {self.cuda.getDevice()} is current")
        return self._handles[handle]

    def set_stream(self, *, handle: int, stream: int) -> None:
        self._handles[handle] = self.of(handle)[0], stream

    def destroy_handle(self, handle: int) -> None:
        self.of(handle)
        del self._handles[handle]

    def pygraph(self, *, io_data_type: DataType, intermediate_data_type: DataType, compute_data_type: DataType, handle: int) -> StrictGraph:
        self.of(handle)
        if (io_data_type, intermediate_data_type, compute_data_type) != (DataType.BFLOAT16, DataType.FLOAT, DataType.FLOAT):
            raise self.cuda.refuse("tiles are bf16 here, and sums fp32")
        return StrictGraph(self, handle)


class StrictGraph:
    """`cudnn.pygraph` with one operation.

    Args:
        library: of the graph.
        handle: it is planned with.

    Attributes:
        selected_engine: a kernel in Python that computes it; none does here.
    """

    selected_engine = None

    def __init__(self, library: StrictCudnn, handle: int) -> None:
        self._library, self._cuda, self._handle = library, library.cuda, handle
        self._inputs: list[GraphTensor] = []
        self._outputs: list[GraphTensor] = []
        self._run: Callable[..., tuple[np.ndarray, ...]] | None = None
        self._stage = 0
        self._scores = 0
        self._most_workspace: int | None = None

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: DataType) -> GraphTensor:
        self._inputs.append(GraphTensor(name, dim, stride, data_type))
        return self._inputs[-1]

    def sdpa(
        self, *, q: GraphTensor, k: GraphTensor, v: GraphTensor, attn_scale: float, generate_stats: bool, name: str,
        diagonal_alignment: DiagonalAlignment | None = None, diagonal_band_right_bound: int | None = None,
    ) -> tuple[GraphTensor, GraphTensor]:  # fmt: skip
        if not generate_stats:
            raise self._cuda.refuse("gradients need the statistics of the forward pass")
        self._check(q, k, v, attn_scale, diagonal_alignment, diagonal_band_right_bound)
        causal = diagonal_band_right_bound == 0
        self._run = lambda q, k, v: forward(q, k, v, attn_scale, causal)
        self._outputs = [GraphTensor("o", [], [], DataType.BFLOAT16), GraphTensor("stats", [], [], None)]
        self._want = [(q.dim, DataType.BFLOAT16), ([*q.dim[:3], 1], DataType.FLOAT)]
        return self._outputs[0], self._outputs[1]

    def sdpa_backward(
        self, *, q: GraphTensor, k: GraphTensor, v: GraphTensor, o: GraphTensor, dO: GraphTensor, stats: GraphTensor, attn_scale: float,
        use_deterministic_algorithm: bool, name: str, diagonal_alignment: DiagonalAlignment | None = None,
        diagonal_band_right_bound: int | None = None,
    ) -> tuple[GraphTensor, GraphTensor, GraphTensor]:  # fmt: skip
        if not use_deterministic_algorithm:
            raise self._cuda.refuse("gradients by atomic sums differ from run to run")
        self._check(q, k, v, attn_scale, diagonal_alignment, diagonal_band_right_bound)
        if o.dim != q.dim or dO.dim != q.dim or stats.dim != [*q.dim[:3], 1] or stats.data_type is not DataType.FLOAT:
            raise self._cuda.refuse(f"o and dO are like q, statistics fp32 (b, h, t, 1); got {o}, {dO}, {stats}")
        causal = diagonal_band_right_bound == 0
        self._run = lambda q, k, v, o, do, stats: backward(q, k, v, o, do, stats, attn_scale, causal)
        self._scores = prod(q.dim[:3]) * k.dim[2]
        self._outputs = [GraphTensor(each, [], [], DataType.BFLOAT16) for each in ("dq", "dk", "dv")]
        self._want = [(x.dim, DataType.BFLOAT16) for x in (q, k, v)]
        return self._outputs[0], self._outputs[1], self._outputs[2]

    def _check(self, q: GraphTensor, k: GraphTensor, v: GraphTensor, scale: object, alignment: object, bound: object) -> None:
        (b, h, _, d), (bk, g, _, dk) = q.dim, k.dim
        if b != bk or d != dk or h % g or v.dim != k.dim or type(scale) is not float:
            raise self._cuda.refuse(f"k and v fit q, and the scale is a float; got {q}, {k}, {v} and {scale!r}")
        if (alignment, bound) not in ((None, None), (DiagonalAlignment.TOP_LEFT, 0)):
            raise self._cuda.refuse(f"a mask is none or causal here, got {alignment} and {bound}")
        if any(x.data_type is not DataType.BFLOAT16 for x in (q, k, v)):
            raise self._cuda.refuse("q, k and v are bf16")

    def _at(self, stage: int, call: str) -> None:
        self._cuda._unsafe(call)
        if self._stage != stage:
            raise self._cuda.refuse(f"{call} is called out of order")
        self._stage += 1

    def validate(self) -> None:
        self._at(0, "validate")
        for tensor, want in zip(self._outputs, self._want, strict=True):
            if not tensor.is_output or (tensor.dim, tensor.data_type) != want or len(tensor.stride) != len(tensor.dim):
                raise self._cuda.refuse(f"an output is {want} and marked as one, got {tensor}")
        for tensor in (*self._inputs, *self._outputs):
            if tensor.stride[-1] != 1:
                raise self._cuda.refuse(f"features lie side by side, got {tensor}")

    def build_operation_graph(self) -> None:
        self._at(1, "build_operation_graph")

    def create_execution_plans(self, modes: list[HeuristicMode]) -> None:
        self._at(2, "create_execution_plans")
        assert modes == [HeuristicMode.A]

    def deselect_workspace_greater_than(self, nbytes: int) -> None:
        if self._stage != 3:
            raise self._cuda.refuse("plans are deselected once there are some, and before their support is checked")
        self._most_workspace = nbytes

    def check_support(self) -> None:
        self._at(3, "check_support")
        queries = self._inputs[0].dim
        if queries[3] % 8 or queries[3] > 128 or self._library.declines(queries):
            raise cudnnGraphNotSupportedError("no engine supports this graph")
        if self._most_workspace is not None and 2 * self._scores > self._most_workspace:
            raise cudnnGraphNotSupportedError("every plan\nwants more workspace")

    def build_plans(self) -> None:
        self._at(4, "build_plans")
        self._library.of(self._handle)
        self._library.num_planned += 1

    def get_workspace_size(self) -> int:
        assert self._stage == 5
        return 2 * self._scores

    def execute(self, pack: Mapping[GraphTensor, int], workspace: int, *, handle: int) -> None:
        if self._stage != 5 or handle != self._handle:
            raise self._cuda.refuse("a graph is built, and carried out with the handle that it was planned with")
        device, stream = self._library.of(handle)
        if set(pack) != {*self._inputs, *self._outputs}:
            raise self._cuda.refuse(f"every input and output has an address, got {[tensor.name for tensor in pack]}")
        accesses = [Access(workspace, self.get_workspace_size(), True)] if self._scores else []
        accesses += [Access(address, tensor.nbytes, tensor.is_output) for tensor, address in pack.items()]
        for address, nbytes, _ in accesses:
            if type(address) is not int or address % ALIGNMENT or self._cuda.memory_at(address, nbytes, "a tensor of cuDNN") != device:
                raise self._cuda.refuse(f"tensors are memory of the handle's device in units of {ALIGNMENT} bytes, got {address!r}")
        self._library.num_started += 1
        self._cuda.submit(stream, "attention of cuDNN", accesses, lambda: self._compute(pack))
        for _ in range(self._library.idle):
            self._cuda.submit(stream, "a pause of cuDNN", [], lambda: None)

    def _compute(self, pack: Mapping[GraphTensor, int]) -> None:
        assert self._run is not None
        found = self._run(*(tensor.array(pack[tensor]).astype(np.float32) for tensor in self._inputs))
        for tensor, values in zip(self._outputs, found, strict=True):
            tensor.array(pack[tensor])[...] = values


def _weights(q: np.ndarray, k: np.ndarray, scale: float, causal: bool) -> np.ndarray:
    """Scores  # (b, h, tq, tk)."""
    s = scale * (q @ np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(-1, -2))
    return np.where(np.tri(*s.shape[2:], dtype=bool), s, -np.inf) if causal else s


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """o and the log-sum-exps."""
    s = _weights(q, k, scale, causal)
    top = s.max(axis=-1, keepdims=True)
    lse = top + np.log(np.exp(s - top).sum(axis=-1, keepdims=True))
    return np.exp(s - lse) @ np.repeat(v, q.shape[1] // v.shape[1], axis=1), lse


def backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray, do: np.ndarray, lse: np.ndarray, scale: float, causal: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq, dk and dv."""
    share = q.shape[1] // k.shape[1]

    def over(x: np.ndarray) -> np.ndarray:
        return x.reshape(x.shape[0], -1, share, *x.shape[2:]).sum(axis=2)

    p = np.exp(_weights(q, k, scale, causal) - lse)
    ds = scale * p * (do @ np.repeat(v, share, axis=1).swapaxes(-1, -2) - (do * o).sum(axis=-1, keepdims=True))
    return ds @ np.repeat(k, share, axis=1), over(ds.swapaxes(-1, -2) @ q), over(p.swapaxes(-1, -2) @ do)


@contextmanager
def installed(cuda: FakeCuda, declines: Callable[[Sequence[int]], bool] = lambda queries: False, *, idle: int = 0) -> Iterator[StrictCudnn]:
    """The frontend in place of the real one."""
    library, module = StrictCudnn(cuda, declines, idle), ModuleType("cudnn")
    for name in (
        "data_type",
        "heur_mode",
        "diagonal_alignment",
        "cudnnGraphNotSupportedError",
        "create_handle",
        "set_stream",
        "destroy_handle",
        "pygraph",
    ):
        setattr(module, name, getattr(library, name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cudnn", module)
        library_attention.frontend.cache_clear()
        yield library
    library_attention.frontend.cache_clear()
