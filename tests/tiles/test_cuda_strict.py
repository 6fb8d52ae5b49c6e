"""Our GPU code over libraries that refuse what CUDA, cuBLAS and ctypes refuse (`support.strict_cuda`): training passes, and faults are told."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import prod
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from support.cuda_emulator import COMPILER, Emulator
from support.dask_nodes import nodes
from support.deadline import DEADLINE
from support.fake_cuda import FakeCuda
from support.gpu_training import on_gpus
from support.strict_cuda import STRICT_TRAINING, TIGHT, installed, opened

from nntask.hardware.gpus import CudaCards
from nntask.models.gpt2 import GPT2
from nntask.optim.optimizers import AdamW
from scheduler.core.errors import DeviceFailed, TaskError
from scheduler.drivers.cuda_cupy import find_gpus
from scheduler.drivers.nccl import CupyNccl
from tiles.kernels.catalog import kernel
from tiles.kernels.cuda.array import DeviceArray
from tiles.kernels.cuda.compiling import KernelBuildError
from tiles.kernels.cuda.device import CudaDevice
from tiles.kernels.reference.attention import Pair
from tiles.kernels.registry import BF16
from wrappers.dask.training import nccl
from wrappers.dask.training.nccl import NcclTransport

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")


@pytest.fixture
def cuda(cuda_libraries: Path, tmp_path: Path) -> Iterator[FakeCuda]:
    """Two cards behind strict libraries."""
    with installed(cuda_libraries, tmp_path / "code", num_devices=2) as found:
        yield found


@pytest.mark.parametrize(("dtype", "budget", "count"), [(np.float32, 1 << 26, 1), (BF16, 1 << 26, 1), (np.float32, TIGHT, 2)])
def test_training_is_refused_nothing(dtype: Any, budget: int, count: int, cuda: FakeCuda, cuda_libraries: Path) -> None:
    """In memory with graphs, in bf16, and on two cards that hold a part: the emulation's losses, and not a call that CUDA would refuse."""
    runtime, num_pageable = on_gpus(opened(cuda, count), budget, 1 << 27), cuda.num_pageable
    found = STRICT_TRAINING.losses(runtime, 0.2, dtype=dtype)
    assert cuda.found == []
    assert cuda.num_pageable == num_pageable
    assert cuda.getDevice() == 0
    np.testing.assert_allclose(found, STRICT_TRAINING.losses(on_gpus([Emulator(cuda_libraries)], 1 << 26, 1 << 27), 0.2, dtype=dtype), rtol=1e-5)
    assert cuda.num_graphs > 0 or budget == TIGHT


