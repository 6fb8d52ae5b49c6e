"""Operations that fail in the middle of a step: what the step leaves behind, and how the training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from nntask import UsageError
from wrappers.torch import Session


class _Net(nn.Module):
    """Picks a column for each row, behind a normalisation whose buffers change in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return functional.log_softmax(self.last(self.norm(self.first(x)).relu()), 1).gather(1, column).square().mean()


class _BadGradient(torch.autograd.Function):
    """The identity, whose gradient exists for columns below 6 only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(column)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (column,) = ctx.saved_tensors
        return gradient + torch.index_select(torch.zeros(6), 0, column.reshape(-1)).sum(), None


class _FailsBackward(nn.Module):
    """Two layers with the identity of a bad gradient between them: that of the last layer is there when it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return self.last(_BadGradient.apply(self.first(x), column)).square().mean()


def batch(seed: int, *, bad: bool = False) -> dict[str, torch.Tensor]:
    """Eight rows and a column for each; a bad one is in the second minibatch of two."""
    generator = torch.Generator().manual_seed(seed)
    column = torch.randint(0, 6, (8, 1), generator=generator)
    column[6] = 6 if bad else column[6]
    return {"x": torch.randn(8, 4, generator=generator), "column": column}


def make(kind: type[nn.Module] = _Net) -> nn.Module:
    """A module with the same values each time."""
    torch.manual_seed(0)
    return kind()


