"""Attention of whole sequences on a GPU by cuDNN, through NVIDIA's frontend (the package `cudnn`): a handle on one stream, a workspace of its own.

Letters: b sequences, h heads of queries, g heads of keys and values, t tokens, d features of a head. Tiles (b, t, h * d) are given as they lie, as
(b, h, t, d) with strides. What it saves is ours: Stats (b, h, t, 1), fp32, are the natural log-sum-exps of the scores (frontend, Attention.md).

Forward and backward pass of a shape are planned together, when it is first met, and used together or not at all: a shape is ours where cuDNN says
that it does not support one of them, or where one wants more workspace than is reserved. That, and the plan that its heuristics choose, depend on the
shape, the card and the versions of the libraries alone, and gradients are asked for with `use_deterministic_algorithm`: equal runs have equal bits.
Planning allocates and compiles, so it is refused while a graph is recorded; fused tasks start their kernels one by one before they record them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

from ..registry import BF16
from .array import DeviceArray

ATTENTION_WORKSPACE_NBYTES: Final = 320 << 20
"""The deterministic gradients of Hopper keep 2 bytes a score, for which the frontend takes up to 256 MiB, and sums in fp32 beside them."""
MOST_FEATURES: Final = 128
"""Largest heads that gradients are supported for on all cards from Ampere on."""
INSTALL_CUDNN: Final = "pip install -e '.[cudnn13]' (drivers from 580) or '.[cudnn12]' (drivers from 525)"


class WholeShape(NamedTuple):
    """What a plan depends on.

    Args:
        b: sequences.
        tq, tk: tokens of queries, and of keys and values.
        heads, groups: h and g.
        size: d.
        scale: factor of the scores.
        causal: whether later keys are masked.
    """

    b: int
    tq: int
    tk: int
    heads: int
    groups: int
    size: int
    scale: float
    causal: bool


class _Plans(NamedTuple):
    """Graphs of a shape, and their tensors in the order of the arguments of `forward` and `backward`."""

    forward: Any
    of_forward: tuple[Any, ...]
    backward: Any
    of_backward: tuple[Any, ...]


def shape_of(q: DeviceArray, k: DeviceArray, size: int, scale: float, causal: bool) -> WholeShape:
    """The shape of an attention of tiles of whole sequences."""
    (b, tq, width), (_, tk, narrow) = q.shape, k.shape
    return WholeShape(b, tq, tk, width // size, narrow // size, size, scale, causal)


class LibraryAttention:
    """cuDNN's attention for one thread and one stream.

    Args:
        workspace: address of `ATTENTION_WORKSPACE_NBYTES` of the device's memory; the device is the calling thread's current one.

    Attributes:
        num_served, num_declined: shapes that were planned, and those that are left to our kernels.

    Raises:
        ImportError: the package or the library is missing.
    """

    def __init__(self, workspace: int) -> None:
        self._cudnn = frontend()
        self._workspace = workspace
        self._plans: dict[WholeShape, _Plans | None] = {}
        self.num_served = self.num_declined = 0
        try:
            self._handle: Any = self._cudnn.create_handle()
        except RuntimeError as error:
            raise ImportError(f"cuDNN does not start ({error}), which its frontend needs; {INSTALL_CUDNN} brings it") from error

    def use(self, stream: int) -> None:
        """Compute on that stream from now on."""
        self._cudnn.set_stream(handle=self._handle, stream=stream)

    def takes(self, shape: WholeShape, *, may_plan: bool) -> bool:
        """Whether cuDNN computes attention of that shape, forward and backward.

        Args:
            may_plan: whether this is no moment at which a graph is recorded.

        Raises:
            RuntimeError: the shape is not planned yet, and may not be planned now.
        """
        if shape not in self._plans:
            if not may_plan:
                raise RuntimeError(f"attention is planned before a graph is recorded, and {shape} is not; start it once outside of a graph")
            found = self._plans[shape] = self._planned(shape)
            self.num_served += found is not None
            self.num_declined += found is None
        return self._plans[shape] is not None

    def forward(self, shape: WholeShape, q: DeviceArray, k: DeviceArray, v: DeviceArray, o: DeviceArray, lse: DeviceArray) -> None:
        """Start o and lse of a shape that it takes."""
        plans = self._plans[shape]
        assert plans is not None
        self._start(plans.forward, plans.of_forward, (q, k, v, o, lse))

    def backward(self, shape: WholeShape, *tiles: DeviceArray) -> None:
        """Start dq, dk and dv of a shape that it takes; `tiles` are q, k, v, o, lse, do, dq, dk, dv."""
        plans = self._plans[shape]
        assert plans is not None
        self._start(plans.backward, plans.of_backward, tiles)

    def close(self) -> None:
        """Give back what cuDNN took; idempotent."""
        handle, self._handle = self._handle, None
        self._plans.clear()
        if handle is not None:
            self._cudnn.destroy_handle(handle)

    def _start(self, graph: Any, tensors: tuple[Any, ...], tiles: tuple[DeviceArray, ...]) -> None:
        graph.execute({tensor: tile.address for tensor, tile in zip(tensors, tiles, strict=True)}, self._workspace, handle=self._handle)

    def _planned(self, shape: WholeShape) -> _Plans | None:
        """Plans of both passes; None where one is not supported, or wants more workspace than there is."""
        try:
            forward, backward = self._forward_graph(shape), self._backward_graph(shape)
            for graph, _ in (forward, backward):
                graph.validate()
                graph.build_operation_graph()
                graph.create_execution_plans([self._cudnn.heur_mode.A])
                graph.check_support()
                graph.build_plans()
        except self._cudnn.cudnnGraphNotSupportedError:
            return None
        if any(graph.get_workspace_size() > ATTENTION_WORKSPACE_NBYTES for graph, _ in (forward, backward)):
            return None
        return _Plans(*forward, *backward)

    def _forward_graph(self, shape: WholeShape) -> tuple[Any, tuple[Any, ...]]:
        graph = self._graph()
        q, k, v = self._inputs(graph, shape)
        o, stats = graph.sdpa(q=q, k=k, v=v, attn_scale=shape.scale, generate_stats=True, name="attention", **self._mask(shape))
        return graph, (q, k, v, _output(o, *_of_queries(shape)), _output(stats, *_of_rows(shape)).set_data_type(self._cudnn.data_type.FLOAT))

    def _backward_graph(self, shape: WholeShape) -> tuple[Any, tuple[Any, ...]]:
        graph, (short, single) = self._graph(), (self._cudnn.data_type.BFLOAT16, self._cudnn.data_type.FLOAT)
        q, k, v = self._inputs(graph, shape)
        o, do = (_input(graph, name, _of_queries(shape), short) for name in ("o", "do"))
        stats = _input(graph, "lse", _of_rows(shape), single)
        dq, dk, dv = graph.sdpa_backward(
            q=q, k=k, v=v, o=o, dO=do, stats=stats, attn_scale=shape.scale, use_deterministic_algorithm=True, name="gradients", **self._mask(shape)
        )
        return graph, (q, k, v, o, stats, do, _output(dq, *_of_queries(shape)), _output(dk, *_of_keys(shape)), _output(dv, *_of_keys(shape)))

    def _graph(self) -> Any:
        kinds = self._cudnn.data_type
        return self._cudnn.pygraph(
            io_data_type=kinds.BFLOAT16, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=self._handle
        )

    def _inputs(self, graph: Any, shape: WholeShape) -> tuple[Any, Any, Any]:
        short, of_keys = self._cudnn.data_type.BFLOAT16, _of_keys(shape)
        return _input(graph, "q", _of_queries(shape), short), _input(graph, "k", of_keys, short), _input(graph, "v", of_keys, short)

    def _mask(self, shape: WholeShape) -> dict[str, Any]:
        """Of causal attention: no key right of the diagonal that begins in the upper left corner."""
        return {"diagonal_alignment": self._cudnn.diagonal_alignment.TOP_LEFT, "diagonal_band_right_bound": 0} if shape.causal else {}


_Layout = tuple[list[int], list[int]]
"""Extents and strides."""


def _of_queries(shape: WholeShape) -> _Layout:
    return _layout(shape.b, shape.heads, shape.tq, shape.size)


def _of_keys(shape: WholeShape) -> _Layout:
    return _layout(shape.b, shape.groups, shape.tk, shape.size)


def _of_rows(shape: WholeShape) -> _Layout:
    """(b, h, t) as (b, h, t, 1)."""
    return [shape.b, shape.heads, shape.tq, 1], [shape.heads * shape.tq, shape.tq, 1, 1]


def _layout(b: int, h: int, t: int, d: int) -> _Layout:
    """(b, t, h * d) as (b, h, t, d)."""
    return [b, h, t, d], [t * h * d, d, h * d, 1]


def _input(graph: Any, name: str, layout: _Layout, kind: Any) -> Any:
    return graph.tensor(name=name, dim=layout[0], stride=layout[1], data_type=kind)


def _output(tensor: Any, extents: list[int], strides: list[int]) -> Any:
    return tensor.set_output(True).set_dim(extents).set_stride(strides)


def may_take(q: DeviceArray, k: DeviceArray, size: int) -> bool:
    """Whether tiles are of a type, and heads of a size, that cuDNN knows on every card."""
    return q.dtype == k.dtype == BF16 and size % 8 == 0 and size <= MOST_FEATURES


@cache
def frontend() -> Any:
    """The frontend.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import cudnn
    except ImportError as error:
        raise ImportError(f"cuDNN is used through the package nvidia-cudnn-frontend, and it cannot be imported ({error}); {INSTALL_CUDNN}") from error
    return cudnn