@pytest.mark.parametrize("number", [3, 200])
def test_a_fault_of_a_kernel_ends_the_run(number: int, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call tells of it, and by what word: cuBLAS has one of its own for it."""
    runtime, inner, calls = on_gpus(opened(cuda), 1 << 26, 1 << 27), cuda.launchKernel, count()

    def launch(*arguments: Any) -> None:
        if next(calls) == number:
            cuda.break_device(0)
        inner(*arguments)

    monkeypatch.setattr(cuda, "launchKernel", launch)
    with pytest.raises(DeviceFailed, match=r"GPU 0 \(Stand-in\) stopped working: cudaError 700"):
        STRICT_TRAINING.losses(runtime)


def test_updates_that_the_driver_refuses_lose_no_parameters(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernel of fused updates is refused before anything was started: parameters are as they were, and the next replay trains."""
    inner, is_broken = CudaDevice._function, True

    def function(self: CudaDevice, source: str, element: str, name: str) -> int:
        if is_broken and name == "adam":
            raise KernelBuildError("planted")
        return inner(self, source, element, name)

    monkeypatch.setattr(CudaDevice, "_function", function)
    with on_gpus(opened(cuda), 1 << 26, 1 << 27) as runtime:
        model = GPT2(STRICT_TRAINING.config, STRICT_TRAINING.tiling, runtime, seed=3)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        tokens, targets = model.input_tensors(2)
        with runtime.record() as step:
            model.train()
            model(tokens, targets, minibatch=0).backward()
            optimizer.step()
        (ids, *_) = STRICT_TRAINING.ids()[0]

        def replay(number: int) -> Any:
            tokens.write(ids[:, :-1])
            targets.write(ids[:, 1:])
            model.dropout_key.write(np.array([3, number], np.uint64))
            optimizer.prepare(number)
            return step.replay()

        before = {name: tensor.read() for name, tensor in model.tensors().items()}
        ticket = replay(1)
        with pytest.raises(TaskError, match="planted"):
            ticket.wait()
        assert ticket.changed_nothing
        for name, tensor in model.tensors().items():
            np.testing.assert_array_equal(tensor.read(), before[name])
        is_broken = False
        replay(2).wait()
        assert any((tensor.read() != before[name]).any() for name, tensor in model.tensors().items())
    assert cuda.found == []


def test_a_fault_that_cublas_tells_is_the_devices(cuda: FakeCuda) -> None:
    """An internal error of cuBLAS is no failure of one task where the device has stopped."""
    (gpu,) = opened(cuda)
    gpu.enter(gpu.stream())
    a = DeviceArray(gpu.reserve(64), (4, 4), np.dtype(np.float32))
    cuda.break_device(0)
    with pytest.raises(DeviceFailed, match="cudaError 700"):
        gpu.gemm(a, a, a, trans_a=False, trans_b=False, alpha=1.0, accumulate=False)


def test_parts_of_a_card_leave_each_other_their_shared_memory(cuda: FakeCuda) -> None:
    """A kernel is allowed shared memory once for all parts, which share it."""
    facts = opened(cuda)[0].facts
    first, second = CudaCards().open([(facts, 0), (facts, 1)], tf32=False, dtype="fp32")
    for gpu, size in ((first, 200), (second, 128), (first, 200)):
        gpu.enter(gpu.stream())
        shapes = [(1, 3, size)] * 4 + [(1, 1, 3)] * 3
        arrays = [DeviceArray(gpu.reserve(4 * prod(shape)), shape, np.dtype(np.float32)) for shape in shapes]
        at = Pair(size, 1.0, True, 0, 0, 0, 0, 1, 3, 0.0, 0)
        kernel("attention", "cuda")(*arrays, arrays[0], at=at, first=True, last=True)
    assert cuda.found == []


def test_another_library_finds_no_error_of_ours(cuda: FakeCuda) -> None:
    """An event that has not passed is the runtime's last error, until kernels of another library are started."""
    (gpu,) = opened(cuda)
    stream, event = gpu.stream(), gpu.event()
    gpu.enter(stream)
    while cuda.last_error == 0:  # the device goes on by chance while it is asked
        stream.record(event)
        event.is_done()
    seen: list[int] = []
    gpu.start_external(lambda pointer: seen.append(cuda.last_error))
    assert seen == [0]


def test_nccl_is_refused_nothing(cuda: FakeCuda) -> None:
    """Buckets both ways between two cards, larger than a piece."""
    facts = find_gpus(lambda: ["cupy-cuda13x"], lambda: cuda)
    transports = [NcclTransport(CupyNccl(card), rank, 2) for rank, card in enumerate(facts)]
    rng = np.random.default_rng(0)
    with nodes(2, lambda rank: transports[rank]) as comms:
        for number in range(4):
            size, ended, here = int(rng.integers(1, 3 * nccl.PIECE)), [Event(), Event()], number % 2
            source, target = rng.integers(0, 256, size, np.uint8), np.zeros(size, np.uint8)
            comms[1 - here].receive.host(lambda error, ended=ended: ended[0].set(), target, peer=here, key=str(number), count=1)
            comms[here].send.host(lambda error, ended=ended: ended[1].set(), source, peer=1 - here, key=str(number))
            assert all(event.wait(DEADLINE) for event in ended)
            assert np.array_equal(source, target)
    assert cuda.found == []
