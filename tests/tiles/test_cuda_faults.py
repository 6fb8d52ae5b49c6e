"""Faults planted in our GPU code, each a small change of a call, as it might be made: the strict libraries find every one of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cuda_emulator import COMPILER
from support.fake_cuda import FakeCuda
from support.gpu_training import on_gpus
from support.strict_cuda import STRICT_TRAINING, TIGHT, Libcublas, installed, opened

from nntask.errors import NntaskError
from scheduler.core.errors import SchedulerError
from scheduler.drivers import cuda_cupy
from scheduler.drivers.cuda import CudaCopier, CudaThread
from scheduler.drivers.cuda_cupy import CupyGpu
from scheduler.drivers.gpu import Flow
from scheduler.storage import device as storage
from scheduler.storage.device import DeviceArena, PinnedRange
from tiles.kernels.catalog import kernel
from tiles.kernels.cuda import device, epilogues, launch, products
from tiles.kernels.cuda.array import DeviceArray
from tiles.kernels.cuda.batches import Batches
from tiles.kernels.cuda.device import CudaDevice
from tiles.kernels.cuda.epilogues import CublasLt
from tiles.kernels.cuda.launch import Arguments, KernelSource
from tiles.kernels.cuda.products import Cublas
from tiles.kernels.reference.attention import Pair
from tiles.kernels.registry import BF16

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")


@pytest.fixture
def cuda(cuda_libraries: Path, tmp_path: Path) -> Iterator[FakeCuda]:
    """Two cards behind strict libraries."""
    with installed(cuda_libraries, tmp_path / "code", num_devices=2) as found:
        yield found


def step(cuda: FakeCuda, count: int = 1, **terms: Any) -> list[float]:
    """A recorded step, often enough to start graphs."""
    return STRICT_TRAINING.losses(on_gpus(opened(cuda, count), terms.pop("budget", 1 << 26), 1 << 27), **terms)


def pressed(cuda: FakeCuda) -> list[float]:
    """The same with copies all the time."""
    return step(cuda, budget=TIGHT)


def two(cuda: FakeCuda) -> None:
    """The same on two cards that are too small."""
    step(cuda, 2, budget=TIGHT)


def short(cuda: FakeCuda) -> None:
    """The same in bf16."""
    step(cuda, dtype=BF16)


def one_attention(cuda: FakeCuda, sequences: int = 1, length: int = 3, size: int = 128) -> None:
    """A kernel of its own on arrays of the card."""
    (gpu,) = opened(cuda)
    stream = gpu.stream()
    gpu.enter(stream)
    shapes = [(sequences, length, size)] * 4 + [(sequences, 1, length)] * 3
    arrays = [DeviceArray(gpu.reserve(4 * prod(shape)), shape, np.dtype(np.float32)) for shape in shapes]
    at = Pair(size, 1.0, True, 0, 0, 0, 0, 1, length, 0.0, 0)
    kernel("attention", "cuda")(*arrays, arrays[0], at=at, first=True, last=True)
    cuda.streamSynchronize(stream.number)


Fault = Callable[[pytest.MonkeyPatch, FakeCuda], object]


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Fault:
    """A fault that puts `make(what is there)` in the place of an attribute."""
    return lambda patch, cuda: patch.setattr(owner, name, make(getattr(owner, name)))


def before(call: Callable[..., object]) -> Callable[[Any], Any]:
    """For `replaced`: something is called first, with the same arguments."""

    def make(inner: Any) -> Any:
        def both(*arguments: Any, **named: Any) -> Any:
            call(*arguments, **named)
            return inner(*arguments, **named)

        return both

    return make


def while_recording(call: Callable[[CudaDevice], object]) -> Fault:
    """A fault that calls something at each product of a graph that is recorded."""
    return replaced(CudaDevice, "gemm", before(lambda gpu, *_, **__: call(gpu) if getattr(gpu._local, "captures", False) else None))


def _other_stream(gpu: CudaDevice, stream: Any) -> None:
    gpu._local.other = gpu.stream()
    gpu._local.stream = gpu._local.other.number


def _after_entering(call: Callable[[CudaDevice, Any], None]) -> Fault:
    def make(inner: Any) -> Any:
        def enter(gpu: CudaDevice, stream: Any) -> None:
            inner(gpu, stream)
            call(gpu, stream)

        return enter

    return replaced(CudaDevice, "enter", make)


def _moved(at: int) -> Callable[[Any], Any]:
    """For `KernelSource.start`: arrays begin some bytes later."""

    def make(inner: Any) -> Any:
        def start(source: Any, kernel: str, element: Any, *arguments: Any, **named: Any) -> None:
            moved = [replace(one, address=one.address + at) if isinstance(one, DeviceArray) else one for one in arguments]
            inner(source, kernel, element, *moved, **named)

        return start

    return make


def _pinned_no_more(arena: DeviceArena, stream: Any, address: int, offset: int, nbytes: int) -> None:
    assert arena.host is not None
    arena.host.close()


def _after(call: Callable[..., object]) -> Callable[[Any], Any]:
    """For `replaced`: something is called afterwards, with the same arguments."""

    def make(inner: Any) -> Any:
        def both(*arguments: Any, **named: Any) -> Any:
            found = inner(*arguments, **named)
            call(*arguments, **named)
            return found

        return both

    return make


FAULTS: dict[str, tuple[Fault, Callable[[FakeCuda], object], str]] = {
    "kernels on another stream than products": (_after_entering(_other_stream), step, "neither waits for the other"),
    "products on a stream of their own": (
        replaced(Cublas, "use", lambda inner: lambda blas, stream: inner(blas, blas._library.cuda.streamCreateWithFlags(1))),
        step,
        "neither waits for the other",
    ),
    "copies wait for no kernel": (replaced(Flow, "hold", lambda inner: lambda *_: None), pressed, "neither waits for the other"),
    "a copy is over when it is asked for": (
        replaced(CudaCopier, "_finish", lambda inner: lambda copier, copy: copier.done(copy.action, 0, 1)),
        pressed,
        "neither waits for the other",
    ),
    "wrong leading dimension": (
        replaced(device, "column_major", lambda inner: lambda *a, **k: (found := inner(*a, **k))._replace(ldc=found.m - 1)),
        step,
        "numbers lie",
    ),
    "wrong type of elements": (replaced(products, "TYPES", lambda inner: {**inner, BF16: 2}), short, r"has the types \(2, 2"),
    "wrong type of sums": (replaced(products, "_FP32", lambda inner: 64), step, "got 64"),
    "sums rounded in between": (replaced(products, "_SUMS_IN_FP32", lambda inner: 0), step, "rounded in between"),
    "a product that leaves out its bias": (replaced(device, "BIAS", lambda inner: inner._replace(number=1)), step, "epilogue 1 of types"),
    "parts of a biased product rounded in between": (replaced(epilogues, "_SUMS_IN_FP32", lambda inner: 7), step, "in another type than its sums"),
    "the bias of a plan": (
        replaced(
            CublasLt,
            "_start",
            lambda inner: lambda blas, plan, product, epilogue, operand, stream: inner(blas, plan, product, epilogue, product.a, stream),
        ),
        step,
        "",
    ),
    "no distance of the operand of GELU": (replaced(epilogues, "_AUX_DISTANCE", lambda inner: 13), short, "attribute 13 of a product"),
    "factors of a batch in the other order": (
        replaced(Batches, "_entry", lambda inner: lambda batches, a, b, c, captures: inner(batches, b, a, c, captures)),
        step,
        "",
    ),
    "a batch that reads behind its addresses": (
        replaced(Batches, "_entry", lambda inner: lambda batches, *given: inner(batches, *given).at(np.uint64, 3, 4)),
        step,
        "no memory of a device",
    ),
    "an address that is not aligned": (replaced(KernelSource, "start", _moved(2)), step, "is read in units of"),
    "an address behind the memory": (replaced(KernelSource, "start", _moved(1 << 40)), step, "points to no memory of a device"),
    "stale arguments": (replaced(Arguments, "fill", lambda inner: _filled_once(inner)), pressed, ""),
    "memory freed while kernels may use it": (replaced(CudaThread, "drain", lambda inner: lambda thread: None), step, "memory is freed while"),
    "the thread of a card has another one": (replaced(CupyGpu, "adopt", lambda inner: lambda gpu: None), two, "is current"),
    "events of another card": (
        replaced(CupyGpu, "event", lambda inner: lambda gpu: cuda_cupy.CupyEvent(gpu._cuda)),
        two,
        "is recorded on a stream of device",
    ),
    "memory of another card": (
        replaced(cuda_cupy, "device_of_thread", lambda inner: lambda cuda, index: nullcontext()),
        two,
        "is no memory|workspace is memory of|of device",
    ),
    "events that take no time": (lambda patch, cuda: patch.setattr(cuda, "eventBlockingSync", 3), step, "timing enabled"),
    "a stream that waits for the legacy stream": (
        lambda patch, cuda: patch.setattr(sys.modules["cupy.cuda"], "Stream", _blocking(sys.modules["cupy.cuda"].Stream)),
        step,
        "and the legacy stream wait for each other",
    ),
    "host memory that is not locked": (replaced(CupyGpu, "pin", lambda inner: lambda *_: True), pressed, "was not locked"),
    "host memory unlocked during a copy": (replaced(DeviceArena, "put", _after(_pinned_no_more)), pressed, "is unlocked while"),
    "a copy over two locked pieces": (replaced(PinnedRange, "pieces", lambda inner: _uncut(inner)), pressed, "beyond a piece of locked"),
    "memory reserved while a graph is recorded": (while_recording(lambda gpu: gpu.reserve(16)), step, "cudaFree was called while"),
    "an event asked for while a graph is recorded": (while_recording(lambda gpu: gpu.event().is_done()), step, "eventQuery was called while"),
    "a wait while a graph is recorded": (
        while_recording(lambda gpu: gpu._cuda.streamSynchronize(gpu._local.stream)),
        step,
        "streamSynchronize was called while",
    ),
    "the legacy stream while a graph is recorded": (while_recording(lambda gpu: setattr(gpu._local, "stream", 0)), step, "the legacy stream"),
    "graphs recorded in the mode of all threads": (
        lambda patch, cuda: patch.setattr(cuda, "streamCaptureModeThreadLocal", 0),
        step,
        "in the mode of one thread",
    ),
    "shared memory that was not asked for": (replaced(CudaDevice, "_allow", lambda inner: lambda *_: None), one_attention, "was allowed 49,152"),
    "a grid that is too large": (
        replaced(launch, "MOST_BLOCKS_ASIDE", lambda inner: 1 << 30),
        partial(one_attention, sequences=70_000, length=1, size=1),
        "a grid has",
    ),
    "a workspace that the stream has taken": (
        replaced(Cublas, "use", lambda inner: lambda blas, stream: products.check(blas._library.cublasSetStream_v2(blas.handle, stream))),
        step,
        "the stream has taken the workspace away",
    ),
    "arguments of a library without types": (
        lambda patch, cuda: patch.setattr(products, "_library", lambda: Libcublas(cuda)),
        step,
        "returns an int, declared is None",
    ),
}


def _blocking(inner: Any) -> Any:
    return lambda *, non_blocking: inner()


def _filled_once(inner: Any) -> Any:
    def fill(packed: Any, arguments: Any) -> None:
        if not hasattr(packed, "is_filled"):
            inner(packed, arguments)
            packed.is_filled = True

    return fill


def _uncut(inner: Any) -> Any:
    def pieces(host: Any, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        list(inner(host, address, nbytes))
        yield address, nbytes

    return pieces


@pytest.mark.filterwarnings("ignore:cuBLASLt has no product with a bias")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a small change of a call of ours, as it might be made; what is said names it, or results are others."""
    plant, run, said = FAULTS[name]
    if "pieces" in name:
        monkeypatch.setattr(storage, "PIN_NBYTES", 3000)
    want = [] if said else STRICT_TRAINING.losses(on_gpus(opened(cuda), TIGHT, 1 << 27))
    assert cuda.found == []
    plant(monkeypatch, cuda)
    error: Exception | None = None
    num_pageable = cuda.num_pageable
    try:
        losses = run(cuda)
    except (SchedulerError, NntaskError, RuntimeError, AssertionError, MemoryError) as found:
        error, losses = found, None
    if name == "host memory that is not locked":
        assert cuda.num_pageable > num_pageable + 1
    elif said:
        assert any(re.search(said, text) for text in cuda.found), (cuda.found[:3], error)
    else:
        assert error is not None or losses != want
