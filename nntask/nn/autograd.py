"""Automatic differentiation on a tape: the order in which gradient tasks are emitted and activations are freed.

Rules.

- A `Node` represents one operation of the forward pass. It references the nodes of its inputs and, in its backward function, only the tile tensors
  which that function needs; never its outputs. Data that no backward function needs is freed with its last Python reference, and a forward pass
  that is not differentiated keeps nothing. There are no reference cycles, so nothing waits for the garbage collector.
- `backward` visits nodes in reverse order of creation and empties each: its activations are freed as soon as the tasks that read them are done.
- Gradients of activations are replaced, never changed in place: two nodes may share one tile tensor. Gradients of parameters are accumulators:
  operations contribute to them by REDUX, over any number of backward passes, until the program sets them to None.
- This module only emits tasks and never reads a value, so it works while a step is being recorded.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from scheduler import Handle
from scheduler.machine import current_label, kept_here, labelled, next_minibatch
from tiles import TileTensor
from tiles.kernels import NARROW
from tiles.ops import elementwise

from ..errors import UsageError

_T = TypeVar("_T")
Gradients = Sequence[TileTensor | None]
Backward = Callable[[Gradients], None]
"""Takes the gradients of a node's outputs (None for outputs without a contribution; at least one has some) and adds to its inputs' edges.

The backward function of a loss is given None when the backward pass begins there: its gradient is 1."""

_enabled: Final[ContextVar[bool]] = ContextVar("nntask_tape_enabled", default=True)
_watched: Final[ContextVar[list[Edge] | None]] = ContextVar("nntask_watched_edges", default=None)
_postponed: Final[ContextVar[list[Callable[[], None]] | None]] = ContextVar("nntask_postponed", default=None)
_order: Final = itertools.count()


class Node:
    """One operation on the tape, or (without a backward function) a place where gradients stay.

    Attributes:
        name: name of the operation, for messages.
        order: number of the node in order of creation.
        inputs: edges to the nodes of the inputs.
        gradients: sums of the contributions so far, one per output.
        is_loss: whether a backward pass may begin here without a gradient.
        path: dotted path of the module that computed it, which labels the tasks of its backward function.
        consumed: whether a backward pass has used the node.
    """

    __slots__ = ("backward", "consumed", "gradients", "inputs", "is_loss", "name", "order", "path")

    def __init__(self, name: str, backward: Backward | None, inputs: tuple[Edge, ...], num_outputs: int, *, is_loss: bool = False) -> None:
        self.name = name
        self.order = next(_order)
        self.backward = backward
        self.inputs = inputs
        self.gradients: list[TileTensor | None] = [None] * num_outputs
        self.is_loss = is_loss
        self.path = current_label().path
        self.consumed = False

    def consume(self) -> tuple[Edge, ...]:
        """Run the backward function, release it and everything it kept, and return the edges to continue with.

        Raises:
            UsageError: an earlier backward pass has used the node.
        """
        if self.consumed:
            raise UsageError(f"the tape of {self.name} was used up by an earlier backward pass", "run the forward pass again")
        backward, inputs, gradients = self.backward, self.inputs, self.gradients
        assert backward is not None
        self.consumed, self.backward, self.inputs = True, None, ()
        self.gradients = [None] * len(gradients)
        if self.is_loss or any(gradient is not None for gradient in gradients):
            with labelled(phase="backward", path=self.path):
                backward(gradients)
        return inputs


class Edge:
    """The gradient of one output of a node: where consumers of a tensor leave their contributions."""

    __slots__ = ("index", "node")

    def __init__(self, node: Node, index: int = 0) -> None:
        self.node = node
        self.index = index

    @property
    def gradient(self) -> TileTensor | None:
        """Sum of the contributions so far."""
        return self.node.gradients[self.index]

    @gradient.setter
    def gradient(self, gradient: TileTensor | None) -> None:
        self.node.gradients[self.index] = gradient

    def add(self, gradient: TileTensor) -> None:
        """Add a contribution; the tensor is shared, not copied."""
        present = self.gradient
        self.gradient = gradient if present is None else elementwise.add(present, gradient)

    def take(self) -> TileTensor | None:
        """Remove and return the sum so far, for an operation that adds it to its own contribution in the same pass."""
        gradient, self.gradient = self.gradient, None
        return gradient


class ParameterEdge(Edge):
    """The gradient of a parameter: an accumulator of the parameter's shape, in fp32 when the parameter is narrower."""

    __slots__ = ("data",)

    def __init__(self, data: TileTensor) -> None:
        super().__init__(Node(data.name or "parameter", None, (), 1))
        self.data = data

    def accumulator(self) -> TileTensor:
        """Return the tensor that operations contribute to by REDUX. The first call creates it, without any task."""
        if self.gradient is None:
            dtype = np.dtype(np.float32) if self.data.dtype in NARROW else self.data.dtype
            self.gradient = self.data.like(dtype=dtype, data_class="gradients", name=f"d {self.data.name}")
        return self.gradient

    def add(self, gradient: TileTensor) -> None:
        """Add a finished tensor to the accumulator, which is never shared."""
        elementwise.accumulate(gradient, self.accumulator())


