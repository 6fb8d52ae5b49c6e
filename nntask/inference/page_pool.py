"""Ownership of the pages of a cache: bookkeeping only, without tiles and tasks.

A page holds the keys and values of `length` positions. It is free, held by one or more texts, or kept: held by no text, but filled with the beginning
of a text that another text may share. If no page is free, the kept page that was unused for longest is taken.

A full page of a prompt is identified by a digest of all tokens up to its end, so equal digests mean equal beginnings. A page is never written again
once its digest is known.

Texts reserve the largest number of pages that they may need before they begin, and take them as they grow. So a text that has begun always finds its
next page.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


class PagePool:
    """Pages of a cache, each free, held or kept.

    Args:
        num_pages: number of pages.
        length: number of positions of a page.

    Attributes:
        num_reserved: number of pages that texts have reserved and not yet taken.
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
        """Number of pages that may be reserved: neither held nor reserved."""
        return len(self._free) + len(self._kept) - self.num_reserved

    @property
    def num_held(self) -> int:
        """Number of pages that texts hold."""
        return len(self._holders)

    @property
    def num_kept(self) -> int:
        """Number of pages that no text holds and whose beginning is known."""
        return len(self._kept)

    def known(self, digests: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest known beginning of a text, from the digests of its full pages."""
        found: list[int] = []
        for digest in digests:
            if digest not in self._page_of:
                break
            found.append(self._page_of[digest])
        return found

    def begin(self, known: Sequence[int], count: int) -> bool:
        """Hold the pages `known` and reserve `count` others. Return False, and change nothing, if fewer than `count` pages are available."""
        if count > self.num_available - sum(page in self._kept for page in known):
            return False
        for page in known:
            self._kept.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
        self.num_reserved += count
        return True

    def take(self) -> int:
        """Take one of the reserved pages, to be held and written by one text."""
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
        """Make a full page available to other texts, unless its beginning is known already."""
        if digest not in self._page_of:
            self._page_of[digest], self._digest_of[page] = page, digest

    def end(self, pages: Sequence[int], unused: int) -> None:
        """Release a text's pages and its `unused` reserved ones. Its last pages are the first to be reused."""
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
    """Return a digest for each full page of tokens, each of all tokens up to the page's end."""
    running, found = hashlib.blake2b(digest_size=16), list[bytes]()
    for end in range(length, len(tokens) + 1, length):
        running.update(np.asarray(tokens[end - length : end], "<i4").tobytes())
        found.append(running.copy().digest())
    return found
