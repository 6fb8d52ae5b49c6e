"""Encoding of single texts and pairs as token ids, with the tokenizer's template around them, truncated as in transformers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .json_lines import clean
from .special_tokens import END_OF_TEXT
from .token_rules import Ids, Offsets, cut_lengths
from .tokenizer import BpeTokenizer, Tokenizer


class RowEncoder:
    """Encoder of the texts of rows with a tokenizer.

    If the tokenizer's template adds no ids to a text, or the tokenizer is plain bytes, the end-of-text id is appended to each text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules = tokenizer.rules if isinstance(tokenizer, BpeTokenizer) else None
        has_template = self._rules is not None and self._rules.num_around(is_pair=False) > 0
        self._end = [] if has_template else [tokenizer.end_of_text]

    def text(self, text: str, limit: int) -> Ids:
        """Return the (n,) ids of a text, with n at most `limit`."""
        return self.row(text, None, limit)[0]

    def row(self, first: str, second: str | None, limit: int) -> tuple[Ids, Ids, bool]:
        """Return the (n,) ids of a text or pair, with n at most `limit`; the type of each, 0 or 1 for the second text; and whether a text was cut.

        The longer text is cut first.
        """
        if self._rules is None or self._end:
            return self._plain(first, second, limit)
        return self._rules.row(first, second, limit)

    def with_offsets(self, text: str) -> tuple[Ids, npt.NDArray[np.int64], Offsets]:
        """Encode a text without a template.

        Returns:
            The (n,) ids; the (n,) number of the first character of each; and the first and last (excluded) character of each.
        """
        if self._rules is None:
            return _byte_offsets(self._tokenizer, text)
        ids, offsets = self._rules.with_offsets(text)
        return ids, np.array([start for start, _ in offsets], np.int64), offsets

    def answers(self, text: str, answers: Iterable[tuple[int, int]]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Return the ids of a rendered conversation, and whether each is learnt, both (n,); `answers` are ranges of characters, ends excluded."""
        ids, starts, offsets = self.with_offsets(clean(text))
        is_answer = np.zeros(len(ids), np.bool_)
        for begin, end in answers:
            is_answer |= (starts >= begin) & (starts < end)
            first = int(np.searchsorted(starts, begin))
            while first and offsets[first - 1][1] > begin:  # a token that begins before the answer, such as a space with its first word
                first -= 1
                is_answer[first] = True
        return ids, is_answer

    def _plain(self, first: str, second: str | None, limit: int) -> tuple[Ids, Ids, bool]:
        ids = [each.astype(np.int32) for each in self._tokenizer.encode([first] if second is None else [first, second])]
        before = (len(ids[0]), len(ids[1]) if len(ids) > 1 else 0)
        lengths = cut_lengths(*before, max(limit - len(ids), 0))
        end = np.array(self._end, np.int32)
        rows = [np.concatenate([each[:length], end]) for each, length in zip(ids, lengths, strict=False)]
        types = np.repeat(np.arange(len(rows), dtype=np.int32), [len(row) for row in rows])
        return np.concatenate(rows)[:limit], types[:limit], sum(before) > sum(lengths)


def conversation_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a rendered conversation, equal to those of training: without a begin-of-text id beyond the template's own."""
    ids = tokenizer.encode([text])[0] if isinstance(tokenizer, BpeTokenizer) else _byte_offsets(tokenizer, text)[0]
    return [int(each) for each in ids]


def _byte_offsets(tokenizer: Tokenizer, text: str) -> tuple[Ids, npt.NDArray[np.int64], Offsets]:
    """Return the ids of plain bytes, with the offsets of `RowEncoder.with_offsets`; an end-of-text word becomes one id if the tokenizer has it.

    Templates write the end of text as a word, and the tokenizer of an exported run reads it as one id.
    """
    end = tokenizer.end_of_text
    ids, starts, position = [], [], 0
    for number, piece in enumerate(text.split(END_OF_TEXT) if end > ord("\n") else [text]):
        if number:
            ids.append(np.array([end], np.int32))
            starts.append(np.array([position], np.int64))
            position += len(END_OF_TEXT)
        ids.append(tokenizer.encode([piece])[0].astype(np.int32))
        starts.append(np.repeat(np.arange(position, position + len(piece)), [len(each.encode("utf-8", "replace")) for each in piece]))
        position += len(piece)
    offsets = np.concatenate(starts)
    return np.concatenate(ids), offsets, [(int(start), int(start) + 1) for start in offsets]
