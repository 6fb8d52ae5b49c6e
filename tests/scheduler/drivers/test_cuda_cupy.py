"""What is asked of CuPy, without CuPy: which device a thread has, which cards are looked at, when graphs are given up."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.core.errors import DoesNotFit
from scheduler.core.shortage import Shortage
from scheduler.drivers import cuda_cupy
from scheduler.drivers.cuda_cupy import CupyGpu, CupyGraph, GpuFacts, choose_gpus, find_gpus
from scheduler.drivers.gpu import NoGpu
from scheduler.drivers.nccl import OLDEST_CUPY, find_library


class Cuda:
    """CuPy's runtime on a machine with three cards.

    Attributes:
        device: of the calling thread; `looked_at` those that memory was taken on.
    """

    eventBlockingSync = 1

    def __init__(self) -> None:
        self.device = 0
        self.looked_at: list[int] = []
        self.events: list[int] = []
        self.graphs: list[int] = []

    def getDeviceCount(self) -> int:
        return 3

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        return {"name": b"Fake", "major": 9, "minor": 0}

    def memGetInfo(self) -> tuple[int, int]:
        self.looked_at.append(self.device)
        return 1 << 30, 1 << 31

    def getDevice(self) -> int:
        return self.device

    def setDevice(self, index: int) -> None:
        self.device = index

    def eventCreateWithFlags(self, flags: int) -> int:
        self.events.append(self.device)
        return len(self.events)

    def eventDestroy(self, number: int) -> None:
        pass

    def free(self, address: int) -> None:
        pass

    def graphInstantiate(self, graph: int) -> int:
        self.graphs.append(graph)
        return graph

    def graphExecDestroy(self, number: int) -> None:
        self.graphs.remove(number)


class FullCard:
    """The CUDA driver of a card that has no memory left."""

    def cuMemAlloc_v2(self, address: object, nbytes: int) -> int:
        """Return the code of CUDA_ERROR_OUT_OF_MEMORY."""
        return 2


def test_a_thread_keeps_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of one GPU makes an event of another, as when it moves data there, and still starts kernels on its own."""
    cuda = Cuda()
    monkeypatch.setattr(cuda_cupy, "_runtime", lambda: cuda)
    first, second = (CupyGpu(GpuFacts(index, "Fake", 90, 1 << 31, 1 << 30)) for index in range(2))
    second.adopt()
    first.event()
    assert cuda.events == [0]
    assert cuda.device == 1


def test_cards_that_are_not_used_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at a card takes memory there; all are looked at where too many were asked for, to be named."""
    cuda = Cuda()
    assert len(find_gpus(lambda: ["cupy-cuda13x"], lambda: cuda, most=1)) == 1
    assert cuda.looked_at == [0]
    monkeypatch.setattr(cuda_cupy, "find_gpus", lambda most: find_gpus(lambda: ["cupy-cuda13x"], lambda: cuda, most))
    assert [card.index for card in choose_gpus(2)] == [0, 1]
    with pytest.raises(NoGpu, match=r"got 4 and there are 3 \(0: Fake, 1: Fake, 2: Fake\)") as refusal:
        choose_gpus(4)
    assert refusal.value.requested == 4
    assert str(refusal.value) == f"the requested number {refusal.value.fact}; {refusal.value.remedy}"


def test_memory_that_a_card_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's code, the bytes and those that are free."""
    cuda = Cuda()
    monkeypatch.setattr(cuda_cupy, "_runtime", lambda: cuda)
    monkeypatch.setattr(cuda_cupy, "_driver", FullCard)
    card = CupyGpu(GpuFacts(0, "Fake", 90, 1 << 31, 1 << 30))
    with pytest.raises(DoesNotFit) as refusal:
        card.reserve(1 << 34)
    assert refusal.value.shortage == Shortage("reserve", card.name, 1 << 34, 1 << 30)
    assert refusal.value.fact == f"{card.name} did not give 17,179,869,184 bytes (CUDA error 2): 1,073,741,824 of its 2,147,483,648 are free"
    assert refusal.value.remedy == "lower the budget of the device, or end other programs that use the card"


def test_nccl_needs_a_newer_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that is installed, and how to get another one."""
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(__version__="13.6.0"))
    with pytest.raises(NoGpu, match=rf"^NCCL is used through CuPy {OLDEST_CUPY} or newer, and 13\.6\.0 is installed; pip install"):
        find_library()


def test_a_graph_that_nobody_has_is_given_back() -> None:
    """It holds memory of the device that no budget counts."""
    cuda = Cuda()
    graphs = [CupyGraph(cuda, number) for number in range(2)]
    assert cuda.graphs == [0, 1]
    del graphs[0]
    assert cuda.graphs == [1]
