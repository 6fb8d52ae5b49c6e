"""Attention of whole sequences on a GPU by cuDNN, through NVIDIA's frontend (the package `cudnn`): a handle on one stream, a workspace of its own.

Letters: b sequences, h heads of queries, g heads of keys and values, t tokens, d features of a head. Tiles (b, t, h * d) are passed without copies,
as (b, h, t, d) with strides. Stats (b, h, t, 1), fp32, are our lse, the natural log-sum-exps of the scores (frontend, Attention.md).

Both passes of a shape are planned together at its first use, and cuDNN computes both or neither. A shape is left to our kernels, with a report, if
cuDNN supports a pass not at all or not within the reserved workspace. This decision, and the plan that cuDNN's heuristics choose, depend only on the
shape, the card and the versions of the libraries. Gradients use `use_deterministic_algorithm`, so equal runs have equal bits.
Planning allocates and compiles, so it is refused while a graph is recorded; fused tasks start their kernels one by one before they record them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

from scheduler.drivers import is_fatal, is_out_of_memory

from ..registry import BF16
from .array import DeviceArray

ATTENTION_WORKSPACE_NBYTES: Final = 320 << 20
"""Bytes of the workspace of one attention, forward or backward."""
GRADIENT_WORKSPACE_NBYTES: Final = 256 << 20
"""Largest workspace of 2 bytes a score for deterministic gradients on Hopper; above it cuDNN sums dq in fp32 in a fixed order, 4 bytes an element.

The frontend has no limit of its own: without this one, shapes of ordinary size exceed `ATTENTION_WORKSPACE_NBYTES` and are declined.
"""
MOST_FEATURES: Final = 128
"""Largest head size whose gradients are supported on all cards from Ampere on."""
INSTALL_CUDNN: Final = "pip install -e '.[cudnn13]' (drivers from 580) or '.[cudnn12]' (drivers from 525)"


class WholeShape(NamedTuple):
    """Description of an attention, which determines its plan.

    Args:
        b: number of sequences.
        tq, tk: numbers of queries, and of keys and values.
        heads, groups: numbers h and g of heads.
        size: number of features d of a head.
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

    def __str__(self) -> str:
        shared = f" that share {self.groups} of keys and values" if self.groups != self.heads else ""
        keys = f" and {self.tk:,} keys" if self.tk != self.tq else ""
        return f"{self.b} x {self.tq:,} tokens{keys}, {self.heads} heads of {self.size}{shared}, {'causal' if self.causal else 'not causal'}"


class _Pass(NamedTuple):
    """The graph of a pass, and its tensors in the order of the arguments of `forward` or `backward`."""

    graph: Any
    tensors: tuple[Any, ...]


class _Plans(NamedTuple):
    """The plans of both passes of a shape.

    Args:
        why_ours: reason why they are left to our kernels; "" if cuDNN computes them.
    """

    forward: _Pass
    backward: _Pass
    why_ours: str


