"""Tensors, parameters and random numbers that a step reads from Python: results are eager PyTorch's, or a refusal says why they cannot be."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.eager_twin import LINE, Batch, Case, Cases, Program, Run, at, check
from support.python_state import difference, state_of
from support.small_modules import Net, module_of, program_of, setting, times
from torch import nn
from torch.nn import functional

from nntask import UsageError
from wrappers.torch import Session

CASES = Cases()
CLEAR = rf"{LINE}|optimizer|learn"
"""Pattern of a refusal that names the user's line, or what a parameter outside the module lacks."""


@CASES.add(before=[setting("scale", lambda run: run.outer.table[run.number])])
def slice_of_another_offset() -> Program:
    """An attribute that is another row of one table each step."""
    program, table = times(lambda self: self.scale, scale=torch.ones(4)), torch.randn(12, 4)
    program.outer.table = table
    return program


@CASES.add(before=[setting("scale", lambda run: run.outer.table[run.number] if run.number % 2 else torch.full((4,), 0.5, dtype=torch.float64))])
def slice_and_whole_tensor() -> Program:
    """An attribute that is a row of a table in every second step, and a tensor of its own in between."""
    return slice_of_another_offset()


@CASES.add(before=[lambda run: setattr(run.outer, "target", run.outer.table[run.number])])
def slice_that_the_loss_reads() -> Program:
    """A target of the loss that is another row of one table each step."""
    outer = SimpleNamespace(table=torch.randn(12, 4), target=None)
    return Program(Net(), lambda y, batch: (y - outer.target).square().mean(), outer)


def _step_outside(run: Run) -> None:
    run.outer.optimizer.step()
    run.outer.optimizer.zero_grad()


@CASES.add(allowed="equal refused", words=CLEAR, before=[_step_outside])
def parameter_outside_the_module() -> Program:
    """A parameter that the loss reads, with an optimizer of the script."""
    scale = nn.Parameter(torch.ones(4))
    outer = SimpleNamespace(scale=scale, optimizer=torch.optim.SGD([scale], lr=0.5))
    return Program(Net(), lambda y, batch: (y * scale).square().mean() + 0.1 * scale.sum(), outer)


class Scaled(nn.Module):  # type: ignore[misc]
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The mean square of the scaled result."""
        return (y * self.scale).square().mean()


@CASES.add(allowed="equal refused", words=CLEAR, terms={"verify": 1}, before=[lambda run: run.note(run.outer.loss.scale.grad)])
def loss_with_a_parameter() -> Program:
    """A loss that is a module and has a parameter, whose gradient the script reads."""
    loss = Scaled()
    return Program(Net(), loss, SimpleNamespace(loss=loss))


@CASES.add()
def parameter_by_isinstance() -> Program:
    """A branch on `isinstance(p, nn.Parameter)`."""
    return times(lambda self: self.scale if isinstance(self.scale, nn.Parameter) else 1.0, scale=nn.Parameter(torch.full((4,), 0.5)))


@CASES.add(allowed="equal refused", words=CLEAR)
def parameter_by_type() -> Program:
    """A branch on `type(p) is nn.Parameter`."""
    return times(lambda self: 0.5 if type(self.b.weight) is nn.Parameter else 1.0)


@CASES.add(allowed="equal refused", words="parameters as keys")
def parameter_as_key() -> Program:
    """A dictionary whose key is a parameter."""
    program = times(lambda self: self.scales.get(self.b.weight, 1.0), scales={})
    program.module.scales[program.module.b.weight] = 0.5
    return program


@CASES.add(before=[at(3, lambda run: run.module.order.copy_(run.module.order.flip(0)))])
def permutation_written_in_place() -> Program:
    """A large permutation matrix that becomes another one in place, with the same sums."""
    return times(lambda self: self.order[:4, :4].sum(0) + 1, order=torch.eye(1024))


@CASES.add(before=[lambda run: run.note(run.module.h is run.module.last)])
def one_tensor_in_two_attributes() -> Program:
    """A hidden state that two attributes hold."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x) + 0.5 * self.h + 0.1 * self.last)
        self.h = self.last = h.detach()
        return self.b(h)

    h = torch.zeros(8, 12)
    return program_of(forward, h=h, last=h)


@CASES.add(before=[at(3, lambda run: setattr(run.module, "scale", torch.full((4,), 0.5, dtype=torch.float64))), lambda run: run.note(run.weights())])
def buffer_replaced() -> Program:
    """A buffer that the script replaces; the state dict has the new one."""
    program = times(lambda self: self.scale)
    program.module.register_buffer("scale", torch.ones(4))
    return program


