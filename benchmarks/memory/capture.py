"""The recorded training step of a command line, from shapes alone: no memory is taken and no kernel runs.

plan = capture(STANDARD)            # GPT-2 small, 8 minibatches of one sequence of 1,024 tokens
plan = capture(STANDARD, model="gpt2-medium", batch=4)
"""

from __future__ import annotations

from dataclasses import replace

from nntask.trainer.settings import TrainSettings
from scheduler.core.steps import StepPlan
from wrappers.cli.bench.standard import STANDARD, captured


def capture(
    settings: TrainSettings = STANDARD,
    *,
    model: str | None = None,
    batch: int | None = None,
    recompute: bool = False,
    grad_clip: float = 0.0,
    lanes: int | None = None,
) -> StepPlan:
    """The step that `settings` train with, changed by the other arguments.

    Args:
        model: name of a preset.
        batch: sequences per step.
        recompute: whether blocks keep only their input.
        grad_clip: largest norm of the gradient; 0 is off.
        lanes: of gradient sums.

    Raises:
        UsageError: a rule of `nntask train` is broken.
    """
    return captured(
        replace(
            settings,
            model=replace(settings.model, model=model or settings.model.model, recompute="block" if recompute else settings.model.recompute),
            tiling=replace(settings.tiling, batch=batch or settings.tiling.batch, lanes=lanes or settings.tiling.lanes),
            optimizer=replace(settings.optimizer, grad_clip=grad_clip or settings.optimizer.grad_clip),
        )
    )


__all__ = ["STANDARD", "capture"]
