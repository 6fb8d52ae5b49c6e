"""What lies around the module: modes, random numbers of Python, the loss, hooks, parts, the surroundings of a step (C4 to C7, C9)."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.eager_twin import Batch, Case, Cases, Program, Run, at, check, rows
from support.small_modules import Net, module_of, program_of
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from nntask import UsageError
from wrappers.torch import Session

CASES = Cases()
ENTRIES = {"rate": 0.1}
"""A global of this file that a loss reads."""


class Normed(Net):
    """A `Net` with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result."""
        return self.b(torch.tanh(self.norm(self.a(x))))


class KeepsStatistics(Normed):
    """A `Normed` whose `train()` leaves batch normalisation in evaluation mode."""

    def train(self, mode: bool = True) -> KeepsStatistics:
        """Set the mode of all but batch normalisation."""
        super().train(mode)
        self.norm.eval()
        return self


X = torch.ones(8, 12, dtype=torch.float64)


@CASES.add(setup=[lambda run: run.module.eval()], before=[at(3, lambda run: run.note(run.evaluate(x=X)))])
def c4_module_in_evaluation_mode() -> Program:
    """A module that is in evaluation mode as a whole trains so, after an evaluation too."""
    return Program(Normed())


@CASES.add(setup=[lambda run: run.module.train()], before=[at(3, lambda run: run.note(run.evaluate(x=X)))])
def c4_train_that_is_overridden() -> Program:
    """A `train()` that keeps the statistics of batch normalisation."""
    return Program(KeepsStatistics())


@CASES.add(setup=[lambda run: run.module.eval()], before=[at(2, lambda run: run.module.train())])
def c4_train_that_is_overridden_called_later() -> Program:
    """The same, called between steps."""
    return Program(KeepsStatistics())


def _note_chance(run: Run) -> None:
    run.note((random.random(), float(np.random.rand())))


@CASES.add(batches=rows(8, 8, 4), before=[_note_chance], steps=8)
def c5_layer_drop() -> Program:
    """A layer that is left out when `random.random() < 0.5`; the script draws from the same generator."""
    return program_of(lambda self, x: self.b(torch.tanh(self.a(x)) if random.random() < 0.5 else x))


@CASES.add(before=[_note_chance], minibatches=2)
def c5_mask_of_numpy() -> Program:
    """A mask that NumPy draws, another one for each minibatch."""
    return program_of(lambda self, x: self.b(torch.tanh(self.a(x)) * torch.from_numpy(np.random.rand(12) < 0.5)))


@CASES.add(before=[at(2, lambda run: run.note(run.evaluate(x=X))), _note_chance])
def c5_chance_in_evaluation() -> Program:
    """An evaluation draws too."""
    return program_of(lambda self, x: self.b(torch.tanh(self.a(x))) * (0.5 + random.random()))


@CASES.add()
def c6_counter_of_the_loss() -> Program:
    """The weight of a term that a counter in the loss function's closure raises."""
    calls = SimpleNamespace(count=0)

    def loss(y: torch.Tensor, batch: Batch) -> torch.Tensor:
        calls.count += 1
        return y.square().mean() + 0.1 * calls.count * y.abs().mean()

    return Program(Net(), loss, calls)


@CASES.add(before=[lambda run: ENTRIES.update(rate=0.1 * run.number)])
def c6_global_of_the_loss() -> Program:
    """The weight of a term that a global says."""
    return Program(Net(), lambda y, batch: y.square().mean() + ENTRIES["rate"] * y.abs().mean())


@CASES.add(before=[lambda run: run.outer.target.fill_(0.1 * run.number)])
def c6_tensor_of_the_outer_scope() -> Program:
    """A target that the script fills between steps."""
    target = torch.zeros(4)
    return Program(Net(), lambda y, batch: (y - target).square().mean(), SimpleNamespace(target=target))


class Centre(nn.Module):
    """A loss that keeps the mean of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.center = torch.zeros(4)

    def forward(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The distance to the centre."""
        found = (y - self.center).square().mean()
        self.center = self.center * 0.9 + y.detach().mean(0) * 0.1
        return found


