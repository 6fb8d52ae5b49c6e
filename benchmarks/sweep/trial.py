"""Training of one module by eager PyTorch and through `wrappers.torch.Session`, and the verdict on how the two compare.

A `Trial` makes equal modules from a seed as often as it is asked. Eager PyTorch trains one of them, a session another. If their losses or final
tensors differ, eager PyTorch trains two more whose weights were moved by 1e-7, and a difference that is rounding shrinks in double precision. Some
modules multiply every rounding by thousands in each step, in double precision too: they are compared after one step, and with moved twins in double.
"""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

STEPS: Final = 5
RATE: Final = 1e-2
OPTIMIZER: Final = {"lr": RATE, "momentum": 0.9, "weight_decay": 0.1}
"""Options of SGD. Weight decay shows whether a parameter without a gradient is skipped."""
NEAR: Final = 1e-5
"""Largest relative difference of what counts as equal."""
NEAR_DOUBLE: Final = 1e-12
"""Largest relative difference after one step in double precision that counts as rounding."""
MOVED: Final = 1e-7
"""Relative change of a twin's weights in single precision."""
MOVED_DOUBLE: Final = 2e-16
"""Relative change of a twin's weights in double precision: one rounding."""
FACTOR: Final = 10.0
"""Largest difference, relative to that of the twins, that counts as rounding."""
MOST_DOUBLE: Final = 1e-3
"""Relative difference in double precision above which moved twins in double precision must differ as well."""
FLOOR: Final = 1e-2
"""Differences are relative to the largest magnitude of a tensor, or to this if that is larger."""
MOST_PARAMETERS: Final = 30_000_000
RAM: Final = "3GB"

EQUAL: Final = "equal"
ROUNDING: Final = "rounding"
RANDOM: Final = "random"
REFUSED: Final = "refused"
DIFFERENT: Final = "different"
TRACEBACK: Final = "traceback"
NO_EAGER: Final = "no eager"
VERDICTS: Final = (EQUAL, ROUNDING, RANDOM, REFUSED, DIFFERENT, TRACEBACK, NO_EAGER)

