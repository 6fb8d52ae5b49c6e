"""Large parameters in pieces: a captured pass rewritten so that no call needs the whole of a parameter that is cut along its first axis.

A parameter above a limit has tiles of some rows each, and so have its gradient and the optimizer's state, so that none of them need fit the budget as
a whole. Each call that touches it becomes one call for each piece: a product writes a part of its result, or adds to it if the summed axis is cut; an
elementwise operation computes the pieces; a lookup writes the rows that lie in a piece, and its gradient adds those (`rows`). For any other call the
pieces are joined in a temporary tensor before it, and if the call changes them, cut after it: correct for all calls, but without savings. A cut
product rounds differently, so the limit is part of the numerics, like a tile size.

Letters: V = rows of the parameter, K = the axis of a product that is summed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from .calls import Call, Capture, Ref, Storage, TileKey, aten
from .rows import ops

LARGEST_TILE: Final = "64MB"
"""Default size above which parameters are cut."""
_ELEMENTWISE: Final = frozenset({aten.clone.default, aten._to_copy.default})
"""Elementwise operations that PyTorch does not tag as pointwise."""


def tiles_of(parameters: Iterable[tuple[str, torch.Tensor]], limit: int) -> dict[str, tuple[int, int]]:
    """Return (rows, rows of a tile) of each parameter to cut, by name: equal tiles of at most `limit` bytes, and at least one row."""
    tiles = {}
    for name, value in parameters:
        nbytes = value.numel() * value.element_size()
        if nbytes > limit and value.dim() > 1 and len(value) > 1:
            most = max(1, limit * len(value) // nbytes)
            tiles[name] = len(value), -(-len(value) // -(-len(value) // most))
    return tiles


@dataclass(frozen=True, slots=True)
class _Cut:
    """A storage in pieces.

    Attributes:
        pieces: storage of each piece.
        ends: row after the last one of each piece.
        row_nbytes: bytes of a row.
    """

    pieces: Sequence[Storage]
    ends: Sequence[int]
    row_nbytes: int

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First row of each piece, and the row after its last."""
        return list(zip([0, *self.ends], self.ends, strict=False))


def cut_parameters(capture: Capture, tiles: Mapping[str, tuple[int, int]]) -> Capture:
    """Return the same pass with large parameters, and their gradients, in pieces.

    Args:
        tiles: (rows, rows of a tile) of each parameter that is cut, by name.
    """
    parameter_cuts = {each: _cut_of(each, *tiles[each.name]) for each in capture.storages if each.role == "parameter" and each.name in tiles}
    if not parameter_cuts:
        return capture
    cuts = _with_gradients(capture, parameter_cuts)
    calls: list[Call] = []
    gradients: dict[TileKey, Ref] = {}
    behind = _cut_behind(capture, cuts, tiles)
    for number, call in enumerate(capture.calls):
        calls.extend(_pieces_of(call, cuts) or _gathered(call, cuts))
        for tile, copy in behind.get(number, ()):
            calls.append(copy)
            gradients[tile] = _result(copy)
    for (name, number), ref in capture.gradients.items():
        if ref.storage in cuts:
            gradients.update({(name, piece): _piece(ref, 0, cuts, piece) for piece in range(len(cuts[ref.storage].pieces))})
        elif name not in tiles:
            gradients[name, number] = ref
    storages = [piece for each in capture.storages for piece in (cuts[each].pieces if each in cuts else (each,))]
    return replace(capture, calls=calls, gradients=gradients, storages=storages)


def _cut_of(storage: Storage, num_rows: int, rows: int) -> _Cut:
    row_nbytes = storage.nbytes // num_rows
    ends = [min(first + rows, num_rows) for first in range(0, num_rows, rows)]
    sizes = [(end - first) * row_nbytes for first, end in zip([0, *ends], ends, strict=False)]
    return _Cut([replace(storage, nbytes=nbytes, piece=number) for number, nbytes in enumerate(sizes)], ends, row_nbytes)


def _with_gradients(capture: Capture, cuts: Mapping[Storage, _Cut]) -> dict[Storage, _Cut]:
    """Return the cuts of parameters, and of those of their gradients that can be computed in pieces."""
    all_cuts = dict(cuts)
    outputs = {leaf.storage for leaf in tree_leaves(capture.outputs) if isinstance(leaf, Ref)}
    owners = {each.name: cut for each, cut in cuts.items()}
    for (name, _), ref in capture.gradients.items():
        if name not in owners or not ref.is_whole or ref.storage in outputs or ref.storage.role != "temporary":
            continue
        for storages in (_elementwise_sources(capture, ref), {ref.storage}):
            if not _are_cut_alike(capture, storages, owners, owners[name]):
                continue
            num_rows = owners[name].ends[-1]
            trial = {**all_cuts, **{each: _cut_of(each, num_rows, owners[name].ends[0]) for each in storages}}
            if all(_pieces_of(call, trial) for call in capture.calls if storages & (call.reads | call.writes)):
                all_cuts = trial
                break
    return all_cuts