@CASES.add(batches=rows(8, 8, 4))
def c6_centre_of_the_loss() -> Program:
    """A centre that the loss module replaces."""
    loss = Centre()
    return Program(Net(), loss, SimpleNamespace(loss=loss))


def _with_teacher() -> Program:
    module, teacher = Net(), Net().requires_grad_(False)

    def objective(module: nn.Module, batch: Batch) -> torch.Tensor:
        y = module(**batch)
        return y.square().mean() + (y - teacher(**batch)).square().mean()

    return Program(module, outer=SimpleNamespace(teacher=teacher), objective=objective)


def _follow(run: Run, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, weight in run.outer.teacher.state_dict().items():
            weight.lerp_(values[name], 0.5)


@CASES.add(before=[lambda run: _follow(run, run.weights())])
def c6_teacher_that_follows() -> Program:
    """A teacher outside that follows by an average, through `session.state_dict()`."""
    return _with_teacher()


@CASES.add(before=[lambda run: _follow(run, dict(run.module.named_parameters()))], allowed="equal refused")
def c6_teacher_that_follows_the_module() -> Program:
    """The same through the module's parameters, which are refused, or have their values."""
    return _with_teacher()


def _train_discriminator(run: Run) -> None:
    judge = run.outer.judge
    loss = functional.softplus(-judge(torch.ones(8, 4, dtype=torch.float64))).mean() + judge.weight.square().mean()
    run.outer.optimizer.zero_grad()
    loss.backward()
    run.outer.optimizer.step()


@CASES.add(before=[_train_discriminator])
def c6_discriminator_by_eager() -> Program:
    """A discriminator that eager PyTorch trains between the steps of the generator, whose loss calls it."""
    judge = nn.Linear(4, 1)
    outer = SimpleNamespace(judge=judge, optimizer=torch.optim.SGD(judge.parameters(), lr=0.5, momentum=0.9))
    return Program(Net(), lambda y, batch: functional.softplus(-judge(y)).mean(), outer)


@CASES.add(before=[lambda run: setattr(type(run.module), "rate", 1.0 / (1 + run.number))])
def c6_class_attribute() -> Program:
    """A rate that is a class attribute."""
    module = module_of(lambda self, x: Net.forward(self, x) * self.rate)
    type(module).rate = 1.0  # type: ignore[attr-defined]
    return Program(module)


def test_c6_two_sessions_that_call_each_others_module() -> None:
    """Two open sessions, each of whose losses calls the module of the other, are refused in words."""
    first, second = Net(), Net()
    terms: dict[str, Any] = {"lr": 0.1, "ram": "16MB", "workers": 1}

    def act() -> None:
        with (
            Session(first, "sgd", loss=lambda y, batch: (y - second(batch["x"])).square().mean(), **terms) as one,
            Session(second, "sgd", loss=lambda y, batch: (y - first(batch["x"])).square().mean(), **terms) as two,
        ):
            one.step(x=torch.ones(8, 12))
            two.step(x=torch.ones(8, 12))

    with pytest.raises(UsageError, match="session"):
        act()


def _halve(module: nn.Module, args: Any, y: torch.Tensor) -> torch.Tensor:
    return y * 0.5


@CASES.add(before=[at(2, lambda run: run.module.a.register_forward_hook(_halve))])
def c7_forward_hook_added() -> Program:
    """A forward hook from the third step on."""
    return Program(Net())


@CASES.add(
    setup=[lambda run: setattr(run.outer, "hook", run.module.a.register_forward_hook(_halve))], before=[at(2, lambda run: run.outer.hook.remove())]
)
def c7_forward_hook_removed() -> Program:
    """A forward hook until the third step."""
    return Program(Net())


@CASES.add(before=[at(2, lambda run: run.module.b.register_full_backward_hook(lambda module, given, made: (given[0] * 0.5,)))])
def c7_backward_hook_added() -> Program:
    """A full backward hook from the third step on."""
    return Program(Net())


@CASES.add(before=[at(2, lambda run: run.module.a.weight.register_hook(lambda gradient: gradient * 0.5))], allowed="equal refused", words="hook")
def c7_hook_of_a_gradient_added() -> Program:
    """`weight.register_hook` while the session is open: as eager, or refused as at opening."""
    return Program(Net())


def _replace(run: Run) -> None:
    run.module.b = nn.Linear(12, 4, dtype=torch.float64)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in run.module.b.parameters():
            weight.copy_(torch.randn(weight.shape) * 0.3)


@CASES.add(before=[at(2, _replace)], allowed="equal refused", words=r"\bb\b|submodule|parameter")
def c7_submodule_replaced() -> Program:
    """A submodule that the script replaces: its parameters are not in the optimizer."""
    return Program(Net())


@CASES.add(before=[at(2, lambda run: setattr(run.module, "a", nn.Identity()))], allowed="equal refused", words=r"\ba\b|submodule|parameter")
def c7_submodule_removed() -> Program:
    """A layer that becomes the identity."""
    return Program(Net())


@CASES.add(before=[at(2, lambda run: setattr(run.module.c, "weight", run.module.a.weight))], allowed="equal refused", words=r"weight|tied|parameter")
def c7_weights_tied() -> Program:
    """Weights that are tied while the session is open."""
    return program_of(lambda self, x: self.b(torch.tanh(self.c(self.a(x)))), c=nn.Linear(12, 12))


@CASES.add(before=[at(2, lambda run: setattr(run.module.norm, "momentum", 0.5))])
def c7_momentum_of_batch_normalisation() -> Program:
    """Another momentum of the running statistics."""
    return Program(Normed())


def _cast(run: Run) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=run.number >= 2)


