"""Public reports about the tensors of a batch, which stay the script's, and about random masks: programs with loops of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nntask import UsageError
from wrappers.torch import Session

from .eager_twin import Outcome
from .torch_reports import EITHER, PYTORCH, report_of


class Changing(nn.Module):
    """A layer over an input that it may scale in place, and another input.

    Args:
        factor: scale of the first input; 1 leaves it as it is.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(12, 4, dtype=torch.float64), factor

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """Scale `x` in place, add `y`, and use the layer."""
        if self.factor != 1:
            x.mul_(self.factor)
        return self.layer(x if y is None else x + y)


def losses_by_eager(module: nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    """Return the losses of five steps on the very same tensors."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = module(**batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def losses_by_session(module: nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    """Return the same of a session."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Session(module, optimizer, loss=lambda y, batch: y.square().mean(), ram="64MB", workers=1) as session:
        return [session.step(**batch) for _ in range(5)]


def outcome_on_one_batch(factor: float, make: Callable[[], dict[str, torch.Tensor]]) -> Outcome:
    """Compare losses, the batch afterwards, and its gradients."""
    torch.manual_seed(0)
    module, theirs, ours = Changing(factor), make(), make()
    expected = losses_by_eager(copy.deepcopy(module), theirs)
    try:
        losses = losses_by_session(module, ours)
    except UsageError as error:
        return Outcome("refused", str(error))
    if not torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-10):
        return Outcome("differs", f"losses are {losses}, and {expected} by eager")
    for name, value in theirs.items():
        if not torch.allclose(ours[name], value, rtol=1e-10):
            return Outcome("differs", f"{name} was not changed in place")
        if (ours[name].grad is None) != (value.grad is None):
            return Outcome("differs", f"{name}.grad is {ours[name].grad}, and {value.grad} by eager")
        if value.grad is not None and not torch.allclose(ours[name].grad, value.grad, rtol=1e-10):
            return Outcome("differs", f"{name}.grad differs")
    return Outcome("equal")


def line(count: int) -> torch.Tensor:
    """Return evenly spaced numbers, (count, 12)."""
    return torch.linspace(-1, 1, count * 12, dtype=torch.float64).reshape(count, 12)


@report_of(PYTORCH, 195422, "input changed in place stays as it was for the script", EITHER, r"\.py:\d+|in place")
def batch_changed_in_place() -> Outcome:
    """The forward pass scales its input in place, and the script uses the same tensor in each step."""
    return outcome_on_one_batch(0.9, lambda: {"x": line(8)})


@report_of(PYTORCH, 139789, "inputs that share memory, of which one is changed", EITHER, r"\.py:\d+|in place|memory")
def batch_that_overlaps() -> Outcome:
    """The forward pass scales one of two overlapping inputs in place."""

    def make() -> dict[str, torch.Tensor]:
        base = line(12)
        return {"x": base[:8], "y": base[4:]}

    return outcome_on_one_batch(0.9, make)


@report_of(PYTORCH, 128035, "gradient of an input lost", EITHER, "requires_grad")
def gradient_of_an_input() -> Outcome:
    """The script reads the gradient of its input after five steps."""
    return outcome_on_one_batch(1, lambda: {"x": line(8).requires_grad_()})


class Dropped(nn.Module):
    """A vector whose elements are dropped, within a checkpoint: the loss is a sum, so gradients show the mask of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.linspace(1, 2, 400, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum up the elements that are kept."""
        return checkpoint(lambda values: functional.dropout(values * 1, 0.5) * x, self.values, use_reentrant=False).sum()


@report_of(PYTORCH, 190758, "dropout drawn again when activations are recomputed", "equal", "")
def dropout_in_a_checkpoint() -> Outcome:
    """The mask of the forward pass is that of the backward pass, and each step has another."""
    module, masks = Dropped(), []  # masks follow from the session's seed, so they are not eager's
    values = module.values.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Session(module, optimizer, loss=lambda y, batch: y, ram="64MB", workers=1) as session:
        for number in range(5):
            loss = session.step(x=torch.ones(1, dtype=torch.float64))
            after = session.state_dict()["values"].clone()
            gradient = (values - after) / 0.1  # the mask of the backward pass, times 2
            if abs(loss / float((gradient * values).sum()) - 1) > 1e-12:
                return Outcome("differs", f"step {number}: the loss is not that of the mask of the backward pass")
            if {round(float(each), 9) for each in gradient.unique()} != {0.0, 2.0} or any(torch.equal(gradient > 1, mask) for mask in masks):
                return Outcome("differs", f"step {number}: no new mask")
            masks.append(gradient > 1)
            values = after
    return Outcome("equal")
