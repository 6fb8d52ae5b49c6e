"""Public reports of results other than eager PyTorch's under torch.compile, FSDP, DeepSpeed or accelerate, tried on a session.

Label smoothing with accumulation (transformers#46731) is a variant in `test_torch_trainer.py`.
"""

from __future__ import annotations

import re

import pytest
import support.torch_reports_autograd
import support.torch_reports_batches
import support.torch_reports_state
import support.torch_reports_training
import support.torch_reports_views  # noqa: F401
from support.torch_reports import REPORTS, Report


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.name)
def test_a_reported_program_trains_as_by_eager(report: Report) -> None:
    """The results are eager PyTorch's, or the program is refused in a sentence that names the place."""
    outcome = report.outcome()
    assert outcome.name in report.allowed, f"{outcome.name}: {outcome.detail}"
    if outcome.name == "refused":
        assert re.search(report.words, outcome.detail), outcome.detail


def test_reports_have_names_of_their_own() -> None:
    """At least twenty threads, and each program once."""
    assert len({report.name for report in REPORTS}) == len(REPORTS)
    assert len({report.thread for report in REPORTS}) >= 20
