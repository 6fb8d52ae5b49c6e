"""State in parts of modules, hooks, losses and modes, which changes in steps or between them: as eager PyTorch, or the user's line is refused."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.eager_twin import LINE, Batch, Case, Cases, Program, Run, at, check, rows
from support.small_modules import Net, module_of, program_of
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

CASES = Cases()
add = functools.partial(CASES.add, allowed="equal refused", words=LINE)
REFUSED = rf"{LINE}|parameter|module|weight|requires_grad"
"""Pattern of a refusal between steps, which has no line of forward."""


@add()
def average_of_losses() -> Program:
    """A loss that is divided by its own running average, kept as a tensor."""

    class Normalised:
        def __init__(self) -> None:
            self.average: torch.Tensor | None = None

        def __call__(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
            loss = y.square().mean()
            self.average = loss.detach() if self.average is None else 0.9 * self.average + 0.1 * loss.detach()
            return loss / self.average.sqrt()

    loss = Normalised()
    return Program(Net(), loss, SimpleNamespace(loss=loss))


@add()
def list_of_losses() -> Program:
    """A lambda as loss that closes over a list."""
    seen: list[int] = []
    return Program(Net(), lambda y, batch: (seen.append(len(seen)), y.square().mean() * len(seen))[1], SimpleNamespace(seen=seen))


@add()
def running_mean_as_a_number() -> Program:
    """A running mean in a Python float, from `.item()` of a prediction."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean().item()
        return self.b(y - self.mean)

    return program_of(forward, mean=0.0)


@add()
def flag_of_a_backward_hook() -> Program:
    """A flag that a backward hook sets, which the next forward reads."""
    program = program_of(lambda self, x: Net.forward(self, x) * (0.5 if self.has_gradient else 1.0), has_gradient=False)
    program.module.b.register_full_backward_hook(lambda module, given, made: setattr(program.module, "has_gradient", True))
    return program


@add(minibatches=2)
def counter_of_backward_passes() -> Program:
    """A counter of backward passes, which scales gradients."""

    def hook(module: Any, given: Any, made: Any) -> Any:
        module.calls += 1
        return (given[0] / module.calls,)

    module = Net()
    module.b.calls = 0
    module.b.register_full_backward_hook(hook)
    return Program(module)


@add()
def gradient_kept_by_a_hook() -> Program:
    """A gradient that a hook of a tensor keeps, which the next forward uses."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        y.register_hook(lambda gradient: setattr(self, "last", gradient.detach()))
        return self.b(y if self.last is None else y + self.last)

    return program_of(forward, last=None)


@add()
def pre_hook_with_state() -> Program:
    """A forward pre-hook that counts."""
    module = Net()
    calls = SimpleNamespace(count=0)

    def hook(module: nn.Module, args: Any) -> Any:
        calls.count += 1
        return (args[0] / calls.count,)

    module.b.register_forward_pre_hook(hook)
    return Program(module, outer=calls)


@add()
def hooks_of_saved_tensors() -> Program:
    """Hooks of saved tensors that count what is packed."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.packed += 1
            return tensor * 1.0

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return Net.forward(self, x) / (1 + self.packed)

    return program_of(forward, packed=0)


@add()
def buffer_registered_in_forward() -> Program:
    """A buffer that each call registers anew."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        self.register_buffer("mean", self.mean * 0.5 + y.detach().mean(0))
        return self.b(y - self.mean)

    module = module_of(forward)
    module.register_buffer("mean", torch.zeros(12))
    return Program(module)


@add()
def buffer_made_by_the_first_call() -> Program:
    """A buffer that the first call makes, and later ones change."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x))
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(12, dtype=x.dtype))
        self.mean.mul_(0.9).add_(y.detach().mean(0))
        return self.b(y - self.mean)

    return program_of(forward)


@add(batches=rows(8, 4, 8))
def cache_by_shape() -> Program:
    """A dictionary of tables by shape, which age."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        table = self.cache.setdefault(len(x), torch.ones(4, dtype=x.dtype))
        table *= 0.9
        return Net.forward(self, x) * table

    return program_of(forward, cache={})


@add()
def keys_and_values() -> Program:
    """Keys and values of earlier steps, which grow."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        self.keys = torch.cat([*([] if self.keys is None else [self.keys]), y.detach()])
        return self.b(functional.scaled_dot_product_attention(y[None], self.keys[None], self.keys[None])[0])

    return program_of(forward, keys=None)


