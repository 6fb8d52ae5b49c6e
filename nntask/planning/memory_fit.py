"""What a training step needs, from shapes alone, and whether a machine has it: ``nntask train`` refuses what cannot fit before memory is taken.

The step is captured (`scheduler.api.capturing_runtime`); what each memory must hold at least is `StepPlan.minimum_bytes`, in the order that a run
would choose.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from scheduler import CapturingRuntime, Codelet
from scheduler.machine import FILE, POLICIES, RecordedTask, StepPlan
from scheduler.planning import AUTO, BLOCK, NONE, SUBMISSION, PlannedOrder, arrange, as_asked, choose_plan, last_tier_bytes, most_again, repetition
from tiles import TileTensor

from ..adapters.frozen_base import FrozenBase
from ..adapters.lora import base_tensors
from ..config.run_config import LanguageRun, RunConfig
from ..config.units import flag_size, rounded_up
from ..engine.recorded import build_model, build_optimizer, emit_training_step
from ..errors import DoesNotFit, UsageError
from ..hardware.imaginary import format_devices
from ..hardware.machine_model import RAM, MachineModel, pace_on, this_machine
from ..hardware.machine_spec import check_budgets
from ..hf.model_directory import ModelDirectory
from .needs import Needs, shortage

MOST_TASKS: Final = 1_000_000
"""Steps of more tasks are refused: recording one takes minutes and gigabytes."""
MOST_TRIED: Final = 100_000
"""Changes that make more tasks of a minibatch are not tried: capturing them takes many seconds."""
MOST_WHOLE: Final = 10_000
"""Changes that make more tasks of a step are judged by three of its minibatches: the others need about as much each."""
TASKS_PER_WORK: Final = 6
"""Tasks per product of a weight tile and a tile of activations (`work_of`), at least: forward, two backward, and what lies between them."""
MOST_ENLARGED: Final = 8
"""Larger devices that are tried, where tiles follow their memory."""
_TILES: Final = {
    "head": ("vocab_tile", "embd_tile"),
    "embedding": ("vocab_tile", "embd_tile"),
    "cross_entropy": ("vocab_tile", "seq_tile"),
    "attention": ("seq_tile", "head_tile"),
    "adam": ("vocab_tile", "inner_tile", "embd_tile"),
    "sgd": ("vocab_tile", "inner_tile", "embd_tile"),
}
"""Word in a task's name -> tile flags that make it smaller, the first one first."""
_OTHER_TILES: Final = ("vocab_tile", "inner_tile", "seq_tile", "embd_tile", "minibatch_tile")


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A model without memory, and its training step.

    Attributes:
        plan: the step in submission order.
        trained, frozen: the model's tensors by name, those that are learnt and those that are not; they have shapes and types, and no data.
        optimizer: likewise, of its state.
        reading: bytes of host memory for the readers of the files that the weights begin in.
    """

    plan: StepPlan
    trained: Mapping[str, TileTensor]
    frozen: Mapping[str, TileTensor]
    optimizer: Mapping[str, TileTensor]
    reading: int = 0


def check_fit(run: RunConfig) -> tuple[CapturedStep, PlannedOrder]:
    """Refuse a run whose step cannot run on its machine within the budgets, and choose the order of one that can.

    Takes no memory, and a second for 20,000 tasks; more where budgets are short, to compare orders.

    Raises:
        DoesNotFit: a budget is not to be had, or too small; says by how much, and what would fit.
        UsageError: the step has too many tasks, or no order of the name that was asked for.
    """
    with no_collections():
        found = capture(run, frozen_base=run.start.frozen_base)
        return found, fitting_order(found, run, lambda target, needs: advice(run, target, needs))


def fitting_order(found: CapturedStep, run: LanguageRun, changes: Callable[[MachineModel, Needs], Sequence[str]]) -> PlannedOrder:
    """The order in which a captured step will run within the budgets of its machine.

    Args:
        changes: of a machine and what the step needs: what would make it fit.

    Raises:
        DoesNotFit, UsageError: as of `check_fit`.
    """
    check_budgets(run.machine)
    target = this_machine(run.machine)
    needs = least_needs(found.plan, run, target, quick=True, reading=found.reading)
    if not needs.fit(target):
        raise DoesNotFit(f"{shortage(target, needs)}; it would fit with {', or '.join(changes(target, needs))}")
    return choose_order(found.plan, run, target.without(found.reading))


def capture(run: RunConfig, num_minibatches: int | None = None, frozen_base: FrozenBase | None = None) -> CapturedStep:
    """Model and step of a run, from shapes.

    Args:
        num_minibatches: per step; as many as the run has unless given.
        frozen_base: the frozen weights of a run with adapters.

    Raises:
        UsageError: the step has more than `MOST_TASKS` tasks.
    """
    size, length = run.step.minibatch, run.model.seq_len
    count = run.step.num_minibatches if num_minibatches is None else num_minibatches
    if (num_tasks := TASKS_PER_WORK * count * work_of(run)) > MOST_TASKS:
        raise UsageError(
            f"a step must have at most {MOST_TASKS:,} tasks, got about {num_tasks:,}: {count:,} x {size:,} sequences of {length:,} "
            "tokens in these tiles; lower --batch or enlarge the tiles"
        )
    if (num_tiles := _tiles_of_positions(run)) > MOST_TASKS:
        config = run.model.config
        raise UsageError(
            f"a step must have at most {MOST_TASKS:,} tasks, got about {num_tiles:,}: one for each tile of a table of {config.n_positions:,} "
            f"positions; lower {config.positions_key} in the config or enlarge the tiles"
        )
    runtime = CapturingRuntime(run.step.lanes, has_gpus=run.machine.has_gpus)
    model = build_model(run.model, runtime)
    if frozen_base is not None:
        frozen_base.attach(model)
    elif (start := _start(run)) is not None:
        start.attach(base_tensors(model))
    optimizer = build_optimizer(model, run.optimizer)
    objective = run.data.objective
    inputs = [model.inputs(size, length, objective.names, objective.target_length) for _ in range(count)]
    with runtime.record():
        outputs = emit_training_step(model, optimizer, inputs)
    del outputs
    plan = recomputing(runtime.plan, run.step.recompute)
    plan.idle = untouched(runtime.plan, [*model.tensors().values(), *optimizer.tensors().values()])
    return CapturedStep(plan, model.trained_tensors(), model.frozen_tensors(), optimizer.tensors(), runtime.reading_nbytes)


def recomputing(plan: StepPlan, recompute: str) -> StepPlan:
    """The step with what --recompute says made again; unless that is left to the planner, who looks at budgets.

    Raises:
        UsageError: nothing that an operation makes here could be made again.
    """
    try:
        return as_asked(plan, recompute)
    except ValueError as error:
        raise UsageError(f"--recompute {recompute}: {error}") from error


def untouched(plan: StepPlan, tensors: Iterable[TileTensor]) -> int:
    """Bytes of tiles that no task of a step touches, those in files apart: rows of positions that no sequence reaches, beside adapters."""
    records = {handle.record for tensor in tensors for handle in tensor.handles}
    return sum(record.size for record in records if record not in plan.uses and FILE not in record.replicas)


def _start(run: RunConfig) -> ModelDirectory | None:
    """The directory that a new run begins with; None where there is none, or the model is another one, as in trials of tiles."""
    if run.start.directory is None:
        return None
    start = ModelDirectory.open(run.start.directory, run.model.config)
    stored, config = start.stored, run.model.config
    is_same = stored == config or (not start.has_head and stored.description.stack == config.description.stack)
    return start if is_same else None


def needs_of(plan: StepPlan, *, thrifty: bool = False, reading: int = 0) -> Needs:
    """What a step needs in the order of the plan.

    Args:
        thrifty: with updates as early as they can instead, the candidate order that needs least.
        reading: bytes of host memory for file readers.
    """
    hungriest = max(plan.tasks, key=_touched)
    persistent = plan.idle + sum(handle.size for handle in plan.uses if handle.kind == "persistent" and not plan.stays_in_file(handle))
    if thrifty:
        eager = arrange(plan, repetition(plan).updates, lambda position: (position,))
        plan = StepPlan([plan.tasks[at] for at in eager], plan.owned, idle=plan.idle)
    total, passive = (last_tier_bytes(plan, computes=computes) for computes in (True, False))
    task, tile = (plan.minimum_bytes(is_last=False, computes=computes) for computes in (True, False))
    least = next((_touched(each) for each in sorted(plan.tasks, key=_touched) if _computes(each)), 0)
    return Needs(task, tile, total, passive, persistent, hungriest, least, reading)


def least_needs(
    plan: StepPlan, run: LanguageRun, target: MachineModel, order: PlannedOrder | None = None, *, quick: bool = False, reading: int = 0
) -> Needs:
    """What the step needs in the order that a run would choose; with less memory, it may choose the submission order or early updates, and make
    again what it can.

    Args:
        order: that of the run, if it is known.
        quick: whether to look no further once a step fits.
        reading: bytes of host memory for file readers.
    """
    name = run.step.order
    if name not in (AUTO, SUBMISSION):
        return needs_of((order or choose_order(plan, run, target)).plan, reading=reading)
    found = needs_of(plan, reading=reading)
    if name != AUTO or (quick and found.fit(target)):
        return found
    least = thriftiest_needs(plan, target, run.step.recompute, quick=quick, reading=reading)
    return min(found, least, key=lambda needs: needs.last(target))


def thriftiest_needs(plan: StepPlan, target: MachineModel, recompute: str, *, quick: bool = False, reading: int = 0) -> Needs:
    """What the step needs with updates as early as they can, and as much made again as a planner would if it is free to choose.

    Args:
        quick: whether to look no further once it fits without.
    """
    found = needs_of(plan, thrifty=True, reading=reading)
    if recompute != AUTO or (quick and found.fit(target)):
        return found
    again = needs_of(most_again(plan), thrifty=True, reading=reading)
    return min(found, again, key=lambda needs: needs.last(target))


def _touched(task: RecordedTask) -> int:
    return sum(handle.size for handle, _ in task.accesses)


def _computes(task: RecordedTask) -> bool:
    """Whether a task has flops; copies and fills have none, and a device that does nothing else is of no use."""
    codelet = task.codelet
    if not isinstance(codelet, Codelet) or codelet.cost is None:
        return False
    return codelet.cost([handle.view for handle, _ in task.accesses], task.constants)[0] > 0


def work_of(run: RunConfig) -> int:
    """Roughly proportional to the tasks of a minibatch: products of a weight tile and a tile of activations."""
    config, cut = run.model.config, run.model.tiling
    width, inner = -(-config.n_embd // cut.embd_tile), -(-config.inner_size // cut.inner_tile)
    heads, vocab = -(-config.n_head // cut.head_tile), -(-config.vocab_size // cut.vocab_tile)
    tokens = -(-run.step.minibatch // cut.minibatch_tile) * -(-run.model.seq_len // cut.seq_tile)
    return tokens * width * (config.n_layer * (config.num_inner_matrices * inner + 4 * heads) + 2 * vocab)


def _tiles_of_positions(run: RunConfig) -> int:
    """Tiles of the table of learned positions, whose length need not be that of sequences."""
    config, cut = run.model.config, run.model.tiling
    description = getattr(config, "description", None)
    rows = 0 if description is None else description.stack.num_positions or 0
    return -(-rows // cut.seq_tile) * -(-config.n_embd // cut.embd_tile)


def choose_order(plan: StepPlan, run: LanguageRun, target: MachineModel) -> PlannedOrder:
    """As `Runtime.plan_step`, of a step that has been given what --recompute says."""
    try:
        return order_on(plan, run.step.order, target, target.policy, AUTO if run.step.recompute == AUTO else NONE)
    except ValueError as error:
        is_open = run.step.num_minibatches == 1 and not run.start.is_continued
        more = "; the others need a --minibatch below --batch" if is_open else ""
        raise UsageError(f"--order {run.step.order}: {error}{more}") from error


def order_on(plan: StepPlan, order: str, target: MachineModel, policy: str, recompute: str = NONE) -> PlannedOrder:
    """As `Runtime.plan_step`, on a machine that need not exist, under a scheduling policy.

    Raises:
        ValueError: the step has no order of that name.
    """
    last, compute_nodes = target.last, target.compute_nodes
    return choose_plan(
        plan,
        order,
        recompute,
        memory=target.memory,
        last=target.nodes[last][1],
        computes_on_last=last in compute_nodes,
        num_devices=len(compute_nodes) if POLICIES[policy]().keeps_partitions and 0 not in compute_nodes else 1,
        pace=lambda planned: pace_on(planned, target),
    )


def advice(
    run: RunConfig,
    target: MachineModel,
    needs: Needs,
    *,
    full: str = "",
    anew: Callable[[MachineModel], RunConfig] | None = None,
) -> list[str]:
    """Changes of which each would make the step fit, checked where that is quick; of a resumed run, of what is not its checkpoint's.

    Args:
        full: the memory that was too small all the same, where the machine has what the step needs at least.
        anew: the run on a machine with larger devices, if its tiles follow them.
    """
    found = more_memory(target, needs, full=full, anew=anew)
    if run.start.is_continued:
        return found
    is_last_short = any(at == target.last for at, _ in needs.short(target))
    if not needs.fits_task(target):
        found += filter(None, [_smaller_tile(run, target, needs)])
    if is_last_short:
        found += filter(None, [_smaller_minibatch(run, target)])
    if is_last_short and run.step.recompute == NONE and not _short(with_free_order(run.recomputing(BLOCK)), target):
        found.append("--recompute block")
    return found


def more_memory(target: MachineModel, needs: Needs, *, full: str = "", anew: Callable[[MachineModel], RunConfig] | None = None) -> list[str]:
    """Budgets of which each would make a step fit; arguments as of `advice`."""
    is_given_room = not (short := needs.short(target))
    if is_given_room:
        at = next((at for at, (name, _) in enumerate(target.nodes) if name == full), 0)
        short = [(at, int(1.1 * target.budgets[target.nodes[at][0]]))]
    found = [_raised(target, _enough(short, target, anew))]
    if not is_given_room and any(at == target.last for at, _ in short) and not target.storage:
        other = target.with_empty_disk()
        follow = None if anew is None else lambda larger: with_free_order(anew(larger))  # nothing is known of the links of that disk
        found.append(_raised(other, _enough(needs.short(other), other, follow), is_new=True))
    return found


def _raised(target: MachineModel, short: Sequence[tuple[int, int]], *, is_new: bool = False) -> str:
    """Flags that give some nodes of a machine so many bytes.

    Args:
        is_new: whether the machine has no disk tier yet.
    """
    flags = []
    devices = max((nbytes for at, nbytes in short if at not in (0, target.last)), default=0)  # one size for all of them
    for at, nbytes in short:
        name, size = target.nodes[at][0], flag_size(nbytes)
        if name == RAM:
            flags.append(f"--ram {size}")
        elif at != target.last:
            device = "" if target.rates is None else format_devices(target.num_devices, devices, target.rates["sim"].flops)
            flags.append(f"--devices {device}" if device else f"--gpu-memory {flag_size(devices)}")
        elif target.is_imaginary:
            flags.append(f"--disk {size}")
        else:
            flags.append(f"--disk DIR with {size} free there" if is_new else f"--disk DIR:{size} in a directory with as much room")
    return " and ".join(dict.fromkeys(flags))


def _enough(short: list[tuple[int, int]], target: MachineModel, anew: Callable[[MachineModel], RunConfig] | None) -> list[tuple[int, int]]:
    """What to raise nodes to, as messages round it, so that the step fits in the tiles that it then has."""
    for _ in range(MOST_ENLARGED):
        rounded = {at: rounded_up(nbytes) for at, nbytes in short}
        larger = target.enlarged(rounded)
        if anew is None or larger.largest_node_nbytes == target.largest_node_nbytes or _is_long(changed := anew(larger)):
            break
        if not (more := _short(changed, larger)):
            break
        short = sorted({**dict(short), **dict(more)}.items())
    return short


def _short(run: RunConfig, target: MachineModel) -> list[tuple[int, int]]:
    """Nodes that a step leaves short, see `Needs.short`; of a long step three minibatches are looked at: each more needs as much as the third."""
    count = run.step.num_minibatches
    looked_at = count if TASKS_PER_WORK * count * work_of(run) <= MOST_WHOLE else min(count, 3)

    def look(num_minibatches: int) -> Needs:
        found = capture(run, num_minibatches)
        return least_needs(found.plan, run, target, quick=looked_at == count, reading=found.reading)

    needs = look(looked_at)
    if looked_at < count:
        two = look(2)
        needs = replace(
            needs,
            total=needs.total + (count - 3) * (needs.total - two.total),
            passive=needs.passive + (count - 3) * (needs.passive - two.passive),
        )
    return needs.short(target)


def with_free_order(run: RunConfig) -> RunConfig:
    """The run with a step other than the one that --order was given for: in one of its orders, unless nothing is to be reordered."""
    return run.in_order(SUBMISSION if run.step.order == SUBMISSION else AUTO)


def _smaller_minibatch(run: RunConfig, target: MachineModel) -> str:
    """--minibatch of one tile, or of one sequence and tiles of one, if that makes the machine large enough; "" if it does not."""
    tile = run.model.tiling.minibatch_tile
    for size in sorted({size for size in (tile, 1) if size < run.step.minibatch}, reverse=True):
        changed = with_free_order(run.cut(minibatch=size, minibatch_tile=size))
        if not (_is_long(changed) or _short(changed, target)):
            return f"--minibatch {size}" + (f" --minibatch-tile {size}" if size != tile else "")
    return ""


def _smaller_tile(run: RunConfig, target: MachineModel, needs: Needs) -> str:
    """Tile flags halved, one after another, until the hungriest task fits, and what must be raised besides; "" if that does not help."""
    name, config = needs.hungriest.name, run.model.config
    changed, flags = run, dict[str, int]()
    for _ in range(8):
        tiles = next((tiles for word, tiles in _TILES.items() if word in name), _OTHER_TILES)
        best = None
        for flag in tiles:
            size = getattr(changed.model.tiling, flag) // 2
            if flag == "head_tile":
                size -= size % (config.n_head // config.n_kv_head)
            if size < 1:
                continue
            trial = changed.cut(**{flag: size})
            if _is_long(trial):
                continue
            after = needs_of(capture(trial, 1).plan)
            if best is None or after.task < best[0].task:
                best = after, trial, flag, size
        if best is None:
            return ""
        after, changed, flag, size = best
        flags[flag], name = size, after.hungriest.name
        if after.task <= target.largest_node_nbytes:
            besides = _raised(target, _short(with_free_order(changed), target))
            return " ".join(f"--{flag.replace('_', '-')} {size}" for flag, size in flags.items()) + (f" and {besides}" if besides else "")
    return ""


def has_too_many_tasks(run: RunConfig) -> bool:
    """Whether a step would be refused for its number of tasks."""
    return TASKS_PER_WORK * run.step.num_minibatches * work_of(run) > MOST_TASKS


def most_tiles(run: RunConfig) -> int:
    """As many minibatches as these may be one, or one after another, in a step that is not refused for its number of tasks."""
    return MOST_TASKS // (TASKS_PER_WORK * work_of(run))


def _is_long(run: RunConfig) -> bool:
    """Whether a step would have too many tasks, or one of its minibatches more than are looked at for advice."""
    return TASKS_PER_WORK * work_of(run) > MOST_TRIED or has_too_many_tasks(run)


@contextmanager
def no_collections() -> Iterator[None]:
    """Captured steps are large and have no garbage cycles worth a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
