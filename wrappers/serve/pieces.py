"""The characters of a text as its tokens come: whole characters only, up to the first stop word and never a piece of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

_HALF: Final = "\N{REPLACEMENT CHARACTER}"
_CONTEXT: Final = 8
"""Ids in front of a text that decide how its first ones are spelled."""


class TextPieces:
    """One text.

    Args:
        decode: ids -> text.
        prompt: ids in front.
        stops: words that end the text; they are not part of it.

    Attributes:
        is_stopped: whether a stop word has come.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self._ids = list(prompt[-_CONTEXT:])
        self._from, self._shown = 0, len(self._ids)  # ids before _shown are spelled; those from _from on are the context of the next
        self._held = ""
        self.is_stopped = False

    def add(self, token: int) -> str:
        """The characters that are certain with one more token, beyond those of earlier calls."""
        self._ids.append(token)
        return self._certain(self._spelled(is_last=False))

    def end(self) -> str:
        """The characters that were held back, when no token follows."""
        found = self._certain(self._spelled(is_last=True))
        rest, self._held = self._held, ""
        return found if self.is_stopped else found + rest

    def _spelled(self, *, is_last: bool) -> str:
        """The characters of ids that are not spelled yet; an incomplete character waits for its remaining bytes."""
        text = self._decode(self._ids[self._from :])
        if text.endswith(_HALF) and not is_last:
            return ""
        found = text[len(self._decode(self._ids[self._from : self._shown])) :]
        if found:  # else the same context is still needed
            self._from, self._shown = self._shown, len(self._ids)
        return found

    def _certain(self, text: str) -> str:
        """What is no piece of a stop word."""
        self._held += text
        ends = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self.is_stopped = True
            found, self._held = self._held[: min(ends)], ""
            return found
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        found = self._held[: len(self._held) - keep]
        self._held = self._held[len(found) :]
        return found


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins, at most all but one of it."""
    return next((count for count in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:count])), 0)
