"""State in objects of Python, where a capture does not look for it: results are eager PyTorch's, or the user's line is refused."""

from __future__ import annotations

import array
import enum
import functools
import itertools
import random
import threading
import weakref
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.eager_twin import LINE, Batch, Case, Cases, Program, check, rows
from support.small_modules import Holder, Net, module_of, program_of, times

CASES = Cases()
add = functools.partial(CASES.add, allowed="equal refused", words=LINE)


@add(before=[lambda run: setattr(run.module, "rate", run.number)])
def property_with_a_setter() -> Program:
    """A property whose setter writes another attribute."""
    program = times(lambda self: self.rate, hidden=1.0)
    kind: Any = type(program.module)
    kind.rate = property(lambda self: 1 / (1 + self.hidden), lambda self, value: setattr(self, "hidden", value))
    return program


class Table:
    """A descriptor whose values are in a table of its own."""

    def __init__(self) -> None:
        self.values: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    def __get__(self, owner: Any, kind: Any = None) -> float:
        """The value of an object."""
        return self.values.get(owner, 1.0)

    def __set__(self, owner: Any, value: float) -> None:
        """Set the value of an object."""
        self.values[owner] = value


@add(before=[lambda run: setattr(run.module, "rate", 0.5**run.number)])
def descriptor() -> Program:
    """A data descriptor that keeps values outside the module."""
    program = times(lambda self: self.rate)
    type(program.module).rate = Table()  # type: ignore[attr-defined]
    return program


@dataclass(eq=False)
class Rate:
    """A number that the script changes."""

    value: float


@add(before=[lambda run: setattr(next(iter(run.module.rates)), "value", 0.5**run.number)])
def object_in_a_set() -> Program:
    """A set whose one item keeps a number."""
    return times(lambda self: next(iter(self.rates)).value, rates={Rate(1.0)})


@add()
def tensor_in_a_set() -> Program:
    """A set that keeps the activations of the last step."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = Net.forward(self, x)
        total = y + sum((each.mean() for each in self.seen), torch.zeros(()))
        self.seen.clear()
        self.seen.add(y.detach())
        return total

    return program_of(forward, seen=set())


@add(before=[lambda run: setattr(run.outer.holder, "value", 0.5**run.number)])
def weak_reference() -> Program:
    """A weak reference to an object of the script."""
    holder = Holder(1.0)
    program = times(lambda self: self.place().value, place=weakref.ref(holder))
    program.outer.holder = holder
    return program


@add(before=[lambda run: setattr(run.module.holder, "value", 0.5**run.number)])
def object_with_slots() -> Program:
    """An attribute of an object without `__dict__`."""
    return times(lambda self: self.holder.value, holder=Holder(1.0))


@dataclass
class Config:
    """A configuration, with a part."""

    rate: float = 1.0
    parts: dict[str, list[float]] = field(default_factory=lambda: {"rates": [1.0]})


@add(before=[lambda run: setattr(run.module.config, "rate", 0.5**run.number)])
def config_changed() -> Program:
    """A dataclass that the script changes."""
    return times(lambda self: self.config.rate, config=Config())


@add(before=[lambda run: run.module.config.parts["rates"].insert(0, 0.5**run.number)])
def config_changed_inside() -> Program:
    """A list in a dictionary in a dataclass."""
    return times(lambda self: self.config.parts["rates"][0], config=Config())


@add(before=[lambda run: setattr(run.module, "config", replace(run.module.config, rate=0.5**run.number))])
def config_replaced() -> Program:
    """A dataclass that is replaced by a copy with another value."""
    return times(lambda self: self.config.rate, config=Config())


class Phase(enum.Enum):
    """Phases of a training."""

    WARM = 1
    COLD = 2


@add(before=[lambda run: setattr(run.module, "phase", Phase(1 + run.number // 2 % 2))])
def enumeration() -> Program:
    """A switch that is an enum."""
    return times(lambda self: 1.0 if self.phase is Phase.WARM else 0.25, phase=Phase.WARM)


@add(minibatches=2)
def history_of_numbers() -> Program:
    """A deque of the last three numbers."""

    def factor(self: Any) -> float:
        self.history.append(self.history[-1] * 0.9)
        return sum(self.history) / len(self.history)

    return times(factor, history=deque([1.0], maxlen=3))


@add(batches=rows(8, 8, 4))
def history_of_tensors() -> Program:
    """A deque of the last three means."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        self.history.append(y.detach().mean(0))
        return self.b(y - sum(self.history) / len(self.history))

    return program_of(forward, history=deque(maxlen=3))


@add()
def iterator_that_counts() -> Program:
    """`itertools.count` as attribute."""
    return times(lambda self: 1 / next(self.count), count=itertools.count(1))


