"""What a training step needs and costs on a machine, from shapes alone: no data, no kernels, nothing written.

``nntask train`` refuses with it what cannot fit (`check_fit`), before memory is taken. ``nntask plan`` goes on (`plan_run`): the step is captured
(`scheduler.capture`), its order chosen as a run would choose it (`scheduler.ordering`), and the core replays it in virtual time with the durations
and links of `places`. What each memory must hold at least is `StepPlan.minimum_bytes`.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from scheduler.capture import CapturingRuntime
from scheduler.core import errors as scheduler_errors
from scheduler.core.orders import arrange, repetition
from scheduler.core.records import SCRATCH
from scheduler.core.steps import RecordedTask, StepPlan
from scheduler.drivers.virtual import Simulation, simulate
from scheduler.ordering import AUTO, SUBMISSION, PlannedOrder, last_tier_bytes, plan_order
from tiles import TileTensor

from ..errors import DoesNotFit, UsageError
from ..models.config import PRESETS, GPT2Config
from ..tiling import ModelTiling
from .gpt2 import build_model, build_optimizer, emit_training_step
from .places import RAM, Target, durations, this_machine, with_coarse_tiles
from .prepare import TILE_FLAGS, with_tiles
from .rules import resolve
from .settings import TrainSettings

FEW_TASKS: Final = 3000
"""Steps of more tasks are replayed once instead of twice where memory is short: virtual time is slow there, and the second moves within 2 % of it."""
MOST_TASKS: Final = 1_000_000
"""Steps of more tasks are refused: recording one takes minutes and gigabytes."""
TASKS_PER_WORK: Final = 6
"""Tasks per product of a weight tile and a tile of activations (`_work`), at least: forward, two backward, and what lies between them."""
MANY_TASKS: Final = 40_000
"""Other models and minibatches are not looked at when capturing one would take more tasks."""
MOST_MINIBATCH: Final = 1 << 20
"""Sequences in flight beyond which nobody asks."""
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
        persistent: of what outlives the step.
        hungriest: that task.
    """

    task: int
    tile: int
    total: int
    passive: int
    persistent: int
    hungriest: RecordedTask

    def last(self, target: Target) -> int:
        """Least budget of the last tier of a machine."""
        return self.total if target.last in target.places else self.passive

    def minimum(self, target: Target) -> dict[str, int]:
        """Least budget of each node of a machine."""
        found = {}
        for at, (name, _) in enumerate(target.nodes):
            passing = self.task if at in target.places else self.tile
            found[name] = max(passing, self.last(target)) if at == target.last else passing
        return found

    def fit(self, target: Target) -> bool:
        """Whether a machine has as much; a task runs where it fits, so the largest place counts."""
        return self.task <= target.largest_place and all(
            budget >= self.minimum(target)[name] for at, (name, budget) in enumerate(target.nodes) if at == target.last or at not in target.places
        )


@dataclass(frozen=True, slots=True)
class Sketch:
    """A model without memory, and its training step.

    Attributes:
        plan: the step in submission order.
        model, optimizer: tensors by name; they have shapes and types, and no data.
    """

    plan: StepPlan
    model: Mapping[str, TileTensor]
    optimizer: Mapping[str, TileTensor]


def check_fit(settings: TrainSettings, config: GPT2Config, tiling: ModelTiling) -> Sketch:
    """Refuse resolved settings whose step cannot run on this machine within its budgets; takes no memory, and a second for 20,000 tasks.

    Raises:
        DoesNotFit: a budget is too small; says by how much, and what would fit.
        UsageError: the step has too many tasks.
    """
    with _no_collections():
        found = sketch(settings, config, tiling)
        target = this_machine(settings)
        needs = _least_needs(found.plan, settings, target)
        if not needs.fit(target):
            changes = advice(settings, config, target, needs)
            raise DoesNotFit(f"{_shortage(target, needs)}; it would fit with {', or '.join(changes)}")
    return found


def plan_run(settings: TrainSettings, config: GPT2Config, target: Target | None = None, *, reach: bool = True) -> dict[str, Any]:
    """The figures of ``nntask plan --json``.

    Args:
        target: an imaginary machine, for which tiles are large unless flags say otherwise; None for this one with the budgets of the settings.
        reach: whether to look for the largest model and minibatch that fit.

    Raises:
        UsageError: a rule is broken, or the step has no such order.
    """
    settings = resolve(settings, config)
    if target is not None:
        settings = with_coarse_tiles(settings, config, target)
    settings, tiling = with_tiles(settings, config)
    target = this_machine(settings) if target is None else target
    with _no_collections():
        plan = capture(settings, config, tiling)
        order = _choose_order(plan, settings, target)
        needs = _least_needs(plan, settings, target, order)
        found, refusal = _simulate(order, settings, target, needs)
        figures = _figures(settings, config, tiling, target, order, needs)
        if found is not None:
            figures.update(_costs(found, settings))
        figures["feasible"] = found is not None
        figures["refusal"] = refusal
        figures["advice"] = [] if found is not None else advice(settings, config, target, needs)
        if reach:
            figures.update(_reach(settings, config, target, len(plan.tasks)))
    return figures


