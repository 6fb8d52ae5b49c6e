"""What a training step needs, from shapes alone, and whether a machine has it: ``nntask train`` refuses what cannot fit before memory is taken.

The step is captured (`scheduler.capture`); what each memory must hold at least is `StepPlan.minimum_bytes`, in the order that a run would choose.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from scheduler.capture import CapturingRuntime
from scheduler.core.orders import arrange, repetition
from scheduler.core.policies import POLICIES
from scheduler.core.records import FILE
from scheduler.core.steps import RecordedTask, StepPlan
from scheduler.drivers.disk import staging_nbytes
from scheduler.ordering import AUTO, SUBMISSION, PlannedOrder, last_tier_bytes, plan_order
from tiles import TileTensor

from ..errors import DoesNotFit, UsageError
from ..hf.directory import ModelDirectory
from ..models.interface import ModelConfig
from ..sizes import flag_size
from ..tiling import ModelTiling
from .base import Base
from .gpus import gpus_of
from .places import RAM, Target, pace_on, this_machine
from .prepare import TILE_FLAGS
from .recorded import build_model, build_optimizer, emit_training_step
from .settings import TrainSettings

MOST_TASKS: Final = 1_000_000
"""Steps of more tasks are refused: recording one takes minutes and gigabytes."""
MOST_TRIED: Final = 100_000
"""Changes that make more tasks of a minibatch are not tried: capturing them takes many seconds."""
TASKS_PER_WORK: Final = 6
"""Tasks per product of a weight tile and a tile of activations (`work_of`), at least: forward, two backward, and what lies between them."""
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
class Needs:
    """Bytes without which a step cannot run.

    Attributes:
        task: that the hungriest task touches.
        tile: of the largest piece of data.
        total: of the last tier, if tasks run there.
        passive: of the last tier, if none do.
        persistent: of what outlives the step and does not stay in files.
        hungriest: that task.
        reading: of host memory besides, for those who read files.
    """

    task: int
    tile: int
    total: int
    passive: int
    persistent: int
    hungriest: RecordedTask
    reading: int = 0

    def last(self, target: Target) -> int:
        """Least budget of the last tier of a machine."""
        return self.total if target.last in target.places else self.passive

    def minimum(self, target: Target) -> dict[str, int]:
        """Least budget of each node of a machine."""
        found = {}
        for at, (name, _) in enumerate(target.nodes):
            passing = self.task if at in target.places else self.tile
            found[name] = max(passing, self.last(target)) if at == target.last else passing
        found[target.nodes[0][0]] += self.reading
        return found

    def fit(self, target: Target) -> bool:
        """Whether a machine has as much; a task runs where it fits, so the largest place counts."""
        return self.fits_task(target) and all(
            budget >= self.minimum(target)[name] for at, (name, budget) in enumerate(target.nodes) if at == target.last or at not in target.places
        )

    def fits_task(self, target: Target) -> bool:
        """Whether some memory holds the hungriest task."""
        return any(target.nodes[at][1] - (0 if at else self.reading) >= self.task for at in target.places)


@dataclass(frozen=True, slots=True)
class Sketch:
    """A model without memory, and its training step.

    Attributes:
        plan: the step in submission order.
        trained, frozen: the model's tensors by name, those that are learnt and those that are not; they have shapes and types, and no data.
        optimizer: likewise, of its state.
        reading: bytes of host memory for those who read the files that the weights begin in.
    """

    plan: StepPlan
    trained: Mapping[str, TileTensor]
    frozen: Mapping[str, TileTensor]
    optimizer: Mapping[str, TileTensor]
    reading: int = 0


def check_fit(settings: TrainSettings, config: ModelConfig, tiling: ModelTiling, base: Base | None = None) -> tuple[Sketch, PlannedOrder]:
    """Refuse resolved settings whose step cannot run on this machine within its budgets, and choose the order of one that can.

    Takes no memory, and a second for 20,000 tasks; more where budgets are short, to compare orders.

    Args:
        base: the frozen weights of a run with adapters.

    Raises:
        DoesNotFit: a budget is too small; says by how much, and what would fit.
        UsageError: the step has too many tasks, or no order of the name that was asked for.
    """
    with no_collections():
        found = sketch(settings, config, tiling, base=base)
        target = this_machine(settings)
        needs = least_needs(found.plan, settings, target, reading=found.reading)
        if not needs.fit(target):
            changes = advice(settings, config, target, needs)
            raise DoesNotFit(f"{shortage(target, needs, staged(settings, target))}; it would fit with {', or '.join(changes)}")
        return found, choose_order(found.plan, settings, target.without(found.reading))


def capture(settings: TrainSettings, config: ModelConfig, tiling: ModelTiling, num_minibatches: int | None = None) -> StepPlan:
    """The step that resolved settings train with; see `sketch`."""
    return sketch(settings, config, tiling, num_minibatches).plan


def sketch(settings: TrainSettings, config: ModelConfig, tiling: ModelTiling, num_minibatches: int | None = None, base: Base | None = None) -> Sketch:
    """Model and step that resolved settings train with, from shapes.

    Args:
        num_minibatches: per step; as many as the settings ask for unless given.
        base: the frozen weights of a run with adapters.

    Raises:
        UsageError: the step has more than `MOST_TASKS` tasks.
    """
    size = settings.tiling.minibatch
    count = count_minibatches(settings) if num_minibatches is None else num_minibatches
    num_tasks = TASKS_PER_WORK * count * work_of(settings, config)
    if num_tasks > MOST_TASKS:
        raise UsageError(
            f"a step must have at most {MOST_TASKS:,} tasks, got about {num_tasks:,}: {count:,} x {size:,} sequences of {settings.model.seq_len:,} "
            "tokens in these tiles; lower --batch or enlarge the tiles"
        )
    runtime = CapturingRuntime(settings.tiling.lanes or 1, has_gpus=bool(gpus_of(settings)[0].parts))
    model = build_model(config, tiling, runtime, settings)
    if base is not None:
        base.attach(model.frozen_tensors())
    elif (start := _start(settings, config)) is not None:
        start.attach(model.frozen_tensors() or model.tensors())
    optimizer = build_optimizer(model, settings)
    inputs = [model.input_tensors(size, settings.model.seq_len) for _ in range(count)]
    with runtime.record():
        outputs = emit_training_step(model, optimizer, inputs)
    del outputs
    runtime.plan.idle = untouched(runtime.plan, [*model.tensors().values(), *optimizer.tensors().values()])
    return Sketch(runtime.plan, model.trained_tensors(), model.frozen_tensors(), optimizer.tensors(), runtime.reading_nbytes)


def untouched(plan: StepPlan, tensors: Iterable[TileTensor]) -> int:
    """Bytes of tiles that no task of a step touches, those in files apart: rows of positions that no sequence reaches, beside adapters."""
    records = {handle.record for tensor in tensors for handle in tensor.handles}
    return sum(record.size for record in records if record not in plan.uses and FILE not in record.replicas)


def _start(settings: TrainSettings, config: ModelConfig) -> ModelDirectory | None:
    """The directory that a new run begins with; None where there is none, or the model is another one, as in trials of tiles."""
    begin = settings.checkpoints.init_from
    if not begin or settings.checkpoints.resume:
        return None
    start = ModelDirectory.open(Path(begin))
    return start if start.config == config else None


def needs_of(plan: StepPlan, *, thrifty: bool = False, reading: int = 0) -> Needs:
    """What a step needs in the order of the plan.

    Args:
        thrifty: with updates as early as they can instead, the candidate order that needs least.
        reading: bytes of host memory for those who read files.
    """
    hungriest = max(plan.tasks, key=_touched)
    persistent = plan.idle + sum(handle.size for handle in plan.uses if handle.kind == "persistent" and not plan.stays_in_file(handle))
    if thrifty:
        eager = arrange(plan, repetition(plan).updates, lambda position: (position,))
        plan = StepPlan([plan.tasks[at] for at in eager], plan.owned, idle=plan.idle)
    total, passive = (last_tier_bytes(plan, computes=computes) for computes in (True, False))
    task, tile = (plan.minimum_bytes(is_last=False, computes=computes) for computes in (True, False))
    return Needs(task, tile, total, passive, persistent, hungriest, reading)


def least_needs(plan: StepPlan, settings: TrainSettings, target: Target, order: PlannedOrder | None = None, *, reading: int = 0) -> Needs:
    """What the step needs in the order that a run would choose; with less room, it may choose the submission order or early updates.

    Args:
        order: None to look no further once the submission order fits.
        reading: bytes of host memory for those who read files.
    """
    name = settings.resources.order
    if name not in (AUTO, SUBMISSION):
        return needs_of((order or choose_order(plan, settings, target)).plan, reading=reading)
    found = [needs_of(plan, reading=reading)]
    if name == AUTO and not (order is None and found[0].fit(target)):
        found.append(needs_of(plan, thrifty=True, reading=reading))
    return min(found, key=lambda needs: needs.last(target))


def _touched(task: RecordedTask) -> int:
    return sum(handle.size for handle, _ in task.accesses)


def work_of(settings: TrainSettings, config: ModelConfig) -> int:
    """Roughly proportional to the tasks of a minibatch: products of a weight tile and a tile of activations."""
    cut = tiling_of(settings)
    width, inner = -(-config.n_embd // cut.embd_tile), -(-config.inner_size // cut.inner_tile)
    heads, vocab = -(-config.n_head // cut.head_tile), -(-config.vocab_size // cut.vocab_tile)
    tokens = -(-settings.tiling.minibatch // cut.minibatch_tile) * -(-(settings.model.seq_len or 1) // cut.seq_tile)
    return tokens * width * (config.n_layer * (config.num_inner_matrices * inner + 4 * heads) + 2 * vocab)


def count_minibatches(settings: TrainSettings) -> int:
    """Minibatches of a step."""
    return max((settings.tiling.batch or 1) // settings.tiling.minibatch, 1)


def choose_order(plan: StepPlan, settings: TrainSettings, target: Target) -> PlannedOrder:
    """As `Runtime.plan_order`."""
    try:
        return order_on(plan, settings.resources.order, target, target.policy(settings.resources.sched))
    except ValueError as error:
        is_open = count_minibatches(settings) == 1 and not settings.checkpoints.resume  # which has its tiling
        more = "; the others need a --minibatch below --batch" if is_open else ""
        raise UsageError(f"--order {settings.resources.order}: {error}{more}") from error


def order_on(plan: StepPlan, order: str, target: Target, policy: str) -> PlannedOrder:
    """As `Runtime.plan_order`, on a machine that need not exist, under a scheduling policy.

    Raises:
        ValueError: the step has no order of that name.
    """
    last, places = target.last, target.places
    return plan_order(
        plan,
        order,
        memory=target.memory,
        last=target.nodes[last][1],
        computes_on_last=last in places,
        num_devices=len(places) if POLICIES[policy]().keeps_parts and 0 not in places else 1,
        pace=lambda parted: pace_on(parted, target),
    )


def staged(settings: TrainSettings, target: Target) -> int:
    """Bytes of --ram that this machine keeps for copies between its disk tier and its GPUs, so that its budget of host memory lacks them."""
    return 0 if target.is_imaginary else staging_nbytes(len(gpus_of(settings)[0].parts), has_tier=target.storage)


def shortage(target: Target, needs: Needs, staging: int = 0) -> str:
    """Which budget is too small.

    Args:
        staging: see `staged`; counted, so that what is said to be needed is what --ram must be.
    """
    if not needs.fits_task(target):
        data = ", ".join(f"{mode} {handle.name or 'scratch'}" for handle, mode in needs.hungriest.accesses)
        return (
            f"{needs.hungriest.name}({data}) needs {needs.task:,} B at once, more than the {target.largest_place:,} B of the largest memory "
            "where it may run" + (f" without the {needs.reading:,} B of RAM that readers of files take" if needs.reading else "")
        )
    minimum = needs.minimum(target)
    short = [(name, budget) for name, budget in target.nodes if budget < minimum[name]]
    name, budget = next((each for each in short if each[0] == target.nodes[target.last][0]), short[0])
    besides = staging if name == RAM else 0
    return f"the step needs {minimum[name] + besides:,} B of {name} at least, more than its budget of {budget + besides:,} B"


def advice(settings: TrainSettings, config: ModelConfig, target: Target, needs: Needs) -> list[str]:
    """Changes of which each would make the step fit, checked where that is quick; of a resumed run, of what is not its checkpoint's."""
    minimum, is_fixed = needs.minimum(target), bool(settings.checkpoints.resume)
    minimum[RAM] += staged(settings, target)
    place = max(target.places, key=lambda at: target.nodes[at][1])
    is_last_short = needs.last(target) > target.nodes[target.last][1]
    more, alone = "", list[str]()  # what every change must bring besides, and those that are enough with it
    if not needs.fits_task(target):
        size = flag_size(minimum[target.nodes[place][0]])
        flag = "--ram" if target.nodes[place][0] == RAM else "--gpu-memory"
        alone.append(f"--devices of {size} each" if target.is_imaginary and place else f"{flag} {size}")
        alone += filter(None, [] if is_fixed else [_smaller_tile(settings, config, target, needs)])
        if is_last_short and place != target.last:
            more = f" and {_larger_last(target, needs)[0]}"
    elif is_last_short:
        alone += _larger_last(target, needs)
    else:
        alone.append(f"--ram {flag_size(max(minimum[RAM], int(1.1 * target.nodes[0][1])))}")
    found = [change + more for change in alone]
    if is_last_short and target.is_imaginary:
        found += filter(None, [_smaller_minibatch(settings, config, target)])
    if is_last_short and settings.model.recompute == "none" and not is_fixed:
        resources = replace(settings.resources, order=AUTO if settings.resources.order != SUBMISSION else SUBMISSION)
        changed = replace(settings, model=replace(settings.model, recompute="block"), resources=resources)
        if least_needs(capture(changed, config, tiling_of(changed), min(2, count_minibatches(changed))), changed, target).fit(target):
            found.append("--recompute block")
    return found


