"""Learning rates as pure functions of the step number, which counts from 1.

A warm-up of W steps reaches lr in step W: from lr / W in step 1, or from `warmup_start_lr` S, as S + (lr - S) * (step - 1) / (W - 1), which is
PyTorch's LinearLR. After the warm-up the schedule's shape begins; it reaches `min_lr` in step `steps` and stays there.
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
    warmup_start_lr: float | None = None,
    min_lr: float = 0.0,
) -> Schedule:
    """Return the schedule of a run.

    Args:
        kind: one of `SHAPES`.
        lr: learning rate after the warm-up.
        steps: optimizer steps of the whole run; the last one gets `min_lr` (except under "constant").
        warmup_steps: steps of linear warm-up.
        warmup_start_lr: learning rate of step 1; None for lr / warmup_steps.
        min_lr: learning rate at the end.

    Raises:
        UsageError: an unknown kind, a negative count, or min_lr above lr.
    """
    if kind not in SHAPES:
        raise UsageError(f"the schedule must be one of {', '.join(SHAPES)}, got {kind!r}", "choose one of them")
    if steps < 1 or warmup_steps < 0:
        raise UsageError(f"steps must be at least 1 and warmup_steps 0 or more, got steps {steps} and warmup_steps {warmup_steps}", "use 1 and 0")
    if kind != "constant" and min_lr > lr:
        raise UsageError(f"min_lr must be at most lr = {lr:g}, got {min_lr:g}", f"the nearest legal value is {lr:g}")
    return partial(_rate, kind=kind, lr=lr, steps=steps, warmup_steps=warmup_steps, warmup_start_lr=warmup_start_lr, min_lr=min_lr)


def _rate(step: int, *, kind: str, lr: float, steps: int, warmup_steps: int, warmup_start_lr: float | None, min_lr: float) -> float:
    if step < 1:
        raise UsageError(f"steps count from 1, got {step}", "the first learning rate is that of step 1")
    if step < warmup_steps:
        return lr * step / warmup_steps if warmup_start_lr is None else warmup_start_lr + (lr - warmup_start_lr) * (step - 1) / (warmup_steps - 1)
    if kind == "constant":
        return lr
    first = max(warmup_steps, 1)  # the step with the whole lr
    progress = min(1.0, (step - first) / max(1, steps - first))
    return min_lr + (lr - min_lr) * SHAPES[kind](progress)
