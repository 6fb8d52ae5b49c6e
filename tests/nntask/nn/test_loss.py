"""The loss of a head on the tape: bias, factor and cap, classes instead of words, sums for evaluation."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from nntask import no_grad
from nntask.nn import functional
from nntask.nn.autograd import Tensor, accumulation
from nntask.nn.initializers import constant
from nntask.nn.module import Parameter
from scheduler import InlineRuntime, Runtime, TaskRuntime
from tiles import TileTensor

B, T, C, V = 3, 5, 6, 11
TILE = (2, 3, 4, 4)
"""Of B, T, C and V: nothing divides its axis."""
BF16 = np.dtype(ml_dtypes.bfloat16)


def parameter(runtime: TaskRuntime, name: str, values: np.ndarray, tile: tuple[int, ...]) -> Parameter:
    """A parameter with these values."""
    found = Parameter(values.shape, tile, constant(0.0))
    found.allocate(runtime, name, values.dtype, None)
    found.data.write(values)
    return found


def given(runtime: TaskRuntime, values: np.ndarray, tile: tuple[int, ...]) -> TileTensor:
    """An input with these values."""
    found = TileTensor(runtime, values.shape, tile, values.dtype, kind="input", name="given")
    found.write(values)
    return found


class Problem:
    """A head over inputs that are looked up in the head's own weight, as where both are tied."""

    def __init__(self, runtime: TaskRuntime, dtype: Any = np.float64, vocab: int = V, length: int = T) -> None:
        self.runtime = runtime
        rng = np.random.default_rng(0)
        self.values = {"w": rng.normal(size=(vocab, C)), "bias": rng.normal(size=vocab)}
        self.tokens = rng.integers(0, vocab, (B, length)).astype(np.int32)
        self.targets = rng.integers(-1, vocab, (B, length)).astype(np.int32)
        self.targets[0, 0], self.targets[1, 0] = -1, 1
        b, t, c, v = TILE
        self.w = parameter(runtime, "w", self.values["w"].astype(dtype), (min(v, vocab), c))
        self.bias = parameter(runtime, "bias", self.values["bias"].astype(dtype), (min(v, vocab),))
        self.ids = [given(runtime, ids, (b, min(t, length))) for ids in (self.tokens, self.targets)]
        self.factor = given(runtime, np.array([1 / (self.targets >= 0).sum()], np.float32), (1,))

    def loss(self, *, scale: float = 1.0, factor: bool = True, cap: float | None = None) -> Tensor:
        """Of predicting the targets."""
        x = functional.embedding(self.ids[0], self.w)
        more = self.factor if factor else None
        return functional.linear_cross_entropy(x, self.w, self.ids[1], scale=scale, bias=self.bias, factor=more, cap=cap)

    def expected(self, cap: float | None = None, reduction: str = "mean") -> tuple[float, dict[str, np.ndarray]]:
        """torch's loss and gradients."""
        w, bias = (torch.tensor(self.values[name], requires_grad=True) for name in ("w", "bias"))
        logits = w[torch.tensor(self.tokens).long()] @ w.T + bias
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        ids = torch.tensor(self.targets).long()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=-1, reduction=reduction)
        loss.backward()
        return loss.item(), {"w": w.grad.numpy(), "bias": bias.grad.numpy()}


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("lanes", [1, 3])
def test_loss_and_gradients_are_those_of_torch(lanes: int, cap: float | None) -> None:
    """The mean over targets that count, several backward passes summed, the weight having more contributions than the bias."""
    problem = Problem(InlineRuntime(lanes=lanes))
    value, gradients = problem.expected(cap)
    for number in range(1, 4):
        loss = problem.loss(cap=cap)
        assert loss.read()[0] == pytest.approx(value, rel=1e-7)  # of the factor, which is fp32
        loss.backward()
        for name, want in gradients.items():
            np.testing.assert_allclose(getattr(problem, name).gradient.read(), number * want, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_narrow_heads_stay_near(dtype: Any) -> None:
    """fp32 and bf16; gradients of bf16 parameters are fp32."""
    problem = Problem(InlineRuntime(), dtype)
    problem.values = {name: value.astype(dtype).astype(np.float64) for name, value in problem.values.items()}
    value, gradients = problem.expected(2.0)
    loss = problem.loss(cap=2.0)
    loss.backward()
    bound = 1e-5 if dtype == np.float32 else 2e-2
    assert loss.read()[0] == pytest.approx(value, rel=bound, abs=bound)
    for name, want in gradients.items():
        found = getattr(problem, name).gradient
        assert found.dtype == np.float32
        np.testing.assert_allclose(found.read(), want, atol=bound)


def test_evaluation_sums_the_losses_of_tokens_that_count() -> None:
    """Without a factor, and without a tape."""
    problem = Problem(InlineRuntime())
    with no_grad():
        loss = problem.loss(factor=False)
    assert loss.edge is None
    assert loss.read()[0] == pytest.approx(problem.expected(reduction="sum")[0], rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, BF16])
def test_two_classes_of_one_token(dtype: Any) -> None:
    """V = 2 and T = 1, as of a classifier, of which one text has no label."""
    problem = Problem(InlineRuntime(), dtype, vocab=2, length=1)
    problem.values = {name: value.astype(dtype).astype(np.float64) for name, value in problem.values.items()}
    value, gradients = problem.expected()
    loss = problem.loss()
    loss.backward()
    bound = {8: 1e-6, 4: 1e-5, 2: 2e-2}[np.dtype(dtype).itemsize]
    assert loss.read()[0] == pytest.approx(value, rel=bound, abs=bound)
    for name, want in gradients.items():
        np.testing.assert_allclose(getattr(problem, name).gradient.read(), want, atol=bound)


def test_a_batch_without_targets_teaches_nothing() -> None:
    """Every target -1 and a factor of 0: the loss and all gradients are 0."""
    problem = Problem(InlineRuntime())
    problem.ids[1].write(np.full((B, T), -1))
    problem.factor.write(np.zeros(1))
    loss = problem.loss()
    loss.backward()
    assert loss.read()[0] == 0
    assert not problem.bias.gradient.read().any()
    assert not problem.w.gradient.read().any()


def test_the_bias_of_a_frozen_head_is_learnt() -> None:
    """With the same gradient, and no task for the weight's."""
    problem = Problem(InlineRuntime())
    _, gradients = problem.expected()
    problem.w.freeze()
    problem.loss().backward()
    np.testing.assert_allclose(problem.bias.gradient.read(), gradients["bias"], atol=1e-6)
    assert problem.w.gradient is None


def test_factors_are_written_between_replays() -> None:
    """A recorded step has the factor of its batch; minibatches may run in any order and the sums have one."""
    with Runtime(cpu_workers=2, ram=1 << 26, lanes=2) as runtime:
        problem = Problem(runtime)
        value, gradients = problem.expected()
        with runtime.record() as step, accumulation():
            losses = []
            for _ in range(2):
                loss = problem.loss(scale=0.5)
                loss.backward()
                losses.append(loss)
        whole = problem.factor.read()
        for times in (1.0, 0.25):
            problem.factor.write(times * whole)
            ticket = step.replay()
            assert sum(ticket.read(loss)[0] for loss in losses) == pytest.approx(times * value, rel=1e-7)
            np.testing.assert_allclose(ticket.read(problem.bias.gradient), times * gradients["bias"], atol=1e-6)
            np.testing.assert_allclose(ticket.read(problem.w.gradient), times * gradients["w"], atol=1e-6)
