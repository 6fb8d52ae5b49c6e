"""Checks that token ids are inside the model's vocabulary. A tokenizer may have more ids than the model, as long as they do not occur."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .tokenizer import Tokenizer


def check_known(ids: npt.NDArray[np.integer], tokenizer: Tokenizer, vocab_size: int, where: str) -> None:
    """Check that ids are inside the model's vocabulary.

    Args:
        ids: (n,) token ids.
        tokenizer: tokenizer that produced the ids.
        vocab_size: number of ids in the model's vocabulary.
        where: origin of the ids, which becomes the subject of the error message.

    Raises:
        DataError: an id is not in the vocabulary.
    """
    if len(ids) and int(ids.max()) >= vocab_size:
        raise DataError(unknown(int(ids[np.argmax(ids >= vocab_size)]), tokenizer, vocab_size, where))


def unknown(token: int, tokenizer: Tokenizer, vocab_size: int, where: str) -> str:
    """Return the error message about an id outside the vocabulary; the other arguments are those of `check_known`."""
    return (
        f"{where} has the token {tokenizer.word(token)} with the id {token}, and the model's vocabulary has the ids 0 to {vocab_size - 1}; "
        "leave it out of the text, or use the tokenizer that belongs to the model"
    )