# Random numbers


@CASES.add()
def seed_of_the_default_generator() -> Program:
    """`torch.default_generator.manual_seed` in forward."""

    def factor(self: Any) -> torch.Tensor:
        torch.default_generator.manual_seed(3)
        return torch.rand(4)

    return times(factor)


@CASES.add()
def seed_and_set_back() -> Program:
    """`torch.manual_seed` in forward, after which the state of the generator is set back."""

    def factor(self: Any) -> torch.Tensor:
        before = torch.get_rng_state()
        torch.manual_seed(3)
        noise = torch.rand(4)
        torch.set_rng_state(before)
        return noise

    return times(factor)


@CASES.add(allowed="equal refused")
def state_of_the_default_generator() -> Program:
    """`torch.set_rng_state` in forward, with a state of the module."""

    def factor(self: Any) -> torch.Tensor:
        torch.set_rng_state(self.chance)
        return torch.rand(4)

    return times(factor, chance=torch.Generator().manual_seed(3).get_state())


@pytest.mark.parametrize("case", CASES)
def test_tensors_in_python_count(case: Case) -> None:
    """Losses, gradients, weights and state are those of eager PyTorch, or the user is told what is refused."""
    check(case)


TERMS: dict[str, Any] = {"loss": lambda y, batch: y.square().mean(), "ram": "64MB", "workers": 1}


def test_dropout_after_a_fork_of_the_generator_varies() -> None:
    """A seed inside `fork_rng` does not fix the dropout that follows it."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            noise = torch.rand(4)
        return Net.forward(self, x) * noise * functional.dropout(torch.ones(4))

    with Session(module_of(forward), "sgd", lr=0.0, **TERMS) as session:
        assert len({session.step(x=torch.ones(8, 12)) for _ in range(8)}) > 1


def _steps(is_embedding: bool, *columns: int) -> tuple[list[float], Any]:
    """Losses of the steps that look up these rows of six, and the state in Python; other rows must be refused and leave the state as it was."""

    def forward(self: Any, x: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        looked_up = self.table(column) if is_embedding else torch.index_select(self.rows, 0, column)
        h = torch.tanh(self.a(x) + 0.5 * self.h + looked_up)
        self.h = h.detach()
        return self.b(h)

    torch.manual_seed(0)
    module = module_of(forward, h=torch.zeros(8, 12), calls=0, seen=[], rows=torch.randn(6, 12), table=nn.Embedding(6, 12))
    losses = []
    with Session(module, "sgd", lr=0.1, **TERMS) as session:
        for column in columns:
            batch = {"x": torch.ones(8, 12), "column": torch.full((8,), column)}
            if column < 6:
                losses.append(session.step(**batch))
                continue
            with pytest.raises(UsageError, match=r"out of|must be ids"):
                session.step(**batch)
    return losses, state_of({name: getattr(module, name) for name in ("h", "calls", "seen")})


@pytest.mark.parametrize("columns", [(9, 0, 1), (0, 9, 1), (0, 1, 9)], ids=["first", "middle", "last"])
@pytest.mark.parametrize("is_embedding", [True, False], ids=["embedding", "index"])
def test_failed_step_leaves_the_state_in_python(is_embedding: bool, columns: tuple[int, ...]) -> None:
    """The hidden state, a counter and a list are as if a step that failed had not been tried."""
    assert not difference(_steps(is_embedding, *columns), _steps(is_embedding, 0, 1), 1e-6)


class Unreadable:
    """An objective that raises when a session asks what it reads."""

    def __call__(self, module: Any, batch: Mapping[str, Any]) -> Any:
        """The loss."""
        return module(**batch).sum()

    def reads(self) -> Any:
        """Raise."""
        raise RuntimeError("no reads")


def test_error_in_the_constructor_gives_the_module_back() -> None:
    """After an exception in `Session(...)` parameters are parameters with their values, no thread is left, and a second session opens."""
    module, threads = Net(), threading.active_count()
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    with pytest.raises(RuntimeError, match="no reads"):
        Session(module, "sgd", lr=0.1, objective=Unreadable(), ram="64MB", workers=1)
    assert {type(value) for value in module.parameters()} == {nn.Parameter}
    assert all(torch.equal(value, before[name]) for name, value in module.named_parameters())
    assert threading.active_count() == threads
    with Session(module, "sgd", lr=0.1, **TERMS) as session:
        session.step(x=torch.ones(8, 12))