def capture(settings: TrainSettings, config: GPT2Config, tiling: ModelTiling, num_minibatches: int | None = None) -> StepPlan:
    """The step that resolved settings train with; see `sketch`."""
    return sketch(settings, config, tiling, num_minibatches).plan


def sketch(settings: TrainSettings, config: GPT2Config, tiling: ModelTiling, num_minibatches: int | None = None) -> Sketch:
    """Model and step that resolved settings train with, from shapes.

    Args:
        num_minibatches: per step; as many as the settings ask for unless given.

    Raises:
        UsageError: the step has more than `MOST_TASKS` tasks.
    """
    size = settings.tiling.minibatch
    count = _num_minibatches(settings) if num_minibatches is None else num_minibatches
    num_tasks = TASKS_PER_WORK * count * _work(settings, config)
    if num_tasks > MOST_TASKS:
        raise UsageError(
            f"a step must have at most {MOST_TASKS:,} tasks, got about {num_tasks:,}: {count:,} x {size:,} sequences of {settings.model.seq_len:,} "
            "tokens in these tiles; lower --batch or enlarge the tiles"
        )
    runtime = CapturingRuntime(settings.tiling.lanes or 1)
    model = build_model(config, tiling, runtime, settings)
    optimizer = build_optimizer(model, settings)
    inputs = [model.input_tensors(size, settings.model.seq_len) for _ in range(count)]
    with runtime.record():
        outputs = emit_training_step(model, optimizer, inputs)
    del outputs
    return Sketch(runtime.plan, model.tensors(), optimizer.tensors())


def needs_of(plan: StepPlan, *, thrifty: bool = False) -> Needs:
    """What a step needs in the order of the plan.

    Args:
        thrifty: with updates as early as they can instead, the candidate order that needs least.
    """
    hungriest = max(plan.tasks, key=_touched)
    persistent = sum(handle.size for handle in plan.uses if handle.kind == "persistent")
    if thrifty:
        eager = arrange(plan, repetition(plan).updates, lambda position: (position,))
        plan = StepPlan([plan.tasks[at] for at in eager], plan.owned)
    total, passive = (last_tier_bytes(plan, computes=computes) for computes in (True, False))
    return Needs(_touched(hungriest), max(handle.size for handle in plan.uses), total, passive, persistent, hungriest)


def _least_needs(plan: StepPlan, settings: TrainSettings, target: Target, order: PlannedOrder | None = None) -> Needs:
    """What the step needs in the order that a run would choose; with less room, it may choose the submission order or early updates.

    Args:
        order: None to look no further once the submission order fits.
    """
    name = settings.resources.order
    if name not in (AUTO, SUBMISSION):
        return needs_of((order or _choose_order(plan, settings, target)).plan)
    found = [needs_of(plan)]
    if name == AUTO and not (order is None and found[0].fit(target)):
        found.append(needs_of(plan, thrifty=True))
    return min(found, key=lambda needs: needs.last(target))


def _touched(task: RecordedTask) -> int:
    return sum(handle.size for handle, _ in task.accesses)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Captured steps are large and have no garbage cycles worth a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _choose_order(plan: StepPlan, settings: TrainSettings, target: Target) -> PlannedOrder:
    """As `Runtime.plan_order`."""
    try:
        return order_on(plan, settings.resources.order, target)
    except ValueError as error:
        raise UsageError(f"--order {settings.resources.order}: {error}") from error


