"""Labels of recorded tasks: phase, minibatch and module, as the program declares them."""

from __future__ import annotations

import numpy as np
from support.training import GPT

from nntask.engine.recorded import emit_training_step
from nntask.models.registry import build
from nntask.nn.autograd import accumulation
from nntask.optim.optimizers import SGD
from nntask.tiling.model_tiling import ModelTiling
from scheduler import CapturingRuntime
from scheduler.core.step_plan import StepPlan
from scheduler.planning.orders import candidates
from scheduler.planning.recompute import Values
from scheduler.planning.step_structure import structure_of
from scheduler.planning.value_groups import all_groups, as_asked


def step_of(minibatches: int, *, by_hand: bool) -> StepPlan:
    """A step of a small GPT-2, from the engine's loop or from a program's own."""
    runtime = CapturingRuntime()
    model = build(GPT, ModelTiling(), runtime, dtype=np.dtype(np.float32), seed=None)
    optimizer = SGD(model.parameters(), 0.1)
    inputs = [model.inputs(2, 8) for _ in range(minibatches)]
    with runtime.record():
        if not by_hand:
            emit_training_step(model, optimizer, inputs)
        else:
            with accumulation():
                for given in inputs:
                    model(**given).backward()
            optimizer.step()
    return runtime.plan


def test_a_program_of_its_own_declares_as_much_as_the_engine() -> None:
    """Backward passes count minibatches, modules know their paths, the optimizer updates; postponed sums belong to their minibatch."""
    for by_hand in (False, True):
        plan = step_of(3, by_hand=by_hand)
        structure = structure_of(plan)
        assert structure.num_minibatches == 3
        sizes = [structure.minibatch.count(number) for number in range(3)]
        assert sizes == [sizes[0]] * 3
        outside = {task.name for task, number in zip(plan.tasks, structure.minibatch, strict=True) if number < 0}
        assert outside == {"copy input", "sum_squares", "sum_scalars", "sgd"}
        assert {"layers:2", "turn:1/8"} < set(candidates(plan))
        labels = {task.label for task in plan.tasks}
        assert {label.path for label in labels if label.phase == "backward"} >= {"h.0.attn.c_proj", "h.1.mlp.c_fc", "h.1.ln_1", "wte"}


def test_groups_of_values_have_the_paths_of_modules() -> None:
    """One value of each layer, numbered by the path; a path, or an operation wherever it is, can be asked for."""
    plan = step_of(2, by_hand=True)
    groups = {group.name: group for group in all_groups(Values(plan))}
    assert any(name.startswith("h.*.mlp.c_fc") for name in groups)
    assert all(len(group.layers) <= GPT.n_layer for name, group in groups.items() if "*" in name)
    name = next(name for name in groups if name.startswith("h.*.mlp.c_fc"))
    clones = [task for task in as_asked(plan, name).tasks if task.num_clones]
    assert len(clones) == 2 * len(groups[name].layers)
    assert {task.label.phase for task in clones} == {"backward"}
    assert all(task.label.block is None for task in clones)
