"""Text from a model, one token after another.

Every token recomputes the whole context. Chance is a counter: token number i of a seed draws the same uniform number on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.floating[Any]]]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: scores are divided by it; 0 takes the best token always.
        top_k: only the k best tokens; 0 for all.
        top_p: only the best tokens that together have this probability; 1 for all.
        seed: of the draws.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def choose(logits: npt.NDArray[np.floating[Any]], how: Sampling, draw: float) -> int:
    """The next token.

    Args:
        logits: (V,) scores.
        draw: uniform in [0, 1).
    """
    scores = np.asarray(logits, np.float64)
    if how.temperature == 0:
        return int(np.argmax(scores))
    order = np.argsort(-scores, kind="stable")
    if how.top_k:
        order = order[: how.top_k]
    weights = np.exp((scores[order] - scores[order[0]]) / how.temperature)
    mass = np.cumsum(weights / weights.sum())
    if how.top_p < 1:
        order = order[: int(np.searchsorted(mass, how.top_p)) + 1]
        mass = mass[: len(order)]
    where = int(np.searchsorted(mass, draw * mass[-1], side="right"))
    return int(order[min(where, len(order) - 1)])


def sample(
    logits: Logits, prompt: Sequence[int], count: int, how: Sampling, *, context: int, vocab_size: int, stop: Collection[int] = ()
) -> Iterator[int]:
    """Yield at most `count` tokens that follow `prompt`.

    Args:
        logits: scores of the token after some ids.
        prompt: at least one id.
        context: most ids the model takes; older ones are dropped.
        vocab_size: ids the tokenizer knows; the model's scores beyond them are ignored.
        stop: end before any of these ids.
    """
    ids = list(prompt)
    for number in range(count):
        window = np.array(ids[-context:], np.int32)
        draw = float(np.random.Generator(np.random.PCG64([how.seed, number])).random())
        token = choose(logits(window)[:vocab_size], how, draw)
        if token in stop:
            return
        ids.append(token)
        yield token
