"""Which pages of a cache are whose: pure bookkeeping, which knows no tiles and no tasks.

A page holds the keys and values of `length` positions. It is free, or held by one text or several, or kept: held by nobody, with a beginning of a
text in it that another may have in common. Kept pages are used again, the longest unused first, when no page is free.

A full page of a prompt is known by a digest of all tokens up to its end, so equal digests are equal beginnings. Pages are never written again
once they are known.

Texts reserve pages before they begin, as many as they may come to need, and take them as they grow: a text that has begun always finds its next one.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


class PagePool:
    """Pages of a cache.

    Args:
        num_pages: how many there are.
        length: positions of a page.

    Attributes:
        num_reserved: pages that texts may still take.
        num_highest: one more than the highest page that was ever taken.
    """

    def __init__(self, num_pages: int, length: int) -> None:
        self.num_pages, self.length = num_pages, length
        self.num_reserved = self.num_highest = 0
        self._free = list(range(num_pages))  # a heap: low pages first, so that few tiles take memory
        self._holders: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Pages that may be reserved: neither held nor reserved."""
        return len(self._free) + len(self._kept) - self.num_reserved

    @property
    def num_held(self) -> int:
        """Pages that texts hold."""
        return len(self._holders)

    @property
    def num_kept(self) -> int:
        """Pages that nobody holds, with a known beginning."""
        return len(self._kept)

    def known(self, digests: Sequence[bytes]) -> list[int]:
        """The pages of the longest beginning that is there, from the digests of a text's full pages."""
        found: list[int] = []
        for digest in digests:
            if digest not in self._page_of:
                break
            found.append(self._page_of[digest])
        return found

    def begin(self, known: Sequence[int], count: int) -> bool:
        """Hold pages that are known, and reserve `count` others; False, and nothing done, where there are not so many."""
        if count > self.num_available - sum(page in self._kept for page in known):
            return False
        for page in known:
            self._kept.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
        self.num_reserved += count
        return True

    def take(self) -> int:
        """One of the reserved pages, to be held and written by one text."""
        assert self.num_reserved > 0  # texts reserve all that they take
        self.num_reserved -= 1
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, _ = self._kept.popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
        self._holders[page] = 1
        self.num_highest = max(self.num_highest, page + 1)
        return page

    def know(self, page: int, digest: bytes) -> None:
        """Let other texts find a page that is full; if its beginning is known already, nothing changes."""
        if digest not in self._page_of:
            self._page_of[digest], self._digest_of[page] = page, digest

    def end(self, pages: Sequence[int], unused: int) -> None:
        """Let go of a text's pages, and of `unused` that it has reserved and not taken. Of known ones the last leave first."""
        self.num_reserved -= unused
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if page in self._digest_of:
                    self._kept[page] = None
                else:
                    heapq.heappush(self._free, page)


def digests_of(tokens: Sequence[int], length: int) -> list[bytes]:
    """A digest for each full page of tokens, of all tokens up to its end."""
    running, found = hashlib.blake2b(digest_size=16), list[bytes]()
    for end in range(length, len(tokens) + 1, length):
        running.update(np.asarray(tokens[end - length : end], "<i4").tobytes())
        found.append(running.copy().digest())
    return found
