"""Tokens as characters while more tokens come: whole characters only, spelled as in the whole text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

HALF: Final = "\N{REPLACEMENT CHARACTER}"
"""What bytes that make no character are decoded to."""


class Spelling:
    """One text.

    Args:
        decode: ids -> text.
        before: ids in front, which are not spelled, and decide how the first ones are.

    Attributes:
        ids: of the text so far, those in front included; whoever has more appends them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode, self.ids = decode, list(before)
        self._from, self._shown = 0, len(self.ids)  # ids before _shown are spelled; those from _from on are the context of the next

    def news(self, *, is_last: bool = False) -> str:
        """The characters of ids that are not spelled yet; an incomplete one waits for its remaining bytes, unless there are none to come."""
        text = self._decode(self.ids[self._from :])
        if text.endswith(HALF) and not is_last:
            return ""
        found = text[len(self._decode(self.ids[self._from : self._shown])) :]
        if found:  # else the same context is still needed
            self._from, self._shown = self._shown, len(self.ids)
        return found
