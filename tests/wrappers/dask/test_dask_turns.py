"""Steps of a node in the order of their numbers, whatever the order in which their messages arrive."""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest

from wrappers.dask.training.node import Turns


async def _let_run() -> None:
    """Let what is ready run."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.call_soon(ready.set_result, None)
    await ready


@pytest.mark.parametrize("arrivals", list(permutations((4, 5, 6))))
def test_calls_go_on_in_the_order_of_their_numbers(arrivals: tuple[int, ...]) -> None:
    """Each order of arrival has one order of going on; what a call waits for afterwards holds up nobody."""

    async def run() -> list[int]:
        turns, found, end = Turns(3), list[int](), asyncio.Event()

        async def call(number: int) -> None:
            await turns.wait(number)
            found.append(number)
            await end.wait()

        calls = []
        for number in arrivals:
            calls.append(asyncio.create_task(call(number)))
            for _ in range(5):
                await _let_run()  # it arrives before the next one
        end.set()
        await asyncio.gather(*calls)
        return found

    assert asyncio.run(run()) == [4, 5, 6]
