"""A node by itself: the rates that it publishes of two steps in flight, and its end with its process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.deadline import DEADLINE

from wrappers.dask.training.node import TrainingNode


class SlowLosses(list[float]):
    """Losses that are summed once another step has ended, or after a tenth of a second if it may not end first."""

    def __init__(self, other_ended: threading.Event) -> None:
        super().__init__([1.0])
        self._other_ended = other_ended

    def __iter__(self) -> Iterator[float]:
        self._other_ended.wait(0.1)
        return super().__iter__()


def test_rates_are_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is stopped between the end of its step and the note of it does not divide by negative seconds."""
    monkeypatch.setattr("distributed.get_worker", lambda: SimpleNamespace(address="tcp://a:1"))
    monkeypatch.setattr("wrappers.dask.training.node._JOBS", {})
    node: Any = TrainingNode("job", 0)
    ended, rates = threading.Event(), []
    node._order = SimpleNamespace(shard=SimpleNamespace(num_minibatches=1), board="run")
    node._run_config = SimpleNamespace(step=SimpleNamespace(minibatch=1))
    node._stream = SimpleNamespace(length=1)
    monkeypatch.setattr(node, "_stats", dict)
    monkeypatch.setattr(node, "_publish", lambda number, loss, rate, stats: (rates.append(rate), ended.set()))
    flights = [SimpleNamespace(shard_outcome=lambda losses=losses: (losses, None)) for losses in (SlowLosses(ended), [1.0])]

    async def finish_both() -> None:
        await asyncio.gather(*(node._finish(flight, number, 0.0) for number, flight in enumerate(flights, 1)))

    try:
        asyncio.run(finish_both())
    finally:
        node._close()
    assert len(rates) == 2
    assert min(rates) > 0


def test_a_process_ends_although_a_node_is_open() -> None:
    """Python deletes the node while it ends the process, when no thread starts any more that could close the node."""
    program = """
import distributed
from types import SimpleNamespace
distributed.get_worker = lambda: SimpleNamespace(address="tcp://a:1")
from wrappers.dask.training.node import TrainingNode
node = TrainingNode("job", 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE)
