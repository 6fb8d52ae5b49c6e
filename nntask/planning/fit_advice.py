"""Memory check of a training step, with advice if it does not fit: ``nntask train`` refuses a run before it takes memory.

Advice is verified if that is quick: the step is captured with the change (`memory_fit.capture`), and fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from scheduler.machine import RecordedTask
from scheduler.planning import AUTO, BLOCK, NONE, SUBMISSION

from ..config.imaginary import format_devices
from ..config.run_config import RunConfig
from ..hardware.machine_model import RAM, MachineModel
from ..io.units import flag_size, rounded_up
from .memory_fit import (
    capture,
    has_too_many_tasks,
    largest_task,
    least_needs,
    least_tasks,
)
from .needs import Needs, working_set

MOST_TRIED: Final = 100_000
"""Largest number of tasks of a changed minibatch that is captured for advice; capturing more takes many seconds."""
MOST_WHOLE: Final = 10_000
"""Largest number of tasks of a step that is captured whole. A longer step is estimated from three minibatches; each further one adds the same needs.
"""
FEW_LAYERS: Final = 2
"""Number of layers of the model that is captured to find its largest task."""
MOST_HALVED: Final = 8
"""Largest number of halvings of tile sizes to make a task small enough; each leaves at least a quarter of the task's bytes."""
MOST_ENLARGED: Final = 8
"""Largest number of larger devices that are tried if tiles follow their memory."""
_TILES: Final = {
    "head": ("vocab_tile", "embd_tile"),
    "embedding": ("vocab_tile", "embd_tile"),
    "cross_entropy": ("vocab_tile", "seq_tile"),
    "attention": ("seq_tile", "head_tile"),
    "adam": ("vocab_tile", "inner_tile", "embd_tile"),
    "sgd": ("vocab_tile", "inner_tile", "embd_tile"),
    "muon": ("inner_tile", "embd_tile"),
}
"""Word in a task's name -> tile flags that make the task smaller, in the order in which they are tried."""
_OTHER_TILES: Final = ("vocab_tile", "inner_tile", "seq_tile", "embd_tile", "minibatch_tile")


def advice(
    run: RunConfig,
    target: MachineModel,
    needs: Needs,
    *,
    full: str = "",
    anew: Callable[[MachineModel], RunConfig] | None = None,
) -> list[str]:
    """Return changes, each of which would make the step fit, verified if that is quick. Settings of a resumed run's checkpoint are kept.

    Args:
        full: name of a memory that filled up although its budget is at least the minimum; "" for none.
        anew: function that returns the run on a machine with larger devices; None if tile sizes do not depend on devices.
    """
    changes = more_memory(target, needs, full=full, anew=anew)
    if run.start.is_continued:
        return changes
    # a smaller minibatch or recomputation helps only if the weights and the optimizer's state fit
    is_last_short = needs.persistent <= target.budgets[target.nodes[target.last][0]] and any(at == target.last for at, _ in needs.short(target))
    if not needs.fits_task(target):
        changes += filter(None, [_smaller_tile(run, target, needs)])
    if is_last_short:
        changes += filter(None, [_smaller_minibatch(run, target)])
    if is_last_short and run.step.recompute not in (AUTO, BLOCK) and not _short(with_free_order(run.recomputing(BLOCK)), target):
        changes.append("--recompute block")
    return changes


def more_memory(target: MachineModel, needs: Needs, *, full: str = "", anew: Callable[[MachineModel], RunConfig] | None = None) -> list[str]:
    """Return flags that raise budgets, such as --ram, each of which would make a step fit. The arguments are those of `advice`."""
    is_given_room = not (short := needs.short(target))
    if is_given_room:
        node = next((node for node, (name, _) in enumerate(target.nodes) if name == full), 0)
        short = [(node, int(1.1 * target.budgets[target.nodes[node][0]]))]
    budgets = [_raised(target, _enough(short, target, anew))]
    if not is_given_room and any(node == target.last for node, _ in short) and not target.storage:
        other = target.with_empty_disk()
        follow = None if anew is None else lambda larger: with_free_order(anew(larger))  # nothing is known of the links of that disk
        budgets.append(_raised(other, _enough(needs.short(other), other, follow), is_new=True))
    return budgets


def _raised(target: MachineModel, short: Sequence[tuple[int, int]], *, is_new: bool = False) -> str:
    """Return the flags that give the nodes of `short` their number of bytes.

    Args:
        is_new: whether the machine has no disk tier yet.
    """
    flags = []
    devices = max((nbytes for at, nbytes in short if at not in (0, target.last)), default=0)  # all devices have one size
    for at, nbytes in short:
        name, size = target.nodes[at][0], flag_size(nbytes)
        if name == RAM:
            flags.append(f"--ram {size}")
        elif at != target.last:
            device = "" if target.rates is None else format_devices(target.num_devices, devices, target.rates["sim"].flops)
            flags.append(f"--devices {device}" if device else f"--gpu-memory {flag_size(devices + target.workspace)}")
        elif target.is_imaginary:
            flags.append(f"--disk {size}")
        else:
            flags.append(f"--disk DIR with {size} free there" if is_new else f"--disk DIR:{size} in a directory with that much free space")
    return " and ".join(dict.fromkeys(flags))


