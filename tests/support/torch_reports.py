"""Public reports of results other than eager PyTorch's, each as the smallest program of its kind that trains on a CPU.

The reports are about torch.compile, FSDP, DeepSpeed, accelerate and transformers' Trainer. A program is of the kind of the report, not its text. The
modules `torch_reports_*` fill `REPORTS`; `tests/wrappers/torch/test_torch_reports.py` runs all of them, and the page about PyTorch lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from .eager_twin import SOMETHING, Case, Outcome, Program, by_eager, outcome_of

PYTORCH: Final = "pytorch/pytorch"
DEEPSPEED: Final = "deepspeedai/DeepSpeed"
FAIRSCALE: Final = "facebookresearch/fairscale"
ACCELERATE: Final = "huggingface/accelerate"
TRANSFORMERS: Final = "huggingface/transformers"
EITHER: Final = "equal refused"
"""Outcomes of programs that a session may refuse, as it cannot replay them."""
Way = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Report:
    """A report and its program.

    Attributes:
        thread: owner, name and number of the thread at GitHub, as `owner/name#number`.
        kind: description of the fault in a few words.
        name: name of the program.
        outcome: runs the program by eager PyTorch and on a session, and compares both.
        allowed: outcomes that are right, of "equal" and "refused".
        words: pattern of the message of a refusal.
    """

    thread: str
    kind: str
    name: str
    outcome: Callable[[], Outcome]
    allowed: frozenset[str]
    words: str

    @property
    def address(self) -> str:
        """The address of the thread."""
        repository, _, number = self.thread.partition("#")
        return f"https://github.com/{repository}/issues/{number}"


REPORTS: Final[list[Report]] = []


def report_of(repository: str, number: int, kind: str, allowed: str, words: str) -> Callable[[Callable[[], Outcome]], Callable[[], Outcome]]:
    """Add a report, whose program the decorated function runs both ways.

    Args:
        repository: owner and name at GitHub.
        number: number of the thread.
        kind: description of the fault in a few words.
        allowed: outcomes that are right.
        words: pattern of the message of a refusal.
    """

    def note(outcome: Callable[[], Outcome]) -> Callable[[], Outcome]:
        REPORTS.append(Report(f"{repository}#{number}", kind, outcome.__name__, outcome, frozenset(allowed.split()), words))
        return outcome

    return note


def report(repository: str, number: int, kind: str, **terms: Any) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    """Add a report, whose program the decorated function builds.

    Args:
        repository: owner and name at GitHub.
        number: number of the thread.
        kind: description of the fault in a few words.
        **terms: fields of `Case`; `allowed` is a string of outcomes.
    """
    allowed, words = terms.pop("allowed", "equal"), terms.pop("words", SOMETHING)

    def note(build: Callable[[], Program]) -> Callable[[], Program]:
        case = Case(build, **terms)

        def outcome() -> Outcome:
            return outcome_of(case, by_eager(case))

        outcome.__name__, outcome.__doc__ = build.__name__, build.__doc__
        report_of(repository, number, kind, allowed, words)(outcome)
        return build

    return note


class Pair(nn.Module):
    """Two linear layers, `first` (12 to 12) and `second` (12 to 4), and a function that says how they are used.

    Args:
        way: computes the result from the module and its input.
    """

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 4)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the result as `way` does."""
        return self.way(self, x)


def pair(way: Way) -> Program:
    """Return the program of a `Pair`."""
    return Program(Pair(way))