class Tensor:
    """A tile tensor with a place on the tape.

    Args:
        data: the tiles.
        edge: receiver of its gradient; None if no gradient is wanted.
    """

    __slots__ = ("__weakref__", "data", "edge")

    def __init__(self, data: TileTensor, edge: Edge | None = None) -> None:
        self.data = data
        self.edge = edge

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the whole tensor."""
        return self.data.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        return self.data.dtype

    @property
    def gradient(self) -> TileTensor | None:
        """Gradient so far. A parameter keeps it until `step` of an optimizer; other tensors lose it once it is used."""
        return None if self.edge is None else self.edge.gradient

    def read(self) -> npt.NDArray[Any]:
        """Return the whole tensor as an array; waits for the tasks that write it."""
        return self.data.read()

    def gather(self, borrow: Callable[[Handle], AbstractContextManager[npt.NDArray[Any]]]) -> npt.NDArray[Any]:
        """Return the whole tensor as an array, read tile by tile through `borrow`, as a ticket's ``read`` does."""
        return self.data.gather(borrow)

    def backward(self, gradient: TileTensor | None = None) -> None:
        """Emit the tasks that compute the gradients of everything this tensor depends on. This ends a minibatch.

        Args:
            gradient: gradient of the final result with respect to this tensor, same shape and tiling; None means 1 and needs a loss.

        Raises:
            UsageError: the tensor has no tape, the tape is used up, or `gradient` is missing or of another shape.
        """
        if self.edge is None:
            raise UsageError(f"backward() needs a tensor computed from parameters with the tape on, got {self!r}", "compute it outside no_grad()")
        if gradient is None:
            if not self.edge.node.is_loss:
                raise UsageError(f"backward() without a gradient begins at a loss, got {self!r}", "pass gradient=")
        elif gradient.shape != self.shape or gradient.tile != self.data.tile:
            raise UsageError(
                f"a gradient has its tensor's shape and tile, {self.shape} and {self.data.tile}, got {gradient.shape} and {gradient.tile}",
                "retile it",
            )
        run_backward(self.edge, gradient)
        next_minibatch()

    def __add__(self, other: Tensor) -> Tensor:
        """Return the elementwise sum."""
        return add(self, other)

    def __repr__(self) -> str:
        return f"Tensor({self.data!r}{', on tape' if self.edge is not None else ''})"


def run_backward(root: Edge, gradient: TileTensor | None) -> None:
    """Propagate `gradient` (None: 1, of a loss) from `root` to every parameter it depends on.

    Raises:
        UsageError: an earlier backward pass has used one of the nodes.
    """
    if gradient is not None:
        root.add(gradient)
    # reverse creation order is a topological order; the heap holds every unvisited node that a visited one leads to
    queue = [(-root.node.order, root.node)] if root.node.backward is not None or root.node.consumed else []
    known = {root.node.order}
    while queue:
        node = heapq.heappop(queue)[1]
        for edge in node.consume():
            after = edge.node
            if (after.backward is not None or after.consumed) and after.order not in known:
                known.add(after.order)
                heapq.heappush(queue, (-after.order, after))


@contextmanager
def _set(variable: ContextVar[_T], value: _T) -> Iterator[_T]:
    """Give a context variable another value inside the ``with`` block."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@contextmanager
def accumulation() -> Iterator[None]:
    """Sum the gradients of several backward passes; postpone contributions that are cheap to keep until the block ends.

    A sum has one order. The contribution of an embedding that shares its weight with the head comes last in its backward pass, so the head of the
    next minibatch would have to wait for that whole pass. Postponed to the end of the block, it leaves minibatches free to run in any order.
    """
    queue: list[Callable[[], None]] = []
    with _set(_postponed, queue):
        yield
    for contribute in queue:
        contribute()


def contribute_late(contribute: Callable[[], None]) -> None:
    """Emit a contribution to a parameter's gradient at the end of the enclosing `accumulation`; at once outside of one."""
    queue = _postponed.get()
    if queue is None:
        contribute()
    else:
        queue.append(kept_here(contribute))


