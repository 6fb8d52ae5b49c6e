"""`Session(verify=N)` compares steps with an eager twin, and the comparison of `support.eager_twin` itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.eager_twin import LINE, Case, Program, Run, adamw, by_eager, check, outcome_of, rows
from support.small_modules import Net, module_of, program_of
from torch import nn

from nntask import NntaskError
from wrappers.torch import Session

TERMS: dict[str, Any] = {"ram": "16MB", "workers": 1}


class Normed(Net):
    """A `Net` with batch normalisation, and dropout if it is asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(12), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result."""
        return self.b(self.drop(torch.tanh(self.norm(self.a(x)))))


def mean_square(y: torch.Tensor, batch: Any) -> torch.Tensor:
    """The loss."""
    return y.square().mean()


def steps(module: nn.Module, **terms: Any) -> list[float]:
    """Losses of eight steps in two minibatches."""
    with Session(module, "adamw", lr=0.01, loss=mean_square, minibatches=2, max_grad_norm=0.5, **terms, **TERMS) as session:
        return [session.step(**batch) for batch in rows(8, 8, 8, 8, 8, 8, 8, 8)()]


@pytest.mark.parametrize("every", [1, 3])
def test_a_healthy_module_passes(every: int) -> None:
    """Loss, gradients, parameters and buffers agree; the losses are those of a session that does not verify."""
    torch.manual_seed(0)
    first = steps(Normed())
    torch.manual_seed(0)
    assert steps(Normed(), verify=every) == first


def test_dropout_agrees() -> None:
    """The twin draws the numbers of the session, so a module with dropout passes."""
    torch.manual_seed(0)
    first = steps(Normed(0.5))
    torch.manual_seed(0)
    assert steps(Normed(0.5), verify=2) == first


def _hidden() -> Iterator[float]:
    """Numbers from a counter inside a generator, which no guard sees."""
    for number in itertools.count(1):
        yield 1.0 / number


@torch.library.custom_op("nntask_tests::aged", mutates_args=())
def aged(x: torch.Tensor) -> torch.Tensor:
    """Multiply by the next number of `_HIDDEN`."""
    return x * next(_HIDDEN)


@aged.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


aged.register_autograd(lambda ctx, gradient: gradient * 0.5)
_HIDDEN = _hidden()


@pytest.mark.parametrize("every", [1, 4])
def test_state_that_no_guard_sees_is_reported(every: int) -> None:
    """An operation whose state is in a generator of another module differs from the twin; the error names what differs and the step."""
    module = module_of(lambda self, x: Net.forward(self, aged(x)))
    with pytest.raises(NntaskError, match=r"(?s)verify.*(loss|gradient|parameter|buffer)|(loss|gradient|parameter|buffer).*(verify|eager)") as caught:
        steps(module, verify=every)
    assert any(word in str(caught.value) for word in ("step", "eager"))


def test_a_branch_on_hidden_state_is_reported() -> None:
    """A factor that forward takes from a generator in a closure is captured once and differs later, unless a guard finds it."""
    factors = _hidden()
    module = module_of(lambda self, x: Net.forward(self, x) * next(factors))
    with pytest.raises(NntaskError, match=rf"{LINE}|eager"):
        steps(module, verify=1)


def test_the_comparison_passes_a_plain_module() -> None:
    """A module without state is equal by eager PyTorch and by a session."""
    check(Case(lambda: Program(Net()), optimizer=adamw, minibatches=2, max_grad_norm=0.1))


def test_the_comparison_finds_differences() -> None:
    """Another loss, another weight and another state in Python are found, and so is chance."""
    plain = Case(lambda: Program(Net()))
    expected = by_eager(plain)
    assert outcome_of(Case(lambda: Program(Net(), lambda y, batch: y.square().mean() * 2)), expected).detail.startswith("losses[0]")
    expected.tensors["a.weight"] += 1e-8
    assert outcome_of(plain, expected).detail.startswith("tensors.a.weight")
    expected = by_eager(plain)
    expected.state["module"]["count"] = 1
    assert "count" in outcome_of(plain, expected).detail
    chance = random.Random()
    with pytest.raises(AssertionError, match="not deterministic"):
        check(Case(lambda: program_of(lambda self, x: Net.forward(self, x) * chance.random())))


def test_the_comparison_fails_other_errors() -> None:
    """An error of another type than UsageError is neither equal nor refused."""

    def fails(run: Run) -> None:
        raise KeyError("twin")

    outcome = outcome_of(Case(lambda: Program(Net()), frozenset({"equal", "refused"}), before=[fails]), by_eager(Case(lambda: Program(Net()))))
    assert (outcome.name, outcome.detail) == ("raised", "KeyError: 'twin'")
