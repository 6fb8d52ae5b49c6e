"""Chains: runs of elementwise calls, reductions and normalisations that become one compiled call each.

A chain reads its inputs, and writes the results that are used after it; values that only its own calls use have no memory. To the rest of the package
a chain is a call like any other, whose operation is a `Chain`. Random calls, calls in place, products and lookups in tables are never part of one.
The choice of chains depends only on the pass, never on a budget, so the bits do not depend on one either. A chain touches at most as much memory as
the largest single call of the pass, plus a sixteenth for the buffers of its function, so the smallest possible budget hardly rises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from .calls import Call, Capture, Ref, Storage, aten
from .inductor import Compiled, compile_function

_MEMBERS: Final = frozenset(
    {
        *(aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.amax.default, aten.amin.default),
        *(aten.var.correction, aten.var_mean.correction, aten.linalg_vector_norm.default),
        *(aten._softmax.default, aten._softmax_backward_data.default, aten._log_softmax.default, aten._log_softmax_backward_data.default),
        *(aten.native_layer_norm.default, aten.native_layer_norm_backward.default),
        *(aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default),
        *(aten.nll_loss_forward.default, aten.nll_loss_backward.default, aten.mse_loss.default, aten.mse_loss_backward.default),
        *(aten.cat.default, aten.stack.default, aten.clone.default, aten._to_copy.default, aten.slice_backward.default, aten.select_backward.default),
        *(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.ones.default, aten.ones_like.default, aten.new_ones.default),
        *(aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default),
        *(aten.arange.default, aten.arange.start, aten.arange.start_step, aten.constant_pad_nd.default, aten.gelu_backward.default),
        *(aten.silu_backward.default, aten.tanh_backward.default, aten.sigmoid_backward.default, aten.threshold_backward.default),
        *(aten.repeat.default, aten.flip.default, aten.roll.default, aten.unsafe_split.Tensor, aten.split_with_sizes_copy.default),
    }
)
"""Operations that may be in a chain, besides those that PyTorch tags as pointwise."""
_DIVISIONS: Final = frozenset({aten.div, aten.floor_divide, aten.remainder, aten.fmod})
_MOVES: Final = frozenset({aten.clone.default, aten._to_copy.default})
"""Copies, which are not faster when compiled. A chain has at least two other calls, and computes not only masks, which compiled loops do slowly."""


class Chain:
    """The operation of a chain's call, in place of PyTorch's; the call's arguments are the inputs, and results are written in place.

    Attributes:
        name: names of its operations, for traces.
        tags: tags of the operation; a chain has none.
        compiled: function that computes it.
    """

    tags: frozenset[Any] = frozenset()

    def __init__(self, name: str, compiled: Compiled) -> None:
        self.name, self.compiled = name, compiled

    def __str__(self) -> str:
        return self.name

    def into(self, results: Sequence[torch.Tensor], *inputs: torch.Tensor) -> None:
        """Compute the results from the inputs."""
        self.compiled.run([*inputs, *results])


class ChainCompiler:
    """Compiler of the chains of passes; equal chains are compiled once."""

    def __init__(self) -> None:
        self._compiled: dict[Any, Compiled] = {}

    def chained(self, capture: Capture) -> Capture:
        """Return a pass with its chains as single calls."""
        return replace(capture, calls=_Chaining(capture, self._compile).calls())

    def _compile(self, calls: Sequence[Call], inputs: Sequence[Ref], results: Sequence[Ref]) -> Chain:
        numbers: dict[Storage, int] = {}

        def placed(ref: Ref) -> Any:
            return (numbers.setdefault(ref.storage, len(numbers)), ref.dtype, ref.shape, ref.strides, ref.offset)

        signature = tree_map_only(Ref, placed, [(str(call.func), call.args, dict(call.kwargs), call.results) for call in calls])
        key = repr((signature, [placed(ref) for ref in inputs], [placed(ref) for ref in results]))
        name = _name_of(calls)
        if key not in self._compiled:
            self._compiled[key] = compile_function(_function_of(calls, inputs, results), inputs, results, name)
        return Chain(name, self._compiled[key])


def _name_of(calls: Sequence[Call]) -> str:
    names = dict.fromkeys(call.func.overloadpacket._qualified_op_name.partition("::")[2].strip("_") for call in calls)
    return " ".join([*names][:4]) + (" ..." if len(names) > 4 else "")


class _Chaining:
    """The search for the chains of one pass."""

    def __init__(self, capture: Capture, compiler: Callable[[Sequence[Call], Sequence[Ref], Sequence[Ref]], Chain]) -> None:
        self._calls, self._compile = capture.calls, compiler
        self._last_use: dict[Storage, int] = {}
        for number, call in enumerate(capture.calls):
            self._last_use.update(dict.fromkeys(call.reads | call.writes, number))
        self._last_use.update({ref.storage: len(capture.calls) for ref in _refs(capture.outputs, capture.gradients)})
        self._limit = max((_nbytes(call.reads | call.writes) for call in capture.calls), default=0)

    def calls(self) -> list[Call]:
        """Return the calls of the pass, with those of each chain merged into one."""
        merged: list[Call] = []
        start = 0
        while start < len(self._calls):
            if _may_join(self._calls[start]):
                end = self._end_of_run(start)
                while end > start + 1 and self._touched(start, end) > self._limit:
                    end -= 1
                merged += self._chains(start, end)
            else:
                end = start + 1
                merged.append(self._calls[start])
            start = end
        return merged

    def _end_of_run(self, start: int) -> int:
        """Return the first call after `start` that cannot be in a chain, or that uses a tensor of the run in a way that is not a view."""
        made: dict[Storage, Ref] = {}
        for number in range(start, len(self._calls)):
            call = self._calls[number]
            used = [ref for ref in _refs(call.args, call.kwargs) if ref.storage in made]
            if not _may_join(call) or any(_grid(made[ref.storage], ref) is None for ref in used):
                return number
            made.update((ref.storage, ref) for ref in _refs(call.results))
        return len(self._calls)

    def _touched(self, start: int, end: int) -> int:
        """Return the bytes that some calls read and write as a chain."""
        calls = self._calls[start:end]
        made = {storage for call in calls for storage in call.made}
        return _nbytes({s for call in calls for s in call.reads} - made) + _nbytes({s for s in made if self._last_use[s] >= end})

    def _chains(self, start: int, end: int) -> list[Call]:
        """Return the calls of a run as one chain, or as two parts if its function needs too much additional memory."""
        calls = self._calls[start:end]
        if sum(call.func not in _MOVES for call in calls) < 2 or all(ref.dtype == torch.bool for call in calls for ref in _refs(call.results)):
            return list(calls)
        produced = {ref.storage: ref for call in calls for ref in _refs(call.results)}
        used = dict.fromkeys(ref for call in calls for ref in _refs(call.args, call.kwargs))
        inputs = [ref for ref in used if ref.storage not in produced]
        results = [ref for ref in produced.values() if self._last_use[ref.storage] >= end]
        chain = self._compile(calls, inputs, results)
        if self._touched(start, end) + chain.compiled.nbytes > self._limit * 17 / 16:
            middle = (start + end) // 2
            return [*self._chains(start, middle), *self._chains(middle, end)]
        writes = frozenset(ref.storage for ref in results)
        return [Call(chain, tuple(inputs), {}, tuple(results), frozenset(ref.storage for ref in inputs), writes, writes)]


def _refs(*values: Any) -> list[Ref]:
    """Return the references in some values, in order."""
    return [leaf for value in values for leaf in tree_leaves(dict(value) if isinstance(value, Mapping) else value) if isinstance(leaf, Ref)]


def _nbytes(storages: Sequence[Storage] | set[Storage] | frozenset[Storage]) -> int:
    return sum(storage.nbytes for storage in storages)


def _sums_columns(call: Call) -> bool:
    """Return whether a call sums over axes other than the innermost in memory, for which PyTorch's own loops are faster than compiled ones."""
    if call.func is not aten.sum.dim_IntList or not call.args[1]:
        return False
    source: Ref = call.args[0]
    axes = {axis % len(source.shape) for axis in call.args[1] if source.shape}
    return all(source.strides[axis] != 1 for axis in axes if source.shape[axis] != 1)


