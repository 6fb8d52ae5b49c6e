"""Token ids that the model has a row for: a tokenizer may have more ids than the model, as long as none of those occurs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .tokenizer import Tokenizer


def check_known(ids: npt.NDArray[np.integer], tokenizer: Tokenizer, vocab_size: int, where: str) -> None:
    """Check that the model has a row for each of some ids.

    Args:
        ids: (n,) token ids.
        tokenizer: the tokenizer that made them.
        vocab_size: number of rows of the model.
        where: where the ids are from, the subject of the error message.

    Raises:
        DataError: it has none for one of them.
    """
    if len(ids) and int(ids.max()) >= vocab_size:
        raise DataError(unknown(int(ids[first_unknown(ids, vocab_size)]), tokenizer, vocab_size, where))


def first_unknown(ids: npt.NDArray[np.integer], vocab_size: int) -> int:
    """Return the position of the first id that the model has no row for."""
    return int(np.argmax(ids >= vocab_size))


def unknown(token: int, tokenizer: Tokenizer, vocab_size: int, where: str) -> str:
    """Return the sentence that refuses an id; arguments as of `check_known`."""
    return (
        f"{where} has the token {tokenizer.word(token)} with the id {token}, and the model's vocabulary has the ids 0 to {vocab_size - 1}; "
        "leave it out of the text, or use the tokenizer that belongs to the model"
    )
