"""Predictions of a masked language model for the masks of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import DataError, UsageError
from ..models.language import LanguageModel
from ..nn.autograd import no_grad
from .pretrained import TextIds


@dataclass(frozen=True, slots=True)
class FilledMask:
    """Predictions for one mask of a text.

    Args:
        position: index of the mask among the text's ids, from 0.
        tokens: most probable ids, best first.
        probabilities: probabilities of `tokens`.
    """

    position: int
    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]


def fill(model: LanguageModel, ids: TextIds, text: Sequence[int], count: int = 5) -> list[FilledMask]:
    """Return the `count` most probable tokens for each mask of a text; each mask is predicted on its own.

    Args:
        text: ids, with masks among them.

    Raises:
        DataError: the tokenizer has no mask token.
        UsageError: the text has no mask, or is longer than the model's context.
    """
    mask, limit = ids.tokenizer.special.mask, model.config.n_positions
    if mask is None:
        raise DataError("a masked language model fills masks, and its tokenizer has no mask token", "use the tokenizer that it was trained with")
    if len(text) > limit:
        raise UsageError(f"the prompt has {len(text)} tokens, more than the model's context of {limit}", "shorten it")
    positions = [at for at, each in enumerate(text) if each == mask]
    if not positions:
        word = ids.tokenizer.word(mask)
        raise UsageError("a masked language model fills masks, and the prompt has none", f"write {word} where a word should be predicted")
    tokens = model.inputs(1, len(text), ("tokens",))["tokens"]
    tokens.write(np.array([text], np.int32))
    model.eval()
    with no_grad():
        scores = model.logits(tokens).read()[0, positions, : ids.vocab_size].astype(np.float64)  # (masks, V)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    best = np.argsort(-shares, axis=1, kind="stable")[:, :count]
    return [
        FilledMask(at, tuple(int(token) for token in row), tuple(float(share[token]) for token in row))
        for at, row, share in zip(positions, best, shares, strict=True)
    ]
