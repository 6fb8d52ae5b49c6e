"""Validation: loss per token, perplexity, and bits per byte, which compares models whose tokenizers differ; of labels the loss alone.

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
from ..engine.interface import Scorer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of a validation.

    Args:
        loss: nats per token.
        perplexity: exp(loss).
        bits_per_byte: bits per byte of text; None where the tokenizer is not known, or a token does not say its bytes.
        tokens: how many targets were scored.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int

    def figures(self) -> dict[str, float | None]:
        """Return the figures that metrics.jsonl adds to the line of the step."""
        return {"validation_loss": self.loss, "validation_bits_per_byte": self.bits_per_byte, "validation_tokens": self.tokens}

    def line_of_labels(self) -> str:
        """For stdout, of a model that predicts labels."""
        return f"loss {self.loss:.4f} | {self.tokens} labels"

    def line(self) -> str:
        """For stdout."""
        bits = "" if self.bits_per_byte is None else f" | {self.bits_per_byte:.3f} bits/byte"
        return f"loss {self.loss:.4f} | perplexity {self.perplexity:.2f}{bits} | {self.tokens} tokens"


def evaluate(
    scorer: Scorer, batches: Iterable[Batch], byte_lengths: npt.NDArray[np.int64] | None, stopped: Callable[[], bool] = lambda: False
) -> Evaluation | None:
    """Score `batches`.

    Args:
        byte_lengths: (V,) bytes that each id stands for.
        stopped: asked before each batch.

    Returns:
        The result, or None when it was stopped before the last batch.
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
