"""Labels of the tasks of a PyTorch step, from which planners take orders and the names of values."""

from __future__ import annotations

import torch

from scheduler.planning.recompute import Values
from scheduler.planning.step_structure import structure_of
from scheduler.planning.value_groups import all_groups
from wrappers.torch.capture.capture import CaptureTerms
from wrappers.torch.steps.dry import PassTerms, captured_step, pass_of


class Deep(torch.nn.Module):
    """Layers of one kind and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C) -> ()."""
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


def test_tasks_declare_phase_minibatch_and_module() -> None:
    """Modules are those of the parameters that were used last; a backward pass ends a minibatch; the optimizer updates."""
    module, terms = Deep(), PassTerms({})
    minibatch = {"x": torch.zeros(4, 16)}
    one = pass_of(module, minibatch, lambda deep, batch: deep(**batch), terms, CaptureTerms(backward=True, divisor=3))
    plan = captured_step(module, torch.optim.SGD(module.parameters(), lr=0.1), [one] * 3, [minibatch] * 3, terms).plan
    structure = structure_of(plan)
    assert structure.num_minibatches == 3
    assert len({structure.minibatch.count(number) for number in range(3)}) == 1
    updates = {task.name for task, is_update in zip(plan.tasks, structure.updates, strict=True) if is_update}
    assert updates == {"sgd", "sum_squares", "sum_scalars"}
    for phase in ("forward", "backward"):
        paths = {task.label.path for task in plan.tasks if task.label.phase == phase}
        assert paths >= {f"layers.{number}" for number in range(1, 6)}
    assert any(group.name.startswith("layers.*") and len(group.layers) > 2 for group in all_groups(Values(plan)))
