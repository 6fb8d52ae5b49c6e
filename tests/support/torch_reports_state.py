"""Public reports about state in Python, code that changes, and hooks of modules."""

from __future__ import annotations

import os
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from .eager_twin import Batch, Program, Run, at
from .torch_reports import EITHER, PYTORCH, Pair, pair, report


def assign(**values: Any) -> Callable[[Run], None]:
    """Return an action that sets attributes of the module."""

    def action(run: Run) -> None:
        for name, value in values.items():
            setattr(run.module, name, value)

    return action


@report(PYTORCH, 124717, "flag of a module not looked at again", before=[at(2, assign(off=True)), at(4, assign(off=False))])
def adapter_switched_off() -> Program:
    """An adapter is off in two steps: it has no gradient there, and its momentum rests."""
    program = pair(lambda self, x: self.second(torch.tanh(x if self.off else x + self.first(x))))
    program.module.off = False
    return program


def show_next_row(run: Run) -> None:
    """Let `current` be the next row of the buffer."""
    module: Any = run.module
    module.current = module.table[run.number % 3 : run.number % 3 + 1]


@report(PYTORCH, 111785, "attribute that is a view of a buffer, moved between steps", allowed=EITHER, before=[show_next_row])
def view_of_a_buffer_moves() -> Program:
    """Each step writes another row of a buffer through a view."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.current.copy_(x.mean(0, keepdim=True))
        return self.second(torch.tanh(self.first(x) + self.table.sum(0)))

    program = pair(way)
    program.module.register_buffer("table", torch.zeros(3, 12))
    return program


def empty_cache(run: Run) -> None:
    """Replace the cache by zeros."""
    module: Any = run.module
    module.cache = torch.zeros_like(module.cache)


@report(PYTORCH, 115774, "tensor attribute replaced by the script between calls", allowed=EITHER, before=[at(3, empty_cache)])
def cache_emptied_by_the_script() -> Program:
    """A cache is written by row in each step, and emptied once."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.cache[0] += x.mean(0)
        return self.second(torch.tanh(self.first(x) + self.cache.sum(0)))

    program = pair(way)
    program.module.cache = torch.zeros(2, 12, dtype=torch.float64)
    return program


@report(PYTORCH, 169253, "list of a class filled in the forward pass", allowed=EITHER)
def list_of_the_class_grows() -> Program:
    """The result is divided by the number of calls, which a list of the class counts."""

    class Counting(Pair):
        calls: ClassVar[list[int]] = []

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        Counting.calls.append(x.shape[0])
        return self.second(torch.tanh(self.first(x))) / len(Counting.calls)

    return Program(Counting(way))


def choose_the_other(run: Run) -> None:
    """Let the module hold the other of the two equal lists."""
    run.module.chosen = run.outer.marks[1]


@report(PYTORCH, 196173, "branch on the identity of equal objects", allowed=EITHER, before=[at(3, choose_the_other)])
def identity_of_equal_lists() -> Program:
    """The module compares a list by `is`; the list that replaces it is equal."""
    outer = SimpleNamespace(marks=([], []))
    program = pair(lambda self, x: self.second(torch.tanh(self.first(x)) if self.chosen is outer.marks[0] else self.first(x)))
    program.module.chosen, program.outer = outer.marks[0], outer
    return program


