"""The driver of GPUs against one that runs late and in any order: results are those of a program without devices, whatever chance does."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.late_gpu import COUNT, FILL, MIX, SPOIL, Gpu, Numbers, Place, gpus, value
from support.plain_tasks import plain_task

from scheduler import SCRATCH, Codelet, R, Runtime, TaskRuntime, W
from scheduler.api.inline_runtime import InlineRuntime
from scheduler.core.errors import DeviceFailed, DoesNotFit, TaskError
from scheduler.core.memory.extents import ExtentAllocator
from scheduler.core.shortage import Shortage
from scheduler.drivers import cuda
from scheduler.drivers.cuda import CudaCopier
from scheduler.drivers.gpu import BOUNCE_NBYTES, IN_FLIGHT, Flow
from scheduler.execution.trace import Trace
from scheduler.storage import HostArena
from scheduler.storage.device import DeviceArena, PinnedRange


def program(runtime: TaskRuntime, seed: int, num_handles: int = 10, num_tasks: int = 120) -> list[float]:
    """Tasks over data chosen by chance; what it all ends with."""
    chance = random.Random(seed)
    counts = [COUNT * (1 + number % 3) for number in range(num_handles)]
    handles = [runtime.handle(8 * count, Numbers(count), name=f"h{number}") for number, count in enumerate(counts)]
    for number, handle in enumerate(handles):
        runtime.submit(FILL, [(handle, W)], {"value": float(number)})
    for salt in range(num_tasks):
        out, *inputs = chance.sample(handles, chance.randrange(1, 4))
        if chance.random() < 0.15:
            with runtime.acquire(out, "RW") as view:
                view += salt
        elif chance.random() < 0.2:
            room = runtime.handle(8 * COUNT, Numbers(), name="room", data_class="scratch")
            runtime.submit(SPOIL, [(out, "RW"), (room, SCRATCH)], {})
        else:
            runtime.submit(MIX, [(out, "RW"), *((handle, R) for handle in inputs)], {"salt": salt})
    runtime.wait()
    return [value(runtime, handle) for handle in handles]


def machine(seed: int, tmp_path: Path, kind: str) -> Runtime:
    """A machine whose memories are too small."""
    page = 8 * COUNT
    if kind == "one":
        return Runtime(0, gpus=gpus(1, seed), gpu_memory=9 * page, ram=64 * page)
    if kind == "two and a worker":
        return Runtime(1, gpus=gpus(2, seed), gpu_memory=9 * page, ram=64 * page)
    return Runtime(0, gpus=gpus(2, seed), gpu_memory=9 * page, ram=1 << 25, disk=tmp_path)


KINDS = ("one", "two and a worker", "two and a disk")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_results_are_those_of_a_program_without_devices(seed: int, kind: str, tmp_path: Path) -> None:
    """Kernels and copies end late, in any order that streams and events allow; memories hold half of the data."""
    want = program(InlineRuntime(), seed)
    with machine(seed, tmp_path, kind) as runtime:
        assert program(runtime, seed) == want
        stats = runtime.stats()
    assert stats["evictions"] > 0
    assert stats["peak_bytes"]["cuda:0"] <= 9 * 8 * COUNT


@pytest.mark.parametrize("bug", ["copies wait for no kernel", "what is given back is free at once", "a copy is over when it is asked for"])
def test_a_missing_wait_is_found(bug: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of three planted bugs changes the results of one program or another."""

    def too_early(self: CudaCopier, copy: Any) -> None:
        self.done(copy.action, 0, 1)

    if bug == "copies wait for no kernel":
        monkeypatch.setattr(Flow, "hold", lambda *_: None)
    elif bug == "what is given back is free at once":
        free = ExtentAllocator.free
        monkeypatch.setattr(ExtentAllocator, "free", lambda self, offset, size, kernel_mark: free(self, offset, size, 0))
    else:
        monkeypatch.setattr(CudaCopier, "_finish", too_early)
    wrong = 0
    for seed in range(12):
        want = program(InlineRuntime(), seed, num_tasks=60)
        with machine(seed, tmp_path, "one") as runtime:
            wrong += program(runtime, seed, num_tasks=60) != want
        if wrong:
            return
    assert wrong


def reserved(gpu: Gpu, count: int) -> tuple[int, np.ndarray]:
    """Memory of so many numbers, 0, 1, 2, ..., and its address."""
    address = gpu.reserve(8 * count)
    numbers = Place(address, count).numbers()
    numbers[...] = np.arange(count)
    return address, numbers


