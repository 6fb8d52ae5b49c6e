"""The recorded steps of a session: one for each purpose and each shape of batches, recorded at their first use.

A module is captured once for each shape of a minibatch. A step is captured once as well: before it is planned, and memory is allocated for it, the
captured tasks are checked against the budgets. If there are many shapes, only the most recently used steps are kept.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from nntask import DoesNotFit, UsageError
from nntask.hardware import MachineSpec, is_device, this_machine
from nntask.planning import least_needs, no_collections, shortage, untouched
from scheduler import Handle, Runtime, Step
from scheduler.machine import StepPlan
from scheduler.planning import AUTO, NONE, PlannedOrder, as_asked
from tiles import TileTensor

from ..capture.batches import check_batch, shapes_of
from ..capture.values import origin_of_values
from ..steps.captures import Captures, PassUse, Purpose, Values
from ..steps.dry import CapturedPasses
from ..steps.emission import StepTasks
from ..steps.optimizers import SessionOptimizer
from ..steps.state import ModuleState
from ..tasks.calls import Guard, HostTensors, Storage, refs_in
from ..tasks.step import Pass
from .hosting import fallbacks_of
from .memory import release_unused

MOST_STEPS: Final = 8
"""Largest number of recorded steps for each purpose; a dropped one is recorded anew when its shape is used."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step for one shape of batches.

    Attributes:
        step: the step.
        passes: the pass over each minibatch.
        divisor: number by which the sum of the minibatches' losses is divided.
        inputs: input tensors of each minibatch, by name.
        outputs: result of the pass over each minibatch, with references in place of tensors.
        kept: handles of the outputs' storages, for each minibatch.
        squares: the gradient's sum of squares; None without an update.
        updated: names of the parameters that the step updates, which are those with a gradient.
    """

    step: Step
    passes: Sequence[Pass]
    divisor: int
    inputs: Sequence[Mapping[str, TileTensor]]
    outputs: Sequence[Any]
    kept: Sequence[Mapping[Storage, Handle]]
    squares: TileTensor | None
    updated: Collection[str]


class StepRecorder:
    """Recorder of the steps of a session.

    Args:
        captures: the passes of the module.
        state: the module's tensors.
        key: key of random numbers.
        optimizer: optimizer that updates the parameters.
        machine: machine whose budgets a step must fit; None if the caller has checked that.
        order, recompute: order of a training step's tasks when memory is short, and the recomputed part, both arguments of `Runtime.record`.

    Attributes:
        fallbacks: number of tasks in the steps so far that CPU workers run although there are GPUs, by name.
    """

    def __init__(
        self,
        captures: Captures,
        state: ModuleState,
        key: TileTensor,
        optimizer: SessionOptimizer,
        *,
        machine: MachineSpec | None,
        order: str,
        recompute: str,
    ) -> None:
        self._captures, self._state, self._key, self._optimizer = captures, state, key, optimizer
        self._machine = machine
        self._planned = {"order": order, "recompute": recompute}
        self.fallbacks: dict[str, int] = {}
        self._steps: dict[tuple[Any, ...], RecordedStep] = {}  # least recently used first

    def step_for(
        self, purpose: Purpose, minibatches: Sequence[Mapping[str, Any]], divisor: int, values: Values
    ) -> tuple[RecordedStep, list[PassUse]]:
        """Return the recorded step for some minibatches, and its uses of its passes.

        Args:
            values: values of tensors, for decisions of the module.

        Raises:
            UsageError: a minibatch has no tensor, the module cannot be captured, or its minibatches have gradients of different parameters.
            DoesNotFit: a budget is too small for the step.
        """
        for minibatch in minibatches:
            check_batch(minibatch, 1, learns=purpose == "train")
        uses = self._captures.passes_over(minibatches, purpose, divisor, values)
        check_uses(uses)
        key = purpose, divisor, *(id(each.tasks) for each in uses)
        recorded = self._steps.pop(key, None)
        if recorded is None:
            self._state.runtime.wait()  # a step that is dropped may still compute
            self._drop(purpose)
            with no_collections():  # a collection would go through all of torch
                recorded = self._record(purpose, [each.tasks for each in uses], minibatches, divisor)
            release_unused()
        self._steps[key] = recorded
        return recorded, uses

    def adopt(self, captured: CapturedPasses, order: PlannedOrder) -> None:
        """Take a training step that was captured and planned before the session was opened, on the tensors of the session.

        Raises:
            RecordingError: the session has other tensors than the captured step (`Runtime.adopt`).
        """
        emission = StepTasks(captured.passes, self._state, captured.minibatches)
        runtime = self._state.runtime
        assert isinstance(runtime, Runtime)  # a state for dry runs runs no step
        step = runtime.adopt(order, captured.data, emission.named_data(self._key, self._optimizer.updates))
        emission.fill_constants()
        divisor = len(captured.passes)
        recorded = _recorded(step, captured.passes, divisor, emission, captured.outputs, captured.squares)
        self._steps["train", divisor, *map(id, captured.passes)] = recorded

    def _drop(self, purpose: Purpose) -> None:
        """Drop the least recently used step if another one would exceed the limit."""
        known = [key for key in self._steps if key[0] == purpose]
        if len(known) == MOST_STEPS:
            del self._steps[known[0]]
            self._captures.keep({each for step in self._steps.values() for each in step.passes})
            gc.collect()  # a step and its instances refer to each other, and hold memory of the budget

    def _record(self, purpose: Purpose, passes: Sequence[Pass], minibatches: Sequence[Mapping[str, Any]], divisor: int) -> RecordedStep:
        if len({frozenset(each.captured.gradients) for each in passes}) > 1:
            raise UsageError(
                "the minibatches of a step must have gradients of the same parameters, and those of minibatches of shapes "
                f"{shapes_of(minibatches)} differ",
                "pad them to one shape",
            )
        is_training = purpose == "train"
        emission = StepTasks(passes, self._state, minibatches)
        runtime = self._state.runtime
        assert isinstance(runtime, Runtime)  # a state for dry runs is never recorded for replays
        order, recompute = self._planned.values() if is_training else (AUTO, NONE)
        check = None if self._machine is None else partial(self._check_fit, self._machine, training=is_training)
        with runtime.record(order, recompute, check=check) as step:
            outputs, squares = emission.submit(self._key, self._optimizer.updates if is_training else None)
        emission.fill_constants()
        return _recorded(step, passes, divisor, emission, outputs, squares)

    def _check_fit(self, spec: MachineSpec, plan: StepPlan, *, training: bool) -> None:
        """Check that a captured step can run within the budgets, before it is planned and memory is allocated for it.

        Raises:
            DoesNotFit: a budget is too small; the message names it and the missing bytes.
            UsageError: the step has nothing that `recompute` could recompute.
        """
        state = self._optimizer.updates.tensors() if training else {}
        plan.idle = untouched(plan, [*self._state.tensors().values(), *state.values()])
        self.fallbacks.update(fallbacks_of(plan.tasks, spec))
        machine, recompute = this_machine(spec), self._planned["recompute"] if training else NONE
        try:
            plan = as_asked(plan, recompute)
        except ValueError as error:
            raise UsageError(f"recompute={recompute!r}: {error}") from error
        needs = least_needs(plan, machine, recompute, quick=True, reading=self._state.runtime.reading_nbytes)
        if not needs.fit(machine):
            lack = shortage(machine, needs)
            is_of_device = is_device(lack.node)
            changes = [
                f"raise {'gpu_memory=' if is_of_device else 'ram='}",
                "use more and smaller minibatches" if training else "predict smaller batches",
            ]
            if spec.disk is None and not is_of_device:
                changes.append("add disk=DIR")
            raise DoesNotFit(lack.fact, f"{', '.join(changes[:-1])}{',' if len(changes) > 2 else ''} or {changes[-1]}", shortage=lack)


def _recorded(
    step: Step,
    passes: Sequence[Pass],
    divisor: int,
    emission: StepTasks,
    outputs: Sequence[Mapping[Storage, Handle]],
    squares: TileTensor | None,
) -> RecordedStep:
    """Return a recorded step; `outputs` are the handles of the outputs of each pass."""
    updated = frozenset(name for name, _ in passes[0].captured.gradients)
    return RecordedStep(step, passes, divisor, emission.inputs, [each.captured.result for each in passes], outputs, squares, updated)


def check_uses(uses: Sequence[PassUse]) -> None:
    """Check that no minibatch of a step decides by a value that another minibatch of the same step changes.

    Raises:
        UsageError: one does; the message names the line of the program.
    """
    reads: list[Guard | HostTensors] = []
    for use in uses:
        reads += [*use.tasks.captured.guards, *use.tasks.captured.host]
    if len(uses) < 2 or not reads:
        return
    changed = {s.name for use in uses for call in use.tasks.captured.calls for s in call.writes if s.role in ("buffer", "parameter", "constant")}
    for read in reads:
        storages = {read.ref.storage} if isinstance(read, Guard) else {ref.storage for ref in refs_in((*read.args, *read.kwargs.values()))}
        if any(leaf.name in changed and leaf.role != "input" for leaf in origin_of_values(read.calls, storages).leaves):
            raise UsageError(
                f"{read.where} needs the value of a tensor that each minibatch changes, and the minibatches of a step are computed together",
                "use minibatches=1, or compute with tensors there (torch.where)",
            )