def _are_cut_alike(capture: Capture, storages: set[Storage], owners: Mapping[str, _Cut], cut: _Cut) -> bool:
    """Return whether all gradients in some storages are whole and belong to parameters that are cut alike; parameters may share a gradient."""
    inside = [(name, ref) for (name, _), ref in capture.gradients.items() if ref.storage in storages]
    return all(ref.is_whole and name in owners and owners[name].ends == cut.ends for name, ref in inside)


def _elementwise_sources(capture: Capture, ref: Ref) -> set[Storage]:
    """Return the storage of a tensor, and those of tensors of its shape from which it is computed elementwise."""
    sources, waiting = {ref.storage}, [ref.storage]
    while waiting:
        storage = waiting.pop()
        for call in capture.calls:
            if storage in call.writes and _is_elementwise(call):
                for source in tree_leaves((call.args, dict(call.kwargs))):
                    is_alike = isinstance(source, Ref) and source.is_whole and source.shape == ref.shape and source.storage.role == "temporary"
                    if is_alike and source.storage not in sources:
                        sources.add(source.storage)
                        waiting.append(source.storage)
    return sources


def _cut_behind(capture: Capture, cuts: Mapping[Storage, _Cut], tiles: Mapping[str, tuple[int, int]]) -> dict[int, list[tuple[TileKey, Call]]]:
    """Return the copies of the pieces of gradients that are computed as a whole, by the number of the last call that writes the gradient."""
    copies: dict[int, list[tuple[TileKey, Call]]] = {}
    for (name, _), ref in capture.gradients.items():
        if name not in tiles or ref.storage in cuts:
            continue
        last = max(number for number, call in enumerate(capture.calls) if ref.storage in call.writes)
        num_rows, rows = tiles[name]
        for number, first in enumerate(range(0, num_rows, rows)):
            source = _narrow(ref, 0, first, min(first + rows, num_rows))
            piece = Storage(prod(source.shape) * ref.dtype.itemsize, "temporary")
            copies.setdefault(last, []).append(((name, number), _clone(source, _whole(piece, source.shape, ref.dtype))))
    return copies


# ---- One call ----


def _pieces_of(call: Call, cuts: Mapping[Storage, _Cut]) -> list[Call] | None:
    """Return the calls on pieces that replace a call; None if there is no rule for it."""
    if not any(storage in cuts for storage in call.reads | call.writes):
        return [call]
    if call.func in (aten.mm.default, aten.addmm.default, aten.addmm.out):
        return _products(call, cuts)
    if call.func is aten.embedding.default:
        return _lookups(call, cuts)
    if call.func is aten.embedding_dense_backward.default:
        return _rows_gradients(call, cuts)
    if call.func is ops.add_rows_gradient.default:
        return _added_rows(call, cuts)
    if _is_elementwise(call):
        return _elementwise(call, cuts)
    return _inside_one_piece(call, cuts)


def _products(call: Call, cuts: Mapping[Storage, _Cut]) -> list[Call] | None:
    """Return the calls for a product of matrices with one cut axis."""
    is_sum, is_made = call.func is not aten.mm.default, call.func is not aten.addmm.out
    if call.kwargs.keys() - {"out"}:
        return None
    left, right = call.args[-2:]
    result = _result(call)
    axes = [(left, 0, "rows"), (left, 1, "sum"), (right, 0, "sum"), (right, 1, "columns"), (result, 0, "rows"), (result, 1, "columns")]
    cut_refs = [ref for ref in (left, right, result) if ref.storage in cuts]
    cut_axes = {(axis, tuple(cuts[ref.storage].ends)) for ref, side, axis in axes if ref.storage in cuts and _axis(ref, cuts[ref.storage]) == side}
    if len(cut_axes) != 1 or any(_axis(ref, cuts[ref.storage]) is None for ref in cut_refs) or (is_sum and is_made and call.args[0].storage in cuts):
        return None
    axis, ends = cut_axes.pop()
    bounds = list(zip([0, *ends], ends, strict=False))
    if axis == "sum":
        operands = [(_slice(left, 1, each, number, cuts), _slice(right, 0, each, number, cuts)) for number, each in enumerate(bounds)]
        adding = [Call.of(aten.addmm.out, (result, *each), (result,), kwargs={"out": result}) for each in operands]
        if is_made:  # (M, K) @ (K, N): the first piece of K writes the result, the others are added
            adding[0] = Call.of(call.func, (*call.args[:-2], *operands[0]), (result,), made=call.made)
        return adding
    side = 0 if axis == "rows" else 1
    calls = []
    for number, each in enumerate(bounds):
        operands_of_piece = (_slice(left, 0, each, number, cuts), right) if side == 0 else (left, _slice(right, 1, each, number, cuts))
        target = _slice(result, side, each, number, cuts)
        first = [_broadcast(call.args[0], result, side, each, number, cuts)] if is_sum else []
        if is_made and result.storage in cuts:
            calls.append(Call.of(call.func, (*first, *operands_of_piece), (target,), made={target.storage}))
        else:
            calls.append(Call.of(aten.addmm.out if is_sum else aten.mm.out, (*first, *operands_of_piece), (target,), kwargs={"out": target}))
    return [_empty(result), *calls] if is_made and result.storage not in cuts else calls


