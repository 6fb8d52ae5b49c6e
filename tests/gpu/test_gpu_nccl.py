"""NCCL as CuPy has it: what one card can show of the calls, and two of the whole way of a bucket."""

from __future__ import annotations

from threading import Event
from typing import Any

import numpy as np
import pytest
from support.dask_nodes import nodes
from support.deadline import DEADLINE

from scheduler.drivers.cuda_cupy import find_gpus
from scheduler.drivers.gpu import NoGpu
from scheduler.drivers.nccl import CupyCommunicator, CupyNccl, find_library
from wrappers.dask.training import nccl
from wrappers.dask.training.nccl import NcclTransport


@pytest.fixture(scope="module")
def cards() -> list[CupyNccl]:
    """NCCL of each card."""
    try:
        return [CupyNccl(facts) for facts in find_gpus()]
    except NoGpu as error:
        pytest.skip(str(error))


def test_one_card_sends_to_itself(cards: list[CupyNccl]) -> None:
    """A communicator of one rank takes a send and a receive in one group, which is all that NCCL allows on a card; then it is aborted."""
    library, card = find_library(), cards[0]
    gpu = card.gpu()
    gpu.adopt()
    free = card.free_nbytes()
    own = CupyCommunicator(library, library.NcclCommunicator(1, card.unique_id(), 0), 0)
    source = np.random.default_rng(0).integers(0, 256, 3_000_001, np.uint8)
    target = np.zeros_like(source)
    out, back = gpu.reserve(source.nbytes), gpu.reserve(source.nbytes)
    stream, end = gpu.stream(), gpu.event()
    stream.copy(out, source.ctypes.data, source.nbytes)
    library.groupStart()
    own.send(out, source.nbytes, stream)
    own.receive(back, source.nbytes, stream)
    library.groupEnd()
    stream.copy(target.ctypes.data, back, source.nbytes)
    stream.record(end)
    end.wait()
    own.check()
    assert np.array_equal(source, target)
    assert card.free_nbytes() <= free - 2 * source.nbytes
    assert len(card.unique_id()) == 128
    assert card.card.count(":") == 2  # domain:bus:device.function
    own.abort()
    own.abort()
    for address in (out, back):
        gpu.release(address)


def test_two_cards_exchange(cards: list[CupyNccl]) -> None:
    """Buckets both ways, larger than a piece; what NCCL takes is measured; at the end every thread has ended, one of them in the middle."""
    if len(cards) < 2:
        pytest.skip("NCCL takes a card for each node, and there is one")
    transports = [NcclTransport(cards[rank], rank, 2) for rank in range(2)]
    rng = np.random.default_rng(0)
    with nodes(2, lambda rank: transports[rank]) as comms:
        assert all(each.taken_nbytes() >= 4 * nccl.PIECE for each in transports)
        for number in range(20):
            size = int(rng.integers(1, 3 * nccl.PIECE))
            source, ended, errors = rng.integers(0, 256, size, np.uint8), [Event(), Event()], []

            def over(event: Event, errors: list[Any] = errors) -> Any:
                return lambda error: (errors.append(error), event.set())

            target = np.zeros_like(source)
            here = number % 2
            comms[1 - here].receive.host(over(ended[0]), target, peer=here, key=str(number), count=1)  # type: ignore[misc]
            comms[here].send.host(over(ended[1]), source, peer=1 - here, key=str(number))  # type: ignore[misc]
            assert all(event.wait(DEADLINE) for event in ended)
            assert errors == [None, None]
            assert np.array_equal(source, target)
        transports[0]._links[0, 1].put([np.zeros(3 * nccl.PIECE, np.uint8)])  # nobody receives it
    for each in transports:
        for link in each._links.values():
            link.join(DEADLINE)
            assert not link.is_alive()
