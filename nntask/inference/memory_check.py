"""Memory check of inference: ``nntask generate``, ``perplexity`` and ``serve`` refuse at start what would run out of memory halfway.

The check counts one step, as `planning.memory_fit` counts a training step. All steps of scoring are equal; of generation, the last step of the
longest text counts, with the whole cache. The pass over the prompts comes before that and may need more; the runtime refuses it then.

The check of ``serve`` counts the largest steps with all pages in use: a token of every text, and a piece of a prompt with log-probabilities, with the
scores that the steps of fewer texts keep. Without a disk tier the cache has the pages that fit, and texts wait until pages are free.

A refusal names every budget that is too small with its least sufficient value, and the flags whose smallest value would make the work fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from scheduler import CapturingRuntime
from tiles import TileTensor

from ..errors import DoesNotFit
from ..hardware.machine_model import MachineModel, this_machine
from ..hardware.machine_spec import MachineSpec, check_budgets
from ..models.language import LanguageModel
from ..nn.autograd import no_grad
from ..planning.fit_advice import more_memory
from ..planning.memory_fit import needs_of, no_collections, untouched
from ..planning.needs import Needs, shortage
from ..tiling.model_tiling import ModelTiling, default_tiling
from .generator import attended
from .pretrained import ModelSource
from .row_steps import PROMPT_ROWS, BatchShape, check_joins, emit_rows, pages_for, token_rows

_SCORE_NBYTES: Final = 4
_INSTANCES: Final = 2
"""Number of instances of a recorded step; each has scores of its own."""


def check_memory(
    source: ModelSource, tiling: ModelTiling, dtype: str, machine: MachineSpec, *, batch: int, length: int, prompt_length: int, num_beams: int = 1
) -> None:
    """Check that texts can be written to their ends. The check takes no memory, and 0.3 s for gpt2-large.

    Args:
        dtype: element type, as for `ModelSource.build`.
        batch: number of texts at a time.
        length: number of tokens of the longest text in the cache.
        prompt_length: number of tokens of the longest prompt. The cache has this length if a text has a single new token; with an encoder, this is
            the encoder's input.
        num_beams: number of beams of each text.

    Raises:
        DoesNotFit: a budget is too small; the message has the shortage.
    """

    def emit(model: LanguageModel, runtime: CapturingRuntime, batch: int, length: int, num_beams: int) -> TileTensor:
        cache = model.cache(batch, length, num_beams)
        tokens, positions = cache.inputs(1)
        last = cache.last_position // cache.tile
        first = 0 if batch > 1 and cache.has_windows else last  # a text that has ended early keeps its window
        sources = cache.sources() if num_beams > 1 else None
        if model.start is not None:
            cache.attend_across(attended(model, [[0] * prompt_length] * batch, num_beams))
        with runtime.record(), no_grad():
            return model.continued_logits(tokens, cache.past(positions, range(first, last + 1), sources)).data

    def needs(batch: int, length: int, num_beams: int) -> Needs:
        return needs_of_step(source, tiling, dtype, machine, lambda model, runtime: emit(model, runtime, batch, length, num_beams))

    size: tuple[int, ...] = (batch, length, num_beams)
    smaller: dict[str, tuple[int, ...]] = {
        "--max-new-tokens": (batch, 1 if source.config.description.encoder else prompt_length, num_beams),
        "--batch": (1, length, num_beams),
        "--num-beams": (batch, length, 1),
    }
    beams = f"{num_beams} beams x " if num_beams > 1 else ""
    _check(machine, needs, size, f"{batch} x {beams}{length} tokens", smaller)


def check_scoring(source: ModelSource, dtype: str, machine: MachineSpec, *, batch: int, length: int) -> None:
    """Check that a text can be scored. The check takes no memory, and 0.3 s for gpt2-large.

    Args:
        dtype: element type, as for `ModelSource.build`.
        batch: number of windows at a time.
        length: number of tokens of a window.

    Raises:
        DoesNotFit: a budget is too small; the message has the shortage.
    """

    def emit(model: LanguageModel, runtime: CapturingRuntime, batch: int, length: int) -> TileTensor:
        given: Mapping[str, Any] = model.inputs(batch, length)
        model.eval()
        with runtime.record(), no_grad():
            return model(**given, reduction="sum").data

    def needs(batch: int, length: int) -> Needs:
        tiling = default_tiling(source.config, batch, length, device=machine.gpus.device_class)
        return needs_of_step(source, tiling, dtype, machine, lambda model, runtime: emit(model, runtime, batch, length))

    _check(machine, needs, (batch, length), f"{batch} x {length} tokens", {"--batch": (1, length), "--seq-len": (batch, 1)})


def needs_of_step(
    source: ModelSource,
    tiling: ModelTiling,
    dtype: str,
    machine: MachineSpec,
    emit: Callable[[LanguageModel, CapturingRuntime], TileTensor | None],
    *,
    data: Sequence[TileTensor] = (),
    kept: int = 0,
) -> Needs:
    """Return the memory needs of a model and a recorded step of it.

    Args:
        emit: function that records the step and returns its output, if it has one.
        data: tensors besides the model's, of which the step may touch a part; `emit` may add to them.
        kept: number of bytes that other steps keep.
    """
    with no_collections():
        runtime = CapturingRuntime(has_gpus=machine.has_gpus)
        model = source.build(runtime, tiling, dtype, read=False)
        emit(model, runtime)
        runtime.plan.idle = untouched(runtime.plan, [*model.tensors().values(), *data]) + kept
        return needs_of(runtime.plan, reading=runtime.reading_nbytes)


def _check(machine: MachineSpec, needs: Callable[..., Needs], size: tuple[int, ...], said: str, smaller: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a machine has the memory that work needs.

    Args:
        needs: function of a size that returns the needs of the work.
        size: size of the work, the arguments of `needs`.
        said: the size in words, for messages.
        smaller: flags -> the size with the smallest value of that flag.

    Raises:
        DoesNotFit: a budget is too small, or the machine cannot provide it.
    """
    check_budgets(machine)
    target, needed = this_machine(machine), needs(*size)
    if needed.fit(target):
        return
    flags = " or ".join(flag for flag, less in smaller.items() if less != size and needs(*less).fit(target))
    lack = shortage(target, needed)
    raise DoesNotFit(f"{said}: {lack.fact}", f"{f'lower {flags}, or ' if flags else ''}{what_to_raise(target, needed)}", shortage=lack)