def _enough(short: list[tuple[int, int]], target: MachineModel, anew: Callable[[MachineModel], RunConfig] | None) -> list[tuple[int, int]]:
    """Return (node, bytes) with which the step fits, rounded as in messages. Larger devices get larger tiles, so the step is checked in those."""
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
    """Return the nodes that are too small for a step, as `Needs.short` does.

    A long step is estimated from three minibatches: each further minibatch adds as many bytes as the third.
    """
    count = run.step.num_minibatches
    is_long = count > 3 and count * least_tasks(run) > MOST_WHOLE

    def needs_of(how: RunConfig, num_minibatches: int) -> Needs:
        step = capture(run, num_minibatches)
        return least_needs(step.plan, target, how.step.recompute, how.step.order, quick=not is_long, reading=step.reading)

    def estimated(how: RunConfig) -> Needs:
        if not is_long:
            return needs_of(how, count)
        two, three = needs_of(how, 2), needs_of(how, 3)
        total, passive = (last + (count - 3) * (last - before) for before, last in ((two.total, three.total), (two.passive, three.passive)))
        return replace(three, total=total, passive=passive)

    if is_long and run.step.order == AUTO:  # the plain order first, since that is quick; both estimates need the same order
        needs = estimated(run.in_order(SUBMISSION).recomputing(NONE))
        if needs.fits_last(target):
            return needs.short(target)
    return estimated(run).short(target)


def with_free_order(run: RunConfig) -> RunConfig:
    """Return the run for a changed step, which need not have the order given by --order: its order is free unless it is the submission order."""
    return run.in_order(SUBMISSION if run.step.order == SUBMISSION else AUTO)


def _smaller_minibatch(run: RunConfig, target: MachineModel) -> str:
    """Return the flag for a minibatch of one tile, or of one sequence, with which the step fits; "" if it fits with neither."""
    tile = run.model.tiling.minibatch_tile
    for size in sorted({size for size in (tile, 1) if size < run.step.minibatch}, reverse=True):
        changed = with_free_order(run.cut(minibatch=size, minibatch_tile=size))
        if not (_is_long(changed) or _short(changed, target)):
            return f"--minibatch {size}" + (f" --minibatch-tile {size}" if size != tile else "")
    return ""


def _smaller_tile(run: RunConfig, target: MachineModel, needs: Needs) -> str:
    """Return tile flags, halved one after another until the largest task fits, and the budgets to raise as well; "" if that does not help."""
    task, nbytes, changed = needs.largest, needs.task, run
    if nbytes > target.largest_node_nbytes << 2 * MOST_HALVED:
        return ""
    flags = dict[str, int]()
    for _ in range(MOST_HALVED):
        tiling = changed.model.tiling
        tiles = next((tiles for word, tiles in _TILES.items() if word in task.name), _OTHER_TILES)
        halves = []
        for flag in sorted(tiles, key=lambda flag: -getattr(tiling, flag)):  # the longest side first: one trial is enough as a rule
            trial = _halved(changed, flag)
            if trial is not None:
                halves.append((trial, flag, largest := _largest_task(trial), working_set(largest)))
                if halves[-1][-1] < nbytes:
                    break
        if not halves:
            return ""
        changed, flag, task, nbytes = min(halves, key=lambda half: half[-1])
        flags[flag] = getattr(changed.model.tiling, flag)
        if nbytes <= target.largest_node_nbytes:
            besides = _raised(target, _short(with_free_order(changed), target))
            return " ".join(f"--{flag.replace('_', '-')} {size}" for flag, size in flags.items()) + (f" and {besides}" if besides else "")
    return ""


def _halved(run: RunConfig, flag: str) -> RunConfig | None:
    """Return a run with a tile size halved; None if that is impossible, or makes the step too long to be captured for advice."""
    size = getattr(run.model.tiling, flag) // 2
    if flag == "head_tile":
        size -= size % (run.model.config.n_head // run.model.config.n_kv_head)
    if size < 1:
        return None
    trial = run.cut(**{flag: size})
    return None if _is_long(trial) else trial


def _largest_task(run: RunConfig) -> RecordedTask:
    """Return the task of a step with the largest working set, from a minibatch of a model with few layers."""
    config = run.model.config
    few = config.with_layers(min(config.n_layer, FEW_LAYERS))
    return largest_task(capture(run.with_model(config=few), 1).plan)


def _is_long(run: RunConfig) -> bool:
    """Return whether a step has too many tasks to run, or whether one of its minibatches has too many to be captured for advice."""
    return least_tasks(run) > MOST_TRIED or has_too_many_tasks(run)
