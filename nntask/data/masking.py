"""Masked language models: some tokens of a sequence are hidden, and predicted from all others (Devlin et al., 2018, BERT, section 3.1).

Each token is chosen independently with a given probability; special tokens are never chosen. Of the chosen tokens, 80 % become the mask token, 10 % a
random token, and 10 % stay. The choice depends on seed, epoch, sequence number and position alone (`draws`); in validation it never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .draws import uniforms
from .known_ids import check_known
from .objectives import IGNORED
from .sampler import Windows
from .token_file import TokenFile
from .tokenizer import BpeTokenizer, Tokenizer

_CHOSEN, _FATE, _WORD = 0, 1, 2
_MASKED: Final = 0.8
_REPLACED: Final = 0.9


@dataclass(frozen=True, slots=True)
class Masking:
    """Parameters of the masking, and the masking of a sequence.

    Args:
        mask: id of the mask token.
        special: ids that are never chosen.
        num_ids: number of ids from which a random token is drawn.
        probability: probability that a token is chosen.
        seed: seed of the run.
    """

    mask: int
    special: npt.NDArray[np.int32]
    num_ids: int
    probability: float
    seed: int

    def hidden(self, ids: npt.NDArray[np.int32], epoch: int, sequence: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the masked tokens of a sequence and its targets, both (T,) int32; targets of tokens that were not chosen are -1."""
        chosen, fate, word = (uniforms(self.seed, epoch, sequence, purpose, len(ids)) for purpose in (_CHOSEN, _FATE, _WORD))
        picked = (chosen < self.probability) & ~np.isin(ids, self.special)
        shown = np.where(picked & (fate < _MASKED), np.int32(self.mask), ids)
        replaced = picked & (fate >= _MASKED) & (fate < _REPLACED)
        shown = np.where(replaced, (word * self.num_ids).astype(np.int32), shown)
        return shown.astype(np.int32), np.where(picked, ids, np.int32(IGNORED)).astype(np.int32)


def masking_of(tokenizer: Tokenizer | None, vocab_size: int, probability: float, seed: int) -> Masking:
    """Return the masking for a tokenizer.

    Args:
        tokenizer: tokenizer of the data; None if it is unknown.
        vocab_size: number of ids in the model's vocabulary.
        probability: probability that a token is chosen.
        seed: seed of the run.

    Raises:
        DataError: the tokenizer is unknown, or has no mask token, or one outside the model's vocabulary.
    """
    mask = None if tokenizer is None else tokenizer.special.mask
    if tokenizer is None or mask is None:
        raise DataError(
            "a masked language model needs a mask token, and the tokenizer of the data has none or is not known",
            "name the model's own with --tokenizer-path DIR, or copy its tokenizer_config.json to the directory of its tokenizer.json",
        )
    check_known(np.array([mask]), tokenizer, vocab_size, "every batch of hidden tokens")
    return Masking(mask, special_ids(tokenizer), min(tokenizer.vocab_size, vocab_size), probability, seed)


def special_ids(tokenizer: Tokenizer) -> npt.NDArray[np.int32]:
    """Return the (n,) ids of special tokens, which represent no text."""
    found = set(tokenizer.special.eos) | ({tokenizer.special.bos} - {None})
    if isinstance(tokenizer, BpeTokenizer):
        found |= {index for index, token in tokenizer.inner.get_added_tokens_decoder().items() if token.special}
    return np.array(sorted(each for each in found if each is not None), np.int32)


class MaskedWindows(Windows):
    """Sequences of a token file with a masking applied; sequence i is tokens [iT, (i+1)T)."""

    names: Sequence[str] = ("tokens", "targets", "factor")
    _num_ahead = 0

    def __init__(self, file: TokenFile, length: int, masking: Masking) -> None:
        super().__init__(file, length)
        self._masking = masking

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """Return tokens and targets, (n, T) int32 each."""
        tokens = self._windows(numbers)
        targets = np.empty_like(tokens)
        for row, number in enumerate(numbers):
            tokens[row], targets[row] = self._masking.hidden(tokens[row], epoch, int(number))
        return {"tokens": tokens, "targets": targets}
