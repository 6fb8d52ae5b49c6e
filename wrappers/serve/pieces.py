"""The characters of a text as its tokens come: whole characters only, up to the first stop word and never a piece of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from nntask.inference import Spelling

CONTEXT: Final = 8
"""Ids in front of a text that decide how its first ones are spelled."""


class TextPieces:
    """One text.

    Args:
        decode: ids -> text.
        prompt: ids in front.
        stops: words that end the text; they are not part of it.

    Attributes:
        is_stopped: whether a stop word has come.
        num_spelled: characters of all tokens so far.
        num_told: those of them that `add` and `end` have returned.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._spelling, self._stops = Spelling(decode, prompt[-CONTEXT:]), stops
        self._held = ""
        self.is_stopped, self.num_spelled, self.num_told = False, 0, 0

    def add(self, token: int) -> str:
        """The characters that are certain with one more token, beyond those of earlier calls."""
        self._spelling.ids.append(token)
        return self._certain(self._spelling.news())

    def end(self) -> str:
        """The characters that were held back, when no token follows."""
        found = self._certain(self._spelling.news(is_last=True))
        rest, self._held = "" if self.is_stopped else self._held, ""
        self.num_told += len(rest)
        return found + rest

    def _certain(self, text: str) -> str:
        """What is no piece of a stop word."""
        self._held += text
        self.num_spelled += len(text)
        ends = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self.is_stopped = True
            found, self._held = self._held[: min(ends)], ""
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
            found = self._held[: len(self._held) - keep]
            self._held = self._held[len(found) :]
        self.num_told += len(found)
        return found


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins, at most all but one of it."""
    return next((count for count in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:count])), 0)