@CASES.add(around=_cast, dtype=torch.float32, tolerance=1e-5)
def c9_autocast_from_the_third_step() -> Program:
    """Autocast around the steps from the third on."""
    return Program(Net(), lambda y, batch: y.float().square().mean())


@CASES.add(around=lambda run: torch.autocast("cpu", torch.bfloat16, enabled=run.number < 2), dtype=torch.float32, tolerance=1e-5)
def c9_autocast_until_the_third_step() -> Program:
    """Autocast around the first two steps."""
    return Program(Net(), lambda y, batch: y.float().square().mean())


@CASES.add(around=lambda run: torch.autocast("cpu", (torch.bfloat16, torch.float16)[run.number % 2]), dtype=torch.float32, tolerance=1e-4)
def c9_autocast_of_another_type() -> Program:
    """Another type of autocast in every step."""
    return Program(Net(), lambda y, batch: y.float().square().mean())


@CASES.add(before=[lambda run: torch.set_default_dtype((torch.float32, torch.float64)[run.number % 2])], tolerance=1e-10)
def c9_default_type() -> Program:
    """Another default type in every step, of a constant that rounds."""
    return program_of(lambda self, x: Net.forward(self, x) * torch.tensor([0.1, 0.2, 0.3, 0.4]))


def _attends(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x).reshape(1, 1, 8, 12)
    y = functional.scaled_dot_product_attention(y, y, y).reshape(8, 12)
    return self.b(y) * (0.5 if torch.backends.cuda.flash_sdp_enabled() else 1.0)


@CASES.add(around=lambda run: sdpa_kernel((SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)[run.number % 2]))
def c9_attention_kernel() -> Program:
    """Another kernel of attention in every step, which the module asks for."""
    return program_of(_attends)


@CASES.add(before=[lambda run: torch.use_deterministic_algorithms(run.number % 2 == 1)])
def c9_deterministic_algorithms() -> Program:
    """A module that asks whether algorithms are to be deterministic."""
    return program_of(lambda self, x: Net.forward(self, x) * (0.5 if torch.are_deterministic_algorithms_enabled() else 1.0))


@pytest.mark.parametrize("case", CASES)
def test_surroundings_are_eagers(case: Case) -> None:
    """Losses, gradients, weights and what the program keeps are those of eager PyTorch."""
    check(case)