def shape_of(q: tuple[int, ...], k: tuple[int, ...], size: int, scale: float, causal: bool) -> WholeShape:
    """Return the description of an attention of whole sequences, given the shapes of the tiles of queries and keys."""
    (b, tq, width), (_, tk, narrow) = q, k
    return WholeShape(b, tq, tk, width // size, narrow // size, size, scale, causal)


class LibraryAttention:
    """cuDNN's attention for one thread and one stream.

    Args:
        workspace: address of `ATTENTION_WORKSPACE_NBYTES` of the device's memory; the device is the calling thread's current one.
        report: function that is called with a sentence about each shape that is left to our kernels, when it is first used.

    Raises:
        ImportError: the package or the library is missing.
    """

    def __init__(self, workspace: int, report: Callable[[str], None]) -> None:
        self._cudnn = frontend()
        self._workspace, self._report = workspace, report
        self._plans: dict[WholeShape, _Plans] = {}
        try:
            self._handle: Any = self._cudnn.create_handle()
        except RuntimeError as error:
            raise ImportError(f"cuDNN does not start ({error}), which its frontend needs; {INSTALL_CUDNN} brings it") from error

    def use(self, stream: int) -> None:
        """Compute on `stream` from now on."""
        self._cudnn.set_stream(handle=self._handle, stream=stream)

    def takes(self, shape: WholeShape, *, may_plan: bool) -> bool:
        """Return whether cuDNN computes attention of `shape`, forward and backward.

        Args:
            may_plan: whether planning is allowed, which it is not while a graph is recorded.

        Raises:
            RuntimeError: the shape is not planned yet, and may not be planned now.
        """
        if shape not in self._plans:
            if not may_plan:
                raise RuntimeError(f"attention is planned before a graph is recorded, and {shape} is not; start it once outside of a graph")
            plans = self._plans[shape] = self._planned(shape)
            if plans.why_ours:
                self._report(f"cuDNN leaves attention of {shape} to nntask's kernels: {plans.why_ours}")
        return not self._plans[shape].why_ours

    def forward(self, shape: WholeShape, q: DeviceArray, k: DeviceArray, v: DeviceArray, o: DeviceArray, lse: DeviceArray) -> None:
        """Start the computation of o and lse for a shape that cuDNN computes."""
        self._start(self._plans[shape].forward, (q, k, v, o, lse))

    def backward(self, shape: WholeShape, *tiles: DeviceArray) -> None:
        """Start dq, dk and dv for a shape that cuDNN computes; `tiles` are q, k, v, o, lse, do, dq, dk, dv."""
        self._start(self._plans[shape].backward, tiles)

    def close(self) -> None:
        """Release the resources of cuDNN; idempotent."""
        handle, self._handle = self._handle, None
        self._plans.clear()
        if handle is not None:
            self._cudnn.destroy_handle(handle)

    def _start(self, planned: _Pass, tiles: tuple[DeviceArray, ...]) -> None:
        addresses = {tensor: tile.address for tensor, tile in zip(planned.tensors, tiles, strict=True)}
        planned.graph.execute(addresses, self._workspace, handle=self._handle)

    def _planned(self, shape: WholeShape) -> _Plans:
        """Plan both passes. Useless plans are kept, too, since releasing them while a graph is recorded would break the recording."""
        passes = self._forward_graph(shape), self._backward_graph(shape)
        for name, (graph, _) in zip(("forward", "backward"), passes, strict=True):
            if why := self._why_none(graph):
                return _Plans(*passes, f"no plan of the {name} pass, {why}")
        return _Plans(*passes, "")

    def _why_none(self, graph: Any) -> str:
        """Plan a graph; return the reason if it cannot be planned, else ""."""
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([self._cudnn.heur_mode.A])
            graph.deselect_workspace_greater_than(ATTENTION_WORKSPACE_NBYTES)
            graph.check_support()
            graph.build_plans()
        except (self._cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:  # RuntimeError: shapes that no descriptor can express
            if isinstance(error, RuntimeError) and (is_out_of_memory(error) or is_fatal(error)):
                raise
            return f"with at most {ATTENTION_WORKSPACE_NBYTES >> 20} MiB of workspace ({' '.join(str(error).split())})"
        if graph.selected_engine is not None:  # a kernel in Python, which does not accept addresses
            return "but by a kernel of the frontend (unset CUDNN_FRONTEND_ENABLE_FROST_ENGINES)"
        nbytes = graph.get_workspace_size()
        return f"which wants {nbytes:,} bytes of workspace and gets {ATTENTION_WORKSPACE_NBYTES:,}" if nbytes > ATTENTION_WORKSPACE_NBYTES else ""

    def _forward_graph(self, shape: WholeShape) -> _Pass:
        graph = self._graph()
        q, k, v = self._inputs(graph, shape)
        o, stats = graph.sdpa(q=q, k=k, v=v, attn_scale=shape.scale, generate_stats=True, name="attention", **self._mask(shape))
        outputs = _output(o, *_of_queries(shape)), _output(stats, *_of_rows(shape)).set_data_type(self._cudnn.data_type.FLOAT)
        return _Pass(graph, (q, k, v, *outputs))

    def _backward_graph(self, shape: WholeShape) -> _Pass:
        graph, (short, single) = self._graph(), (self._cudnn.data_type.BFLOAT16, self._cudnn.data_type.FLOAT)
        q, k, v = self._inputs(graph, shape)
        o, do = (_input(graph, name, _of_queries(shape), short) for name in ("o", "do"))
        stats = _input(graph, "lse", _of_rows(shape), single)
        dq, dk, dv = graph.sdpa_backward(
            q=q, k=k, v=v, o=o, dO=do, stats=stats, attn_scale=shape.scale, use_deterministic_algorithm=True, name="gradients", **self._mask(shape)
        )
        outputs = _output(dq, *_of_queries(shape)), _output(dk, *_of_keys(shape)), _output(dv, *_of_keys(shape))
        return _Pass(graph, (q, k, v, o, stats, do, *outputs))

    def _graph(self) -> Any:
        kinds = self._cudnn.data_type
        return self._cudnn.pygraph(
            io_data_type=kinds.BFLOAT16, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=self._handle
        )

    def _inputs(self, graph: Any, shape: WholeShape) -> tuple[Any, Any, Any]:
        short, of_keys = self._cudnn.data_type.BFLOAT16, _of_keys(shape)
        return _input(graph, "q", _of_queries(shape), short), _input(graph, "k", of_keys, short), _input(graph, "v", of_keys, short)

    def _mask(self, shape: WholeShape) -> dict[str, Any]:
        """Return the options of the causal mask, if any: no key right of the diagonal that begins in the upper left corner."""
        return {"diagonal_alignment": self._cudnn.diagonal_alignment.TOP_LEFT, "diagonal_band_right_bound": 0} if shape.causal else {}


_Layout = tuple[list[int], list[int]]
"""Extents and strides."""


def _of_queries(shape: WholeShape) -> _Layout:
    return _layout(shape.b, shape.heads, shape.tq, shape.size)


def _of_keys(shape: WholeShape) -> _Layout:
    return _layout(shape.b, shape.groups, shape.tk, shape.size)


def _of_rows(shape: WholeShape) -> _Layout:
    """Return the layout of (b, h, t) as (b, h, t, 1)."""
    return [shape.b, shape.heads, shape.tq, 1], [shape.heads * shape.tq, shape.tq, 1, 1]


def _layout(b: int, h: int, t: int, d: int) -> _Layout:
    """Return the layout of (b, t, h * d) as (b, h, t, d)."""
    return [b, h, t, d], [t * h * d, d, h * d, 1]


def _input(graph: Any, name: str, layout: _Layout, kind: Any) -> Any:
    return graph.tensor(name=name, dim=layout[0], stride=layout[1], data_type=kind)


def _output(tensor: Any, extents: list[int], strides: list[int]) -> Any:
    return tensor.set_output(True).set_dim(extents).set_stride(strides)


def takes_heads(size: int) -> bool:
    """Return whether cuDNN supports heads of `size` features on every card."""
    return size % 8 == 0 and size <= MOST_FEATURES


def may_take(q: DeviceArray, k: DeviceArray, size: int) -> bool:
    """Return whether cuDNN supports the type of these tiles and the head size on every card."""
    return q.dtype == k.dtype == BF16 and takes_heads(size)


@cache
def frontend() -> Any:
    """Return the frontend, after setting its limit for the workspace of deterministic gradients, which it reads when it plans.

    Raises:
        ImportError: the frontend is not installed.
    """
    os.environ.setdefault("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", str(GRADIENT_WORKSPACE_NBYTES))
    try:
        import cudnn
    except (ImportError, OSError, AssertionError) as error:  # importing it loads the cuDNN library, and fails if there are two
        raise ImportError(f"cuDNN is used through the package nvidia-cudnn-frontend, and it cannot be imported ({error}); {INSTALL_CUDNN}") from error
    return cudnn
