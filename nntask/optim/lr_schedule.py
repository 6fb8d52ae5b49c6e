"""Learning rates as pure functions of the step number, which counts from 1.

Two warm-ups, of which a run uses one: `warmup_steps` W gives lr * step / W in the first W steps; `full_lr_iter` F (NNTile's) gives
start_lr + (lr - start_lr) * (step - 1) / (F - 1) while step < F. After the warm-up the schedule's shape begins; it reaches `min_lr` in step `steps`
and stays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

from ..errors import UsageError

Schedule = Callable[[int], float]
"""Learning rate of a step, counted from 1."""

WSD_DECAY: Final = 0.2
"""Fraction of the steps in which `wsd` decays."""


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    """Cosine decay (Loshchilov and Hutter, SGDR, 2017, equation 5, without restarts)."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _wsd(progress: float) -> float:
    """Warm-up, stable phase, decay (Hu et al., MiniCPM, 2024, section 4); the decay is linear, over the last fifth."""
    return min(1.0, (1.0 - progress) / WSD_DECAY)


SHAPES: Final[dict[str, Callable[[float], float]]] = {"constant": _constant, "linear": _linear, "cosine": _cosine, "wsd": _wsd}
"""Name -> factor between lr (1) and min_lr (0) as a function of progress after the warm-up, 0 to 1."""


def make_schedule(
    kind: str,
    lr: float,
    *,
    steps: int,
    warmup_steps: int = 0,
    min_lr: float = 0.0,
    start_lr: float = 0.0,
    full_lr_iter: int = 1,
) -> Schedule:
    """Return the schedule of a run.

    Args:
        kind: one of `SHAPES`.
        lr: learning rate after the warm-up.
        steps: optimizer steps of the whole run; the last one gets `min_lr` (except under "constant").
        warmup_steps: steps of linear warm-up.
        min_lr: learning rate at the end.
        start_lr: learning rate of step 1 under `full_lr_iter`.
        full_lr_iter: first step with the whole `lr`.

    Raises:
        UsageError: an unknown kind, a negative count, both warm-ups at once, or min_lr above lr.
    """
    if kind not in SHAPES:
        raise UsageError(f"the schedule must be one of {', '.join(SHAPES)}, got {kind!r}; choose one of them")
    if steps < 1 or warmup_steps < 0 or full_lr_iter < 1:
        raise UsageError(
            f"steps and full_lr_iter must be at least 1 and warmup_steps 0 or more, got steps {steps}, full_lr_iter {full_lr_iter}, "
            f"warmup_steps {warmup_steps}; use 1, 1 and 0"
        )
    if warmup_steps and full_lr_iter > 1:
        raise UsageError(f"warmup_steps {warmup_steps} and full_lr_iter {full_lr_iter} are both warm-ups; drop one of them")
    if kind != "constant" and min_lr > lr:
        raise UsageError(f"min_lr must be at most lr = {lr:g}, got {min_lr:g}; the nearest legal value is {lr:g}")
    return partial(_rate, kind=kind, lr=lr, steps=steps, warmup_steps=warmup_steps, min_lr=min_lr, start_lr=start_lr, full_lr_iter=full_lr_iter)


def _rate(step: int, *, kind: str, lr: float, steps: int, warmup_steps: int, min_lr: float, start_lr: float, full_lr_iter: int) -> float:
    if step < 1:
        raise UsageError(f"steps count from 1, got {step}; the first learning rate is that of step 1")
    if step < full_lr_iter:
        return start_lr + (lr - start_lr) * (step - 1) / (full_lr_iter - 1)
    if step < warmup_steps:
        return lr * step / warmup_steps
    first = max(warmup_steps, full_lr_iter, 1)  # the step with the whole lr
    if kind == "constant":
        return lr
    progress = min(1.0, (step - first) / max(1, steps - first))
    return min_lr + (lr - min_lr) * SHAPES[kind](progress)
