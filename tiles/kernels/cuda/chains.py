"""Chains of operations that one kernel computes: it keeps in registers what the operations would write and read again.

The sums and the roundings are those of the single operations, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from scheduler.machine import KernelChain, Link

from ..registry import register_chain
from .attention import attention_backward, attention_delta
from .elementwise import activation_backward, activation_sums, add, column_sums
from .many import Task
from .norm import layer_norm, layer_norm_backward, residual_layer_norm, residual_rms_norm, rms_norm, rms_norm_backward
from .tables import dropout, dropout_sums


def _sum_and_norm(tasks: Sequence[Task], *, norm: Callable[..., None], num_vectors: int) -> None:
    """s = x + r; y = norm(s), by the kernel of a residual norm, which takes s after gamma [and beta]."""
    ((x, r, s), _), ((_, *tiles), constants) = tasks
    norm(x, r, *tiles[:num_vectors], s, *tiles[num_vectors:], **constants)


def _sums_and_norm_backward(tasks: Sequence[Task], *, norm: Callable[..., None], dy_index: int) -> None:
    """dy = a + b [+ c]; gradients of a norm, whose tile number `dy_index` is dy."""
    (((first, second, _), _), *sums), (tiles, constants) = tasks[:-1], tasks[-1]
    norm(*tiles[:dy_index], first, *tiles[dy_index + 1 :], **constants, more=(second, *(tile for (_, tile, _), _ in sums)))


def _norm_backward_and_sums(tasks: Sequence[Task]) -> None:
    """[dy = a + b [+ c];] gradients of a layer norm; db (+)= sums of the rows of dx."""
    *before, ((_, total), flags) = tasks
    norm = partial(layer_norm_backward, sums=(total, flags["accumulate"]))
    if len(before) > 1:
        _sums_and_norm_backward(before, norm=norm, dy_index=4)
    else:
        ((tiles, constants),) = before
        norm(*tiles, **constants)


def _activation_and_sums(tasks: Sequence[Task]) -> None:
    """dx = dy * activation'(x); db (+)= sums of the rows of dx."""
    ((x, dy, dx), constants), ((_, total), flags) = tasks
    activation_sums(x, dy, dx, total, kind=constants["kind"], accumulate=flags["accumulate"])


def _dropout_and_sums(tasks: Sequence[Task]) -> None:
    """y = dropout(x); db (+)= sums of the rows of y."""
    ((x, key, y), constants), ((_, total), flags) = tasks
    dropout_sums(x, key, y, total, **constants, accumulate=flags["accumulate"])


def _delta_and_backward(tasks: Sequence[Task]) -> None:
    """delta = row sums of do * o; gradients of attention with the first keys."""
    ((o, do, delta), sizes), (tiles, constants) = tasks
    if tiles[3] == do:
        attention_backward(*tiles, **constants, o=o)
    else:
        attention_delta(o, do, delta, **sizes)
        attention_backward(*tiles, **constants)


for _before in (2, 1, 0):
    _sums = tuple(Link(number, 2, number + 1, 0 if number + 1 < _before else 4, is_private=True) for number in range(_before))
    _columns = Link(_before, -3, _before + 1, 0)
    register_chain(KernelChain((*[add] * _before, layer_norm_backward, column_sums), (*_sums, _columns), _norm_backward_and_sums))
for _norm, _residual, _backward, _dy in (
    (layer_norm, residual_layer_norm, layer_norm_backward, 4),
    (rms_norm, residual_rms_norm, rms_norm_backward, 3),
):
    _both = partial(_sum_and_norm, norm=_residual, num_vectors=_dy - 2)
    register_chain(KernelChain((add, _norm), (Link(0, 2, 1, 0),), _both))
    _gradients = partial(_sums_and_norm_backward, norm=_backward, dy_index=_dy)
    _sums = (Link(0, 2, 1, 0, is_private=True), Link(1, 2, 2, _dy, is_private=True))
    register_chain(KernelChain((add, add, _backward), _sums, _gradients))
    register_chain(KernelChain((add, _backward), (Link(0, 2, 1, _dy, is_private=True),), _gradients))
register_chain(KernelChain((activation_backward, column_sums), (Link(0, 2, 1, 0),), _activation_and_sums))
register_chain(KernelChain((attention_delta, attention_backward), (Link(0, 2, 1, 5),), _delta_and_backward))
register_chain(KernelChain((dropout, column_sums), (Link(0, 2, 1, 0),), _dropout_and_sums))