def _divides_integers(call: Call) -> bool:
    """Return whether a call divides integers: compiled loops record a division by zero in a variable that threads share."""
    return call.func.overloadpacket in _DIVISIONS and not all(ref.dtype.is_floating_point for ref in _refs(call.results))


def _may_join(call: Call) -> bool:
    """Return whether a call may be in a chain: it only fills new, whole memory with real numbers, by an operation that fuses."""
    is_known = call.func in _MEMBERS or torch.Tag.pointwise in call.func.tags
    if not is_known or call.is_random or call.writes != call.made or _sums_columns(call) or _divides_integers(call):
        return False
    if any(ref.is_conj or ref.is_neg or ref.dtype.is_complex or 0 in ref.shape for ref in _refs(call.args, call.kwargs, call.results)):
        return False
    results = _refs(call.results)
    return len({ref.storage for ref in results}) == len(results) and all(ref.storage in call.made and _is_dense(ref) for ref in results)


def _order(ref: Ref) -> list[int]:
    """Return the axes of a tensor from the outermost in memory to the innermost."""
    return sorted(range(len(ref.shape)), key=lambda axis: (-ref.strides[axis], ref.shape[axis] == 1))


def _is_dense(ref: Ref) -> bool:
    """Return whether a tensor is all of its storage, with its axes in any order."""
    order = _order(ref)
    return replace(ref, shape=tuple(ref.shape[a] for a in order), strides=tuple(ref.strides[a] for a in order)).is_whole


