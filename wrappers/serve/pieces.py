"""Streaming of a text: returns complete characters only, up to the first stop word, and never a part of a stop word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from nntask.inference import Spelling

CONTEXT: Final = 8
"""Number of ids before a text that decide how its first tokens are spelled."""


class TextPieces:
    """The characters of one text, released as its tokens arrive.

    Args:
        decode: ids -> text.
        prompt: ids before the text.
        stops: words that end the text; they are not part of it.

    Attributes:
        is_stopped: whether a stop word has occurred.
        num_spelled: number of characters of all tokens so far.
        num_told: number of characters that `add` and `end` have returned.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._spelling, self._stops = Spelling(decode, prompt[-CONTEXT:]), stops
        self._held = ""
        self.is_stopped, self.num_spelled, self.num_told = False, 0, 0

    def add(self, token: int) -> str:
        """Add a token and return the characters that have become certain."""
        self._spelling.ids.append(token)
        return self._certain(self._spelling.news())

    def end(self) -> str:
        """Return the characters that were held back, when no token follows."""
        found = self._certain(self._spelling.news(is_last=True))
        rest, self._held = "" if self.is_stopped else self._held, ""
        self.num_told += len(rest)
        return found + rest

    def _certain(self, text: str) -> str:
        """Return the held characters and `text`, up to a possible beginning of a stop word."""
        self._held += text
        self.num_spelled += len(text)
        ends = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self.is_stopped = True
            certain, self._held = self._held[: min(ends)], ""
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
            certain = self._held[: len(self._held) - keep]
            self._held = self._held[len(certain) :]
        self.num_told += len(certain)
        return certain


def _overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of `text` that are a proper beginning of `stop`."""
    return next((count for count in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:count])), 0)
