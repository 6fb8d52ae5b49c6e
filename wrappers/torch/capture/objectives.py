"""Objectives: functions of a module and a batch that compute the module's result, or a loss from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nntask import UsageError

from .capture import Function

Loss = Callable[[Any, Mapping[str, Any]], torch.Tensor]
"""Function of the module's result and the batch that returns a tensor of one element."""


def call(module: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
    """Return the module's result for a batch."""
    return module(**batch)


def objective_of(loss: Loss) -> Function:
    """Return the objective that calls the module and computes a loss from its result."""
    return lambda module, batch: loss(module(**batch), batch)


def scalar(objective: Function) -> Function:
    """Return an objective that raises unless the result is a tensor with one element."""

    def checked(module: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        loss = objective(module, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"the loss must be a tensor with one element, got {what}", "give loss=, a function of the result and the batch")
        return loss

    return checked


def loss_of(outputs: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss in a module's result, or the result if it is a tensor."""
    loss = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if loss is None:
        raise UsageError(f"the module's result, a {type(outputs).__name__}, has no loss", "give labels in the batch, or loss=, a function of both")
    return loss


def read_by(objective: Any) -> dict[str, Any]:
    """Return the objects from which a loss can reach state of Python, by names for messages: the result of its `reads`, or the function itself."""
    reads = getattr(objective, "reads", None)
    return {"loss": objective} if reads is None else dict(reads())
