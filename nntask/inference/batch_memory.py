"""Memory check of a running batch: ``nntask serve`` refuses at start what would fail later, and limits the pages of its cache.

The check counts the largest steps, with all pages in use: a step of one token of every text, and a step of a piece of a prompt with
log-probabilities. The scores that the steps of fewer texts keep are added. With a disk tier the cache may be larger than host memory. Without one it
has all pages that fit, and texts wait until pages are free.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from scheduler import CapturingRuntime
from tiles import TileTensor

from ..errors import DoesNotFit
from ..hardware.machine_model import this_machine
from ..hardware.machine_spec import MachineSpec, check_budgets
from ..models.language import LanguageModel
from ..planning.needs import Needs, shortage
from ..tiling.model_tiling import ModelTiling
from .memory_check import needs_of_step, what_to_raise
from .pretrained import ModelSource
from .row_steps import PROMPT_ROWS, BatchShape, check_joins, emit_rows, pages_for, token_rows

_SCORE_NBYTES: Final = 4
_INSTANCES: Final = 2
"""Number of instances of a recorded step; each has scores of its own."""


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
        found = (_needs(source, tiling, dtype, machine, shape, num_rows) for num_rows in (most, PROMPT_ROWS))
        return max((needs for needs in found if not needs.fit(target)), key=lambda needs: (needs.last(target), needs.task), default=None)

    if lacking(shape) is None:
        return shape
    fewest = replace(shape, num_pages=shape.num_pages if is_exact else min(shape.most, shape.num_pages))
    if (needs := lacking(fewest)) is not None:
        smaller = "lower --slots or --max-context, or " if not is_exact else "lower --cache-tokens, or "
        size = f"{shape.slots} texts over a cache of {fewest.num_pages * shape.page} tokens"
        raise DoesNotFit(f"{size}: {shortage(target, needs)}; {smaller}{what_to_raise(target, needs)}")
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

    kept = sum(token_rows(shape.slots, has_gpus=machine.has_gpus)[:-1]) * source.config.vocab_size * _SCORE_NBYTES * _INSTANCES
    return needs_of_step(source, tiling, dtype, machine, emit, data=data, kept=kept)
