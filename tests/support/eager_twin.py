"""Programs of PyTorch users, run by a plain loop of eager PyTorch and by a session, and the comparison of both runs.

A case builds its program afresh for each run, from the same seeds, so that closures, classes and globals belong to one run alone. Both runs make the
same steps and the same actions between them. Losses, norms of the gradient, notes of the actions, parameters and buffers are compared, and so is what
the module and the outer objects keep in Python. The outcome is "equal", "refused" (a UsageError), "differs", or "raised" (any other error).
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nntask import UsageError
from wrappers.torch import Session

from .python_state import difference, state_of

Batch = dict[str, Any]
LINE = r"(?<!/eager_twin)\.py:\d+"
"""Pattern of a place in the user's code, which this file is not."""
SOMETHING = rf"{LINE}|session|weights|parameter|optimizer"
"""Pattern of a refusal that names at least the kind of thing that it is about."""


@dataclass
class Program:
    """What a user's script has before its first step.

    Attributes:
        module: the module.
        loss: from the module's result and the batch to the loss; None for the mean square of the result's distance to zero.
        outer: objects of the script outside the module, such as a teacher.
        objective: from the module and a batch to the loss, in place of `loss`.
    """

    module: torch.nn.Module
    loss: Callable[[Any, Batch], torch.Tensor] | None = None
    outer: SimpleNamespace = field(default_factory=SimpleNamespace)
    objective: Callable[[torch.nn.Module, Batch], torch.Tensor] | None = None

    def loss_of(self, module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of a batch."""
        if self.objective is not None:
            return self.objective(module, batch)
        return (self.loss or mean_square)(module(**batch), batch)


def mean_square(y: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The mean square of a result."""
    return y.square().mean()


def rows(*counts: int, columns: int = 12) -> Callable[[], list[Batch]]:
    """Batches of one input `x` with these numbers of rows; of another seed each."""
    return lambda: [{"x": torch.randn(count, columns, generator=torch.Generator().manual_seed(7 + i))} for i, count in enumerate(counts)]


USUAL = rows(8, 8, 8)
"""Three batches of one shape."""


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def plain_sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    """SGD without options."""
    return torch.optim.SGD(module.parameters(), lr=0.1)


def adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Adam, with a large eps: gradients near zero make no steps of rounding errors."""
    return torch.optim.Adam(module.parameters(), lr=0.01, eps=1e-3, weight_decay=0.05)


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW, likewise."""
    return torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)


Action = Callable[["Run"], None]


@dataclass(frozen=True)
class Case:
    """A program, its steps, and the outcomes that are right.

    Attributes:
        build: makes the program.
        allowed: outcomes that are right, of "equal" and "refused".
        words: pattern of the message of a refusal.
        batches: makes the batches, which are taken in turn.
        steps: number of steps.
        before: run before each step.
        setup: run once, when module and optimizer are there and no session is open.
        around: a context around each step.
        optimizer: makes the optimizer.
        minibatches: parts of each batch.
        max_grad_norm: norm to which the gradient is clipped; 0 is off.
        dtype: element type of the program.
        tolerance: largest difference, relative to the largest of 1 and the values.
        ignore: pattern of places in the Python state that may differ: what each call makes anew before it reads it.
        terms: further arguments of the session.
    """

    build: Callable[[], Program]
    allowed: frozenset[str] = frozenset({"equal"})
    words: str = SOMETHING
    batches: Callable[[], Sequence[Batch]] = USUAL
    steps: int = 6
    before: Sequence[Action] = ()
    setup: Sequence[Action] = ()
    around: Callable[[Run], AbstractContextManager[Any]] = lambda run: nullcontext()
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd
    minibatches: int = 1
    max_grad_norm: float = 0.0
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-10
    ignore: str = ""
    terms: Mapping[str, Any] = field(default_factory=dict)


class Cases(list[Any]):
    """The cases of a file, as parameters of its test."""

    def add(self, **terms: Any) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
        """Add a case, whose name is that of the function that builds it."""

        def note(build: Callable[[], Program]) -> Callable[[], Program]:
            head, _, tail = build.__name__.partition("_")
            if isinstance(terms.get("allowed"), str):
                terms["allowed"] = frozenset(terms["allowed"].split())
            self.append(pytest.param(Case(build, **terms), id=f"{head.upper() if head[1:].isdigit() else head}_{tail}".rstrip("_")))
            return build

        return note


@dataclass
class Found:
    """The results of a run: numbers of each step, notes, parameters and buffers, what a state dict has of them, and the state in Python."""

    losses: list[float]
    norms: list[float]
    notes: list[Any]
    tensors: dict[str, torch.Tensor]
    saved: dict[str, torch.Tensor]
    state: dict[str, Any]


class Run:
    """A program under way; actions are given it.

    Attributes:
        module: the module.
        optimizer: the optimizer.
        outer: the objects outside the module.
        number: the step that comes next, from 0.
    """

    def __init__(self, case: Case) -> None:
        seed_all(0)
        torch.set_default_dtype(case.dtype)
        try:
            self.program, self._batches = case.build(), case.batches()
        finally:
            torch.set_default_dtype(torch.float32)
        self.case, self.module, self.outer = case, self.program.module, self.program.outer
        self.optimizer = case.optimizer(self.module)
        self.number = 0
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._notes: list[Any] = []

    def note(self, value: Any) -> None:
        """Keep a value, to compare it with that of the other run."""
        self._notes.append(torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value))

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of parameters and buffers, by the documented way."""
        raise NotImplementedError

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set some parameters and buffers, by the documented way."""
        raise NotImplementedError

    def evaluate(self, **batch: Any) -> float:
        """The loss of a batch in evaluation mode."""
        raise NotImplementedError

    def predict(self, **batch: Any) -> Any:
        """The module's result for a batch in evaluation mode."""
        raise NotImplementedError

    def _step(self, batch: Batch) -> tuple[float, float]:
        raise NotImplementedError

    def all_steps(self) -> None:
        """Take all steps."""
        for number in range(self.case.steps):
            self.number = number
            for action in self.case.before:
                action(self)
            batch = {name: _own(value) for name, value in self._batches[number % len(self._batches)].items()}
            with self.case.around(self):
                loss, norm = self._step(batch)
            self._losses.append(loss)
            self._norms.append(norm)
        self.number = self.case.steps

    def found(self, saved: dict[str, torch.Tensor]) -> Found:
        """The results; the module must have its values.

        Args:
            saved: `weights` after the last step.
        """
        tensors = {name: value.detach().clone() for name, value in (*self.module.named_parameters(), *self.module.named_buffers())}
        return Found(self._losses, self._norms, self._notes, tensors, saved, {"module": state_of(self.module), "outer": state_of(self.outer)})