@pytest.mark.parametrize(("shift", "count"), [(-3, 10), (3, 10), (40, 10), (-3, 300_000), (3, 300_000), (200_000, 300_000)])
def test_data_moves_behind_the_kernels_before_it(shift: int, count: int) -> None:
    """A move of overlapping ranges, asked for while a kernel that writes the data has not run; a later kernel reads it where it went.

    A short way takes no more copies than a long one: two for each MiB.
    """
    gpu = Gpu()
    flow = Flow(gpu)
    gpu.enter(flow.stream)
    address, numbers = reserved(gpu, 50 + 40 + abs(shift) + count)
    seen: list[float] = []
    flow.begin()
    gpu.later(lambda: np.multiply(numbers, 10, out=numbers))
    flow.mark()
    before = len(flow.stream.steps)
    flow.move(address + 8 * (50 + shift), address + 8 * 50, 8 * count)
    assert len(flow.stream.steps) - before <= 2 * -(-8 * count // BOUNCE_NBYTES) + 1
    gpu.later(lambda: seen.extend(numbers[50 + shift : 50 + count + shift]))
    flow.mark()
    assert not seen
    flow.wait()
    assert seen == [10 * (50 + i) for i in range(count)]


def test_a_copy_in_a_graph_happens_when_the_graph_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while it is recorded, and again each time."""
    gpu = Gpu()
    flow = Flow(gpu)
    gpu.enter(flow.stream)
    monkeypatch.setattr(cuda._here, "flow", flow, raising=False)
    address, numbers = reserved(gpu, 4)
    start = flow.capture(lambda: cuda.copy_on_gpu(Place(address, 1), Place(address + 8, 1)))
    assert start is not None
    flow.mark()
    flow.wait()
    assert numbers[1] == 1
    for number in (7, 9):
        numbers[0] = number
        start()
        flow.mark()
        flow.wait()
        assert numbers[1] == number


def test_a_held_stream_waits_for_its_mark_and_no_other() -> None:
    """A copy held by the first of two marks needs the first kernel alone."""
    gpu = Gpu()
    flow, other, event = Flow(gpu), gpu.stream(), gpu.event()
    gpu.enter(flow.stream)
    address, numbers = reserved(gpu, 2)
    flow.begin()
    gpu.later(lambda: numbers.fill(7))
    flow.mark()
    first = flow.number
    flow.stream.put(lambda: None, lambda: False)  # a kernel that never ends
    flow.mark()
    flow.hold(other, first)
    other.copy(address + 8, address, 8)
    other.record(event)
    event.wait()
    assert numbers[1] == 7


def test_a_mark_that_the_device_is_past_holds_nobody() -> None:
    """Not even by the next one, whose kernel runs for long: copies go on beside it."""
    gpu = Gpu()
    flow, other, event = Flow(gpu), gpu.stream(), gpu.event()
    flow.begin()
    flow.mark()
    first = flow.number
    flow.wait()
    flow.collect()
    flow.stream.put(lambda: None, lambda: False)  # a kernel that never ends
    flow.mark()
    flow.hold(other, first)
    other.record(event)
    event.wait()


def test_tasks_finish_before_their_kernels_but_not_many() -> None:
    """With the device stuck in the first kernel, `IN_FLIGHT` tasks are put on the flow without waiting; the next one waits."""
    gpu, is_open = Gpu(), threading.Event()
    flow = Flow(gpu)
    gpu.enter(flow.stream)
    tasks = [plain_task(number, "task", ("cuda",)) for number in range(IN_FLIGHT + 1)]
    for task in tasks[:-1]:
        assert flow.begin() == []
        if task is tasks[0]:
            flow.stream.put(lambda: None, is_open.is_set)
        flow.mark(task)
    with pytest.raises(DeviceFailed, match="which has no work that can begin"):
        flow.begin()
    is_open.set()
    ended = flow.begin()
    assert [each.task for each in ended] == tasks[: len(ended)] != []
    flow.mark(tasks[-1])
    flow.wait()
    ended += flow.collect()
    assert [each.task for each in ended] == tasks
    assert all(before.end_ns == after.start_ns for before, after in pairwise(ended))


@pytest.mark.parametrize("when", [0, 7, 60])
def test_a_device_that_stops_ends_the_run(when: int, tmp_path: Path) -> None:
    """One sentence, from whatever the program waits in; the runtime closes."""
    first, second = gpus(2, 0)
    second.fails_after = when

    def run() -> None:
        with Runtime(0, gpus=[first, second], gpu_memory=1 << 16, ram=1 << 20) as runtime:
            for _ in range(100):
                program(runtime, 0)

    with pytest.raises(DeviceFailed, match=r"fake:1 stopped working: planted.*continue from the last checkpoint"):
        run()


@pytest.mark.parametrize("call", ["begin", "mark", "move", "wait", "collect", "exchange"])
def test_each_call_of_a_device_that_stops_names_it(call: str) -> None:
    """With the error of its driver."""
    gpu = Gpu()
    memory = HostArena(1 << 12)
    arena = DeviceArena(gpu, 1 << 12, PinnedRange(gpu, memory, 1 << 12))
    flow, idle = arena.flow, Flow(gpu)
    gpu.enter(flow.stream)
    flow.begin()
    flow.mark(plain_task(0, "task", ("cuda",)))
    gpu.fails_after = 0
    calls: dict[str, Callable[[], object]] = {
        "begin": idle.begin,
        "mark": flow.mark,
        "move": lambda: flow.move(arena.address, arena.address + 64, 64),
        "wait": flow.wait,
        "collect": flow.collect,
        "exchange": lambda: arena.exchange(memory.address, 0, 64, 0, writes=True),
    }
    with pytest.raises(DeviceFailed) as failure:
        calls[call]()
    assert (failure.value.device, failure.value.why) == (gpu.name, "planted: the device fell off the bus")


def test_a_kernel_that_raises_fails_its_task() -> None:
    """As on the CPU; later tasks run."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    with Runtime(0, gpus=gpus(1, 0), gpu_memory=1 << 16, ram=1 << 20) as runtime:
        data = runtime.handle(8 * COUNT, Numbers())
        runtime.submit(Codelet("broken", cuda=broken), [(data, W)], {})
        with pytest.raises(TaskError, match=r"kernel 'broken'.*ZeroDivisionError: planted"):
            runtime.wait()
        runtime.submit(FILL, [(data, W)], {"value": 2.0})
        assert value(runtime, data) == 2 * COUNT


def test_a_callback_sees_what_the_device_has() -> None:
    """`on_task` gets a read-only copy of each tile, after the kernel."""
    seen: list[float] = []
    with Runtime(0, gpus=gpus(1, 3), gpu_memory=1 << 16, ram=1 << 20) as runtime:
        data = runtime.handle(8 * COUNT, Numbers())
        runtime.on_task(lambda task: seen.extend(float(tile.data[5]) for tile in task.tiles))
        for value in range(5):
            runtime.submit(FILL, [(data, W)], {"value": float(value)})
        runtime.wait()
    assert seen == [0, 1, 2, 3, 4]


def test_durations_are_the_devices(tmp_path: Path) -> None:
    """Each task stands in the trace once, one after another, and the time the device was busy is their sum."""
    trace = Trace()
    with Runtime(0, gpus=gpus(1, 1), gpu_memory=1 << 16, ram=1 << 20, trace=trace) as runtime:
        program(runtime, 1, num_tasks=30)
        runtime.wait()
    busy, num_tasks = runtime.stats()["busy_seconds"]["cuda:0"], runtime.stats()["tasks"]
    spans = sorted((start, end) for _, _, _, start, end, *_ in trace.tasks())
    assert len(spans) == num_tasks
    assert all(before <= after for (_, before), (after, _) in pairwise(spans))
    assert busy > 0


@pytest.mark.parametrize("can_pin", [True, False])
def test_host_memory_is_locked_in_pieces_as_copies_touch_it(can_pin: bool) -> None:
    """No copy spans two pieces; a system that refuses is asked once; everything is unlocked at the end."""
    gpu = Gpu()
    gpu.can_pin = can_pin
    arena = HostArena(200 << 20)
    pinned = PinnedRange(gpu, arena, 200 << 20)
    piece = 64 << 20
    found = list(pinned.pieces(arena.address + piece - 10, piece + 20))
    assert sum(count for _, count in found) == piece + 20
    assert [count for _, count in found] == [10, piece, 10]
    assert list(gpu.pinned.values()) == ([piece] * 3 if can_pin else [])
    assert pinned.nbytes == len(gpu.pinned) * piece
    assert pinned.is_refused is not can_pin
    list(pinned.pieces(arena.address + 3 * piece, 10))
    assert sum(gpu.pinned.values()) == (200 << 20 if can_pin else 0)
    pinned.close()
    assert not gpu.pinned


def test_a_runtime_closes_its_devices() -> None:
    """Whoever opens the cards again finds them as they were."""
    devices = gpus(2, 0)
    with Runtime(0, gpus=devices, gpu_memory=1 << 16, ram=1 << 20):
        assert not any(gpu.is_closed for gpu in devices)
    assert all(gpu.is_closed for gpu in devices)


def test_a_budget_above_the_device_is_refused() -> None:
    """Before anything runs."""
    with pytest.raises(MemoryError, match="has 1,000 bytes left, fewer than 65,536"):
        Runtime(0, gpus=[Gpu("small", memory=1000)], gpu_memory=1 << 16, ram=1 << 20)


def test_memory_between_disk_and_device_is_counted(tmp_path: Path) -> None:
    """It is taken off the budget of host memory, and a budget below it is refused."""
    with Runtime(0, gpus=gpus(1, 0), gpu_memory=1 << 16, ram=32 << 20, disk=tmp_path) as runtime:
        assert runtime.stats()["budget_bytes"]["ram"] == 16 << 20
    with pytest.raises(DoesNotFit, match="must exceed the 16,777,216 B between the disk and GPUs, got 16,777,216 B; raise it") as refusal:
        Runtime(0, gpus=gpus(1, 0), gpu_memory=1 << 16, ram=16 << 20, disk=tmp_path)
    assert refusal.value.shortage == Shortage("full", "ram", 16 << 20, 16 << 20)