@add()
def iterator_that_cycles() -> Program:
    """`itertools.cycle` as attribute."""
    return times(lambda self: next(self.rates), rates=itertools.cycle([1.0, 0.5, 0.25]))


@add()
def generator() -> Program:
    """A generator as attribute."""
    return times(lambda self: next(self.rates), rates=(0.5**i for i in range(1000)))


@add()
def array_of_numpy() -> Program:
    """A NumPy array that forward changes in place."""

    def factor(self: Any) -> torch.Tensor:
        self.scale *= 0.9
        return torch.from_numpy(self.scale.copy())

    return times(factor, scale=np.ones(4))


@add(before=[lambda run: run.module.scale.__imul__(0.9)])
def array_of_numpy_between_steps() -> Program:
    """A NumPy array that the script changes in place, under a tensor of its memory."""
    scale = np.ones(4)
    return times(lambda self: self.view, scale=scale, view=torch.from_numpy(scale))


@add(before=[lambda run: run.module.scale.__setitem__(0, 0.5**run.number)])
def array_of_python() -> Program:
    """An `array.array` that the script changes in place."""
    return times(lambda self: self.scale[0], scale=array.array("d", [1.0]))


@add(before=[lambda run: run.module.scale.__setitem__(0, run.number)])
def bytes_that_change() -> Program:
    """A `bytearray` that the script changes in place."""
    return times(lambda self: 1 / (1 + self.scale[0]), scale=bytearray(b"\0"))


@add(minibatches=2)
def generator_of_random() -> Program:
    """A `random.Random` of the module."""
    return times(lambda self: self.chance.random(), chance=random.Random(3))


@add(minibatches=2)
def generator_of_numpy() -> Program:
    """A `numpy.random.Generator` of the module."""
    return times(lambda self: torch.from_numpy(self.chance.random(4)), chance=np.random.default_rng(3))


@add(before=[lambda run: setattr(run.module.local, "rate", 0.5**run.number)])
def thread_local() -> Program:
    """`threading.local`, read in forward, in the thread that calls the session."""
    return times(lambda self: getattr(self.local, "rate", 1.0), local=threading.local())


class AlwaysEqual:
    """An object that says it is equal to all others."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@add(before=[lambda run: setattr(run.module, "config", AlwaysEqual(0.5**run.number))])
def equal_to_everything() -> Program:
    """An attribute whose new value says that it is equal to the old one."""
    return times(lambda self: self.config.rate, config=AlwaysEqual(1.0))


@add(before=[lambda run: setattr(run.module, "flag", (0.0, -0.0, 0, False)[run.number % 4])])
def equal_but_not_the_same() -> Program:
    """0.0, -0.0, 0 and False, which are equal to each other."""
    return times(lambda self: {"0.0": 1.0, "-0.0": 0.5, "0": 0.25, "False": 0.125}[repr(self.flag)], flag=0.0)


@add(before=[lambda run: run.module.parts[1].append(0.5**run.number)])
def list_in_a_tuple() -> Program:
    """A list inside a tuple."""
    return times(lambda self: self.parts[1][-1], parts=(1, [1.0]))


@add()
def dictionaries_of_collections() -> Program:
    """`Counter`, `defaultdict`, `OrderedDict` and `ChainMap` that forward changes."""

    def factor(self: Any) -> float:
        self.counter["calls"] += 1
        self.lists["calls"].append(1)
        self.ordered.move_to_end(next(iter(self.ordered)))
        self.chain["rate"] = self.chain["rate"] * 0.9
        return next(iter(self.ordered.values())) * self.chain["rate"] / (self.counter["calls"] + len(self.lists["calls"]))

    ordered = OrderedDict(a=1.0, b=2.0, c=3.0)
    return times(factor, counter=Counter(), lists=defaultdict(list), ordered=ordered, chain=ChainMap({}, {"rate": 1.0}))


@add(before=[lambda run: setattr(run.module.a.weight, "rate", 0.5**run.number)])
def attribute_of_a_parameter() -> Program:
    """A Python attribute of a parameter."""
    program = times(lambda self: self.a.weight.rate)
    program.module.a.weight.rate = 1.0  # type: ignore[union-attr]
    return program


def _without_mask(y: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (y * batch.pop("mask")).square().mean() + len(batch) * 0.1


@add(batches=lambda: [{**batch, "mask": torch.ones(8, 4)} for batch in rows(8, 8)()])
def batch_that_the_loss_changes() -> Program:
    """A loss that takes an entry out of the batch."""
    return Program(module_of(lambda self, x, mask: Net.forward(self, x)), _without_mask)


@pytest.mark.parametrize("case", CASES)
def test_state_in_python_counts(case: Case) -> None:
    """Losses, gradients, weights and state are those of eager PyTorch, or the user's line is refused."""
    check(case)
