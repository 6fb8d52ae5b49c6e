"""Handles with a source: written by its task when they are first asked for, once, and not before."""

from __future__ import annotations

import gc

import pytest

from scheduler import Codelet, HandleLost, InlineRuntime, Runtime, TaskError


class Store:
    """Sources that fill a handle with a number and remember that they did."""

    def __init__(self, runtime, kit) -> None:  # type: ignore[no-untyped-def]
        self.runtime, self.kit = runtime, kit
        self.read: list[str] = []

    def handle(self, value: float, name: str, **options):  # type: ignore[no-untyped-def]
        """A handle whose source fills it with `value`."""
        handle = self.kit.handle(self.runtime, name, kind="persistent", **options)
        self.runtime.attach(handle, lambda found: self.submit(found, value))
        return handle

    def submit(self, handle, value: float) -> None:  # type: ignore[no-untyped-def]
        """The source's task."""
        self.read.append(handle.name)
        self.runtime.submit(self.kit.fill, [(handle, "W")], {"value": value})


@pytest.fixture(params=["inline", "threads"])
def runtime(request):  # type: ignore[no-untyped-def]
    """The oracle and the real one."""
    if request.param == "inline":
        yield InlineRuntime()
    else:
        with Runtime(2, ram=1 << 20) as made:
            yield made
            made._engine.machine.validate()


def test_the_first_to_ask_has_it_read(runtime, kit) -> None:  # type: ignore[no-untyped-def]
    """By a task that reads, one that updates, or the program; nobody else, and never twice."""
    store = Store(runtime, kit)
    a, b, c, d = (store.handle(number, name) for number, name in enumerate("abcd", 1))
    total = kit.filled(runtime, 0)
    assert store.read == []
    runtime.submit(kit.add, [(total, "RW"), (b, "R")])
    runtime.submit(kit.double, [(a, "RW")])
    assert kit.value(runtime, c) == 3
    runtime.submit(kit.add, [(total, "RW"), (a, "R")])
    assert kit.value(runtime, total) == 4
    assert store.read == ["b", "a", "c"]
    del d
    gc.collect()


def test_overwriting_forgets_the_source(runtime, kit) -> None:  # type: ignore[no-untyped-def]
    """What would be overwritten is not read."""
    store = Store(runtime, kit)
    a, b = store.handle(1, "a"), store.handle(2, "b")
    runtime.submit(kit.fill, [(a, "W")], {"value": 5})
    with runtime.acquire(b, "W") as view:
        view.fill(7)
    assert (kit.value(runtime, a), kit.value(runtime, b), store.read) == (5, 7, [])


def test_sums_begin_with_what_the_source_holds(runtime, kit) -> None:  # type: ignore[no-untyped-def]
    """A contribution adds to it."""
    store = Store(runtime, kit)
    a, one = store.handle(3, "a"), kit.filled(runtime, 1)
    plus = Codelet("plus", cpu=lambda out, part, *, accumulate: out.__iadd__(part) if accumulate else out.__setitem__(..., part))
    runtime.submit(plus, [(a, "REDUX"), (one, "R")])
    assert (kit.value(runtime, a), store.read) == (4, ["a"])


def test_recording_reads_nothing_and_the_first_replay_what_it_needs(kit) -> None:  # type: ignore[no-untyped-def]
    """In the order of first use; data that the step overwrites is not read, nor what it does not touch."""
    with Runtime(2, ram=1 << 20) as runtime:
        store = Store(runtime, kit)
        a, b, c, d = (store.handle(number, name) for number, name in enumerate("abcd", 1))
        with runtime.record() as step:
            runtime.submit(kit.fill, [(c, "W")], {"value": 10})
            runtime.submit(kit.add, [(c, "RW"), (b, "R")])
            runtime.submit(kit.add, [(c, "RW"), (a, "R")])
        assert store.read == []
        step.replay()
        step.replay().wait()
        assert store.read == ["b", "a"]
        assert [kit.value(runtime, handle) for handle in (a, b, c)] == [1, 2, 13]
        assert kit.value(runtime, d) == 4
        runtime._engine.machine.validate()


def test_sources_keep_to_the_budget(kit, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """More data than memory: what a replay reads at its beginning waits on the disk for its use."""
    count = 512  # one page of numbers each
    with Runtime(2, ram=8 * 4096, disk=(tmp_path, 1 << 20)) as runtime:
        store = Store(runtime, kit)
        handles = [store.handle(number, str(number), count=count) for number in range(32)]
        total = kit.filled(runtime, 0, count=count, kind="persistent")
        with runtime.record() as step:
            for handle in handles:
                runtime.submit(kit.add, [(total, "RW"), (handle, "R")])
        step.replay().wait()
        assert kit.value(runtime, total) == sum(range(32))
        assert runtime.stats()["peak_bytes"]["ram"] <= 8 * 4096
        runtime._engine.machine.validate()


def test_a_source_that_fails(kit) -> None:  # type: ignore[no-untyped-def]
    """Whoever needs the data is told, of a replay and of a task alike."""
    for recorded in (False, True):
        with Runtime(2, ram=1 << 20) as runtime:
            broken = kit.handle(runtime, "broken", kind="persistent")
            runtime.attach(broken, lambda handle, runtime=runtime: runtime.submit(kit.fail, [(handle, "W")]))
            total = kit.filled(runtime, 0, kind="persistent")
            if recorded:
                with runtime.record() as step:
                    runtime.submit(kit.add, [(total, "RW"), (broken, "R")])
                with pytest.raises((TaskError, HandleLost), match="planted"):
                    step.replay().wait()
                assert isinstance(runtime.unseen_failure, TaskError)
            else:
                runtime.submit(kit.add, [(total, "RW"), (broken, "R")])
            with pytest.raises(TaskError) as told:
                runtime.wait()
            assert isinstance(told.value.__cause__, ZeroDivisionError)
            assert runtime.unseen_failure is None
