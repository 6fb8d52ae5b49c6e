"""``--attention auto``: choice between nntask's and cuDNN's kernels for attention, by time on the card, before a run begins.

Each shape of attention in a step is timed with both, forward and backward, on one device of each kind of card. cuDNN is chosen if it supports every
shape, takes less than `GAIN` of the seconds, and leaves room for the whole step next to its workspace; the seconds do not include the cost of moving
data. Otherwise, and if cuDNN cannot be used, nntask's kernels are chosen. Results differ in their last bits, so the choice holds for all devices of
the run and is written into its settings; a resumed run keeps it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import scheduler
from scheduler.machine import RecordedTask
from scheduler.planning import SUBMISSION, largest_device_bytes
from tiles.kernels import ATTENTION_WORKSPACE_NBYTES, Pair, WholeShape, shape_of, takes_heads

from ..config.run_config import RunConfig
from ..errors import StorageError
from ..hardware.gpu_attention import AttentionSeconds, time_attention, why_not_cudnn
from ..hardware.gpus import GpuPlan
from ..hardware.machine_model import this_machine
from ..hardware.machine_spec import with_cudnn
from ..io.regular_file import read_text
from ..io.units import format_size
from ..planning.memory_fit import capture, no_collections, order_on
from .run_directory import PLAN

GAIN: Final = 0.95
"""Ratio of cuDNN's seconds to those of our kernels below which cuDNN is chosen. At about equal speed, kernels that need no library are better."""
_KEY: Final = "gpu_attention"
ATTENTION: Final = "attention"
FORWARD: Final = "whole_attention"
BACKWARD: Final = "whole_attention_backward"

Measure = Callable[[GpuPlan, str, Mapping[WholeShape, tuple[int, int]]], AttentionSeconds]


class ChosenAttention(NamedTuple):
    """Run with its choice of attention.

    Attributes:
        run: run with the chosen attention in its settings.
        figures: figures of the choice for plan.json; those already in plan.json if the run is resumed, and empty if there was no choice.
    """

    run: RunConfig
    figures: Mapping[str, Any]


def choose_attention(run: RunConfig, say: Callable[[str], None], measure: Measure = time_attention) -> ChosenAttention:
    """Choose the faster attention for a run with ``--attention auto``, and print the choice with its reason.

    Args:
        run: run whose attention may be open.
        say: function that prints a line.
        measure: timing function, such as `time_attention`.

    Raises:
        DoesNotFit, UsageError: a card cannot be opened.
        StorageError: a card stopped working.
    """
    if run.settings.model.attention != "auto":
        return ChosenAttention(run, {} if run.start.resumed is None else _recorded(run.directory))
    measured = _measured(run, measure)
    is_faster = measured.own is not None and measured.cudnn is not None and measured.cudnn < GAIN * measured.own
    own, cudnn = _computed_by(run, "own"), _computed_by(run, "cudnn") if is_faster else None
    why_not = measured.why_not if cudnn is None else _shortage(cudnn)
    chosen = own if cudnn is None or why_not else cudnn
    say(f"--attention auto: {_words(measured._replace(why_not=why_not), is_faster=is_faster)}")
    seconds = {"own_seconds": measured.own, "cudnn_seconds": measured.cudnn}
    return ChosenAttention(chosen, {_KEY: {"chosen": chosen.settings.model.gpu_attention, **seconds, "why_not_cudnn": why_not}})


def _recorded(directory: Path) -> dict[str, Any]:
    """Return the figures of the choice in plan.json of a run; empty if there are none."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):  # the file is for people; a run needs none
        figures = json.loads(read_text(directory / PLAN)).get(_KEY)
        return {_KEY: figures} if figures else {}
    return {}


def told_attention(tasks: Sequence[RecordedTask]) -> str:
    """Return a sentence on cuDNN's tasks in a step of a run with cuDNN attention, or the reason for which there are none."""
    count = sum(task.name in (FORWARD, BACKWARD) for task in tasks)
    if not count:
        return f"attention: cuDNN computes none of it: {_why_none(tasks)}"
    size = format_size(ATTENTION_WORKSPACE_NBYTES)
    return f"attention: cuDNN computes it in {count} tasks a step, with {size} of each GPU's budget as workspace"


def _measured(run: RunConfig, measure: Measure) -> AttentionSeconds:
    model, gpus = run.model, run.machine.gpus
    why = why_not_cudnn(gpus)
    if not why and model.dtype != "bf16":
        why = f"it computes in bf16, and this is --dtype {model.dtype}"
    if why:
        return AttentionSeconds(None, None, why)
    with no_collections():
        tasks = capture(run.with_model(library=True), 1).plan.tasks
    counts = _shapes(tasks, run.step.num_minibatches)
    if not counts:
        return AttentionSeconds(None, None, _why_none(tasks))
    try:
        return measure(gpus, model.dtype, counts)
    except scheduler.DeviceFailed as error:
        raise StorageError(str(error)) from error


