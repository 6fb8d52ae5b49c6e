"""The recorded steps of a session: one for each purpose and each shape of batches, made when they are first asked for.

A module is captured once for each shape of a minibatch. Before a step is recorded, and memory is taken for it, a dry run from shapes says whether the
budgets hold it. Of many shapes the steps that were used last are kept.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from nntask import DoesNotFit, UsageError
from nntask.hardware import MachineSpec, this_machine
from nntask.optim import Optimizer
from nntask.planning import no_collections, shortage, thriftiest_needs
from scheduler import Handle, Runtime, Step
from scheduler.planning import AUTO, NONE, as_asked
from tiles import TileTensor

from .batches import check_batch, shapes_of
from .calls import Guard, HostTensors, Storage, refs_in
from .captures import Captures, PassUse, Purpose, Values
from .dry import captured_step
from .emission import StepTasks
from .gpus import fallbacks_of
from .memory import release_unused
from .state import ModuleState
from .step import Pass
from .values import origin_of_values

MOST_STEPS: Final = 8
"""Recorded steps that are kept for each purpose; one that is dropped is recorded again when its shape comes back."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step for one shape of batches.

    Attributes:
        step: the step.
        passes: the pass over each minibatch.
        divisor: the loss of the step is the sum of the minibatches' losses divided by this.
        inputs: by name, of each minibatch.
        outputs: of each minibatch: what the pass returns, with references.
        kept: handles of the outputs' storages, of each minibatch.
        squares: the gradient's sum of squares; None without an update.
        updated: names of the parameters that the step updates: those that have a gradient.
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
    """Records the steps of a session.

    Args:
        captures: the passes of the module.
        state: the module's tensors.
        key: what random numbers follow from.
        optimizer: updates the parameters.
        options: the optimizer of torch.optim that it follows.
        max_norm: norm to which the gradient is clipped; 0 is off.
        machine: the budgets, within which a step is checked to fit; None where the caller has done so.
        order, recompute: in which a training step executes when memory is short, and what it makes again, as of `Runtime.record`.

    Attributes:
        fallbacks: of the steps so far, tasks that CPU workers run although there are GPUs: name -> how many in a step.
    """

    def __init__(
        self,
        captures: Captures,
        state: ModuleState,
        key: TileTensor,
        optimizer: Optimizer,
        options: torch.optim.Optimizer,
        *,
        max_norm: float,
        machine: MachineSpec | None,
        order: str,
        recompute: str,
    ) -> None:
        self._captures, self._state, self._key, self._optimizer = captures, state, key, optimizer
        self._options, self._max_norm, self._machine = options, max_norm, machine
        self._planned = {"order": order, "recompute": recompute}
        self.fallbacks: dict[str, int] = {}
        self._steps: dict[tuple[Any, ...], RecordedStep] = {}  # those used last come last

    def step_for(
        self, purpose: Purpose, minibatches: Sequence[Mapping[str, Any]], divisor: int, values: Values
    ) -> tuple[RecordedStep, list[PassUse]]:
        """The recorded step for some minibatches, and the uses that it makes of its passes.

        Args:
            values: of tensors, for decisions of the module.

        Raises:
            UsageError: a minibatch has no tensor, the module cannot be captured, or its minibatches have gradients of different parameters.
            DoesNotFit: a budget is too small for the step.
        """
        for minibatch in minibatches:
            check_batch(minibatch, 1, learns=purpose == "train")
        uses: list[PassUse] = []
        for number, each in enumerate(minibatches):
            taken = [use.tasks for use in uses]
            uses.append(self._captures.pass_over(each, purpose, divisor, values(each, number), taken))
        check_uses(uses)
        key = (purpose, divisor, *(id(each.tasks) for each in uses))
        found = self._steps.pop(key, None)
        if found is None:
            self._state.runtime.wait()  # a step that is dropped may still compute
            self._drop(purpose)
            with no_collections():  # which would go through all of torch
                found = self._record(purpose, [each.tasks for each in uses], minibatches, divisor)
            release_unused()
        self._steps[key] = found
        return found, uses

    def _drop(self, purpose: Purpose) -> None:
        """Make room for one more step."""
        known = [key for key in self._steps if key[0] == purpose]
        if len(known) == MOST_STEPS:
            del self._steps[known[0]]
            self._captures.keep({each for step in self._steps.values() for each in step.passes})
            gc.collect()  # a step and its instances know each other, and hold memory of the budget

    def _record(self, purpose: Purpose, passes: Sequence[Pass], minibatches: Sequence[Mapping[str, Any]], divisor: int) -> RecordedStep:
        if len({frozenset(each.captured.gradients) for each in passes}) > 1:
            raise UsageError(
                "the minibatches of a step must have gradients of the same parameters, and those of minibatches of shapes "
                f"{shapes_of(minibatches)} differ; pad them to one shape"
            )
        is_training = purpose == "train"
        if self._machine is not None:
            self._check_fit(self._machine, passes, minibatches, training=is_training)
        emission = StepTasks(passes, self._state, minibatches)
        runtime = self._state.runtime
        assert isinstance(runtime, Runtime)  # a dry state is never recorded for replays
        order, recompute = self._planned.values() if is_training else (AUTO, NONE)
        with runtime.record(order, recompute) as step:
            kept, squares = emission.submit(self._key, self._optimizer if is_training else None)
        updated = frozenset(name for name, _ in passes[0].captured.gradients)
        return RecordedStep(step, passes, divisor, emission.inputs, [each.captured.result for each in passes], kept, squares, updated)

    def _check_fit(self, spec: MachineSpec, passes: Sequence[Pass], minibatches: Sequence[Mapping[str, Any]], *, training: bool) -> None:
        """Refuse a step that cannot run within the budgets, before memory is taken for it.

        Raises:
            DoesNotFit: says which budget is too small, and by how much.
            UsageError: the step has nothing that `recompute` could make again.
        """
        terms, module = self._captures.terms, self._captures.module
        plan = captured_step(module, self._options if training else None, passes, minibatches, terms, max_norm=self._max_norm).plan
        self.fallbacks.update(fallbacks_of(plan.tasks, spec))
        machine, recompute = this_machine(spec), self._planned["recompute"] if training else NONE
        try:
            plan = as_asked(plan, recompute)
        except ValueError as error:
            raise UsageError(f"recompute={recompute!r}: {error}") from error
        needs = thriftiest_needs(plan, machine, recompute, quick=True)
        if not needs.fit(machine):
            story = shortage(machine, needs)
            is_of_device = " of cuda:" in story or " of sim:" in story or (spec.has_gpus and "largest memory" in story)
            changes = [
                f"raise {'gpu_memory=' if is_of_device else 'ram='}",
                "use more and smaller minibatches" if training else "predict smaller batches",
            ]
            if spec.disk is None and not is_of_device:
                changes.append("add disk=DIR")
            raise DoesNotFit(f"{story}; {', '.join(changes[:-1])}{',' if len(changes) > 2 else ''} or {changes[-1]}")


def check_uses(uses: Sequence[PassUse]) -> None:
    """Refuse a step of several minibatches of which one decides by what another one of the same step changes.

    Raises:
        UsageError: names the line of the program.
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
                f"{read.where} needs the value of a tensor that each minibatch changes, and the minibatches of a step are computed together; use "
                "minibatches=1, or compute with tensors there (torch.where)"
            )