@add(minibatches=2)
def queue_with_a_pointer() -> Program:
    """A queue of negatives with a pointer in Python, as in MoCo."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.b(torch.tanh(self.a(x)))
        scores = y @ self.queue.clone().T
        self.queue[self.place : self.place + len(x)] = y.detach()
        self.place = (self.place + len(x)) % len(self.queue)
        return scores

    module = module_of(forward, place=0)
    module.register_buffer("queue", torch.randn(12, 4))
    return Program(module)


@add()
def state_of_a_recurrent_layer() -> Program:
    """Both states of an LSTM, a tuple in a dictionary."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y, state = self.cell(x[:, None], self.states.get("last"))
        self.states["last"] = tuple(each.detach() for each in state)
        return self.b(y[:, 0])

    return program_of(forward, cell=nn.LSTM(12, 12, batch_first=True), states={})


@add(before=[at(2, lambda run: setattr(run.module.act, "forward", torch.relu))])
def forward_patched_of_a_part() -> Program:
    """Another forward of a part."""
    return program_of(lambda self, x: self.b(self.act(self.a(x))), act=nn.Tanh())


@add(before=[lambda run: run.module.acts.update({"used": (nn.Tanh(), nn.ReLU())[run.number % 2]})])
def module_in_a_dictionary_swapped() -> Program:
    """A part in a `ModuleDict` that the script replaces."""
    return program_of(lambda self, x: self.b(self.acts["used"](self.a(x))), acts=nn.ModuleDict({"used": nn.Tanh()}))


@add(before=[at(3, lambda run: run.module.blocks.append(nn.Tanh()))])
def module_appended() -> Program:
    """A part that is appended to a `Sequential`."""
    return program_of(lambda self, x: self.b(self.blocks(x)), blocks=nn.Sequential(nn.Linear(12, 12), nn.ReLU()))


@add(before=[lambda run: setattr(run.module, "order", (run.module.order[1], run.module.order[0]))])
def order_of_layers() -> Program:
    """The order in which layers are applied."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = torch.tanh(self.layers[number](x))
        return self.b(x)

    return program_of(forward, layers=nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12)]), order=(0, 1))


@add(before=[lambda run: setattr(run.module, "depth", 1 + run.number // 2)])
def layers_that_grow() -> Program:
    """A depth that grows: later layers have no gradient before."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: self.depth]:
            x = torch.tanh(layer(x))
        return self.b(x)

    return program_of(forward, layers=nn.ModuleList([nn.Linear(12, 12) for _ in range(3)]), depth=1)


@add(before=[at(3, lambda run: run.module.scales.append(nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))))], words=REFUSED)
def parameters_that_grow() -> Program:
    """A `ParameterList` that grows by one that is not in the optimizer."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda y, scale: y * scale, self.scales, Net.forward(self, x))

    return program_of(forward, scales=nn.ParameterList([torch.ones(4)]))


@add(before=[at(2, lambda run: run.module.a.requires_grad_(False)), at(4, lambda run: run.module.a.requires_grad_(True))], words=REFUSED)
def layer_frozen_and_freed() -> Program:
    """A layer that is frozen for two steps."""
    return Program(Net())


@add(before=[lambda run: setattr(run.module, "is_detached", run.number % 2 == 1)])
def part_without_gradient() -> Program:
    """A part that runs under `no_grad` in every second step."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_detached):
            y = torch.tanh(self.a(x))
        return self.b(y)

    return program_of(forward, is_detached=False)


def _untie(run: Run) -> None:
    run.module.c.weight = nn.Parameter(torch.full((12, 12), 0.1, dtype=torch.float64))


@add(before=[at(2, _untie)], words=REFUSED)
def weights_untied() -> Program:
    """Weights that were tied, and are apart from the third step on."""
    module = module_of(lambda self, x: self.b(torch.tanh(self.c(torch.tanh(self.a(x))))), c=nn.Linear(12, 12))
    module.c.weight = module.a.weight  # type: ignore[union-attr]
    return Program(module)


