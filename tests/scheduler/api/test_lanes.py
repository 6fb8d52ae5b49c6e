"""REDUX: contributions go to lanes by number, lanes are summed in a fixed tree, and nothing else decides the bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.search import search

from scheduler import Codelet, DoesNotFit, InlineRuntime, RunStopped, Runtime, contribution

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
    total.combine = kit.add  # the sums are still there
    assert kit.value(runtime, total) == tree(2, 2)[0]


def stop(runtime, kit) -> None:  # type: ignore[no-untyped-def]
    """A callback has asked for the end, and the program has heard of it."""

    def enough(task: object) -> None:
        raise ZeroDivisionError("enough")

    runtime.on_task(enough)
    runtime.submit(kit.fill, [(kit.handle(runtime), "W")], {"value": 0})
    with pytest.raises(RunStopped):
        runtime.wait()


@pytest.mark.parametrize("refused", ["a reader", "a contribution", "an overwrite", "a recording"])
def test_what_is_refused_after_a_stop_changes_no_sum(kit, refused: str) -> None:  # type: ignore[no-untyped-def]
    """Lanes are neither forgotten nor counted by a task that was not taken on, and a sum can still be read."""
    with Runtime(1, lanes=2, ram=1 << 20) as runtime:
        total, fresh = kit.handle(runtime, "total", 16), kit.handle(runtime, "fresh", 16)
        emit(runtime, total, 3)
        runtime.wait()
        stop(runtime, kit)
        if refused == "a recording":
            with runtime.record():
                pass
        else:
            access = {"a reader": (total, "R"), "a contribution": (fresh, "REDUX"), "an overwrite": (total, "W")}[refused]
            with pytest.raises(RunStopped):
                runtime.submit(kit.empty, [access])
        with runtime.acquire(total, "R") as view:
            assert view.tobytes() == tree(2, 3).tobytes()
        runtime.on_task(None)
        emit(runtime, fresh, 3)
        with runtime.acquire(fresh, "R") as view:
            assert view.tobytes() == tree(2, 3).tobytes()


def test_a_task_that_does_not_fit_changes_no_sum(kit) -> None:  # type: ignore[no-untyped-def]
    """Neither that of a contribution nor that of what it would read; and lanes are summed wherever there is room, not where the reader is placed."""
    with Runtime(1, lanes=2, ram=1 << 20, sim_gpus=1, gpu_memory=8192) as runtime:
        total, fresh, large = (kit.handle(runtime, name, count) for name, count in (("total", 600), ("fresh", 16), ("large", 1 << 18)))
        widen = Codelet("widen", cpu=lambda out, *, number, accumulate: out.__setitem__(..., number + accumulate * out))
        for number in (1, 2):
            runtime.submit(widen, [(total, "REDUX")], {"number": number})
        for accesses in ([(large, "W"), (total, "R")], [(large, "W"), (fresh, "REDUX")]):
            with pytest.raises(DoesNotFit):
                runtime.submit(kit.empty, accesses)
        with pytest.raises(DoesNotFit), runtime.place("sim:0"):
            runtime.submit(kit.empty, [(large, "R"), (total, "R")])
        with runtime.place("sim:0"):
            assert kit.value(runtime, total) == 3
        emit(runtime, fresh, 2)
        with runtime.acquire(fresh, "R") as view:
            assert view.tobytes() == tree(2, 2).tobytes()


@pytest.mark.parametrize("lanes", [2, 3, 4, 5, 8])
def test_parts_of_a_sum_made_apart_are_the_bits_of_the_whole(lanes: int, kit) -> None:  # type: ignore[no-untyped-def]
    """Any way to give neighbouring lanes to several runtimes: each sums what it has, one of them puts the parts together."""
    for count in (2, 3, 4, 7, 23):
        used = min(lanes, count)
        for cut in range(1, used):
            apart = []
            for mine in (range(cut), range(cut, used)):
                runtime = InlineRuntime(lanes=lanes)
                total = kit.handle(runtime, "total", 16)
                for number in (n for n in range(count) if n % lanes in mine):
                    with contribution(number):
                        runtime.submit(CONTRIBUTE, [(total, "REDUX")], {"number": number})
                apart.append((runtime, total, runtime.partial_sums(total, used)))
            (runtime, total, own), (there, _, others) = apart
            for lane, part in {**own, **others}.items():
                if lane in others:
                    copy = kit.handle(runtime, "copy", 16)
                    with runtime.acquire(copy, "W") as view, there.acquire(part, "R") as source:
                        view[:] = source
                    part = copy
                runtime.add_partial_sum(total, lane, part)
            with runtime.acquire(total, "R") as view:
                assert view.tobytes() == tree(lanes, count).tobytes()


def test_several_tasks_of_a_contribution_share_its_lane(kit) -> None:  # type: ignore[no-untyped-def]
    """A numbered contribution is summed in one chain, however many tasks it has; outside, tasks are counted again."""
    runtime = InlineRuntime(lanes=2)
    total = kit.handle(runtime, "total", 16)
    for number in range(4):
        with contribution(number // 2):
            runtime.submit(CONTRIBUTE, [(total, "REDUX")], {"number": number})
    with runtime.acquire(total, "R") as view:
        assert view.tobytes() == ((PARTS[0] + PARTS[1]) + (PARTS[2] + PARTS[3])).tobytes()


def contribute_twice(first: np.ndarray, second: np.ndarray, *, number: int, accumulate: bool) -> None:
    """Add contribution `number` to one sum and its double to another, or begin both with them."""
    for total, factor in ((first, 1), (second, 2)):
        total[:] = factor * PARTS[number] + (total if accumulate else 0)


TWICE = Codelet("contribute twice", cpu=contribute_twice)


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("num_first", [1, 2, 4, 5])
def test_sums_of_one_task_go_on_after_the_program_has_read_one_of_them(lanes: int, num_first: int, kit) -> None:  # type: ignore[no-untyped-def]
    """The read combines the lanes of one sum alone, as a program does that prints a gradient between two passes."""
    with Runtime(2, lanes=lanes, ram=1 << 20) as runtime:
        sums = [kit.handle(runtime, name, 16) for name in ("weight", "bias")]
        for number in range(num_first + 4):
            if number == num_first:
                with runtime.acquire(sums[1], "R") as view:
                    np.testing.assert_allclose(view, 2 * PARTS[:number].sum(0), rtol=1e-9, atol=1e-6)
            runtime.submit(TWICE, [(total, "REDUX") for total in sums], {"number": number})
        for factor, total in enumerate(sums, 1):
            with runtime.acquire(total, "R") as view:
                np.testing.assert_allclose(view, factor * PARTS[: num_first + 4].sum(0), rtol=1e-9, atol=1e-6)


class CountingRuntime(InlineRuntime):
    """A runtime that counts the tasks that reach it."""

    num_submitted = 0

    def _submit(self, *arguments: Any) -> None:
        self.num_submitted += 1
        super()._submit(*arguments)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_task_that_begins_one_sum_and_continues_another_is_refused(lanes: int, kit) -> None:  # type: ignore[no-untyped-def]
    """Its kernel has one `accumulate`. No task reaches the runtime, also none that sums a third handle; the sums go on after the remedy."""
    runtime = CountingRuntime(lanes=lanes)
    begun, fresh, read = (kit.handle(runtime, name, 16) for name in ("begun", "fresh", "read"))
    emit(runtime, begun, lanes)
    emit(runtime, read, lanes)
    accesses = [(begun, "REDUX"), (fresh, "REDUX"), (read, "R")]
    mixed = Codelet("mixed", cpu=lambda first, second, third, **constants: contribute_twice(first, second, **constants))
    with pytest.raises(ValueError, match=r"begins all of its sums or continues all.*mixed.*continue.*'begun'.*begin.*'fresh'.*; write zeros"):
        runtime.submit(mixed, accesses, {"number": lanes})
    assert runtime.num_submitted == 2 * lanes
    runtime.submit(kit.fill, [(fresh, "W")], {"value": 0.0})
    runtime.submit(mixed, accesses, {"number": lanes})
    for total, expected in ((begun, PARTS[: lanes + 1].sum(0)), (fresh, 2 * PARTS[lanes])):
        with runtime.acquire(total, "R") as view:
            np.testing.assert_allclose(view, expected, rtol=1e-9, atol=1e-6)


@search(200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lanes=st.integers(1, 4), events=st.lists(st.sampled_from(("both", "both", "first", "second", "read", "write")), max_size=20))
def test_sums_of_tasks_with_several_are_plain_sums_or_refused(lanes: int, events: list[str], kit) -> None:  # type: ignore[no-untyped-def]
    """Any program: a refused task changes nothing, and it is refused only if one sum has begun and the other has not."""
    runtime = InlineRuntime(lanes=lanes)
    sums = [kit.handle(runtime, name, 16) for name in ("first", "second")]
    expected: list[np.ndarray | None] = [None, None]
    for number, event in enumerate(events):
        if event == "read" and expected[0] is not None:
            with runtime.acquire(sums[0], "R") as view:
                np.testing.assert_allclose(view, expected[0], rtol=1e-9, atol=1e-6)
        elif event == "write":
            with runtime.acquire(sums[1], "W") as view:
                view[:] = 3.0
            expected[1] = np.full(16, 3.0)
        elif event in ("first", "second"):
            which = event == "second"
            runtime.submit(CONTRIBUTE, [(sums[which], "REDUX")], {"number": number})
            expected[which] = PARTS[number] + (0.0 if expected[which] is None else expected[which])
        elif event == "both":
            try:
                runtime.submit(TWICE, [(total, "REDUX") for total in sums], {"number": number})
            except ValueError:
                assert (expected[0] is None) != (expected[1] is None)
            else:
                expected = [factor * PARTS[number] + (0.0 if before is None else before) for factor, before in enumerate(expected, 1)]
    for total, value in zip(sums, expected, strict=True):
        if value is not None:
            with runtime.acquire(total, "R") as view:
                np.testing.assert_allclose(view, value, rtol=1e-9, atol=1e-6)
