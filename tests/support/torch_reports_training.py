"""Public reports about optimizers, accumulation, tied and frozen parameters, and batch normalisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .eager_twin import Batch, Program, Run, adam, adamw, at, plain_sgd, rows
from .torch_reports import ACCELERATE, DEEPSPEED, EITHER, FAIRSCALE, PYTORCH, TRANSFORMERS, Pair, pair, report


def normed(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Use the batch normalisation `norm`."""
    return self.second(torch.tanh(self.norm(self.first(x))))


def stop_tracking(run: Run) -> None:
    """Let batch normalisation keep its statistics."""
    run.module.norm.track_running_stats = False


@report(PYTORCH, 20967, "`track_running_stats` changed after construction", allowed=EITHER, before=[at(3, stop_tracking)])
def statistics_no_longer_tracked() -> Program:
    """Batch normalisation stops tracking its statistics."""
    program = pair(normed)
    program.module.norm = nn.BatchNorm1d(12)
    return program


@report(PYTORCH, 96136, "statistics of batch normalisation within a checkpoint")
def batch_norm_in_a_checkpoint() -> Program:
    """Eager PyTorch updates the statistics twice a step, in the forward pass and when it recomputes."""
    program = pair(lambda self, x: checkpoint(normed, self, x, use_reentrant=False))
    program.module.norm = nn.BatchNorm1d(12)
    return program


def tied() -> nn.Module:
    """Return layers of which the first and the last share their parameters, with one that is not used."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last, self.unused = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
            self.last.weight, self.last.bias = self.first.weight, self.first.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Use all layers but one."""
            return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))

    return Tied()


@report(DEEPSPEED, 966, "other losses with tied weights and an unused layer", optimizer=adamw)
def tied_and_unused() -> Program:
    """Tied parameters are updated once, unused ones stay as they are."""
    return Program(tied())


@report(PYTORCH, 88621, "other norm of the gradient, and so other clipping", optimizer=adam, max_grad_norm=0.1, minibatches=2)
def clipping_of_tied_weights() -> Program:
    """A tied parameter counts once in the norm."""
    return Program(tied())


def train_before(run: Run) -> None:
    """Take three steps of a plain loop with the optimizer."""
    for number in range(3):
        run.optimizer.zero_grad()
        x = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        run.module(x=x).square().mean().backward()
        run.optimizer.step()
    run.optimizer.zero_grad()


@report(DEEPSPEED, 5104, "step count of the optimizer wrong from the start", allowed=EITHER, optimizer=adam, setup=[train_before])
def optimizer_that_has_stepped() -> Program:
    """Moments and step counts from before the session count."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(x))))


def learn_first(run: Run, learns: bool) -> None:
    """Let the first layer learn, or freeze it."""
    run.module.first.requires_grad_(learns)


@report(
    "facebookresearch/fairseq",
    4702,
    "frozen parameters are updated",
    allowed=EITHER,
    optimizer=adamw,
    before=[at(2, lambda run: learn_first(run, False)), at(4, lambda run: learn_first(run, True))],
)
def frozen_for_two_steps() -> Program:
    """A layer is frozen for two steps: no decay, no moments."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(x))))


@report(FAIRSCALE, 805, "average of weights kept in the forward pass through `.data`", allowed=EITHER)
def teacher_follows_in_forward() -> Program:
    """A teacher within the module follows by an average of parameters."""

    def way(self: Any, x: torch.Tensor) -> torch.Tensor:
        for mine, other in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
            mine.data = mine * 0.9 + other.data * 0.1
        return self.second(torch.tanh(self.first(x) - self.teacher(x)))

    program = pair(way)
    program.module.teacher = nn.Linear(12, 12).requires_grad_(False)
    return program


def keep_prototypes(run: Run) -> None:
    """Drop the gradient of the last layer before the optimizer's first three steps."""

    def drop(optimizer: torch.optim.Optimizer, arguments: Any, terms: Any) -> None:
        if run.number < 3:
            run.module.second.weight.grad = None

    run.optimizer.register_step_pre_hook(drop)


@report(FAIRSCALE, 605, "gradient set to None before the optimizer's step", allowed=EITHER, setup=[keep_prototypes])
def gradient_dropped_before_the_step() -> Program:
    """Prototypes keep their values for three steps."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(x))))


def make_schedule(run: Run) -> None:
    """Put a schedule beside the module."""
    run.outer.schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1 / (1 + step))


def follow_schedule(run: Run) -> None:
    """Step the schedule between steps."""
    if run.number:
        run.outer.schedule.step()
    run.note([group["lr"] for group in run.optimizer.param_groups])


@report(ACCELERATE, 963, "schedule stepped by each minibatch", minibatches=2, setup=[make_schedule], before=[follow_schedule])
def schedule_with_accumulation() -> Program:
    """A step of two minibatches is one step of the schedule."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(x))))


def labelled() -> list[Batch]:
    """Batches whose halves have other numbers of labels."""
    labels = torch.tensor([0, 1, 2, 3, -100, -100, 1, -100])
    return [{"x": torch.randn(8, 12, generator=torch.Generator().manual_seed(i)), "labels": labels.roll(i)} for i in range(3)]


class Labelled(Pair):
    """A pair of layers that takes labels."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits."""
        return super().forward(x)


@report(TRANSFORMERS, 35203, "normalisation over minibatches with unequal numbers of labels", minibatches=2, batches=labelled, optimizer=plain_sgd)
def unequal_labels_in_minibatches() -> Program:
    """Gradients are those of the mean of the minibatches' means."""
    module = Labelled(lambda self, x: self.second(torch.tanh(self.first(x))))
    return Program(module, loss=lambda y, batch: functional.cross_entropy(y, batch["labels"]))


@report(DEEPSPEED, 930, "parameter read outside its module", optimizer=adamw)
def parameter_of_another_module() -> Program:
    """The forward pass reads elements of a layer's weight, which broadcast."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(x) * self.second.weight[0] + self.second.bias[0])))


@report(
    "Lightning-AI/pytorch-lightning",
    19987,
    "last window of accumulation smaller than the others",
    allowed=EITHER,
    words="pad the batch",
    minibatches=2,
    batches=rows(8, 8, 5),
)
def incomplete_last_batch() -> Program:
    """A batch of five rows is cut into two minibatches of unequal sizes."""
    return pair(lambda self, x: self.second(torch.tanh(self.first(x))))