def _lookups(call: Call, cuts: Mapping[Storage, _Cut]) -> list[Call] | None:
    weight, ids, *_ = call.args
    result = _result(call)
    if result.storage in cuts or weight.storage not in cuts or not weight.is_whole:
        return None
    pieces = _numbered_pieces(weight, 0, cuts)
    return [_empty(result), *(Call.of(ops.look_up_rows.default, (result, piece, ids, first, weight.shape[0]), ()) for first, piece in pieces)]


def _rows_gradients(call: Call, cuts: Mapping[Storage, _Cut]) -> list[Call] | None:
    gradient, ids, _, padding, by_count = call.args
    result = _result(call)
    if by_count or result.storage not in cuts or gradient.storage in cuts:
        return None
    return [
        Call.of(ops.rows_gradient.default, (gradient, ids, first, piece.shape[0], padding), (piece,), made={piece.storage})
        for first, piece in _numbered_pieces(result, 0, cuts)
    ]


def _added_rows(call: Call, cuts: Mapping[Storage, _Cut]) -> list[Call] | None:
    total, gradient, ids, first, padding = call.args
    if total.storage not in cuts or gradient.storage in cuts or first:
        return None
    return [Call.of(call.func, (piece, gradient, ids, begin, padding), ()) for begin, piece in _numbered_pieces(total, 0, cuts)]


def _is_elementwise(call: Call) -> bool:
    return (torch.Tag.pointwise in call.func.tags or call.func in _ELEMENTWISE) and not call.is_random and len(call.results) == 1


def _elementwise(call: Call, cuts: Mapping[Storage, _Cut]) -> list[Call] | None:
    """Return the calls for an elementwise operation whose result is cut."""
    result = _result(call)
    if result.storage not in cuts:
        return _inside_one_piece(call, cuts)
    cut = cuts[result.storage]
    axis = _axis(result, cut)
    tensors = [leaf for leaf in tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, Ref)]
    for ref in tensors:
        if ref.storage in cuts and (ref.shape != result.shape or _axis(ref, cuts[ref.storage]) != axis or cuts[ref.storage].ends != cut.ends):
            return None
    if axis is None:
        return None
    calls = []
    for number, each in enumerate(cut.bounds):

        def take(ref: Ref, number: int = number, each: tuple[int, int] = each) -> Ref:
            return _broadcast(ref, result, axis, each, number, cuts)

        args, kwargs = tree_map_only(Ref, take, (call.args, dict(call.kwargs)))
        target = take(result)
        calls.append(Call.of(call.func, args, (target,), kwargs=kwargs, made={target.storage} if call.made else ()))
    return calls


