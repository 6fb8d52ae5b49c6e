"""In-place computation of gradients that are sums: the second summand is added to the memory of the first.

A tied embedding, for example, has a gradient from the output layer and one from the lookup. Eager PyTorch allocates both, of the size of the table,
and a third one for their sum. Here the product computes the gradient and the rows of the lookup are added to it, which saves memory and traffic of
the largest tensors. The order of additions differs from eager PyTorch, so the last bits do, too; the order depends only on the module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils._pytree import tree_leaves, tree_map_only

from .calls import Call, Capture, Ref, Storage, aten
from .rows import ops


def with_accumulated_sums(capture: Capture) -> Capture:
    """Return the same pass with the sums that compute gradients done in place, if one summand can be added to the other."""
    calls: list[Call | None] = list(capture.calls)
    needed = {leaf.storage for leaf in tree_leaves(capture.outputs) if isinstance(leaf, Ref)}
    needed |= {ref.storage for ref in capture.gradients.values()}  # a summand may be the gradient of another parameter
    makers = {storage: number for number, call in enumerate(capture.calls) for storage in call.made}
    moved: dict[Storage, Storage] = {}
    for ref in capture.gradients.values():
        total = ref.storage
        while (position := makers.get(total)) is not None and (merged := _sum_of(calls, position, needed)) is not None:
            made_at, first, adding = merged
            calls[made_at], calls[position] = adding, None
            moved[total] = first.storage
            total = first.storage
    return _renamed(replace(capture, calls=[call for call in calls if call is not None]), moved)


def adding_to(call: Call, total: Ref | None = None) -> Call | None:
    """Return a call that adds the result of `call` to a tensor of its shape; None if no such call exists.

    Args:
        total: tensor to add to; None for the result of `call` itself, in memory that already holds values.
    """
    total = total or call.results[0]
    if call.func is aten.mm.default:
        return Call.of(aten.addmm.out, (total, *call.args), (total,), kwargs={"out": total})
    if call.func is aten.embedding_dense_backward.default and not call.args[4]:
        gradient, ids, _, padding, _ = call.args
        return Call.of(ops.add_rows_gradient.default, (total, gradient, ids, 0, padding), ())
    if call.func is ops.rows_gradient.default:
        gradient, ids, first, _, padding = call.args
        return Call.of(ops.add_rows_gradient.default, (total, gradient, ids, first, padding), ())
    return None


def only_adds(call: Call, storage: Storage) -> bool:
    """Return whether a call only adds to a storage."""
    if call.func is aten.addmm.out:
        total, *operands = call.args
        return total == call.kwargs["out"] and call.kwargs.keys() == {"out"} and all(ref.storage is not storage for ref in operands)
    return call.func is ops.add_rows_gradient.default and call.args[1].storage is not storage


def _sum_of(calls: Sequence[Call | None], at: int, kept: set[Storage]) -> tuple[int, Ref, Call] | None:
    """Return how the result of a call, if it is a sum, can be computed in place; None if it cannot.

    Args:
        at: number of the call.
        kept: storages that are needed after the pass, and so cannot be overwritten.

    Returns:
        Number of the call that computes the later summand; the earlier summand; the call that replaces that of the later one.
    """
    call = calls[at]
    assert call is not None  # only sums are removed, once each
    if call.func is not aten.add.Tensor or call.kwargs or not all(isinstance(each, Ref) for each in call.args):
        return None
    result = call.results[0]
    assert result is not None  # additions return tensors
    if any(not ref.is_whole or (ref.shape, ref.dtype) != (result.shape, result.dtype) for ref in (*call.args, result)):
        return None
    if any(ref.storage in kept for ref in call.args):
        return None
    for first, second in (call.args, reversed(call.args)):
        if second.storage.role != "temporary" or first.storage.role != "temporary":
            return None
        made_at, *others = _users(calls, second.storage)
        maker = calls[made_at]
        assert maker is not None
        before = _users(calls, first.storage)
        is_alone = second.storage in maker.made and maker.results == (replace(first, storage=second.storage),)
        if is_alone and others == [at] and before[-1] == at and before[-2] < made_at:
            adding = adding_to(maker, first)
            if adding is not None:
                return made_at, first, adding
    return None


def _users(calls: Sequence[Call | None], storage: Storage) -> list[int]:
    """Return the numbers of the calls that touch a storage."""
    return [number for number, call in enumerate(calls) if call is not None and storage in call.reads | call.writes]


def _renamed(capture: Capture, moved: Mapping[Storage, Storage]) -> Capture:
    """Return the same pass with storages replaced according to `moved`."""

    def renamed(ref: Ref) -> Ref:
        storage = ref.storage
        while storage in moved:
            storage = moved[storage]
        return ref if storage is ref.storage else replace(ref, storage=storage)

    def rename(value: Any) -> Any:
        return tree_map_only(Ref, renamed, value)

    calls = [
        replace(Call.of(call.func, rename(call.args), rename(call.results), kwargs=rename(dict(call.kwargs)), made=call.made), draw=call.draw)
        if any(storage in moved for storage in call.reads | call.writes)
        else call
        for call in capture.calls
    ]
    return replace(capture, calls=calls, gradients={tile: rename(ref) for tile, ref in capture.gradients.items()})
