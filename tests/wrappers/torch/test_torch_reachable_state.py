"""State that a step reads through the objects it can reach: results are eager PyTorch's, or a refusal says why they cannot be."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import multiprocessing
import types
from collections import ChainMap, UserList
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.eager_twin import LINE, Case, Cases, Program, Run, SessionRun, at, check
from support.small_modules import Net, program_of, rate_of, setting, times

CASES = Cases()
CLEAR = rf"{LINE}|iterator|generator"
"""Pattern of a refusal that names the user's line, or the kind of object."""
RATE = 1.0
"""A global of this file that a decorated method reads."""
SETTINGS = types.ModuleType("settings")
"""A module of Python with settings."""
SETTINGS.__file__ = __file__
X = torch.ones(8, 12, dtype=torch.float64)


def _set_in(holder: str, name: str = "rate") -> Callable[[Run], None]:
    """An action that sets an attribute of an object of the module."""
    return lambda run: setattr(getattr(run.module, holder), name, rate_of(run))


def _put_in(holder: str) -> Callable[[Run], None]:
    """An action that sets the first entry of a container of the module."""
    return lambda run: getattr(run.module, holder).__setitem__(0, rate_of(run))


# Functions


def _scaling(rate: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y, rate=rate: y * rate  # type: ignore[misc]


@CASES.add(before=[setting("last", lambda run: _scaling(3 * rate_of(run)))])
def functions_of_one_code() -> Program:
    """Two functions of one code object with other defaults, one of which is replaced."""
    return program_of(lambda self, x: self.last(self.first(Net.forward(self, x))), first=_scaling(2.0), last=_scaling(3.0))


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def _decorated() -> torch.Tensor:
    return torch.ones(4, dtype=torch.float64) * RATE


@CASES.add(before=[lambda run: globals().update(RATE=rate_of(run))])
def function_without_gradient() -> Program:
    """A function decorated by `torch.no_grad` that reads a global."""
    return times(lambda self: _decorated())


@CASES.add(before=[lambda run: run.outer.rates.update(rate=rate_of(run))])
def function_of_vmap() -> Program:
    """A function of `torch.vmap` that reads a dictionary of its closure."""
    rates = {"rate": 1.0}
    program = program_of(lambda self, x: self.scaling(Net.forward(self, x)), scaling=torch.vmap(lambda y: y * rates["rate"]))
    program.outer.rates = rates
    return program


class Phased(Net):
    """A `Net` whose `train()` sets a rate of its own."""

    rate = 1.0

    def train(self, mode: bool = True) -> Phased:
        """Set the mode, and the rate of it."""
        super().train(mode)
        self.rate = 1.0 if mode else 0.5
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scaled result."""
        return super().forward(x) * self.rate


def _evaluate(run: Run) -> None:
    """Evaluate as a script does: by `eval()` and `train()`."""
    if isinstance(run, SessionRun):
        run.note(run.evaluate(x=X))
        return
    run.module.eval()
    with torch.no_grad():
        run.note(float(run.program.loss_of(run.module, {"x": X})))
    run.module.train()


@CASES.add(before=[at(1, _evaluate), at(3, _evaluate)], setup=[lambda run: run.module.train()])
def train_that_sets_a_rate() -> Program:
    """An overridden `train()` that sets an attribute, with evaluations between steps."""
    return Program(Phased())


# Objects of Python


class Pair(tuple[float, ...]):
    """A subclass of tuple."""


class Rate(float):
    """A subclass of float."""


class Entries(dict[str, Any]):
    """A subclass of dict, with attributes."""

    rate = 1.0


class Items(list[Any]):
    """A subclass of list, with attributes."""

    rate = 1.0


class Slotted:
    """A class with a slot."""

    __slots__ = ("rate",)
    rate: float


class SlottedAndOpen(Slotted):
    """A class with an inherited slot beside its `__dict__`."""


def _slotted() -> SlottedAndOpen:
    value = SlottedAndOpen()
    value.rate = 1.0
    return value


OBJECTS: dict[str, tuple[Callable[[], Any], str]] = {
    "namespace": (lambda: argparse.Namespace(rate=1.0), "rate"),
    "dict_with_attributes": (Entries, "rate"),
    "list_with_attributes": (Items, "rate"),
    "slots_and_dict": (_slotted, "rate"),
    "module_of_python": (lambda: SETTINGS, "rate"),
    "shared_value": (lambda: multiprocessing.Value("d", 1.0), "value"),
    "value_of_c": (lambda: ctypes.c_double(1.0), "value"),
    "user_list": (lambda: UserList([1.0]), "0"),
    "chain_map": (lambda: ChainMap({0: 1.0}), "0"),
    "view_of_memory": (lambda: memoryview(bytearray(8)).cast("d"), "0"),
}
"""Makers of objects, and where the script changes each: an attribute, or the first entry."""


def _object(make: Callable[[], Any], place: str) -> Case:
    """The case of an object whose content the script changes after three steps."""
    if place == "0":
        return Case(lambda: times(lambda self: self.value[0], value=make()), before=[_put_in("value")])
    return Case(lambda: times(lambda self: getattr(self.value, place), value=make()), before=[_set_in("value", place)])


@CASES.add(before=[setting("rates", lambda run: Pair((rate_of(run), 2.0)))])
def subclass_of_tuple() -> Program:
    """A subclass of tuple that is replaced by one with other entries."""
    return times(lambda self: self.rates[0], rates=Pair((1.0, 2.0)))


@CASES.add(before=[setting("rate", lambda run: Rate(rate_of(run)))])
def subclass_of_float() -> Program:
    """A subclass of float that is replaced by another value."""
    return times(lambda self: self.rate, rate=Rate(1.0))


@CASES.add(before=[lambda run: run.outer.rates.__setitem__(0, rate_of(run))])
def proxy_of_a_mapping() -> Program:
    """A read-only view of a dictionary of the script."""
    rates = {0: 1.0}
    program = times(lambda self: self.rates[0], rates=types.MappingProxyType(rates))
    program.outer.rates = rates
    return program


@CASES.add(before=[lambda run: setattr(SETTINGS, "rate", rate_of(run))])
def module_of_python_as_local() -> Program:
    """A module of Python that forward reads by a local name."""

    def factor(self: Any) -> float:
        settings = SETTINGS
        return settings.rate  # type: ignore[no-any-return]

    return times(factor)


@CASES.add(before=[lambda run: setattr(run.module.prior, "scale", torch.full((4,), rate_of(run), dtype=torch.float64))])
def distribution() -> Program:
    """A distribution of `torch.distributions` whose scale the script replaces."""
    return times(lambda self: self.prior.scale, prior=torch.distributions.Normal(torch.zeros(4), torch.ones(4)))


def _step_schedule(run: Run) -> None:
    run.outer.schedule.optimizer.step()
    run.outer.schedule.step()


def _scheduled(factor: Callable[[Any], float]) -> Program:
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), lambda number: 0.9**number)
    return Program(Net(), lambda y, batch: y.square().mean() * factor(schedule), SimpleNamespace(schedule=schedule))


@CASES.add(before=[_step_schedule])
def step_of_a_schedule() -> Program:
    """A loss that reads `last_epoch` of a schedule of the script."""
    return _scheduled(lambda schedule: 1 / (1 + schedule.last_epoch))


@CASES.add(before=[_step_schedule])
def rate_of_a_schedule() -> Program:
    """A loss that calls `get_last_lr` of a schedule of the script."""
    return _scheduled(lambda schedule: schedule.get_last_lr()[0])


class Rows(torch.utils.data.Dataset[Any]):  # type: ignore[misc]
    """A dataset with an epoch."""

    epoch = 0


@CASES.add(before=[lambda run: setattr(run.outer.data, "epoch", run.number // 2)])
def epoch_of_a_dataset() -> Program:
    """A loss that reads the epoch of a dataset."""
    data = Rows()
    return Program(Net(), lambda y, batch: y.square().mean() / (1 + data.epoch), SimpleNamespace(data=data))


@CASES.add(before=[lambda run: setattr(run.outer.last, "rate", rate_of(run))])
def long_chain_of_objects() -> Program:
    """A chain of 400 objects, the last of which has a rate that a function reads."""
    last = first = argparse.Namespace(rate=1.0)
    for _ in range(400):
        first = argparse.Namespace(next=first)
    program = times(lambda self: last.rate, first=first)
    program.outer.last = last
    return program


RATES = (0.5, 1.0, 2.0, 3.0, 0.1, 0.2, 0.3)
ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "map": lambda: map(float, RATES),
    "chain": lambda: itertools.chain(RATES[:3], RATES[3:]),
    "reversed": lambda: reversed(list(RATES)),
    "keys": lambda: iter(dict.fromkeys(RATES)),
    "tensors": lambda: (torch.tensor(rate, dtype=torch.float64) for rate in RATES),
}


def _hidden(reset_at: Callable[[int], bool]) -> Case:
    """A hidden state in a dictionary that the script replaces by an equal one before some steps."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x) + 0.5 * self.state["h"])
        self.state["h"] = h.detach()
        return self.b(h)

    def reset(run: Run) -> None:
        run.note(run.module.state["h"])
        if reset_at(run.number):
            run.outer.state = run.module.state = {"h": torch.zeros(8, 12, dtype=torch.float64)}
        run.note(run.outer.state is run.module.state)

    def build() -> Program:
        state = {"h": torch.zeros(8, 12)}
        program = program_of(forward, state=state)
        program.outer.state = state
        return program

    return Case(build, before=[reset], steps=8)


RESETS: dict[str, Callable[[int], bool]] = {
    "once": lambda number: number == 2,
    "each_second_step": lambda number: number % 2 == 0,
    "each_third_step": lambda number: number % 3 == 0,
    "each_step": lambda number: True,
}
CASES += [pytest.param(_object(*terms), id=name) for name, terms in OBJECTS.items()]
CASES += [
    pytest.param(
        Case(lambda make=make: times(lambda self: next(self.rates), rates=make()), frozenset({"equal", "refused"}), CLEAR),  # type: ignore[misc]
        id=f"iterator_{name}",
    )
    for name, make in ITERATORS.items()
]
CASES += [pytest.param(_hidden(reset_at), id=f"container_replaced_{name}") for name, reset_at in RESETS.items()]


@pytest.mark.parametrize("case", CASES)
def test_reachable_state_counts(case: Case) -> None:
    """Losses, gradients, weights and state are those of eager PyTorch, or the user is told what is refused."""
    check(case)