Batch = Mapping[str, Any]
Loss = Callable[[Any, Mapping[str, Any]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Trial:
    """A module in training mode, and its batches.

    Args:
        make: function that makes the module with random weights; equal ones after equal seeds.
        batches: one batch for each step, all of one shape.
        loss: function from the module's result and the batch to the loss; None if the result has the loss.
        about: what the batches hold, in words.
    """

    make: Callable[[], nn.Module]
    batches: Sequence[Batch]
    loss: Loss | None = None
    about: str = ""


@dataclass(slots=True)
class Verdict:
    """How a module fared.

    Attributes:
        verdict: one of `VERDICTS`.
        reason: sentence of a refusal, error of a traceback, or why eager PyTorch does not train the module.
        place: innermost lines of a traceback.
        loss_difference: largest relative difference of a loss.
        state_difference: largest relative difference of a parameter or buffer at the end.
        twin_loss_difference: the same of the moved eager twins.
        twin_state_difference: the same of the moved eager twins.
        double_difference: largest relative difference of a loss or tensor in double precision, where it had to be tried.
        double_first_difference: the same after one step, if `double_difference` is above `MOST_DOUBLE`.
        double_twin_difference: the same of moved eager twins in double precision after all steps, likewise.
        worst: name of the tensor with the largest difference.
        parameters: number of elements of the parameters.
        inputs: what the batches hold.
    """

    verdict: str
    reason: str = ""
    place: str = ""
    loss_difference: float | None = None
    state_difference: float | None = None
    twin_loss_difference: float | None = None
    twin_state_difference: float | None = None
    double_difference: float | None = None
    double_first_difference: float | None = None
    double_twin_difference: float | None = None
    worst: str = ""
    parameters: int = 0
    inputs: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields that are set."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None, 0)}


@dataclass(frozen=True, slots=True)
class Trained:
    """Losses of the steps, and parameters and buffers after them."""

    losses: list[float]
    state: dict[str, torch.Tensor]


def without_dropout(module: nn.Module) -> nn.Module:
    """The module, in training mode, with every probability of dropping something set to zero."""
    for part in module.modules():
        for name, value in vars(part).items():
            is_probability = isinstance(value, float) and 0 < value < 1
            drops = name in ("p", "prob") and re.search("drop|stochastic", type(part).__name__.lower())
            if is_probability and ("drop" in name.lower() or drops):
                setattr(part, name, 0.0)
    return module.train()


def seed(number: int) -> None:
    """Seed every generator that a module may draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def made(trial: Trial, moved: int = 0) -> nn.Module:
    """The module of a trial with its first weights; `moved` is the seed of a twin, 0 for the weights as they are."""
    seed(0)
    module = without_dropout(trial.make())
    if moved:
        generator = torch.Generator().manual_seed(moved)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    sign = torch.randn(parameter.shape, generator=generator).sign().to(parameter.dtype)
                    parameter.mul_(1 + (MOVED_DOUBLE if parameter.dtype == torch.float64 else MOVED) * sign)
    return module


def eager(trial: Trial, *, moved: int = 0, draws: int = 1) -> Trained:
    """Training by PyTorch itself.

    Args:
        trial: what to train.
        moved: seed of a twin with moved weights; 0 for none.
        draws: seed of random numbers of the forward pass.

    Raises:
        ValueError: the loss is not a finite scalar that depends on the parameters.
    """
    module = made(trial, moved)
    optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], **OPTIMIZER)
    losses = []
    seed(draws)
    for batch in trial.batches:
        optimizer.zero_grad()
        loss = loss_of(module(**batch), batch, trial.loss)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if not np.isfinite(losses).all():
        raise ValueError(f"the losses are not finite: {losses}")
    return Trained(losses, state_of(module))


def loss_of(result: Any, batch: Batch, loss: Loss | None) -> torch.Tensor:
    """The loss of a module's result.

    Raises:
        ValueError: it is no scalar with a gradient.
    """
    found = loss(result, batch) if loss else result if isinstance(result, torch.Tensor) else result["loss"]
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.requires_grad:
        raise ValueError("the result has no scalar loss that depends on the parameters")
    return found


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of what a module's `state_dict` holds."""
    return {name: value.detach().clone() for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


def through_session(trial: Trial) -> Trained:
    """Training through the door."""
    from wrappers.torch import Session

    module = made(trial)
    optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], **OPTIMIZER)
    seed(1)
    with Session(module, optimizer, loss=trial.loss, ram=RAM, workers=1) as session:
        losses = [session.step(**batch) for batch in trial.batches]
        return Trained(losses, session.state_dict())


def difference(ours: Trained, theirs: Trained) -> tuple[float, float, str]:
    """Largest relative difference of a loss, of a tensor, and the name of that tensor."""
    losses = max(abs(one - other) / max(abs(other), FLOOR) for one, other in zip(ours.losses, theirs.losses, strict=True))
    worst, largest = "", 0.0
    if ours.state.keys() != theirs.state.keys():
        return _number(losses), float("inf"), f"names of tensors: {sorted(ours.state.keys() ^ theirs.state.keys())[:3]}"
    for name, value in theirs.state.items():
        found = _apart(ours.state[name], value)
        if found > largest:
            worst, largest = name, found
    return _number(losses), largest, worst


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    if not theirs.numel():
        return 0.0
    kind = torch.complex128 if theirs.is_complex() else torch.float64
    one, other = ours.to(kind), theirs.to(kind)
    apart = torch.where(one == other, 0.0, (one - other).abs()).max().item()  # equal infinities are no difference
    scale = torch.where(other.abs().isfinite(), other.abs(), 0.0).max().item()
    return _number(apart / max(scale, FLOOR))


def _number(value: float) -> float:
    return value if value == value else float("inf")


def tried(trial: Trial, note: Callable[[str], None] = lambda _: None) -> Verdict:
    """Train a module both ways.

    Args:
        trial: module and batches.
        note: is called with "session" when eager PyTorch has trained the module.
    """
    size = sum(each.numel() for each in made(trial).parameters())
    if size > MOST_PARAMETERS:
        return Verdict(NO_EAGER, f"not tiny: {size:,} parameters", parameters=size)
    try:
        theirs, again = eager(trial), eager(trial, draws=2)
    except Exception as error:
        return Verdict(NO_EAGER, sentence(error), parameters=size, inputs=trial.about)
    note("session")
    verdict = compared(trial, theirs, is_random=max(difference(again, theirs)[:2]) > 0)
    verdict.parameters, verdict.inputs = size, trial.about
    return verdict


def compared(trial: Trial, theirs: Trained, *, is_random: bool) -> Verdict:
    """Train a module through a session, and compare with what eager PyTorch found.

    Args:
        trial: module and batches.
        theirs: eager PyTorch's losses and state.
        is_random: whether eager PyTorch finds other values with another seed; nothing can be compared then.
    """
    from nntask import UsageError

    try:
        ours = through_session(trial)
    except UsageError as error:
        return Verdict(REFUSED, sentence(error))
    except Exception as error:
        return Verdict(TRACEBACK, sentence(error, with_type=True), place_of(error))
    losses, state, worst = difference(ours, theirs)
    if is_random:
        return Verdict(RANDOM, "eager PyTorch finds other losses with another seed", loss_difference=losses)
    if max(losses, state) <= NEAR:
        return Verdict(EQUAL, loss_difference=losses, state_difference=state)
    twins = [difference(eager(trial, moved=number), theirs) for number in (1, 2)]
    twin_losses, twin_state = (max(twin[place] for twin in twins) for place in (0, 1))
    double = in_double(trial)
    verdict = judged((losses, state), (twin_losses, twin_state), double)
    first = double_twin = None
    if verdict == ROUNDING and double is not None and double > MOST_DOUBLE:
        first, double_twin = in_double(trial, steps=1), twins_in_double(trial)
        verdict = ROUNDING if is_chaos(double, first, double_twin) else DIFFERENT
    return Verdict(verdict, "", "", losses, state, twin_losses, twin_state, double, first, double_twin, worst)


def judged(apart: tuple[float, float], twins: tuple[float, float], double: float | None) -> str:
    """The verdict on differences that are not equal.

    Args:
        apart: difference of the losses, and of the tensors.
        twins: the same of eager twins that were moved.
        double: larger one of the two in double precision; None if the module does not train in it. Above `MOST_DOUBLE`, `is_chaos` decides.
    """
    is_small = all(ours <= FACTOR * max(twin, NEAR) for ours, twin in zip(apart, twins, strict=True))
    shrinks = double is None or double <= max(NEAR, max(apart) / FACTOR) or double > MOST_DOUBLE
    return ROUNDING if is_small and shrinks else DIFFERENT


def is_chaos(double: float, first: float | None, twin: float) -> bool:
    """Whether a difference above `MOST_DOUBLE` in double precision has grown from rounding.

    Args:
        double: difference after all steps.
        first: difference after one step, which a fault of a session would show; None if the session did not train.
        twin: difference of eager twins after all steps.
    """
    return first is not None and first <= NEAR_DOUBLE and double <= FACTOR * twin


def wide(trial: Trial, steps: int = STEPS) -> Trial:
    """The trial in double precision, with its first `steps` batches."""
    batches = [{name: _doubled(value) for name, value in batch.items()} for batch in trial.batches[:steps]]
    return Trial(lambda: trial.make().double(), batches, trial.loss)


def in_double(trial: Trial, steps: int = STEPS) -> float | None:
    """Largest relative difference when both ways train the module in double precision; None if one of them does not."""
    doubled = wide(trial, steps)
    try:
        return max(difference(through_session(doubled), eager(doubled))[:2])
    except Exception:  # the module fixes a type somewhere
        return None


def twins_in_double(trial: Trial) -> float:
    """Largest relative difference of eager twins in double precision whose weights were moved by one rounding."""
    doubled = wide(trial)
    theirs = eager(doubled)
    return max(max(difference(eager(doubled, moved=number), theirs)[:2]) for number in (1, 2))


def _doubled(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def sentence(error: BaseException, *, with_type: bool = False) -> str:
    """An error in one line of at most 500 characters, without paths and addresses of this machine."""
    text = " ".join(str(error).split())
    text = re.sub(r"(/[\w.+-]+)+/site-packages/", "", text)
    text = re.sub(r"(?<![\w.])(/[\w.+-]+)+/(?=[\w.+-]+)", "", text)
    text = re.sub(r"0x[0-9a-f]{6,}", "0x...", text)
    text = text if len(text) <= 500 else f"{text[:497]}..."
    return f"{type(error).__name__}: {text}" if with_type or not text else text


def place_of(error: BaseException) -> str:
    """The innermost four places of a traceback."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return " > ".join(f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}" for frame in frames)
