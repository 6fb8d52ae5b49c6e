"""Small modules that the cases of `eager_twin` are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .eager_twin import Program, Run


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


def times(factor: Callable[[Any], Any], /, **attributes: Any) -> Program:
    """A program whose result is multiplied by what a function of the module gives."""
    return program_of(lambda self, x: Net.forward(self, x) * factor(self), **attributes)


class Holder:
    """An object with slots."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        """The value."""
        return self.value


def rate_of(run: Run) -> float:
    """The rate of a step, which changes once, after three equal steps."""
    return 1.0 if run.number < 3 else 0.5


def setting(name: str, make: Callable[[Run], Any] = rate_of) -> Callable[[Run], None]:
    """An action that sets an attribute of the module."""
    return lambda run: setattr(run.module, name, make(run))
