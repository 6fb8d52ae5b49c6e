"""Memory of a device under pressure: random programs over tiles, budgets that hold a part of them, one card and parts of it, with a disk below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pressed_programs import NBYTES, SIZE, TILE, program

from scheduler import Runtime
from tiles import TileTensor
from tiles.ops.elementwise import scale


@pytest.mark.parametrize("seed", range(6))
def test_results_do_not_depend_on_memory(seed: int, open_gpus: Any, tmp_path: Path) -> None:
    """The same bits with room for everything, for ten tiles, on two parts of the card, and with a disk below; near to the CPU's."""
    want = program(Runtime(0, gpus=open_gpus(1), gpu_memory=1 << 24, ram=1 << 25), seed)
    assert np.array_equal(program(Runtime(0, gpus=open_gpus(1), gpu_memory=10 * NBYTES, ram=1 << 25), seed), want)
    assert np.array_equal(program(Runtime(0, gpus=open_gpus(2), gpu_memory=10 * NBYTES, ram=1 << 25), seed), want)
    small = Runtime(0, gpus=open_gpus(1), gpu_memory=10 * NBYTES, ram=(16 << 20) + 40 * NBYTES, disk=tmp_path)
    assert np.array_equal(program(small, seed), want)
    np.testing.assert_allclose(want, program(Runtime(1, ram=1 << 26), seed), rtol=1e-3, atol=1e-3)


def test_host_memory_is_locked(open_gpus: Any) -> None:
    """What copies touch is pinned, unless the system refuses; a copy to the device and back keeps its bytes."""
    (gpu,), ours = open_gpus(1), np.zeros(1 << 25, np.uint8)
    may_pin = gpu.pin(ours.ctypes.data, ours.nbytes)
    if may_pin:
        gpu.unpin(ours.ctypes.data)
    with Runtime(0, gpus=[gpu], gpu_memory=1 << 24, ram=1 << 25) as runtime:
        tensor = TileTensor(runtime, (SIZE, SIZE), (TILE, TILE), np.float32)
        value = np.arange(SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE)
        tensor.write(value)
        assert np.array_equal(scale(tensor, 1.0).read(), value)
        pinned = runtime.stats()["pinned_bytes"]
    assert pinned == (1 << 25 if may_pin else 0)