def order_on(plan: StepPlan, order: str, target: Target) -> PlannedOrder:
    """As `Runtime.plan_order`, on a machine that need not exist.

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
        num_devices=1 if 0 in places else len(places),
    )


def _simulate(order: PlannedOrder, settings: TrainSettings, target: Target, needs: Needs) -> tuple[Simulation | None, str]:
    """What the step costs; or why it cannot run."""
    if not needs.fit(target):
        return None, _shortage(target, needs)
    resources = settings.resources
    is_short = order.plan.needed_bytes() > target.memory
    try:
        found = simulate(
            order.plan,
            workers=target.workers,
            nodes=target.nodes,
            policy=target.policy(resources.sched, order.plan.needed_bytes()),
            duration=durations(order.plan, target).of,
            transfer=target.models.transfer_seconds,
            storage=target.storage,
            channels=target.channels,
            eviction=resources.evict,
            prefetch=resources.prefetch,
            replays=1 if is_short and len(order.plan.tasks) > FEW_TASKS else 2,
        )
    except scheduler_errors.DoesNotFit as error:
        return None, str(error).partition("; raise the budget")[0]
    return found, ""


def _shortage(target: Target, needs: Needs) -> str:
    """Which budget is too small."""
    if needs.task > target.largest_place:
        data = ", ".join(f"{mode} {handle.name or 'scratch'}" for handle, mode in needs.hungriest.accesses)
        return (
            f"{needs.hungriest.name}({data}) needs {needs.task:,} B at once, more than the {target.largest_place:,} B of the largest memory "
            "where it may run"
        )
    minimum = needs.minimum(target)
    name, budget = min(target.nodes, key=lambda node: node[1] / minimum[node[0]] if node[0] != target.nodes[target.last][0] else -1)
    return f"the step needs {minimum[name]:,} B of {name} at least, more than its budget of {budget:,} B"


def _figures(settings: TrainSettings, config: GPT2Config, tiling: ModelTiling, target: Target, order: PlannedOrder, needs: Needs) -> dict[str, Any]:
    """Everything that is known before virtual time."""
    last = target.nodes[target.last][0]
    names = Counter(task.name for task in order.plan.tasks)
    return {
        "feasible": False,
        "peak_bytes": {last: needs.last(target)},
        "minimum_budget_bytes": needs.minimum(target),
        "persistent_bytes": {last: needs.persistent},
        "moved_bytes_per_step": {},
        "tasks_per_step": len(order.plan.tasks),
        "seconds_per_step": None,
        "parameters": config.num_parameters,
        "budget_bytes": dict(target.nodes),
        "needed_bytes": order.plan.needed_bytes(),
        "bytes_by_class": _by_class(order.plan),
        "order": order.name,
        "forecast_bytes": {name: found.total for name, found in order.forecasts.items()},
        "policy": target.policy(settings.resources.sched, order.plan.needed_bytes()),
        "evict": settings.resources.evict,
        "workers": dict(Counter(f"{kind}@{target.nodes[node][0]}" for kind, node, _ in target.workers)),
        "tasks_by_name": dict(names.most_common()),
        "tiles": {name: getattr(tiling, name) for name in tiling.__slots__},
        "largest_model": None,
        "largest_minibatch": None,
    }


def _by_class(plan: StepPlan) -> dict[str, int]:
    """Most bytes of each class that live at once, in the planned order with one task at a time."""
    changes: dict[str, Counter[int]] = {}
    for handle, use in plan.uses.items():
        change = changes.setdefault(handle.data_class, Counter())
        if dict(plan.tasks[use.positions[0]].accesses)[handle] == SCRATCH:
            for position in use.positions:
                change[position] += handle.size
                change[position + 1] -= handle.size
        else:
            change[-1 if use.needs_data else use.positions[0]] += handle.size
            if plan.owned.get(handle) is False:
                change[use.positions[-1] + 1] -= handle.size
    found = {}
    for name, change in sorted(changes.items()):
        live = highest = 0
        for position in sorted(change):
            live += change[position]
            highest = max(highest, live)
        found[name] = highest
    return found


def _costs(found: Simulation, settings: TrainSettings) -> dict[str, Any]:
    """What virtual time says."""
    tokens = (settings.tiling.batch or 1) * (settings.model.seq_len or 0)
    return {
        "peak_bytes": found.peak_bytes,
        "peak_bytes_by_class": found.peak_bytes_by_class,
        "moved_bytes_per_step": {link: nbytes for link, nbytes in found.moved_bytes.items() if nbytes},
        "seconds_per_step": found.seconds,
        "tokens_per_second": tokens / found.seconds if found.seconds else None,
        "busy_share": sum(found.busy_seconds) / (len(found.busy_seconds) * found.seconds) if found.seconds else None,
        "evictions_per_step": found.num_evictions,
    }


def _reach(settings: TrainSettings, config: GPT2Config, target: Target, num_tasks: int) -> dict[str, Any]:
    """The largest preset and the largest minibatch that fit this machine with these flags; None where that would take long to find out."""
    per_minibatch = num_tasks / _num_minibatches(settings)
    return {
        "largest_model": _largest_model(settings, target, per_minibatch / _work(settings, config)),
        "largest_minibatch": None if 4 * per_minibatch > MANY_TASKS else _largest_minibatch(settings, config, target),
    }


def _work(settings: TrainSettings, config: GPT2Config) -> int:
    """Roughly proportional to the tasks of a minibatch: products of a weight tile and a tile of activations."""
    cut = tiling_of(settings)
    width, inner = -(-config.n_embd // cut.embd_tile), -(-config.inner_size // cut.inner_tile)
    heads, vocab = -(-config.n_head // cut.head_tile), -(-config.vocab_size // cut.vocab_tile)
    tokens = -(-settings.tiling.minibatch // cut.minibatch_tile) * -(-(settings.model.seq_len or 1) // cut.seq_tile)
    return tokens * width * (config.n_layer * (2 * inner + 4 * heads) + 2 * vocab)


def _largest_model(settings: TrainSettings, target: Target, tasks_per_work: float) -> str | None:
    """The largest preset that fits; tile sizes come from the table anew, in at most two minibatches, since more of them need no more room."""
    for name, preset in sorted(PRESETS.items(), key=lambda item: -item[1].num_parameters):
        length = min(settings.model.seq_len or preset.n_positions, preset.n_positions)
        cut = replace(settings.tiling, minibatch_tile=None, seq_tile=None, embd_tile=None, inner_tile=None, head_tile=None, vocab_tile=None)
        changed = replace(settings, model=replace(settings.model, model=name, seq_len=length), tiling=cut)
        changed, tiling = with_tiles(with_coarse_tiles(changed, preset, target) if target.rates is not None else changed, preset)
        count = min(2, _num_minibatches(changed))
        if count * tasks_per_work * _work(changed, preset) <= MANY_TASKS and needs_of(capture(changed, preset, tiling, count)).fit(target):
            return name
    return None


def _largest_minibatch(settings: TrainSettings, config: GPT2Config, target: Target) -> int | None:
    """Sequences in flight at once that fit, in whole tiles and with these tiles: what one more tile adds, added as often as there is room."""
    step = settings.tiling.minibatch_tile or 1
    needs = []
    for size in (step, 2 * step):
        changed = replace(settings, tiling=replace(settings.tiling, batch=size, minibatch=size))
        tiling = ModelTiling(**{name: getattr(settings.tiling, name) for name in TILE_FLAGS}).resolve(config, size, settings.model.seq_len or 1)
        needs.append(needs_of(capture(changed, config, tiling)))
    first, second = needs
    if not first.fit(target):
        return 0
    if not second.fit(target):
        return step
    growth = max(second.last(target) - first.last(target), 1)
    room = target.nodes[target.last][1] - first.last(target)
    return min((1 + room // growth) * step, MOST_MINIBATCH)


def _num_minibatches(settings: TrainSettings) -> int:
    return max((settings.tiling.batch or 1) // settings.tiling.minibatch, 1)


def advice(settings: TrainSettings, config: GPT2Config, target: Target, needs: Needs) -> list[str]:
    """Changes of which each would make the step fit, checked where that is quick."""
    minimum = needs.minimum(target)
    found = []
    place = max(target.places, key=lambda at: target.nodes[at][1])
    last_budget = target.nodes[target.last][1]
    if needs.task > target.largest_place:
        flag = "--ram" if target.nodes[place][0] == RAM else "--gpu-memory" if target.rates is None else "a device memory of"
        found.append(f"{flag} {shown_size(minimum[target.nodes[place][0]])}")
        smaller = _smaller_tile(settings, config, target, needs)
        found += [smaller] if smaller else []
    elif needs.last(target) > last_budget and not target.storage:
        found.append(f"--ram {shown_size(needs.last(target))}")
        found.append(f"--disk DIR with {shown_size(needs.last(target))} free there")
    elif needs.last(target) > last_budget:
        found.append(f"--disk DIR:{shown_size(needs.last(target))} in a directory with as much room")
    else:
        found.append(f"--ram {shown_size(max(minimum[RAM], int(1.1 * target.nodes[0][1])))}")
    if needs.last(target) > last_budget and settings.model.recompute == "none":
        changed = replace(settings, model=replace(settings.model, recompute="block"))
        if needs_of(capture(changed, config, tiling_of(changed), min(2, _num_minibatches(changed)))).fit(target):
            found.append("--recompute block")
    return found


def _smaller_tile(settings: TrainSettings, config: GPT2Config, target: Target, needs: Needs) -> str:
    """Tile flags halved, one after another, until the hungriest task fits; "" if that does not help."""
    name = needs.hungriest.name
    changed, flags = settings, dict[str, int]()
    for _ in range(8):
        tiles = next((tiles for word, tiles in _TILES.items() if word in name), _OTHER_TILES)
        best = None
        for flag in tiles:
            size = getattr(changed.tiling, flag) // 2
            if size < 1:
                continue
            trial = replace(changed, tiling=replace(changed.tiling, **{flag: size}))
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


def tiling_of(settings: TrainSettings) -> ModelTiling:
    """The tile sizes of resolved settings."""
    return ModelTiling(**{name: getattr(settings.tiling, name) for name in TILE_FLAGS})


def shown_size(nbytes: int) -> str:
    """A size that the flags accept and that is no smaller, in whole MiB or GiB."""
    unit, shift = ("GiB", 30) if nbytes >= 100 << 30 else ("MiB", 20)
    return f"{-(-nbytes // (1 << shift))}{unit}"