def run(kind: type[nn.Module], bad_at: int | None, **terms: Any) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses of four steps, the weights, and the number of steps; before one of them a bad batch is tried."""
    with Session(make(kind), lr=0.1, minibatches=2, **terms) as session:
        losses = []
        for number in range(4):
            if number == bad_at:
                with pytest.raises(UsageError, match=r"index.*out of.*; the step was left out, and parameters, buffers and optimizer are as before"):
                    session.step(**batch(9, bad=True))
            losses.append(session.step(**batch(number)))
        return losses, session.state_dict(), session.num_steps


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("kind", "terms"), [(_Net, {}), (_Net, {"max_grad_norm": 1.0}), (_FailsBackward, {"max_grad_norm": 1.0})])
def test_a_step_that_fails_is_as_if_it_had_not_been_tried(kind: type[nn.Module], terms: dict[str, Any], workers: int) -> None:
    """Forward or backward, first or later: losses, weights, buffers of normalisations and the number of steps."""
    losses, weights, number = run(kind, None, ram="16MB", workers=workers, **terms)
    for bad_at in (0, 2):
        found, same, counted = run(kind, bad_at, ram="16MB", workers=workers, **terms)
        assert (found, counted) == (losses, number)
        assert all(torch.equal(same[name], value) for name, value in weights.items())


def test_a_step_that_fails_over_a_disk(tmp_path: Path) -> None:
    """In memory that holds a part: the same bits."""
    losses, weights, _ = run(_Net, None, ram="16MB", workers=2)
    found, same, _ = run(_Net, 2, ram="60KB", disk=f"{tmp_path}:16MB", workers=2)
    assert found == losses
    assert all(torch.equal(same[name], value) for name, value in weights.items())


def test_the_sentence_names_the_operation_and_evaluation_goes_on() -> None:
    """One line, with what PyTorch says; its exception is the cause of the cause."""
    words = r"^aten\.gather\.default failed: index 6 is out of bounds .*; look at the values of this batch"
    with Session(make(), lr=0.1, ram="16MB") as session:
        with pytest.raises(UsageError, match=f"{words}; the step was left out"):
            session.step(**batch(0, bad=True))
        with pytest.raises(UsageError, match=f"{words}$") as error:
            session.evaluate(**batch(0, bad=True))
        assert isinstance(error.value.__cause__.__cause__.__cause__, RuntimeError)
        assert session.evaluate(**batch(0)) > 0


def test_steps_in_flight_behind_one_that_fails() -> None:
    """They run as if it had not been, and each outcome is its own; the step that failed keeps its number."""
    with Session(make(), "sgd", lr=0.1, minibatches=2, ram="16MB") as session:
        started = [session.start(**batch(number, bad=number == 1)) for number in range(4)]
        with pytest.raises(UsageError, match="was left out"):
            started[1].result()
        losses = [started[number].result().loss for number in (0, 2, 3)]
    with Session(make(), "sgd", lr=0.1, minibatches=2, ram="16MB") as session:
        assert [session.step(**batch(number)) for number in (0, 2, 3)] == losses


def test_a_step_that_was_half_done_says_so(tmp_path: Path) -> None:
    """Without clipping the last layer is updated before the gradient of the first one fails; the session goes on from what was saved."""
    with Session(make(_FailsBackward), lr=0.1, ram="16MB", workers=1) as session:
        losses = [session.step(**batch(0))]
        session.save(tmp_path / "saved")
        losses.append(session.step(**batch(1)))
        session.resume(tmp_path / "saved")
        words = r"step 2 has updated some parameters and not all; continue with resume\(\) from the last save\(\)"
        with pytest.raises(UsageError, match=rf"aten\.index_select\.default failed: .*; {words}$"):
            session.step(**batch(1, bad=True))
        for call in (lambda: session.step(**batch(1)), lambda: session.save(tmp_path / "bad"), lambda: session.save_weights(tmp_path / "bad")):
            with pytest.raises(UsageError, match=f"^{words}$"):
                call()
        assert not (tmp_path / "bad").exists()
        session.resume(tmp_path / "saved")
        assert session.step(**batch(1)) == losses[1]


@pytest.mark.parametrize("kind", [_Net, _FailsBackward])
def test_a_step_in_flight_that_fails_is_over_before_the_session_goes_on_elsewhere(kind: type[nn.Module], tmp_path: Path) -> None:
    """Resumed behind a step that nobody has asked for: it neither counts among later steps nor makes the session half done."""
    with Session(make(kind), lr=0.1, ram="16MB", workers=1) as session:
        session.step(**batch(0))
        session.step(**batch(1))
        session.save(tmp_path / "saved")
        expected = [session.step(**batch(2)), session.step(**batch(3)), session.step(**batch(4))]
        session.resume(tmp_path / "saved")
        failed = session.start(**batch(2, bad=True))
        session.resume(tmp_path / "saved")
        assert [session.step(**batch(2)), session.step(**batch(3)), session.step(**batch(4))] == expected
        assert session.num_steps == 5
        with pytest.raises(UsageError, match="failed"):
            failed.result()
        session.save(tmp_path / "later")


def test_a_batch_that_eager_pytorch_refuses_is_named_by_verify_and_changes_nothing() -> None:
    """The step that `verify=` takes by eager PyTorch first fails: the error says so, buffers are as before, and the session goes on."""
    torch.manual_seed(0)
    with Session(_Net(), "sgd", lr=0.1, objective=lambda module, batch: module(**batch), minibatches=2, ram="16MB", workers=1, verify=1) as session:
        session.step(**batch(0))
        before = session.state_dict()
        with pytest.raises(UsageError, match=r"step 2 by eager PyTorch first, which raised (RuntimeError|IndexError): .*fix the batch"):
            session.step(**batch(1, bad=True))
        after = session.state_dict()
        assert session.num_steps == 1
        assert all(torch.equal(before[name], after[name]) for name in before)
        session.step(**batch(2))


class _TakesNoHooks(nn.Linear):
    """A layer that refuses the hook by which a session guards its values."""

    def _register_load_state_dict_pre_hook(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("this layer takes no hooks")


def test_a_session_that_fails_to_open_gives_the_values_back() -> None:
    """What fails after the values were taken leaves the module as it was."""
    module = nn.Sequential(nn.Linear(4, 4), _TakesNoHooks(4, 4))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="takes no hooks"):
        Session(module, "sgd", lr=0.1, loss=lambda y, _: y.sum(), ram="16MB", workers=1)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(type(value) is nn.Parameter for value in module.parameters())
    module(torch.zeros(2, 4)).sum().backward()
