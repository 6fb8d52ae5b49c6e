"""Loss and perplexity of a trained model on a text.

Every token but the first is scored once, in windows of whole sequences that do not overlap. A token sees the tokens before it in its window, as in
training, so the first tokens of a window have little context. A last window that is not full counts as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import isfinite

import numpy as np

from scheduler import Runtime

from ..data.batch import Batch
from ..data.token_file import TokenFile
from ..data.tokenizer import Tokenizer
from ..engine.evaluation import Evaluation, evaluate
from ..engine.recorded import Inference
from ..errors import DataError, Diverged
from ..tiling.model_tiling import default_tiling
from .pretrained import ModelSource


def perplexity(
    source: ModelSource,
    runtime: Runtime,
    file: TokenFile,
    tokenizer: Tokenizer | None,
    *,
    length: int,
    batch: int,
    select: int = -1,
    dtype: str = "auto",
    progress: Callable[[int, int], None] = lambda scored, total: None,
) -> Evaluation:
    """Score a file of tokens.

    Args:
        tokenizer: tokenizer whose token lengths give bits per byte; None for no such figure.
        length: number of tokens of a window, at most the model's longest sequence.
        batch: number of windows scored at once.
        select: number of windows to score, from the first; -1 for all.
        dtype: element type, as for `ModelSource.build`.
        progress: function called after each batch with the number of windows scored so far, and the number of all windows.

    Raises:
        DataError: the file holds fewer than two tokens.
        Diverged: the loss is not finite.
    """
    config = source.config
    if file.num_tokens < 2:
        raise DataError(f"{file.name} holds {file.num_tokens} tokens, and scoring takes at least 2", "use a longer text")
    length = min(length, file.num_tokens - 1)
    tiling = default_tiling(config, batch, length, device="cuda" if runtime.has_gpus else "cpu")
    scorer = Inference(source.build(runtime, tiling, dtype), runtime, length)
    batches = _told(windows(file, length, batch, select), batch, num_windows(file, length, select), progress)
    evaluation = evaluate(scorer, batches, tokenizer.byte_lengths() if tokenizer else None)
    assert evaluation is not None  # nothing stops it
    if not isfinite(evaluation.loss):
        raise Diverged(
            f"the loss of {file.name} is {evaluation.loss}: weights are not finite, or too large for the element type",
            "use an earlier checkpoint, or --dtype fp32",
        )
    return evaluation


def num_windows(file: TokenFile, length: int, select: int = -1) -> int:
    """Return the number of windows of `length` tokens in a file, at most `select` if that is positive."""
    total = -(-(file.num_tokens - 1) // length)
    return min(total, select) if select > 0 else total


def _told(batches: Iterable[Batch], size: int, total: int, progress: Callable[[int, int], None]) -> Iterator[Batch]:
    """Yield the batches, and report each to `progress` when the next one is requested."""
    for number, batch in enumerate(batches, 1):
        yield batch
        progress(min(number * size, total), total)


def windows(file: TokenFile, length: int, batch: int, select: int = -1) -> Iterator[Batch]:
    """Yield batches of `batch` windows of a file, in order; positions that the last windows lack have targets -1.

    Args:
        select: number of windows, from the first; -1 for all.
    """
    total = num_windows(file, length, select)
    for first in range(0, total, batch):
        tokens = np.zeros((batch, length), np.int32)
        targets = np.full((batch, length), -1, np.int32)
        for row, number in enumerate(range(first, min(first + batch, total))):
            ids = file.window(number * length, min(length + 1, file.num_tokens - number * length))
            tokens[row, : len(ids) - 1], targets[row, : len(ids) - 1] = ids[:-1], ids[1:]
        yield Batch.causal(tokens, targets)
