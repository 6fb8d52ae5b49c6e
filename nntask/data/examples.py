"""Which sequences a source of data gives for what is learnt."""

from __future__ import annotations

from .objectives import Objective
from .sampler import Examples, Windows
from .token_file import TokenFile
from .tokenizer import Tokenizer

Source = TokenFile


def examples_of(source: Source, objective: Objective, tokenizer: Tokenizer | None, vocab_size: int, seed: int) -> Examples:
    """The sequences of a source.

    Args:
        source: training or validation data.
        tokenizer: the tokenizer that made the ids; None if it is unknown.
        vocab_size: number of ids in the model's vocabulary.
        seed: of random choices.

    Raises:
        DataError: the tokenizer lacks a token that the objective takes.
    """
    return Windows(source, objective.length)