def what_to_raise(target: MachineModel, needs: Needs) -> str:
    """Return advice: budgets that suffice, and those with a disk tier that replaces host memory."""
    return f"use {', or '.join(more_memory(target, needs))}"


def fitted(source: ModelSource, tiling: ModelTiling, dtype: str, machine: MachineSpec, shape: BatchShape, *, is_exact: bool = False) -> BatchShape:
    """Return the shape with as many of its pages as fit into the machine's memory. The check itself takes no memory.

    Args:
        dtype: element type, as for `ModelSource.build`.
        is_exact: whether fewer pages than `shape` has are refused.

    Raises:
        DoesNotFit: a budget is too small for the pages of one text; the message has the shortage.
        UsageError: texts of this model cannot run side by side.
    """
    check_joins(source.config)
    check_budgets(machine)
    target, most = this_machine(machine), token_rows(shape.slots, has_gpus=machine.has_gpus)[-1]

    def lacking(shape: BatchShape) -> Needs | None:
        """Return the needs of the largest step that does not fit; None if all steps fit."""
        steps = (_needs(source, tiling, dtype, machine, shape, num_rows) for num_rows in (most, PROMPT_ROWS))
        return max((needs for needs in steps if not needs.fit(target)), key=lambda needs: (needs.last(target), needs.task), default=None)

    if lacking(shape) is None:
        return shape
    fewest = replace(shape, num_pages=shape.num_pages if is_exact else min(shape.most, shape.num_pages))
    if (needs := lacking(fewest)) is not None:
        smaller = "lower --slots or --max-context, or " if not is_exact else "lower --cache-tokens, or "
        size = f"{shape.slots} texts over a cache of {fewest.num_pages * shape.page} tokens"
        lack = shortage(target, needs)
        raise DoesNotFit(f"{size}: {lack.fact}", f"{smaller}{what_to_raise(target, needs)}", shortage=lack)
    fits, not_so = fewest.num_pages, shape.num_pages
    while not_so - fits > max(1, fits // 16):
        middle = (fits + not_so) // 2
        fits, not_so = (fits, middle) if lacking(replace(shape, num_pages=middle)) else (middle, not_so)
    return replace(shape, num_pages=fits)


def _needs(source: ModelSource, tiling: ModelTiling, dtype: str, machine: MachineSpec, shape: BatchShape, num_rows: int) -> Needs:
    """Return the needs of a step over rows with scores, which is at least those of a step without.

    The step sees one tile of pages; further tiles are further tasks of the same size.
    """
    data: list[TileTensor] = []

    def emit(model: LanguageModel, runtime: CapturingRuntime) -> TileTensor | None:
        model.eval()
        pages = pages_for(model, runtime, shape)
        data.extend(pages.tensors)
        inputs = pages.inputs(num_rows)
        with runtime.record():
            return emit_rows(model, pages.past(inputs, 1), inputs, scores=True)

    scores_nbytes = sum(token_rows(shape.slots, has_gpus=machine.has_gpus)[:-1]) * source.config.vocab_size * _SCORE_NBYTES * _INSTANCES
    return needs_of_step(source, tiling, dtype, machine, emit, data=data, kept=scores_nbytes)
