"""Public reports of results other than eager PyTorch's under torch.compile, FSDP, DeepSpeed or accelerate, tried on a session."""

from __future__ import annotations

import pytest
import support.torch_reports_autograd
import support.torch_reports_state
import support.torch_reports_training
import support.torch_reports_views  # noqa: F401
import torch
from support.eager_twin import check
from support.torch_reports import REPORTS, Report
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from wrappers.torch import Session

PROGRAMS = [report for report in REPORTS if report.case is not None]


@pytest.mark.parametrize("report", PROGRAMS, ids=lambda report: report.name)
def test_a_reported_program_trains_as_by_eager(report: Report) -> None:
    """The results are eager PyTorch's, or the program is refused in a sentence that names the place."""
    assert report.case is not None
    check(report.case)


class Dropped(nn.Module):
    """A vector whose elements are dropped, within a checkpoint: the loss is a sum, so gradients show the mask of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.linspace(1, 2, 400, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum up the elements that are kept."""
        return checkpoint(lambda values: functional.dropout(values * 1, 0.5) * x, self.values, use_reentrant=False).sum()


def test_a_dropout_mask_is_one_in_both_passes_and_another_in_each_step() -> None:
    """Masks follow from the seed and the step, so they are not eager's; losses tell those of the forward pass (pytorch#190758)."""
    module, masks = Dropped(), []
    values = module.values.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Session(module, optimizer, loss=lambda y, batch: y, ram="64MB", workers=1) as session:
        for _ in range(5):
            loss = session.step(x=torch.ones(1, dtype=torch.float64))
            after = session.state_dict()["values"].clone()
            gradient = (values - after) / 0.1
            assert loss == pytest.approx(float((gradient * values).sum()), rel=1e-12)
            assert {round(float(each), 9) for each in gradient.unique()} == {0.0, 2.0}
            masks.append(gradient > 1)
            values = after
    assert all(not torch.equal(one, other) for number, one in enumerate(masks) for other in masks[:number])