def _inside_one_piece(call: Call, cuts: Mapping[Storage, _Cut]) -> list[Call] | None:
    """Return a call whose tensors lie inside one piece each, such as the first rows of a table; None if they do not."""
    if any(storage in cuts for storage in call.made):
        return None
    moved: dict[Ref, Ref] = {}
    for ref in tree_leaves((call.args, dict(call.kwargs), call.results)):
        if isinstance(ref, Ref) and ref.storage in cuts:
            cut, size = cuts[ref.storage], ref.dtype.itemsize
            span = ref.offset * size, (ref.offset + 1 + sum((n - 1) * stride for n, stride in zip(ref.shape, ref.strides, strict=True))) * size
            for (first, end), piece in zip(cut.bounds, cut.pieces, strict=True):
                if first * cut.row_nbytes <= span[0] and span[1] <= end * cut.row_nbytes:
                    moved[ref] = replace(ref, storage=piece, offset=ref.offset - first * cut.row_nbytes // size)
            if ref not in moved:
                return None
    args, kwargs, results = tree_map_only(Ref, lambda ref: moved.get(ref, ref), (call.args, dict(call.kwargs), call.results))
    return [replace(Call.of(call.func, args, results, kwargs=kwargs, made=call.made), draw=call.draw)]


def _gathered(call: Call, cuts: Mapping[Storage, _Cut]) -> list[Call]:
    """Return a call on whole tensors, with calls that join the pieces before it, and that cut the tensors it changes after it."""
    wholes = {each: Storage(each.nbytes, "temporary") for each in call.reads | call.writes if each in cuts}

    def on_whole(ref: Ref) -> Ref:
        return replace(ref, storage=wholes.get(ref.storage, ref.storage))

    args, kwargs, results = tree_map_only(Ref, on_whole, (call.args, dict(call.kwargs), call.results))
    before, behind = [], []
    for storage in sorted(wholes, key=lambda each: each.nbytes):
        whole, pieces = _whole(wholes[storage]), [_whole(piece) for piece in cuts[storage].pieces]
        if storage not in call.made:
            before.append(Call.of(aten.cat.default, (pieces,), (whole,), made={whole.storage}))
        if storage in call.writes:
            for (first, end), piece in zip(cuts[storage].bounds, pieces, strict=True):
                source = _narrow(whole, 0, first * cuts[storage].row_nbytes, end * cuts[storage].row_nbytes)
                behind.append(_clone(source, piece) if storage in call.made else Call.of(aten.copy_.default, (piece, source), (piece,)))
    new_storages = {wholes.get(storage, storage) for storage in call.made}
    return [*before, replace(Call.of(call.func, args, results, kwargs=kwargs, made=new_storages), draw=call.draw), *behind]


# ---- References ----


def _result(call: Call) -> Ref:
    """Return the only result of a call."""
    (result,) = call.results
    assert result is not None  # the operations of this module return tensors
    return result


def _axis(ref: Ref, cut: _Cut) -> int | None:
    """Return the axis of a tensor that runs over the rows of its storage; None if none does."""
    row = cut.row_nbytes // ref.dtype.itemsize
    for axis, (length, stride) in enumerate(zip(ref.shape, ref.strides, strict=True)):
        others = sum((n - 1) * step for at, (n, step) in enumerate(zip(ref.shape, ref.strides, strict=True)) if at != axis)
        if length == cut.ends[-1] and stride == row and ref.offset + others < row and not ref.is_conj and not ref.is_neg:
            return axis
    return None


def _narrow(ref: Ref, axis: int, first: int, end: int) -> Ref:
    """Return a part of a tensor along an axis."""
    shape = (*ref.shape[:axis], end - first, *ref.shape[axis + 1 :])
    return replace(ref, shape=shape, offset=ref.offset + first * ref.strides[axis])


def _piece(ref: Ref, axis: int, cuts: Mapping[Storage, _Cut], number: int) -> Ref:
    """Return a piece of a tensor whose storage is cut, along the axis that runs over the rows."""
    cut = cuts[ref.storage]
    first, end = cut.bounds[number]
    return replace(ref, storage=cut.pieces[number], shape=(*ref.shape[:axis], end - first, *ref.shape[axis + 1 :]))


def _numbered_pieces(ref: Ref, axis: int, cuts: Mapping[Storage, _Cut]) -> Iterator[tuple[int, Ref]]:
    """Yield the pieces of a tensor, each with the number of its first row."""
    for number, (first, _) in enumerate(cuts[ref.storage].bounds):
        yield first, _piece(ref, axis, cuts, number)


def _slice(ref: Ref, axis: int, bounds: tuple[int, int], number: int, cuts: Mapping[Storage, _Cut]) -> Ref:
    """Return a piece of a tensor, which is cut or whole."""
    return _piece(ref, axis, cuts, number) if ref.storage in cuts else _narrow(ref, axis, *bounds)


def _broadcast(ref: Ref, result: Ref, axis: int, bounds: tuple[int, int], number: int, cuts: Mapping[Storage, _Cut]) -> Ref:
    """Return the part of a tensor that is needed for a piece of a result to whose shape the tensor is broadcast."""
    at = axis - (len(result.shape) - len(ref.shape))
    return ref if at < 0 or ref.shape[at] == 1 else _slice(ref, at, bounds, number, cuts)


def _whole(storage: Storage, shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.uint8) -> Ref:
    """Return a storage as a contiguous tensor, by default of bytes."""
    shape = (storage.nbytes,) if shape is None else shape
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Ref(storage, dtype, shape, strides, 0)


def _clone(source: Ref, result: Ref) -> Call:
    return Call.of(aten.clone.default, (source,), (result,), made={result.storage})


def _empty(result: Ref) -> Call:
    """Return the call that allocates the memory of a tensor."""
    return Call.of(aten.empty_strided.default, (result.shape, result.strides), (result,), made={result.storage})