def _larger_last(target: Target, needs: Needs) -> list[str]:
    """Flags that make the last tier large enough."""
    size = flag_size(needs.last(target))
    if target.is_imaginary:
        return [f"--disk {size}"] if target.storage else [f"--ram {size}", f"--disk {size}"]
    if target.storage:
        return [f"--disk DIR:{size} in a directory with as much room"]
    return [f"--ram {size}", f"--disk DIR with {size} free there"]


def _smaller_minibatch(settings: TrainSettings, config: ModelConfig, target: Target) -> str:
    """--minibatch of one tile, or of one sequence, if that makes the last tier large enough; "" if it does not."""
    cut = settings.tiling
    tile = cut.minibatch_tile or 1
    size = tile if tile < cut.minibatch else 1
    resources = replace(settings.resources, order=AUTO if settings.resources.order != SUBMISSION else SUBMISSION)
    changed = replace(settings, tiling=replace(cut, minibatch=size, minibatch_tile=size), resources=resources)
    if size == cut.minibatch or _is_long(changed, config):
        return ""
    plan = capture(changed, config, tiling_of(changed), min(2, count_minibatches(changed)))
    return f"--minibatch {size}" if least_needs(plan, changed, target).fit(target) else ""


def _smaller_tile(settings: TrainSettings, config: ModelConfig, target: Target, needs: Needs) -> str:
    """Tile flags halved, one after another, until the hungriest task fits; "" if that does not help."""
    name = needs.hungriest.name
    changed, flags = settings, dict[str, int]()
    for _ in range(8):
        tiles = next((tiles for word, tiles in _TILES.items() if word in name), _OTHER_TILES)
        best = None
        for flag in tiles:
            size = getattr(changed.tiling, flag) // 2
            if flag == "head_tile":
                size -= size % (config.n_head // config.n_kv_head)
            if size < 1:
                continue
            trial = replace(changed, tiling=replace(changed.tiling, **{flag: size}))
            if _is_long(trial, config):
                continue
            after = needs_of(capture(trial, config, tiling_of(trial), 1))
            if best is None or after.task < best[0].task:
                best = after, trial, flag, size
        if best is None:
            return ""
        after, changed, flag, size = best
        flags[flag], name = size, after.hungriest.name
        if after.task <= target.largest_place:
            return " ".join(f"--{flag.replace('_', '-')} {size}" for flag, size in flags.items())
    return ""


def _is_long(settings: TrainSettings, config: ModelConfig) -> bool:
    """Whether a step would have too many tasks, or one of its minibatches more than are looked at for advice."""
    num_tasks = TASKS_PER_WORK * work_of(settings, config)
    return num_tasks > MOST_TRIED or num_tasks * count_minibatches(settings) > MOST_TASKS


def tiling_of(settings: TrainSettings) -> ModelTiling:
    """The tile sizes of resolved settings."""
    return ModelTiling(**{name: getattr(settings.tiling, name) for name in TILE_FLAGS})


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
