"""Calls in the order of their numbers, although messages may overtake each other on their way.

Dask sends each call of an actor over whatever connection is free, so the call for one step may arrive before that for the step ahead of it. Computed
in the order of arrival, a node would then sum its share of one step with those of another step of its peers.
"""

from __future__ import annotations

import asyncio


class Turns:
    """Lets numbered calls proceed one after the other. Used by one event loop.

    Args:
        last: number of the last call before the first one.
    """

    def __init__(self, last: int) -> None:
        self._last = last
        self._waiting: dict[int, asyncio.Event] = {}

    async def wait(self, number: int) -> None:
        """Return once all calls with smaller numbers have proceeded; the next call proceeds when this one awaits something else."""
        if number > self._last + 1:
            await self._waiting.setdefault(number, asyncio.Event()).wait()
        self._last = number
        following = self._waiting.pop(number + 1, None)
        if following is not None:
            following.set()
