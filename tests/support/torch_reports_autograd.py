"""Public reports about gradients, custom functions, hooks of tensors and modes of autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .eager_twin import Batch, Program, Run
from .torch_reports import EITHER, PYTORCH, pair, report


@report(PYTORCH, 136662, "two additions in place to one column, under `torch.func.grad`")
def columns_in_place_under_func_grad() -> Program:
    """Columns of a tensor of zeros are added to twice."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:, 0] += x[:, 2].square()
        y[:, 0] += x[:, 2].square()
        return y.sum()

    return pair(lambda self, x: self.second(torch.func.grad(inner)(torch.tanh(self.first(x)))))


@report(PYTORCH, 183602, "gradient of `diagonal_scatter`")
def diagonal_scatter() -> Program:
    """The diagonal of an activation is replaced."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(torch.diagonal_scatter(y, y.tanh().diagonal() * 2))

    return pair(way)


@report(PYTORCH, 180771, "gradient of `slice_scatter`")
def slice_scatter() -> Program:
    """Columns of an activation are replaced, and then summed up."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = torch.slice_scatter(y, y[:, :6].tanh(), dim=1, start=0, end=6)
        return self.second(y) * z.sum(1, keepdim=True)

    return pair(way)


class Modulated(nn.Module):
    """Chained layer norms whose scales and shifts are pieces of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Parameter(torch.randn(4, 12) * 0.1), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise, scale and shift twice."""
        shift, scale, other_shift, other_scale = self.table.chunk(4)
        y = functional.layer_norm(x, (12,)) * (1 + scale) + shift
        y = functional.layer_norm(x + y, (12,)) * (1 + other_scale) + other_shift
        return self.last(y)


@report(PYTORCH, 193061, "gradient of a parameter that is cut into scales and shifts of layer norms")
def modulated_layer_norms() -> Program:
    """Two layer norms share one table of scales and shifts."""
    return Program(Modulated())


