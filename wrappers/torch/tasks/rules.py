"""Rules that compute operations into given memory: fills, copies, indexed sums, and random numbers.

PyTorch's generator for CUDA differs from the CPU's and takes its seed from the host, which would have to wait for the device. So a random call on a
GPU takes uniform numbers that a kernel of ours (``keyed_uniform`` of `tiles`) writes to scratch memory: a function of seed, step, minibatch,
draw and the element's index, where seed and step are read on the device. They depend neither on the order of tasks nor on the card, and differ from
those that a CPU worker draws. Results are deterministic, because tasks with a CUDA kernel run only on GPUs if the
machine has any. Random calls without a rule for GPUs are left to CPU workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import pi, prod
from typing import Any, Final, NamedTuple

import torch

from . import rows
from .calls import Call, Ref, aten

Into = Callable[..., object]
"""Function ``(results, *args, **kwargs)`` that fills the list of result tensors."""

_EXACT_BITS: Final = {torch.bfloat16: 8, torch.float16: 11}
"""Bits of mantissa of types in which a number below 1 could be rounded to 1."""


def _with_scalar(function: Callable[..., Any]) -> Into:
    def run(results: Sequence[torch.Tensor], left: torch.Tensor, right: Any, *rest: Any) -> None:
        if rest and rest[0] != 1:
            function(left, right, alpha=rest[0], out=results[0])
        else:
            function(left, right, out=results[0])

    return run


def _safe_softmax(results: Sequence[torch.Tensor], source: torch.Tensor, axis: int, dtype: torch.dtype | None = None) -> None:
    typed = source if dtype is None else source.to(dtype)
    aten._softmax.out(typed, axis, False, out=results[0])
    results[0].masked_fill_(source.isneginf().all(axis, keepdim=True), 0)  # rows without any allowed position


def _slice_backward(results: Sequence[torch.Tensor], gradient: torch.Tensor, _: Any, axis: int, start: int, end: int, step: int) -> None:
    aten.slice.Tensor(results[0].zero_(), axis, start, end, step).copy_(gradient)


def _embedding(results: Sequence[torch.Tensor], weight: torch.Tensor, ids: torch.Tensor, *_: Any) -> None:
    torch.index_select(weight, 0, ids.reshape(-1), out=results[0].view(-1, weight.shape[1]))  # (V, C), (N,) -> (N, C)


def _masked_fill(results: Sequence[torch.Tensor], source: torch.Tensor, mask: torch.Tensor, value: Any) -> None:
    results[0].copy_(source).masked_fill_(mask, value)


INTO: Final[Mapping[Any, Into]] = {
    **dict.fromkeys((aten.clone.default, aten._to_copy.default), lambda results, source, **_: results[0].copy_(source)),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), lambda results, *_, **__: results[0].fill_(0)),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), lambda results, *_, **__: results[0].fill_(1)),
    **dict.fromkeys((aten.full.default, aten.full_like.default), lambda results, _, value, **__: results[0].fill_(value)),
    aten.new_full.default: lambda results, _, size, value, **__: results[0].fill_(value),
    aten.scalar_tensor.default: lambda results, value, **_: results[0].fill_(value),
    aten.mul.Scalar: _with_scalar(torch.mul),
    aten.div.Scalar: _with_scalar(torch.div),
    aten.add.Scalar: _with_scalar(torch.add),
    aten.sub.Scalar: _with_scalar(torch.sub),
    aten.relu.default: lambda results, source: torch.clamp_min(source, 0, out=results[0]),  # the function that PyTorch's own kernel calls
    aten._safe_softmax.default: _safe_softmax,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: lambda results, gradient, _, axis, index: results[0].zero_().select(axis, index).copy_(gradient),
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: lambda results, gradient, ids, _, padding, __: rows.gradient_into(results[0], gradient, ids, 0, padding),
    rows.ops.rows_gradient.default: lambda results, gradient, ids, first, _, padding: rows.gradient_into(results[0], gradient, ids, first, padding),
    aten.nll_loss_backward.default: lambda results, *args: aten.nll_loss_backward.grad_input(*args, grad_input=results[0]),
}
"""Operation -> its rule."""


class RandomRule(NamedTuple):
    """The computation of a random operation.

    Attributes:
        cpu: rule with the further argument ``generator``; None if the operation itself takes a generator.
        gpu: rule with the further argument ``uniforms``, fp32 numbers in [0, 1), which it may overwrite; None without a rule for GPUs.
        num_uniforms: count of uniform numbers for an element.
    """

    cpu: Into | None
    gpu: Into | None = None
    num_uniforms: int = 1


def num_uniforms(call: Call) -> int:
    """Return the number of uniform numbers that a random call with a rule for GPUs needs."""
    target = call.results[0]
    if target is None or not call.made:
        target = call.args[0]
    assert isinstance(target, Ref)  # the tensor to fill
    return RANDOM[call.func].num_uniforms * prod(target.shape)


def stream_of(call: Call, minibatch: int) -> int:
    """Return the stream of ``keyed_uniform`` for a call in a minibatch."""
    return call.draw << 32 | minibatch


def _dropout(
    results: Sequence[torch.Tensor],
    source: torch.Tensor,
    p: float,
    train: bool | None,
    *,
    generator: torch.Generator | None = None,
    uniforms: torch.Tensor | None = None,
) -> None:
    out, mask = results
    if train is False:
        out.copy_(source)
        mask.fill_(True)
        return
    if uniforms is None:
        mask.bernoulli_(1 - p, generator=generator)
    else:
        torch.ge(uniforms.view(mask.shape), p, out=mask)
    torch.mul(source, mask, out=out).mul_(0.0 if p == 1 else 1 / (1 - p))


def _fill_uniform(target: torch.Tensor, low: float, high: float, uniforms: torch.Tensor) -> None:
    bits = _EXACT_BITS.get(target.dtype)
    if bits is not None:
        uniforms.mul_(2**bits).floor_().mul_(2**-bits)
    target.copy_(uniforms.mul_(high - low).add_(low).view(target.shape))


def _fill_normal(target: torch.Tensor, mean: float, std: float, uniforms: torch.Tensor) -> None:
    """Fill a tensor with normal numbers (Box and Muller, 1958); each element uses two uniform numbers."""
    radius, turn = uniforms.view(2, *target.shape)
    radius.neg_().add_(1).log_().mul_(-2).sqrt_()
    target.copy_(radius.mul_(turn.mul_(2 * pi).cos_()).mul_(std).add_(mean))


def _fill_bernoulli(target: torch.Tensor, p: float | torch.Tensor, uniforms: torch.Tensor) -> None:
    drawn = uniforms.view(target.shape)
    target.copy_(torch.lt(drawn, p, out=drawn))


def _integers(results: Sequence[torch.Tensor], low: int, high: int, *, generator: torch.Generator, **_: Any) -> None:
    results[0].random_(low, high, generator=generator)


_UNIFORM: Final = RandomRule(
    lambda results, *_, generator, **__: results[0].uniform_(generator=generator),
    lambda results, *_, uniforms, **__: _fill_uniform(results[0], 0.0, 1.0, uniforms),
)
_NORMAL: Final = RandomRule(
    lambda results, *_, generator, **__: results[0].normal_(generator=generator),
    lambda results, *_, uniforms, **__: _fill_normal(results[0], 0.0, 1.0, uniforms),
    2,
)
_BERNOULLI: Final = RandomRule(
    None, lambda results, source, p=None, *, uniforms, **_: _fill_bernoulli(results[0], source if p is None else p, uniforms)
)
_BERNOULLI_FILL: Final = RandomRule(None, lambda _, target, p=0.5, *, uniforms, **__: _fill_bernoulli(target, p, uniforms))
RANDOM: Final[Mapping[Any, RandomRule]] = {
    aten.native_dropout.default: RandomRule(_dropout, _dropout),
    aten.rand.default: _UNIFORM,
    aten.rand_like.default: _UNIFORM,
    aten.randn.default: _NORMAL,
    aten.randn_like.default: _NORMAL,
    aten.uniform_.default: RandomRule(None, lambda _, target, low=0.0, high=1.0, *, uniforms, **__: _fill_uniform(target, low, high, uniforms)),
    aten.normal_.default: RandomRule(None, lambda _, target, mean=0.0, std=1.0, *, uniforms, **__: _fill_normal(target, mean, std, uniforms), 2),
    aten.bernoulli.default: _BERNOULLI,
    aten.bernoulli.p: _BERNOULLI,
    aten.bernoulli_.float: _BERNOULLI_FILL,
    aten.bernoulli_.Tensor: _BERNOULLI_FILL,
    aten.randint.default: RandomRule(lambda results, high, *_, **terms: _integers(results, 0, high, **terms)),
    aten.randint.low: RandomRule(lambda results, low, high, *_, **terms: _integers(results, low, high, **terms)),
    aten.randint_like.default: RandomRule(lambda results, _, high, *__, **terms: _integers(results, 0, high, **terms)),
    aten.randint_like.low_dtype: RandomRule(lambda results, _, low, high, *__, **terms: _integers(results, low, high, **terms)),
    aten.randperm.default: RandomRule(lambda results, count, *_, generator, **__: torch.randperm(count, generator=generator, out=results[0])),
}
"""Random operation -> its rule."""
