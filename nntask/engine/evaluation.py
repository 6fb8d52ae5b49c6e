"""Validation: loss per token, perplexity, and bits per byte, which compares models with different tokenizers; for labels, only the loss.

A step of validation sums losses and keeps no scores, so there is no accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..data.batch import Batch
from .interface import Scorer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of a validation.

    Args:
        loss: mean loss in nats per token.
        perplexity: exp(loss).
        bits_per_byte: loss in bits per byte of text; None if the tokenizer, or the bytes of a token, are unknown.
        tokens: number of targets that were scored.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int

    def figures(self) -> dict[str, float | None]:
        """Return the figures that metrics.jsonl adds to the line of the step."""
        return {"validation_loss": self.loss, "validation_bits_per_byte": self.bits_per_byte, "validation_tokens": self.tokens}

    def line(self) -> str:
        """Return the line for stdout."""
        bits = "" if self.bits_per_byte is None else f" | {self.bits_per_byte:.3f} bits/byte"
        return f"loss {self.loss:.4f} | perplexity {self.perplexity:.2f}{bits} | {self.tokens} tokens"


def evaluate(
    scorer: Scorer, batches: Iterable[Batch], byte_lengths: npt.NDArray[np.int64] | None, stopped: Callable[[], bool] = lambda: False
) -> Evaluation | None:
    """Score `batches`.

    Args:
        byte_lengths: (V,) number of bytes of each id; None if it is unknown.
        stopped: function called before each batch; it returns whether to stop.

    Returns:
        The result, or None if it was stopped before the last batch.
    """
    total, tokens, nbytes = 0.0, 0, 0
    for batch in batches:
        if stopped():
            return None
        total += scorer.evaluate(batch)
        scored: npt.NDArray[Any] = batch.targets[batch.targets >= 0]
        tokens += scored.size
        if byte_lengths is not None:
            nbytes += int(byte_lengths[scored].sum())
    loss = total / tokens if tokens else math.nan
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return Evaluation(loss, perplexity, total / math.log(2) / nbytes if nbytes else None, tokens)
