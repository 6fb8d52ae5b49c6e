"""Small modules that the cases of `eager_twin` are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .eager_twin import Program


class Net(nn.Module):  # type: ignore[misc]
    """Two linear layers around a tanh: (B, 12) -> (B, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 12)
        self.b = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result, (B, 4)."""
        return self.b(torch.tanh(self.a(x)))


def module_of(forward: Callable[..., Any], /, base: type[nn.Module] = Net, **attributes: Any) -> nn.Module:
    """A `Net` of a class of its own, with another forward and further attributes; tensors that are no parameters become plain attributes."""
    kind = type("Own", (base,), {"forward": forward, "__module__": "tests.own"})
    module = kind()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def program_of(forward: Callable[..., Any], /, **attributes: Any) -> Program:
    """A program around `module_of`."""
    return Program(module_of(forward, **attributes))
