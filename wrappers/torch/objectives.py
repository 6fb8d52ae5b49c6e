"""What a pass computes: the module's result, or a loss from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nntask import UsageError

from .capture import Function

Loss = Callable[[Any, Mapping[str, Any]], torch.Tensor]
"""From the module's result and the batch to a tensor of one element."""


def call(module: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
    """The module's result for a batch."""
    return module(**batch)


def objective_of(loss: Loss) -> Function:
    """The objective that calls the module and computes a loss from its result."""
    return lambda module, batch: loss(module(**batch), batch)


def scalar(objective: Function) -> Function:
    """An objective that refuses what is not a tensor with one element."""

    def checked(module: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        loss = objective(module, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"the loss must be a tensor with one element, got {what}; give loss=, a function of the result and the batch")
        return loss

    return checked


def loss_of(outputs: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The loss that a module's result has or is."""
    found = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, Mapping):
        found = outputs.get("loss")
    if found is None:
        raise UsageError(f"the module's result, a {type(outputs).__name__}, has no loss; give labels in the batch, or loss=, a function of both")
    return found


def read_by(objective: Any) -> dict[str, Any]:
    """Return, by names for messages, what the state of Python that a loss reads is reachable from: the function itself, or what its `reads` says."""
    reads = getattr(objective, "reads", None)
    return {"loss": objective} if reads is None else dict(reads())
