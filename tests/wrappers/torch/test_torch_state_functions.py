"""State in functions, classes and globals: results are eager PyTorch's, or the user's line is refused."""

from __future__ import annotations

import contextvars
import functools
import os
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.eager_twin import LINE, Case, Cases, Program, at, check, rows
from support.small_modules import Holder, Net, module_of, program_of, times
from torch.nn import functional

CASES = Cases()
add = functools.partial(CASES.add, allowed="equal refused", words=LINE)
SHARED: dict[str, Any] = {}
WARMTH: contextvars.ContextVar[float] = contextvars.ContextVar("warmth", default=1.0)
HELPERS = types.ModuleType("helpers")


@add(batches=rows(8, 4))
def class_counter() -> Program:
    """A counter of the class that forward raises."""

    def factor(self: Any) -> float:
        type(self).calls += 1
        return 1 / type(self).calls

    program = times(factor)
    type(program.module).calls = 0  # type: ignore[attr-defined]
    return program


@add()
def nonlocal_counter() -> Program:
    """A counter that a closure of forward raises."""
    calls = 0

    def factor(self: Any) -> float:
        nonlocal calls
        calls += 1
        return 1 / calls

    return times(factor)


@add(minibatches=2)
def default_argument() -> Program:
    """A list that is the default of an argument."""

    def forward(self: Any, x: torch.Tensor, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
        seen.append(len(x))
        return Net.forward(self, x) / len(seen)

    return program_of(forward)


@add(before=[at(3, lambda run: run.outer.table.cache_clear())])
def cache_of_a_function() -> Program:
    """A cached function whose source changes, and whose cache the script clears later."""
    source = [1.0]

    @functools.lru_cache
    def table(size: int) -> float:
        source[0] *= 0.5
        return source[0]

    return Program(module_of(lambda self, x: Net.forward(self, x) * table(4)), outer=SimpleNamespace(table=table))


@add(before=[lambda run: setattr(run.module, "activation", functools.partial(functional.leaky_relu, negative_slope=0.1 * run.number))])
def partial_replaced() -> Program:
    """A partial function that the script replaces."""
    return program_of(lambda self, x: self.b(self.activation(self.a(x))), activation=None)


@add(before=[lambda run: run.module.activation.keywords.update(negative_slope=0.1 * run.number)])
def partial_changed() -> Program:
    """A partial function whose keywords the script changes in place."""
    return program_of(lambda self, x: self.b(self.activation(self.a(x))), activation=functools.partial(functional.leaky_relu, negative_slope=0.0))


@add(before=[lambda run: WARMTH.set(1.0 + run.number)])
def context_variable() -> Program:
    """A context variable that the script sets."""
    return times(lambda self: 1 / WARMTH.get())


@add()
def global_dictionary() -> Program:
    """A dictionary of this file that forward writes."""
    SHARED.clear()

    def factor(self: Any) -> float:
        SHARED["calls"] = SHARED.get("calls", 0) + 1
        return 1 / SHARED["calls"]

    return times(factor)


@add(before=[lambda run: setattr(run.outer.holder, "value", 0.5**run.number)])
def bound_method() -> Program:
    """A method of an object of the script, kept as a function."""
    holder = Holder(1.0)
    program = times(lambda self: self.read(), read=holder.get)
    program.outer.holder = holder
    return program


@add(before=[lambda run: os.environ.update(OWN_RATE=str(0.5**run.number))])
def environment_variable() -> Program:
    """An environment variable that the script sets."""
    return times(lambda self: float(os.environ.get("OWN_RATE", "1")))


@add(before=[lambda run: setattr(HELPERS, "rate", 0.5**run.number)])
def attribute_of_a_python_module() -> Program:
    """A constant of another module of Python."""
    return times(lambda self: HELPERS.rate)


@add(before=[lambda run: setattr(HELPERS, "shape", (torch.tanh, torch.relu)[run.number % 2])])
def function_of_a_python_module() -> Program:
    """A function of another module of Python that is patched."""
    return program_of(lambda self, x: self.b(HELPERS.shape(self.a(x))))


@add()
def attribute_of_a_function() -> Program:
    """A counter that is an attribute of a function."""

    def factor(self: Any) -> float:
        factor.calls += 1  # type: ignore[attr-defined]
        return 1 / factor.calls  # type: ignore[attr-defined]

    factor.calls = 0  # type: ignore[attr-defined]
    return times(factor)


@add(before=[lambda run: setattr(run.outer.factor, "__defaults__", (0.5**run.number,))])
def defaults_of_a_function() -> Program:
    """Defaults of a function that the script changes."""

    def factor(self: Any, rate: float = 1.0) -> float:
        return rate

    return Program(module_of(lambda self, x: Net.forward(self, x) * factor(self)), outer=SimpleNamespace(factor=factor))


@add()
def exceptions_that_decide() -> Program:
    """A stack that runs empty, and what an exception does then."""

    def factor(self: Any) -> float:
        try:
            return self.stack.pop()
        except IndexError:
            self.stack.extend([0.5, 0.25])
            return 1.0

    return times(factor, stack=[0.75])


@add(before=[lambda run: setattr(run.module, "name", ("tanh", "relu", "sigmoid")[run.number % 3])])
def name_of_a_function() -> Program:
    """The name of an activation, which forward looks up."""
    return program_of(lambda self, x: self.b(getattr(torch, self.name)(self.a(x))), name="tanh")


@add()
def call_overridden() -> Program:
    """A `__call__` of the class that counts."""

    class Counts(Net):
        calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().__call__(*args, **kwargs) / self.calls

    return Program(Counts())


@add(before=[at(2, lambda run: setattr(run.module, "forward", lambda x: run.module.b(torch.relu(run.module.a(x)))))])
def forward_patched_on_the_instance() -> Program:
    """Another forward of the instance from the third step on."""
    return Program(Net())


@add(before=[at(2, lambda run: setattr(type(run.module), "forward", lambda self, x: self.b(torch.relu(self.a(x)))))])
def forward_patched_on_the_class() -> Program:
    """Another forward of the class."""
    return program_of(Net.forward)


@pytest.mark.parametrize("case", CASES)
def test_state_of_functions_counts(case: Case) -> None:
    """Losses, gradients, weights and state are those of eager PyTorch, or the user's line is refused."""
    check(case)