def _own(value: Any) -> Any:
    """A copy of a tensor of a batch, which the program may change; one with the negative bit as it is, which a copy would lose."""
    return value.clone() if isinstance(value, torch.Tensor) and not value.is_neg() else value


class EagerRun(Run):
    """The program in a plain loop."""

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        self.module.load_state_dict(dict(values), strict=False)

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        modes = {child: child.training for child in self.module.modules()}
        self.module.eval()
        with torch.no_grad():
            yield
        for child, is_training in modes.items():
            child.training = is_training

    def evaluate(self, **batch: Any) -> float:
        with self._evaluation():
            return float(self.program.loss_of(self.module, batch))

    def predict(self, **batch: Any) -> Any:
        with self._evaluation():
            return self.module(**batch)

    def _step(self, batch: Batch) -> tuple[float, float]:
        count = self.case.minibatches
        self.optimizer.zero_grad()
        total = 0.0
        for number in range(count):
            part = {name: value.chunk(count)[number] if isinstance(value, torch.Tensor) and value.dim() else value for name, value in batch.items()}
            loss = self.program.loss_of(self.module, part)
            (loss / count if count > 1 else loss).backward()
            total += float(loss.detach())
        learnt = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in learnt if parameter.grad is not None])
        if self.case.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(learnt, self.case.max_grad_norm)
        self.optimizer.step()
        return total / count, float(norm)


class SessionRun(Run):
    """The program on a session."""

    session: Session

    def weights(self) -> dict[str, torch.Tensor]:
        return self.session.state_dict()

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        self.session.load_state_dict(dict(values), strict=False)  # type: ignore[attr-defined, unused-ignore]

    def evaluate(self, **batch: Any) -> float:
        return self.session.evaluate(**batch)

    def predict(self, **batch: Any) -> Any:
        return self.session.predict(**batch)

    def open(self) -> Session:
        """Open the session."""
        terms: dict[str, Any] = {"ram": "64MB", "workers": 1, **self.case.terms}
        if self.program.objective is not None:
            terms["objective"] = self.program.objective
        else:
            terms["loss"] = self.program.loss or mean_square
        self.session = Session(self.module, self.optimizer, minibatches=self.case.minibatches, max_grad_norm=self.case.max_grad_norm, **terms)
        return self.session

    def _step(self, batch: Batch) -> tuple[float, float]:
        outcome = self.session.start(**batch).result()
        return outcome.loss, outcome.grad_norm


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def own_surroundings() -> Iterator[None]:
    """Give what a program may change in the process back its values."""
    before = dict(os.environ), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before[0])
        torch.set_default_dtype(before[1])
        torch.use_deterministic_algorithms(before[2])
        torch.set_grad_enabled(before[3])


def by_eager(case: Case) -> Found:
    """The results of eager PyTorch."""
    with own_surroundings():
        run = EagerRun(case)
        for action in case.setup:
            action(run)
        seed_all(1)
        run.all_steps()
        return run.found(run.weights())


def by_session(case: Case) -> Found:
    """The results of a session.

    Raises:
        UsageError: the session refuses something.
    """
    with own_surroundings():
        run = SessionRun(case)
        for action in case.setup:
            action(run)
        seed_all(1)
        with run.open() as session:
            run.all_steps()
            saved = run.weights()
            session.load_into(run.module)
        return run.found(saved)


@dataclass(frozen=True)
class Outcome:
    """What became of a case: the outcome's name, and the message or the first difference."""

    name: str
    detail: str = ""


def outcome_of(case: Case, expected: Found) -> Outcome:
    """Run a case by a session and compare it with the results of eager PyTorch."""
    try:
        found = by_session(case)
    except UsageError as error:
        return Outcome("refused", str(error))
    except Exception as error:  # any other error is a fault of the session, whatever its type
        return Outcome("raised", f"{type(error).__name__}: {error}")
    text = difference(vars(found), vars(expected), case.tolerance, ignore=case.ignore)
    return Outcome("differs", text) if text else Outcome("equal")


def check(case: Case) -> None:
    """Run a case both ways and fail unless its outcome is allowed.

    Eager PyTorch runs twice: a case whose two runs differ would compare chance.
    """
    expected = by_eager(case)
    text = difference(vars(by_eager(case)), vars(expected), case.tolerance / 10, ignore=case.ignore)  # kernels may round by where memory lies
    assert not text, f"the case is not deterministic: {text}"
    outcome = outcome_of(case, expected)
    assert outcome.name in case.allowed, f"{outcome.name}: {outcome.detail}"
    if outcome.name == "refused":
        assert re.search(case.words, outcome.detail), f"the refusal does not match {case.words!r}: {outcome.detail}"


def at(step: int, action: Action) -> Action:
    """An action before one step alone."""
    return lambda run: action(run) if run.number == step else None