class Halves(nn.Module):
    """A parametrization whose factor is an attribute."""

    factor = 0.5

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight in use."""
        return weight * self.factor


@add(before=[at(3, lambda run: setattr(run.module.a.parametrizations.weight[0], "factor", 0.25))])
def factor_of_a_parametrization() -> Program:
    """A number that a parametrization reads."""
    module = Net()
    parametrize.register_parametrization(module.a, "weight", Halves())
    return Program(module)


@add(before=[at(3, lambda run: parametrize.register_parametrization(run.module.a, "weight", Halves()))], words=REFUSED)
def parametrization_added() -> Program:
    """A parametrization from the fourth step on."""
    return Program(Net())


@add(before=[at(3, lambda run: parametrize.remove_parametrizations(run.module.a, "weight", leave_parametrized=False))], words=REFUSED)
def parametrization_removed() -> Program:
    """A parametrization until the fourth step."""
    module = Net()
    parametrize.register_parametrization(module.a, "weight", Halves())
    return Program(module)


@add(around=lambda run: parametrize.cached())
def parametrization_cached() -> Program:
    """A step inside `parametrize.cached()`."""
    module = Net()
    parametrizations.spectral_norm(module.a)
    return Program(module)


@add(before=[lambda run: setattr(run.module.drop, "p", float(run.number % 2))])
def rate_of_dropout() -> Program:
    """A dropout whose probability is 0 and 1 by turns."""
    return program_of(lambda self, x: self.b(torch.tanh(self.a(x))) + self.b(self.drop(x)), drop=nn.Dropout(0.0))


@add(before=[at(2, lambda run: run.module.drop.eval()), at(4, lambda run: run.module.drop.train())])
def mode_of_a_dropout() -> Program:
    """A dropout of all elements that is switched off for two steps."""
    return program_of(lambda self, x: self.b(torch.tanh(self.a(x))) + self.b(self.drop(x)), drop=nn.Dropout(1.0))


@add(before=[lambda run: setattr(run.module.norm, "eps", 0.1 * (1 + run.number)), at(3, lambda run: setattr(run.module.norm, "num_groups", 2))])
def options_of_a_layer() -> Program:
    """Numbers of a normalisation that the script changes."""
    return program_of(lambda self, x: self.b(self.norm(self.a(x))), norm=nn.GroupNorm(3, 12))


@add(before=[at(3, lambda run: setattr(run.module.norm, "track_running_stats", False))])
def statistics_switched_off() -> Program:
    """Batch normalisation that stops tracking statistics, but still has them."""
    return program_of(lambda self, x: self.b(self.norm(self.a(x))), norm=nn.BatchNorm1d(12))


def _keep_optimizer(run: Run) -> None:
    run.outer.optimizer = run.optimizer


@add(setup=[_keep_optimizer], before=[lambda run: run.optimizer.param_groups[0].update(lr=0.1 / (1 + run.number))], ignore="optimizer")
def rate_that_the_loss_reads() -> Program:
    """The learning rate of the optimizer, which the loss reads."""
    outer = SimpleNamespace()
    return Program(Net(), lambda y, batch: y.square().mean() * outer.optimizer.param_groups[0]["lr"], outer)


@add(around=lambda run: torch.autocast("cpu", torch.bfloat16, enabled=run.number % 2 == 1), dtype=torch.float32, tolerance=1e-5)
def autocast_asked_for() -> Program:
    """A module that asks whether autocast is on, and of which type."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return Net.forward(self, x).float() * (0.5 if torch.is_autocast_enabled("cpu") else 1.0)

    return program_of(forward)


@add(before=[lambda run: setattr(run.outer, "number", run.number)])
def penalty_in_every_third_step() -> Program:
    """A penalty of the gradient that the objective adds in every third step."""
    outer = SimpleNamespace(number=0)

    def objective(module: nn.Module, batch: Batch) -> torch.Tensor:
        x = batch["x"].clone().requires_grad_(outer.number % 3 == 2)
        y = module(x=x)
        loss = y.square().mean()
        return loss + torch.autograd.grad(y.sum(), x, create_graph=True)[0].square().mean() if x.requires_grad else loss

    return Program(Net(), outer=outer, objective=objective)


@pytest.mark.parametrize("case", CASES)
def test_state_of_parts_counts(case: Case) -> None:
    """Losses, gradients, weights and state are those of eager PyTorch, or the refusal names the place."""
    check(case)
