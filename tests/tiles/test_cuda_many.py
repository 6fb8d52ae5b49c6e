"""Several tasks in one start on an emulated device: the bits of one task after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cuda_cases import BF16, ONLY_FLOATS, arguments
from support.cuda_emulator import COMPILER, Emulator, on_device
from support.kernel_cases import CASES, Maker

from tiles.emission import codelet
from tiles.kernels.catalog import kernel, operations, register
from tiles.kernels.cuda.many import MOST_TILES
from tiles.kernels.registry import registered_many

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")
MANY = [op for op in operations("cuda") if registered_many(kernel(op, "cuda"))]

Task = tuple[list[np.ndarray], dict[str, Any]]


@pytest.fixture(scope="module")
def emulator(cuda_libraries: Path) -> Emulator:
    """The device of these tests."""
    found = Emulator(cuda_libraries, eager=True)
    found.enter(found.stream())
    return found


def check(op: str, tasks: list[Task]) -> None:
    """One after another, and all at once."""
    single = [[array.copy() for array in arrays] for arrays, _ in tasks]
    for arrays, (_, constants) in zip(single, tasks, strict=True):
        kernel(op, "cuda")(*map(on_device, arrays), **constants)
    many = registered_many(kernel(op, "cuda"))
    assert many is not None
    many([([on_device(array) for array in arrays], constants) for arrays, constants in tasks])
    for want, (found, _) in zip(single, tasks, strict=True):
        for one, other in zip(want, found, strict=True):
            assert one.tobytes() == other.tobytes()


def test_what_starts_together() -> None:
    """Updates, their norm, and gradients of biases."""
    assert MANY == ["adam", "column_sums", "sum_scalars", "sum_squares"]


@pytest.mark.parametrize("op", MANY)
def test_cases_of_two_types_at_once(op: str, emulator: Emulator) -> None:
    """All cases of the operation, in fp32 and bf16, some of them twice."""
    kinds = [(number, short) for number in range(len(CASES[op])) for short in (False, op not in ONLY_FLOATS, False)]
    check(op, [arguments(op, number, short) for number, short in kinds])


def test_more_tiles_than_one_start_takes(emulator: Emulator) -> None:
    """Of unequal sizes, some with several blocks."""
    make = Maker(np.float32)
    check("sum_squares", [([make(1 + 531 * number), np.zeros(1)], {}) for number in range(MOST_TILES + 3)])
    check("column_sums", [([make(9, 1 + number), make(1 + number)], {"accumulate": number % 2 == 0}) for number in range(MOST_TILES + 3)])
    check("column_sums", [([make(200 + number, 12), make(12)], {"accumulate": number % 2 == 0}) for number in range(40)])
    counts = (1, 400, 3, 384, 2, *[12] * 40)
    check("sum_scalars", [([*(make(1).astype(np.float64) for _ in range(count)), np.zeros(1)], {}) for count in counts])
    numbers = {"decoupled": True, "max_norm": 1.0, "clip": True, "master": True}
    hyper = np.array([[1e-3, 0.1, 0.001, 0.9, 0.999, 1e-8, decay, 0.0] for decay in (0.0, 0.1)])
    norm, tasks = np.array([4.0]), []
    for number in range(2 * MOST_TILES + 3):
        size = 1 + 97 * number
        state = [make(size), make(size), make.positive(size)]
        tasks.append(([make(size).astype(BF16), *state, hyper, norm, make(size)], {**numbers, "row": number % 2}))
    check("adam", tasks)


@pytest.mark.usefixtures("own_kernels")
def test_a_kernel_of_the_program_starts_alone() -> None:
    """What knows how to start several of ours does not know it."""
    assert codelet("adam").cuda_many is registered_many(kernel("adam", "cuda"))
    register("adam", "cuda")(lambda *tiles, **constants: None)
    assert codelet("adam").cuda_many is None
