"""Public reports of results other than eager PyTorch's, each as the smallest program of its kind that trains on a CPU.

The reports are about torch.compile, FSDP, DeepSpeed, accelerate and transformers' Trainer. A program is of the kind of the report, not its text. The
modules `torch_reports_*` fill `REPORTS`; `tests/wrappers/test_torch_reports.py` runs all of them, and the page about PyTorch lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from .eager_twin import Case, Program

PYTORCH: Final = "pytorch/pytorch"
DEEPSPEED: Final = "deepspeedai/DeepSpeed"
FAIRSCALE: Final = "facebookresearch/fairscale"
ACCELERATE: Final = "huggingface/accelerate"
TRANSFORMERS: Final = "huggingface/transformers"
EITHER: Final = "equal refused"
"""Outcomes of programs of which a session may refuse what cannot be noticed or replayed."""
Way = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Report:
    """A report and its program.

    Attributes:
        thread: owner, name and number of the thread at GitHub, as `owner/name#number`.
        kind: description of the fault in a few words.
        name: name of the program.
        says: what the program does, in a sentence.
        case: the program, with the outcomes that are right; None for a program that is a test of its own.
    """

    thread: str
    kind: str
    name: str
    says: str
    case: Case | None = None

    @property
    def address(self) -> str:
        """The address of the thread."""
        repository, _, number = self.thread.partition("#")
        return f"https://github.com/{repository}/issues/{number}"


REPORTS: Final[list[Report]] = []


def report(repository: str, number: int, kind: str, **terms: Any) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    """Add a report, whose program the decorated function builds.

    Args:
        repository: owner and name at GitHub.
        number: number of the thread.
        kind: description of the fault in a few words.
        **terms: fields of `Case`; `allowed` is a string of outcomes.
    """
    allowed = frozenset(terms.pop("allowed", "equal").split())

    def note(build: Callable[[], Program]) -> Callable[[], Program]:
        REPORTS.append(Report(f"{repository}#{number}", kind, build.__name__, (build.__doc__ or "").strip(), Case(build, allowed=allowed, **terms)))
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