def other_way(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Use a sine for the tanh."""
    return self.second(torch.sin(self.first(x)))


def change_the_code(run: Run) -> None:
    """Give the method of the module's class the code of another function."""
    type(run.module).mix.__code__ = other_way.__code__


@report(PYTORCH, 197860, "code of a method replaced", allowed=EITHER, before=[at(3, change_the_code)])
def code_of_a_method_changes() -> Program:
    """The method that forward calls computes something else from the fourth step on."""

    class Mixing(Pair):
        def mix(self, x: torch.Tensor) -> torch.Tensor:
            """Use a tanh."""
            return self.second(torch.tanh(self.first(x)))

    return Program(Mixing(lambda self, x: self.mix(x)))


def bend_otherwise(run: Run) -> None:
    """Replace the function outside the module."""
    run.outer.bend = torch.cos


@report(
    PYTORCH,
    108898,
    "function that the forward pass calls replaced",
    allowed=EITHER,
    before=[at(3, bend_otherwise)],
)
def function_outside_replaced() -> Program:
    """A function outside the module is replaced by another one."""
    outer = SimpleNamespace(bend=torch.tanh)
    program = pair(lambda self, x: self.second(outer.bend(self.first(x))))
    program.outer = outer
    return program


def joined(operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Return a way that joins an activation and its input by an operation."""
    return lambda self, x: self.second(operation(torch.tanh(self.first(x)), x))


@report(PYTORCH, 197811, "closures of one code over different operations", allowed=EITHER, before=[at(3, assign(way=joined(torch.Tensor.__mul__)))])
def closures_of_one_code() -> Program:
    """The function of the module is replaced by one of the same code that has captured another operation."""
    return pair(joined(torch.Tensor.__add__))


def replace_forward(run: Run) -> None:
    """Give the first layer another forward."""
    layer: Any = run.module.first
    layer.forward = lambda x: functional.linear(x, layer.weight)


@report(PYTORCH, 117265, "`forward` of a layer replaced", allowed=EITHER, before=[at(3, replace_forward)])
def forward_of_a_layer_replaced() -> Program:
    """From the fourth step on the first layer has no bias, whose momentum rests."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(x))))


def double_gradients(run: Run) -> None:
    """Register a hook that doubles the gradients that enter the first layer."""
    run.module.first.register_full_backward_pre_hook(lambda module, gradients: tuple(2 * each for each in gradients))


@report(PYTORCH, 117265, "hook before a layer's backward pass not called", setup=[double_gradients])
def hook_before_backward() -> Program:
    """The hook is there from the start."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(x))))


def note_seen(run: Run) -> None:
    """Note what the hook has kept."""
    run.note(dict(run.outer.seen))


@report(PYTORCH, 117758, "forward hook that collects statistics", allowed=EITHER, before=[note_seen])
def hook_collects_statistics() -> Program:
    """A hook keeps the sum of a layer's result in a dict, which the script reads after each step."""
    outer = SimpleNamespace(seen={})
    program = pair(lambda self, x: self.second(torch.tanh(self.first(x))))
    program.module.first.register_forward_hook(lambda module, arguments, y: outer.seen.update(sum=y.detach().sum()))
    program.outer = outer
    return program


@report(PYTORCH, 198189, "order of an `OrderedDict` lost", allowed=EITHER)
def least_recently_used_layer() -> Program:
    """Each step uses the layer that was used longest ago, and moves it to the end."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        name = next(iter(self.turns))
        self.turns.move_to_end(name)
        return self.second(torch.tanh(self.first(x) if name == "first" else x))

    program = pair(way)
    program.module.turns = OrderedDict(first=1, none=2, nothing=3)
    return program


@contextmanager
def scaled_inputs(run: Run) -> Iterator[None]:
    """Let a hook of all modules scale the inputs of linear layers, from the third step on."""

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        return tuple(each * 1.5 for each in inputs) if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_pre_hook(hook) if run.number >= 2 else None
    yield
    if handle is not None:
        handle.remove()


@report(PYTORCH, 149502, "hook of all modules", allowed=EITHER, around=scaled_inputs)
def hook_of_all_modules() -> Program:
    """A hook of all modules is there from the third step on."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(x))))


def add_adapter(run: Run) -> None:
    """Give the module an adapter, which does not learn."""
    run.module.adapter = nn.Linear(12, 4, dtype=torch.float64).requires_grad_(False)
    nn.init.constant_(run.module.adapter.weight, 0.1)
    nn.init.zeros_(run.module.adapter.bias)


@report(PYTORCH, 120958, "adapter set while the module is compiled", allowed=EITHER, before=[at(3, add_adapter)])
def adapter_set_later() -> Program:
    """An attribute that was None becomes a module."""
    program = pair(lambda self, x: self.second(torch.tanh(self.first(x))) + (0 if self.adapter is None else self.adapter(x)))
    program.module.adapter = None
    return program


def note_evaluation(run: Run) -> None:
    """Note the loss of a batch in evaluation mode."""
    run.note(run.evaluate(x=torch.ones(8, 12, dtype=torch.float64)))


@report(
    PYTORCH,
    104984,
    "evaluation with the weights of its first call",
    before=[note_evaluation],
)
def evaluated_between_steps() -> Program:
    """Each evaluation has the weights of its step, and batch normalisation the statistics."""
    program = pair(lambda self, x: self.second(torch.tanh(self.norm(self.first(x)))))
    program.module.norm = nn.BatchNorm1d(12)
    return program


def note_history(run: Run) -> None:
    """Note what the loss has kept."""
    run.note([float(value) for value in run.outer.history])


@report(PYTORCH, 197896, "list of a closure not filled", allowed=EITHER, before=[note_history])
def loss_keeps_a_history() -> Program:
    """The loss function appends a part of the loss to a list, which the script reads after each step."""
    program = pair(lambda self, x: self.second(torch.tanh(self.first(x))))
    program.outer = SimpleNamespace(history=[])

    def loss(y: torch.Tensor, batch: Batch) -> torch.Tensor:
        program.outer.history.append(y.detach().abs().mean())
        return y.square().mean()

    program.loss = loss
    return program


def note_sums(run: Run) -> None:
    """Note the sums that the module has kept."""
    run.note({name: float(value) for name, value in run.module.sums.items()})


@report(PYTORCH, 164732, "fake tensor left in a dict of the module", allowed=EITHER, before=[note_sums])
def sums_kept_in_a_dict() -> Program:
    """The forward pass adds to a dict of tensors, which the script reads after each step."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x)))
        self.sums["y"] = self.sums["y"] + y.detach().sum() if "y" in self.sums else y.detach().sum()
        return y

    program = pair(way)
    program.module.sums = {}
    return program


@report(PYTORCH, 197085, "same permutation by `random.shuffle` in each call", allowed=EITHER)
def shuffled_columns() -> Program:
    """The forward pass shuffles the columns by Python's random numbers."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        columns = list(range(12))
        random.shuffle(columns)
        return self.second(torch.tanh(self.first(x))[:, columns])

    return pair(way)


def note_random_numbers(run: Run) -> None:
    """Note the next random numbers of the script."""
    run.note((torch.rand(2), random.random(), np.random.rand()))


@report(PYTORCH, 143431, "random numbers of the script changed by compiling", before=[note_random_numbers])
def random_numbers_of_the_script() -> Program:
    """The script draws random numbers between steps."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(x))))


def set_scale(run: Run) -> None:
    """Set an environment variable."""
    os.environ["NNTASK_TEST_SCALE"] = str(1 + run.number)


@report(PYTORCH, 189027, "environment variable read once", allowed=EITHER, before=[set_scale])
def environment_variable_changes() -> Program:
    """The forward pass reads an environment variable, which the script sets before each step."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(x))) * float(os.environ["NNTASK_TEST_SCALE"]))


@report(PYTORCH, 189027, "environment variable read once", allowed=EITHER, before=[set_scale])
def environment_by_an_import_inside() -> Program:
    """The forward pass imports the module whose environment variable it reads."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        import os as system

        return self.second(torch.tanh(self.first(x))) * float(system.environ["NNTASK_TEST_SCALE"])

    return pair(way)


@report(PYTORCH, 195010, "`maxlen` of a `deque` dropped", allowed=EITHER, steps=8)
def window_of_activations() -> Program:
    """A deque keeps the activations of the last three steps, which the forward pass averages."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        self.window.append(y.detach())
        return self.second(y + sum(self.window) / len(self.window))

    program = pair(way)
    program.module.window = deque(maxlen=3)
    return program
