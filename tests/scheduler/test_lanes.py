"""REDUX: contributions go to lanes by number, lanes are summed in a fixed tree, and nothing else decides the bits."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler import Codelet, InlineRuntime, Runtime

PARTS = np.random.default_rng(7).standard_normal((23, 16)).astype(np.float64) * 10.0 ** np.random.default_rng(8).integers(-8, 8, (23, 1))


def contribute(total: np.ndarray, *, number: int, accumulate: bool) -> None:
    """Add contribution `number`, or begin the sum with it."""
    if accumulate:
        total += PARTS[number]
    else:
        total[:] = PARTS[number]


CONTRIBUTE = Codelet("contribute", cpu=contribute)


def tree(lanes: int, count: int) -> np.ndarray:
    """What L lanes must give, in plain NumPy: lane j takes contributions j, j + L, ...; then lane j receives lane j + s for s = 1, 2, 4, ..."""
    sums = []
    for lane in range(min(lanes, count)):
        total = PARTS[lane].copy()
        for number in range(lane + lanes, count, lanes):
            total += PARTS[number]
        sums.append(total)
    stride = 1
    while stride < len(sums):
        for first in range(0, len(sums) - stride, 2 * stride):
            sums[first] += sums[first + stride]
        stride *= 2
    return sums[0]


def emit(runtime, handle, count: int) -> None:  # type: ignore[no-untyped-def]
    """Submit the first `count` contributions."""
    for number in range(count):
        runtime.submit(CONTRIBUTE, [(handle, "REDUX")], {"number": number})


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 5])
def test_sums_are_the_tree_of_the_lane_count(lanes: int, kit) -> None:  # type: ignore[no-untyped-def]
    """Inline execution gives the tree's bits for any number of contributions."""
    for count in (1, 2, 3, 4, 7, 23):
        runtime = InlineRuntime(lanes=lanes)
        total = kit.handle(runtime, "total", 16)
        emit(runtime, total, count)
        with runtime.acquire(total, "R") as view:
            assert view.tobytes() == tree(lanes, count).tobytes()


@pytest.mark.parametrize("sched", ["eager", "prio", "lws"])
@pytest.mark.parametrize("sim_gpus", [0, 1, 2])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_bits_do_not_depend_on_the_machine(workers: int, sim_gpus: int, sched: str, kit) -> None:  # type: ignore[no-untyped-def]
    """Workers, policy, devices, recording: for a given number of lanes the bits are the same."""
    for lanes in (1, 2, 3, 4, 5):
        with Runtime(workers, sim_gpus=sim_gpus, sched=sched, lanes=lanes, ram=1 << 20, gpu_memory=6 * 4096) as runtime:
            total = kit.handle(runtime, "total", 16)
            emit(runtime, total, 23)
            with runtime.record() as step:
                recorded = kit.handle(runtime, "recorded", 16)
                emit(runtime, recorded, 23)
            ticket = step.replay()
            expected = tree(lanes, 23).tobytes()
            with runtime.acquire(total, "R") as view:
                assert view.tobytes() == expected
            assert ticket.read(recorded).tobytes() == expected


def test_lanes_open_before_a_recording_are_summed_outside_it(kit) -> None:  # type: ignore[no-untyped-def]
    """A step neither takes nor leaves half-made sums: contributions before, inside and after it all count once."""
    with Runtime(2, lanes=3, ram=1 << 20) as runtime:
        total, copy = kit.handle(runtime, "total", 16), kit.handle(runtime, "copy", 16)
        emit(runtime, total, 5)
        with runtime.record() as step:
            runtime.submit(Codelet("copy", cpu=lambda a, b: np.copyto(b, a)), [(total, "R"), (copy, "W")])
            emit(runtime, total, 4)
        for _ in range(3):
            step.replay()
        emit(runtime, total, 2)
        with runtime.acquire(total, "R") as view:
            np.testing.assert_allclose(view, PARTS[:5].sum(0) + 3 * PARTS[:4].sum(0) + PARTS[:2].sum(0), rtol=1e-9, atol=1e-6)
        with runtime.acquire(copy, "R") as view:
            np.testing.assert_allclose(view, PARTS[:5].sum(0) + 2 * PARTS[:4].sum(0), rtol=1e-9, atol=1e-6)


def test_an_overwrite_drops_the_lanes(kit) -> None:  # type: ignore[no-untyped-def]
    """What is about to be overwritten is not summed first."""
    runtime = InlineRuntime(lanes=4)
    total = runtime.handle(8 * 16, kit.handle(runtime, "", 16).view, name="no combine codelet")
    emit(runtime, total, 6)
    runtime.submit(kit.fill, [(total, "W")], {"value": 2.0})
    assert kit.value(runtime, total) == 2


def test_lanes_without_a_combine_codelet_are_refused(kit) -> None:  # type: ignore[no-untyped-def]
    """Summing several lanes needs to know how."""
    runtime = InlineRuntime(lanes=2)
    total = runtime.handle(8 * 16, kit.handle(runtime, "", 16).view, name="total")
    emit(runtime, total, 2)
    with pytest.raises(ValueError, match=r"total.*2 lanes but has no combine codelet"):
        kit.value(runtime, total)