@report(PYTORCH, 181581, "gradients of gradients lost under `create_graph=True`")
def gradient_penalty() -> Program:
    """The loss has the norm of the gradient by the input."""

    def objective(module: nn.Module, batch: Batch) -> torch.Tensor:
        x = batch["x"].detach().requires_grad_()
        y = module(x=x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + (slope.norm(dim=1) - 1).square().mean()

    program = pair(lambda self, x: self.second(functional.relu(self.first(x)) ** 2))
    program.objective = objective
    return program


@report(PYTORCH, 91468, "hook of an activation not called")
def hook_of_an_activation() -> Program:
    """The gradient of an activation is scaled by a hook."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        y.register_hook(lambda gradient: gradient * 3.14)
        return self.second(y)

    return pair(way)


def note_kept_gradient(run: Run) -> None:
    """Note the gradient that the last step has left at the activation."""
    kept = getattr(run.module, "kept", None)
    run.note(None if kept is None else kept.grad)


@report(PYTORCH, 146212, "`retain_grad` ignored", allowed=EITHER, before=[note_kept_gradient])
def retained_gradient() -> Program:
    """A script reads the gradient of an activation after each step."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.kept = torch.tanh(self.first(x))
        self.kept.retain_grad()
        return self.second(self.kept)

    return pair(way)


@report(PYTORCH, 116221, "hooks of saved tensors ignored", allowed=EITHER)
def saved_tensor_hooks() -> Program:
    """What the backward pass reads is twice what was saved."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: 2 * saved):
            y = y * y.sigmoid()
        return self.second(y)

    return pair(way)


class Doubled(torch.autograd.Function):
    """A function that changes its input in place, and whose gradient is another one than that of its steps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Double the input in place."""
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Scale by three."""
        return gradients[0] * 3


@report(PYTORCH, 133491, "`mark_dirty` of a custom function dropped")
def marked_dirty() -> Program:
    """The result of a custom function is its changed input, which is read by both names."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * 1
        z = Doubled.apply(y)
        return self.second(y * z)

    return pair(way)


class Stashed(torch.autograd.Function):
    """A function that keeps tensors as attributes of its context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Keep the input and a count beside it."""
        ctx.x, ctx.count = x, x.shape[0]
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Read what was kept."""
        return gradients[0] * ctx.x.cos() / ctx.count


@report(PYTORCH, 106387, "tensor kept as an attribute of a custom function's context")
def stash_in_the_context() -> Program:
    """A custom function keeps its input without `save_for_backward`."""
    return pair(lambda self, x: self.second(Stashed.apply(self.first(x))))


class Straight(torch.autograd.Function):
    """A rounding whose gradient is that of the identity."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        """Round."""
        return torch.round(x * 4) / 4

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Pass the gradient through."""
        return gradients[0]


@report(PYTORCH, 193279, "custom backward dropped under `torch.func.grad`")
def custom_backward_under_func_grad() -> Program:
    """A gradient inside the forward pass goes through a custom function."""
    slope = torch.func.grad(lambda x: (Straight.apply(x) ** 3).sum())
    return pair(lambda self, x: self.second(slope(self.first(x)) + Straight.apply(self.first(x))))


@report(PYTORCH, 153044, "backward pass under the autocast of the forward pass", dtype=torch.float32, tolerance=1e-6)
def inner_autocast_off() -> Program:
    """A layer in fp32 inside a forward pass in bf16; gradients are computed outside of both."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.tanh(self.first(x))
            with torch.autocast("cpu", enabled=False):
                y = self.second(y.float())
        return y

    return pair(way)


@report(PYTORCH, 176854, "`detach_` in place ignored")
def detached_in_place() -> Program:
    """A part of an activation is cut off the graph."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        gate = self.first(x).sigmoid()
        gate.detach_()
        return self.second(y * gate if not gate.requires_grad else y)

    return pair(way)


@report(PYTORCH, 123713, "`requires_grad_` inside the forward pass ignored")
def gradient_switched_on_inside() -> Program:
    """An activation computed without gradients gets its own gradient."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = torch.tanh(self.first(x))
        y.requires_grad_()
        z = self.second(y)
        (slope,) = torch.autograd.grad(z.square().sum(), y, create_graph=True)
        return z + slope.sum(1, keepdim=True)

    return pair(way)


@report(PYTORCH, 114338, "`enable_grad` inside `no_grad`")
def gradients_on_inside_off() -> Program:
    """One layer learns within a part that has no gradients."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = torch.tanh(self.first(x))
            with torch.enable_grad():
                z = self.second(y)
        return z

    return pair(way)


@report(
    PYTORCH,
    151918,
    "gradient of an embedding's padding row",
    batches=lambda: [{"x": torch.tensor([[0, 3, 5], [0, 0, 7], [2, 3, 0]])}],
)
def padding_row() -> Program:
    """The padding row gets no gradient, and decays."""
    module = nn.Sequential(nn.Embedding(9, 12, padding_idx=0), nn.Linear(12, 4))
    return Program(module, objective=lambda module, batch: module(batch["x"]).square().mean())


@report(PYTORCH, 198118, "pseudo-inverse of a complex matrix under a dispatch mode")
def complex_pseudo_inverse() -> Program:
    """The pseudo-inverse of a complex matrix made of two layers' weights."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        inverse = torch.linalg.pinv(torch.complex(self.second.weight, self.first.weight[:4]))  # (12, 4)
        return self.second(x) + (self.first(x).to(inverse.dtype) @ inverse).abs()

    return pair(way)


@report(PYTORCH, 147565, "checkpoint under hooks of saved tensors")
def checkpoint_under_saved_tensor_hooks() -> Program:
    """Saved tensors are kept on the CPU around a checkpoint."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            y = self.first(x) ** 2
            y = checkpoint(lambda inner: inner.pow(2).tanh(), y, use_reentrant=False)
            return self.second(y**2)

    return pair(way)


@report(PYTORCH, 169179, "requirement of a gradient lost by an assignment to slices")
def skew_symmetric_by_assignment() -> Program:
    """A parameter fills the upper triangle of a matrix of zeros."""

    class Skew(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.angles, self.last = nn.Parameter(torch.randn(66)), nn.Linear(12, 4)
            self.register_buffer("places", torch.triu_indices(12, 12, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Rotate by the exponential of the skew-symmetric matrix."""
            matrix = torch.zeros(12, 12, dtype=x.dtype)
            matrix[self.places[0], self.places[1]] = self.angles * 0.1
            rotation = torch.matrix_exp(matrix - matrix.T if matrix.requires_grad else matrix)
            return self.last(torch.tanh(x @ rotation))

    return Program(Skew())


def inputs_that_learn() -> list[Batch]:
    """Return batches of which every second one requires a gradient."""
    return [{"x": torch.randn(8, 12, generator=torch.Generator().manual_seed(i)).requires_grad_(i % 2 == 1)} for i in range(2)]


@report(PYTORCH, 113290, "requirement of an input's gradient not looked at again", allowed=EITHER, batches=inputs_that_learn)
def input_requires_grad() -> Program:
    """The result is doubled where the input requires a gradient."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(x))) * (2 if x.requires_grad else 1))