def _shortage(run: RunConfig) -> str:
    """Return why cuDNN's workspace would force a step to move data; "" if it would not."""
    if run.step.update_on == "auto":
        run = run.updating_on("device")  # the updater of a step that moves nothing
    target = this_machine(run.machine)
    with no_collections():
        plan = order_on(capture(run, frozen_base=run.start.frozen_base).plan, SUBMISSION, target, target.policy).plan
    needed = largest_device_bytes(plan, len(target.compute_nodes))
    left = min(target.nodes[at][1] for at in target.compute_nodes if at)
    if needed <= left:
        return ""
    return (
        f"the step needs {format_size(needed)} of a GPU to move nothing, and cuDNN's workspace leaves {format_size(left)} "
        "(raise --gpu-memory, or ask for --attention cudnn)"
    )


def _shapes(tasks: Iterable[RecordedTask], num_minibatches: int) -> dict[WholeShape, tuple[int, int]]:
    """Return the number of forward and backward passes of a step for each shape, from the tasks of one minibatch."""
    found: Counter[tuple[WholeShape, str]] = Counter()
    for task in tasks:
        if task.name in (FORWARD, BACKWARD):
            (q, _), (k, _), at = task.accesses[0], task.accesses[1], cast(Pair, task.constants["at"])
            found[shape_of(cast(Any, q.spec.view).shape, cast(Any, k.spec.view).shape, at.head_size, at.scale, at.causal), task.name] += (
                num_minibatches
            )
    return {shape: (found[shape, FORWARD], found[shape, BACKWARD]) for shape in dict.fromkeys(shape for shape, _ in found)}


def _why_none(tasks: Iterable[RecordedTask]) -> str:
    """Return why cuDNN computes no attention of a step: for each kind of attention the first rule that it breaks, with the value."""
    pairs = ((task, cast(Pair, task.constants["at"])) for task in tasks if task.name == ATTENTION)
    found = dict.fromkeys(_broken_rule(task, at) for task, at in pairs if at.q_start == at.k_start == 0)  # one task of each attention
    return "; ".join(found) or "the model has none"


def _broken_rule(task: RecordedTask, at: Pair) -> str:
    """Return the first rule of cuDNN attention (`tiles.ops.attention`) that a task of our attention breaks."""
    (q, _), (k, _), how = task.accesses[0], task.accesses[1], at.pattern
    buckets = how.buckets.count if how.buckets else 0
    rules = [
        (at.p > 0, f"it takes no dropout, got {at.p:g} (--dropout)"),
        (not takes_heads(at.head_size), f"it takes heads of up to 128 features in steps of 8, got {at.head_size}"),
        (buckets > 0, f"it adds no biases of distances to scores, got {buckets:,} of them"),
        (how.window > 0, f"it takes no windows, got one of {how.window:,} tokens"),
        (how.cap > 0, f"it takes no caps of scores, got {how.cap:g}"),
        (how.documents > 0, "it keeps no documents apart, and rows hold several texts or padding"),
    ]
    cut = ((cast(Any, handle.spec.view).shape[1], length) for handle, length in ((q, at.length), (k, at.row)))
    rules += [(tile < length, f"it takes whole sequences, and tiles have {tile:,} of {length:,} tokens (--seq-tile)") for tile, length in cut]
    return next((rule for is_broken, rule in rules if is_broken), "it takes bf16 on GPUs")


def _computed_by(run: RunConfig, who: str) -> RunConfig:
    """Return the run with attention computed by `who`, "own" or "cudnn"."""
    is_cudnn = who == "cudnn"
    settings = replace(run.settings, model=replace(run.settings.model, attention="cudnn" if is_cudnn else "flash"))
    machine = with_cudnn(run.machine) if is_cudnn else run.machine
    return replace(run.with_model(library=is_cudnn).on(machine), settings=settings)


def _words(found: AttentionSeconds, *, is_faster: bool) -> str:
    if found.own is None or found.cudnn is None:
        seconds = "" if found.own is None else f", {found.own:.3g} s a step"
        return f"nntask's kernels{seconds}; not cuDNN: {found.why_not}"
    own, cudnn = f"{found.own:.3g} s a step of nntask's kernels", f"{found.cudnn:.3g} s a step"
    if found.why_not:
        return f"nntask's kernels; not cuDNN, {cudnn} compared with {own}: {found.why_not}"
    return f"cuDNN, {cudnn} compared with {own}" if is_faster else f"nntask's kernels; cuDNN is not clearly faster, {cudnn} compared with {own}"