def _grid(made: Ref, ref: Ref) -> list[tuple[int, int, int, int]] | None:
    """Return how a tensor lies in a dense one: the memory as a grid of axes, of each of which the tensor covers a part.

    Returns:
        For each axis of the grid, the outermost first: its length, first index and length of the part, and the axis of the tensor, -1 if the tensor
        lacks it; None if there is no such grid.
    """
    if ref.dtype != made.dtype:
        return None
    total, rest, inner = prod(made.shape), ref.offset, prod(made.shape)
    axes = []
    for axis in _order(ref):
        length, stride = ref.shape[axis], ref.strides[axis]
        if length == 1 or stride == 0:
            continue
        if inner % stride:
            return None
        first, rest = divmod(rest, stride)
        if first + length > inner // stride:
            return None
        axes.append((inner // stride, first, length, axis))
        inner = stride
    if rest >= inner or total == 0:
        return None
    return [*axes, (inner, rest, 1, -1)]


def _view(value: torch.Tensor, made: Ref, ref: Ref) -> torch.Tensor:
    """Return a tensor as a view of the value of a dense one over the same storage, by operations on shapes and slices."""
    if made == ref:
        return value
    grid = _grid(made, ref)
    assert grid is not None  # `_end_of_run` has checked that
    flat = value.permute(_order(made)).reshape([length for length, *_ in grid])
    for at, (length, first, count, _) in enumerate(grid):
        if count != length:
            flat = flat.narrow(at, first, count)
    axes = [axis for *_, axis in grid if axis >= 0]
    flat = flat.squeeze(-1).permute(sorted(range(len(axes)), key=lambda at: axes[at]))
    return flat.reshape([ref.shape[axis] if axis in axes else 1 for axis in range(len(ref.shape))]).expand(ref.shape)


def _function_of(calls: Sequence[Call], inputs: Sequence[Ref], results: Sequence[Ref]) -> Callable[..., list[torch.Tensor]]:
    """Return the function that a chain computes, for tracing."""

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given: Mapping[Ref, torch.Tensor] = dict(zip(inputs, tensors, strict=True))
        computed: dict[Storage, tuple[Ref, torch.Tensor]] = {}

        def find(ref: Ref) -> torch.Tensor:
            return _view(computed[ref.storage][1], computed[ref.storage][0], ref) if ref.storage in computed else given[ref]

        for call in calls:
            args, kwargs = tree_map_only(Ref, find, (call.args, dict(call.kwargs)))
            result = call.func(*args, **kwargs)
            leaves = list(result) if isinstance(result, tuple | list) else [result]
            computed.update({ref.storage: (ref, value) for ref, value in zip(call.results, leaves, strict=True) if ref is not None})
        return [computed[ref.storage][1] for ref in results]

    return function