def tape_enabled() -> bool:
    """Return whether operations are put on the tape."""
    return _enabled.get()


def no_grad() -> AbstractContextManager[object]:
    """Keep operations inside the ``with`` block off the tape: for evaluation and sampling."""
    return _set(_enabled, False)


def edges_of(inputs: Sequence[Tensor | None]) -> tuple[Edge, ...]:
    """Return the edges of the inputs that want a gradient; empty if the tape is off."""
    edges = tuple(x.edge for x in inputs if x is not None and x.edge is not None)
    if _enabled.get():
        return edges
    watched = _watched.get()
    if watched is not None:
        watched += edges
    return ()


def on_tape(
    name: str, inputs: Sequence[Tensor | None], outputs: Sequence[TileTensor], backward: Backward, *, is_loss: bool = False
) -> tuple[Tensor, ...]:
    """Return the outputs of an operation as tensors, with a node on the tape if an input wants a gradient.

    Args:
        backward: backward function. It must capture only what it needs, because that lives until the backward pass.
        is_loss: whether a backward pass may begin here, with gradient 1.
    """
    edges = edges_of(inputs)
    if not edges:
        return tuple(Tensor(data) for data in outputs)
    node = Node(name, backward, edges, len(outputs), is_loss=is_loss)
    return tuple(Tensor(data, Edge(node, i)) for i, data in enumerate(outputs))


def checkpoint(block: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """Return ``block(x, *others)`` and keep only the arguments; the backward pass recomputes the rest.

    The numbers are the same as without checkpointing, because kernels are deterministic and random masks are indexed by position, not by time.

    Args:
        block: function that is called once now and once in the backward pass and does the same both times. Every computed tensor that it reads must
            be an argument, because the backward pass of the block ends at its arguments.
        x: input of any shape.
        others: further inputs, such as an encoder's output that all blocks attend to.
    """
    if not tape_enabled():
        return block(x, *others)
    edges, arguments = [given.edge for given in (x, *others)], [given.data for given in (x, *others)]
    with no_grad(), _set(_watched, []) as inside:
        y = block(*(Tensor(data) for data in arguments)).data
    if not inside and all(edge is None for edge in edges):  # nothing in it is learnt
        return Tensor(y)

    def backward(gradients: Gradients) -> None:
        (dy,) = gradients
        assert dy is not None
        inner = [None if edge is None else Edge(Node("checkpoint input", None, (), 1)) for edge in edges]
        for edge, begun in zip(edges, inner, strict=True):  # the block continues the sums so far, so their order stays the same
            if edge is not None and begun is not None:
                begun.gradient = edge.take()
        with _set(_enabled, True):
            again = block(*(Tensor(data, edge) for data, edge in zip(arguments, inner, strict=True)))
        if again.edge is not None:
            run_backward(again.edge, dy)
        for edge, leaf in zip(edges, inner, strict=True):
            if edge is not None and leaf is not None and leaf.gradient is not None:
                edge.add(leaf.gradient)

    node = Node("checkpoint", backward, tuple(edge for edge in edges if edge is not None), 1)
    return Tensor(y, Edge(node))


def only(gradients: Gradients) -> TileTensor:
    """Return the gradient of an operation's only output."""
    (gradient,) = gradients
    assert gradient is not None  # a node without any gradient is not visited
    return gradient


def add_to(edges: Sequence[Edge | None], gradients: Sequence[TileTensor]) -> None:
    """Add its gradient to each edge; None for an input that wants none."""
    for edge, gradient in zip(edges, gradients, strict=True):
        if edge is not None:
            edge.add(gradient)


def accumulator_of(edge: Edge) -> TileTensor:
    """Return the tensor in which the gradient of a weight is summed.

    Raises:
        UsageError: the weight was computed and is not a parameter.
    """
    if not isinstance(edge, ParameterEdge):
        raise UsageError(f"weights must be parameters, got the output of {edge.node.name}", "make it a Parameter")
    return edge.accumulator()


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y, of equal shapes and tilings."""
    edges = (x.edge, y.edge)
    return on_tape("add", [x, y], [elementwise.add(x.data, y.data)], lambda gradients: add_to(edges, [only(gradients)] * 2))[0]
