"""Random calls on a GPU, from uniform numbers that a kernel of ours writes to scratch memory before PyTorch computes the task.

PyTorch's generator for CUDA differs from the CPU's and takes its seed from the host, which would have to wait for the device. The numbers here are a
function of seed, step, minibatch, draw and the element's index (``keyed_uniform`` of `tiles`), and seed and step are read on the device. So they
depend neither on the order of tasks nor on the card. They differ from those that a CPU worker draws. This is deterministic, because tasks with a CUDA
kernel run only on GPUs if the machine has any, as with our own models.

Calls that need other numbers have no rule here and are left to CPU workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import pi, prod
from typing import Any, Final

import torch

from .calls import Call, Ref, aten

Rule = Callable[..., None]
"""Function ``(results, *args, uniforms=, **kwargs)`` that computes a call from fp32 numbers in [0, 1), which it may overwrite."""

_EXACT_BITS: Final = {torch.bfloat16: 8, torch.float16: 11}
"""Bits of mantissa of types in which a number below 1 could be rounded to 1."""


def rule_of(func: Any) -> Rule | None:
    """Return the rule that computes a random call on a GPU; None if there is none."""
    entry = _RULES.get(func)
    return None if entry is None else entry[0]


def num_uniforms(call: Call) -> int:
    """Return the number of uniform numbers that a random call with a rule needs."""
    target = call.results[0]
    if target is None or not call.made:
        target = call.args[0]
    assert isinstance(target, Ref)  # the tensor to fill
    return _RULES[call.func][1] * prod(target.shape)


def stream_of(call: Call, minibatch: int) -> int:
    """Return the stream of ``keyed_uniform`` for a call in a minibatch."""
    return call.draw << 32 | minibatch


def _dropout(results: Sequence[torch.Tensor], source: torch.Tensor, p: float, train: bool | None, *, uniforms: torch.Tensor) -> None:
    out, mask = results
    if train is False:
        out.copy_(source)
        mask.fill_(True)
        return
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
    found = uniforms.view(target.shape)
    target.copy_(torch.lt(found, p, out=found))


def _rand(results: Sequence[torch.Tensor], *_: Any, uniforms: torch.Tensor, **__: Any) -> None:
    _fill_uniform(results[0], 0.0, 1.0, uniforms)


def _randn(results: Sequence[torch.Tensor], *_: Any, uniforms: torch.Tensor, **__: Any) -> None:
    _fill_normal(results[0], 0.0, 1.0, uniforms)


def _uniform_(_: Any, target: torch.Tensor, low: float = 0.0, high: float = 1.0, *, uniforms: torch.Tensor, **__: Any) -> None:
    _fill_uniform(target, low, high, uniforms)


def _normal_(_: Any, target: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, uniforms: torch.Tensor, **__: Any) -> None:
    _fill_normal(target, mean, std, uniforms)


def _bernoulli(results: Sequence[torch.Tensor], source: torch.Tensor, p: float | None = None, *, uniforms: torch.Tensor, **__: Any) -> None:
    _fill_bernoulli(results[0], source if p is None else p, uniforms)


def _bernoulli_(_: Any, target: torch.Tensor, p: float | torch.Tensor = 0.5, *, uniforms: torch.Tensor, **__: Any) -> None:
    _fill_bernoulli(target, p, uniforms)


_RULES: Final[Mapping[Any, tuple[Rule, int]]] = {
    aten.native_dropout.default: (_dropout, 1),
    aten.rand.default: (_rand, 1),
    aten.rand_like.default: (_rand, 1),
    aten.randn.default: (_randn, 2),
    aten.randn_like.default: (_randn, 2),
    aten.uniform_.default: (_uniform_, 1),
    aten.normal_.default: (_normal_, 2),
    aten.bernoulli.default: (_bernoulli, 1),
    aten.bernoulli.p: (_bernoulli, 1),
    aten.bernoulli_.float: (_bernoulli_, 1),
    aten.bernoulli_.Tensor: (_bernoulli_, 1),
}
"""Random operation -> its rule, and the count of uniform numbers for an element."""
