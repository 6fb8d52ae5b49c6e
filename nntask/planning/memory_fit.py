"""Memory needs of a training step, from shapes alone, and the order in which a machine will run it.

The step is captured (`scheduler.api.capturing_runtime`). `StepPlan.minimum_bytes` gives the least size of each memory, in the order that a run would
choose.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Final, Self

from scheduler import CapturingRuntime, Codelet, TaskRuntime
from scheduler.machine import FILE, POLICIES, RecordedTask, StepPlan
from scheduler.planning import (
    AUTO,
    NONE,
    SUBMISSION,
    Judge,
    PlannedOrder,
    PlanningMachine,
    as_asked,
    choose_plan,
    last_tier_bytes,
    most_again,
    order_ranks,
    what_is_asked,
)
from tiles import TileTensor

from ..adapters.frozen_base import FrozenBase
from ..adapters.lora import base_tensors
from ..config.run_config import LanguageRun, RunConfig
from ..engine.models import build_model
from ..engine.recorded import StepSymbols, build_optimizer, emit_training_step, exchange_of, named_data
from ..errors import DoesNotFit, UsageError
from ..hardware.machine_model import MachineModel, pace_on, this_machine
from ..hardware.machine_spec import check_budgets
from ..hf.model_directory import ModelDirectory
from ..models.language import LanguageModel
from ..optim.sharded import DataShard, Transport
from .needs import Needs, shortage, working_set
from .virtual_replay import replay_seconds

_LOG: Final = logging.getLogger(__name__)

MOST_TASKS: Final = 1_000_000
"""Largest number of tasks of a step; recording a longer one takes minutes and gigabytes."""
TASKS_PER_WORK: Final = 6
"""Least number of tasks per product of a weight tile and a tile of activations: forward, two backward, and those between them."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """Model without memory, and its training step.

    Attributes:
        plan: step in submission order, with the recomputation of --recompute.
        trained, frozen: trained and frozen tensors of the model by name; they have shapes and types, and no data.
        optimizer: tensors of the optimizer's state by name, without data as well.
        reading: bytes of host memory for the readers of the files that the weights start from.
        recorded: step without recomputation; None if that is the plan.
        symbols: symbolic handles by which an engine of tiles runs the step; None for a model that is not made of tiles.
        whole: parameters that one node updates as a whole (`Optimizer.whole`).
    """

    plan: StepPlan
    trained: Mapping[str, TileTensor]
    frozen: Mapping[str, TileTensor]
    optimizer: Mapping[str, TileTensor]
    reading: int = 0
    recorded: StepPlan | None = None
    symbols: StepSymbols | None = None
    whole: Mapping[str, str] = field(default_factory=dict)

    def recomputing(self, recompute: str) -> Self:
        """Return the step with the recomputation of --recompute. A recomputation left to the planner is not applied, since it depends on budgets.

        Raises:
            UsageError: no output of an operation in this step can be recomputed.
        """
        try:
            again = as_asked(self.plan, recompute)
        except ValueError as error:
            raise UsageError(f"{recompute}: {error}", flag="--recompute") from error
        return self if again is self.plan else replace(self, plan=again, recorded=self.plan)


def fitting_order(found: CapturedStep, run: LanguageRun, changes: Callable[[MachineModel, Needs], Sequence[str]]) -> PlannedOrder:
    """Return the order in which a captured step will run within the budgets of its machine.

    Args:
        changes: function from a machine and the needs of the step to changes that would make it fit.

    Raises:
        DoesNotFit, UsageError: the step does not fit or has no such order, as for `run_candidates.planned_run`.
    """
    check_budgets(run.machine)
    target = this_machine(run.machine)
    order, needs = order_or_needs(found, run, target)
    if needs is not None:
        raise does_not_fit(target, needs, changes(target, needs))
    return order


def does_not_fit(target: MachineModel, needs: Needs, changes: Sequence[str]) -> DoesNotFit:
    """Return the error for a step that does not fit a machine, with the changes that would make it fit."""
    lack = shortage(target, needs)
    return DoesNotFit(lack.fact, f"it would fit with {', or '.join(changes)}", shortage=lack)


def capture(
    run: RunConfig,
    num_minibatches: int | None = None,
    frozen_base: FrozenBase | None = None,
    build: Callable[[TaskRuntime], LanguageModel] | None = None,
    share: tuple[DataShard, Transport] | None = None,
) -> CapturedStep:
    """Capture the model and the step of a run, from shapes.

    Args:
        num_minibatches: number of minibatches of a step; that of the run by default.
        frozen_base: frozen weights of a run with adapters.
        build: function that builds the model with the files of its weights; None for the model and the files that the run starts from.
        share: this node's shard of the step and its connection to the others; None for a step on one machine.

    Raises:
        UsageError: the step has more than `MOST_TASKS` tasks.
    """
    if share is None:
        count = run.step.num_minibatches if num_minibatches is None else num_minibatches
    else:
        count = len(share[0].minibatches)
    check_num_tasks(run, count)
    _LOG.info("capturing a step of %d minibatch%s", count, "" if count == 1 else "es")
    machine = run.machine
    runtime = CapturingRuntime(run.step.lanes, has_gpus=machine.has_gpus, aside=machine.aside, mixed=machine.sharing == "mixed")
    model = _built(run, runtime, frozen_base) if build is None else build(runtime)
    exchange = None if share is None else exchange_of(model, run.optimizer, *share)
    tiles_of = None if exchange is None else exchange.tiles_of
    optimizer = build_optimizer(model, run.optimizer, tiles_of, on_cpu=run.step.update_on == "cpu")
    objective = run.data.objective
    inputs = [model.inputs(run.step.minibatch, run.model.seq_len, objective.names, objective.target_length) for _ in range(count)]
    with runtime.record():
        losses, squares = emit_training_step(model, optimizer, inputs, exchange)
    plan = runtime.plan
    plan.idle = untouched(plan, [*model.tensors().values(), *optimizer.tensors().values()])
    symbols = StepSymbols(named_data(model, optimizer, inputs), losses, squares)
    trained, frozen = model.trained_tensors(), model.frozen_tensors()
    captured = CapturedStep(plan, trained, frozen, optimizer.tensors(), runtime.reading_nbytes, symbols=symbols, whole=optimizer.whole)
    return captured.recomputing(run.step.recompute)


def check_num_tasks(run: RunConfig, count: int) -> None:
    """Refuse a step of `count` minibatches that has too many tasks to be captured.

    Raises:
        UsageError: the step has more than `MOST_TASKS` tasks.
    """
    size, length = run.step.minibatch, run.model.seq_len
    if (num_tasks := count * least_tasks(run)) > MOST_TASKS:
        raise UsageError(
            f"a step must have at most {MOST_TASKS:,} tasks, got about {num_tasks:,}: {count:,} x {size:,} sequences of {length:,} "
            "tokens in these tiles",
            "lower --batch or enlarge the tiles",
        )
    if (num_tiles := _tiles_of_positions(run)) > MOST_TASKS:
        config = run.model.config
        raise UsageError(
            f"a step must have at most {MOST_TASKS:,} tasks, got about {num_tiles:,}: one for each tile of a table of {config.n_positions:,} "
            "positions",
            f"lower {config.positions_key} in the config or enlarge the tiles",
        )


def untouched(plan: StepPlan, tensors: Iterable[TileTensor]) -> int:
    """Return the bytes of tiles that no task of a step touches, such as rows of positions that no sequence reaches. Tiles in files do not count."""
    records = {handle.record for tensor in tensors for handle in tensor.handles}
    return sum(record.spec.size for record in records if record not in plan.uses and FILE not in record.replicas)


def _built(run: RunConfig, runtime: TaskRuntime, frozen_base: FrozenBase | None) -> LanguageModel:
    """Return the model of a run, with the files that its weights start from."""
    model = build_model(run.model, runtime)
    if frozen_base is not None:
        frozen_base.attach(model)
    elif (start := _start(run)) is not None:
        start.attach(base_tensors(model))
    return model


def _start(run: RunConfig) -> ModelDirectory | None:
    """Return the model directory that a new run starts from; None if there is none, or if the model is another one, as in trials of tiles."""
    if run.start.directory is None:
        return None
    start = ModelDirectory.open(run.start.directory, run.model.config)
    stored, config = start.stored, run.model.config
    is_same = stored == config or (not start.has_head and stored.description.stack == config.description.stack)
    return start if is_same else None


def needs_of(plan: StepPlan, *, reading: int = 0, ranks: Sequence[int] | None = None) -> Needs:
    """Return the needs of a step in the order of the plan.

    Args:
        reading: bytes of host memory for file readers.
        ranks: place of each task in another order, if it runs in that one.
    """
    tasks = [task for task, is_beside in zip(plan.tasks, plan.aside, strict=True) if not is_beside]
    persistent = plan.idle + sum(handle.spec.size for handle in plan.uses if handle.spec.kind == "persistent" and not plan.stays_in_file(handle))
    total, passive = (last_tier_bytes(plan, computes=computes, ranks=ranks) for computes in (True, False))
    tile = plan.minimum_bytes(is_last=False, computes=False)
    least = next((working_set(task) for task in sorted(tasks, key=working_set) if _computes(task)), 0)
    return Needs(tile, total, passive, persistent, largest_task(plan), least, reading, plan.largest_task(aside=True))


def least_needs(plan: StepPlan, target: MachineModel, recompute: str, order: str = AUTO, *, quick: bool = False, reading: int = 0) -> Needs:
    """Return the least needs of the step among the orders and recomputations that a planner may choose.

    Only the needs of the last tier depend on the order and on the recomputation.

    Args:
        recompute: value of --recompute; a planner that may choose has the largest recomputations as well.
        order: value of --order.
        quick: whether to return the first needs that the last tier satisfies, of which the submission order's come first if the order is open.
        reading: bytes of host memory for file readers.
    """
    _LOG.info("computing the least memory of a step of %d tasks", len(plan.tasks))
    given = None if order == AUTO else next(order_ranks(plan, order), None)
    least, computes = needs_of(plan, reading=reading, ranks=given), target.last in target.compute_nodes
    steps = chain([plan], most_again(plan) if recompute == AUTO else ())
    candidates = ((step, ranks) for step in steps for ranks in order_ranks(step, order))
    while not (quick and least.fits_last(target)) and (candidate := next(candidates, None)) is not None:
        step, ranks = candidate
        nbytes = last_tier_bytes(step, computes=computes, ranks=ranks)
        if nbytes < least.last(target):
            other = last_tier_bytes(step, computes=not computes, ranks=ranks)
            least = replace(least, total=nbytes if computes else other, passive=other if computes else nbytes)
    return least


def largest_task(plan: StepPlan) -> RecordedTask:
    """Return the task of a step with the largest working set; tasks that CPU workers run for devices are left out."""
    return max((task for task, is_aside in zip(plan.tasks, plan.aside, strict=True) if not is_aside), key=working_set)


def _computes(task: RecordedTask) -> bool:
    """Return whether a task has flops. Copies and fills have none, and a device that does nothing else is of no use."""
    codelet = task.codelet
    if not isinstance(codelet, Codelet) or codelet.cost is None:
        return False
    return codelet.cost([handle.spec.view for handle, _ in task.accesses], task.constants)[0] > 0


def least_tasks(run: RunConfig) -> int:
    """Return a lower bound on the number of tasks of a minibatch, to which that is roughly proportional."""
    config, cut = run.model.config, run.model.tiling
    width, inner = -(-config.n_embd // cut.embd_tile), -(-config.inner_size // cut.inner_tile)
    heads, vocab = -(-config.n_head // cut.head_tile), -(-config.vocab_size // cut.vocab_tile)
    tokens = -(-run.step.minibatch // cut.minibatch_tile) * -(-run.model.seq_len // cut.seq_tile)
    return TASKS_PER_WORK * tokens * width * (config.n_layer * (config.num_inner_matrices * inner + 4 * heads) + 2 * vocab)


def _tiles_of_positions(run: RunConfig) -> int:
    """Return the number of tiles of the table of learned positions, whose length may differ from that of sequences."""
    config, cut = run.model.config, run.model.tiling
    description = getattr(config, "description", None)
    rows = 0 if description is None else description.stack.num_positions or 0
    return -(-rows // cut.seq_tile) * -(-config.n_embd // cut.embd_tile)


def choose_order(step: CapturedStep, run: LanguageRun, target: MachineModel) -> PlannedOrder:
    """Choose the order of a step with its --recompute applied, like `Runtime.record`, and add the costs of other recomputations.

    Raises:
        UsageError: the step has no order of the requested name.
    """
    recompute = run.step.recompute
    try:
        judge = partial(replay_seconds, target=target, how=run.machine.scheduling)
        order = order_on(step.plan, run.step.order, target, target.policy, AUTO if recompute == AUTO else NONE, judge)
    except ValueError as error:
        is_open = run.step.num_minibatches == 1 and not run.start.is_continued
        more = "; the others need a --minibatch below --batch" if is_open else ""
        raise UsageError(f"{run.step.order}: {error}{more}", flag="--order") from error
    if recompute == AUTO or not order.forecasts:
        return order
    return replace(order, recomputation=what_is_asked(step.recorded or step.plan, recompute, lambda planned: pace_on(planned, target)))


def order_or_needs(step: CapturedStep, run: LanguageRun, target: MachineModel) -> tuple[PlannedOrder, Needs | None]:
    """Return the order that a run would choose. If none fits, return the submission order, or the given one, and the least needs of the step."""
    how = run.step
    needs = least_needs(step.plan, target, how.recompute, how.order, quick=True, reading=step.reading)
    fits = needs.fit(target)
    if needs.fits_last(target) and not fits:  # a quick result has no least needs of the last tier
        needs = least_needs(step.plan, target, how.recompute, how.order, reading=step.reading)
    if fits or how.order not in (AUTO, SUBMISSION):
        return choose_order(step, run, target.without(step.reading)), None if fits else needs
    return PlannedOrder(SUBMISSION, step.plan, {}, num_tasks=len(step.plan.tasks)), needs


def order_on(plan: StepPlan, order: str, target: MachineModel, policy: str, recompute: str = NONE, judge: Judge | None = None) -> PlannedOrder:
    """Plan a step on a machine that may be imaginary, under a scheduling policy, like `Runtime.record`.

    Args:
        judge: judge of planned steps (`PlanningMachine.judge`); None for none.

    Raises:
        ValueError: the step has no order of that name.
    """
    last, compute_nodes = target.last, target.compute_nodes
    num_devices = len(compute_nodes) if POLICIES[policy]().keeps_partitions and 0 not in compute_nodes else 1
    machine = PlanningMachine(
        target.memory, target.nodes[last][1], last in compute_nodes, num_devices, lambda planned: pace_on(planned, target), judge
    )
    _LOG.info("comparing orders and recomputations of a step of %d tasks", len(plan.tasks))
    return choose_plan(plan, order, recompute, machine)


def has_too_many_tasks(run: RunConfig) -> bool:
    """Return whether a step would be refused for its number of tasks."""
    return run.step.num_minibatches * least_tasks(run) > MOST_TASKS


def most_tiles(run: RunConfig) -> int:
    """Return the number of minibatches of the run's size with which a step reaches the limit on tasks, whether separate or merged into one."""
    return MOST_TASKS // least_tasks(run)


@contextmanager
def no_collections() -> Iterator[None]:
    """Pause garbage collection: captured steps are large, and collections would take a third of the time to find no garbage cycles of note."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
