"""Dask graphs on our workers: results, memory within budgets, the tier file, and what the program is told."""

from __future__ import annotations

import gc
import inspect
import os
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from dask._task_spec import Alias, DataNode, Task, TaskRef
from dask.callbacks import Callback
from support.deadline import DEADLINE

from nntask.errors import UsageError
from scheduler import DoesNotFit
from wrappers.dask import get, runtime
from wrappers.dask.graphs.blocks import Action, MemoryRequest
from wrappers.dask.graphs.ledger import Ledger
from wrappers.dask.graphs.plan import make_plan, prepare
from wrappers.dask.graphs.scheduler import _current

MIB = 1 << 20


def ones(name: str, nbytes: int = MIB) -> Task:
    """A task that makes an array of its own."""
    return Task(name, np.ones, nbytes // 8)


def combine(*arrays: Any) -> Any:
    """The sum of all items."""
    return float(sum(array.sum() for array in arrays))


def test_arrays_equal_those_of_dask() -> None:
    """QR, products, changed chunks and reductions, within a budget that none of them fits, and the same bits without one."""
    x = da.random.default_rng(0).standard_normal((1024, 512), chunks=128)
    q, r = da.linalg.qr(x.rechunk((256, 512)))
    jobs = [(x @ x.T).sum(axis=0), abs(q @ r).sum(), x.rechunk((1024, 64)).std(axis=0), (x - x.mean(axis=0)).T[::3].sum(axis=1)]
    expected = dask.compute(*jobs, scheduler="threads")
    for found, truth in zip(dask.compute(*jobs, scheduler=get), expected, strict=True):
        np.testing.assert_array_equal(found, truth)


def bump(array: Any) -> Any:
    """What it is given, changed in place; an array, or a dict of more items than one is taken apart into."""
    for each in array.values() if isinstance(array, dict) else [array]:
        each += 100.0
    return array


def many(number: int) -> dict[int, Any]:
    """Arrays in a dict that leaves memory as a whole."""
    return {place: np.full(MIB // 8 // 128, float(number)) for place in range(128)}


@pytest.mark.parametrize("make", [lambda number: np.full(MIB // 8, float(number)), many])
def test_what_a_function_changes_in_place_and_returns_is_not_lost(tmp_path: Path, make: Any) -> None:
    """``x += 1; return x`` on results that were on the disk before: they are written anew, not read back as they were."""

    def first(array: Any, *after: Any) -> float:
        return float((array[0] if isinstance(array, dict) else array)[0])

    graph: dict[str, Any] = {f"made{n}": Task(f"made{n}", make, n) for n in range(12)}
    graph |= {f"seen{n}": Task(f"seen{n}", first, TaskRef(f"made{n}")) for n in range(12)}
    graph["all made"] = Task("all made", lambda *each: None, *(TaskRef(f"seen{n}") for n in range(12)))
    graph |= {f"bumped{n}": Task(f"bumped{n}", lambda array, _: bump(array), TaskRef(f"made{n}"), TaskRef("all made")) for n in range(12)}
    graph |= {f"again{n}": Task(f"again{n}", first, TaskRef(f"bumped{n}")) for n in range(12)}
    graph["all bumped"] = Task("all bumped", lambda *each: None, *(TaskRef(f"again{n}") for n in range(12)))
    graph |= {f"last{n}": Task(f"last{n}", first, TaskRef(f"bumped{n}"), TaskRef("all bumped")) for n in range(12)}
    with runtime(ram=5 * MIB, disk=tmp_path, workers=1) as graphs:
        found = graphs.get(graph, [f"last{n}" for n in range(12)])
        assert graphs.stats()["moved_bytes"]["disk->ram"] > 6 * MIB
    assert found == tuple(100.0 + n for n in range(12))


def test_graphs_within_tasks_that_wait_for_what_those_hold_say_so(tmp_path: Path) -> None:
    """Two tasks pin most of the memory and compute graphs that need the rest twice: an error instead of waiting forever."""
    both = threading.Barrier(2)

    def compute_within(array: Any) -> float:
        both.wait(DEADLINE)
        parts = {f"part{n}": Task(f"part{n}", np.ones, 10 * MIB // 64) for n in range(3)}
        return float(get(parts | {"sum": Task("sum", combine, *map(TaskRef, parts))}, "sum")) + float(array[0])

    graph: dict[str, Any] = {f"made{n}": ones(f"made{n}", 5 * MIB) for n in range(2)}
    graph |= {f"outer{n}": Task(f"outer{n}", compute_within, TaskRef(f"made{n}")) for n in range(2)}
    with runtime(ram=12 * MIB, disk=tmp_path, workers=2) as graphs:
        with pytest.raises(DoesNotFit, match="graphs that are computed within tasks wait for memory that those tasks hold") as refusal:
            graphs.get(graph, ["outer0", "outer1"])
        lack = refusal.value.shortage
        assert (lack.cause, lack.node) == ("taken", "ram")
        assert 10 * MIB <= lack.budget <= 12 * MIB
        assert graphs.get({"after": ones("after", 8 * MIB)}, "after").nbytes == 8 * MIB


def test_a_graph_within_a_task_does_not_wait_for_later_tasks(tmp_path: Path) -> None:
    """Tasks that read most of the memory compute small graphs: one runs after the other, and no graph waits behind a task that waits for it."""

    def compute_within(array: Any) -> float:
        parts = {f"part{n}": Task(f"part{n}", np.ones, MIB // 16) for n in range(2)}
        return float(get(parts | {"sum": Task("sum", combine, *map(TaskRef, parts))}, "sum")) + float(array[0])

    graph: dict[str, Any] = {f"made{n}": ones(f"made{n}", 3 * MIB) for n in range(4)}
    graph |= {f"outer{n}": Task(f"outer{n}", compute_within, TaskRef(f"made{n}")) for n in range(4)}
    with runtime(ram=5 * MIB, disk=tmp_path, workers=2) as graphs:
        assert graphs.get(graph, [f"outer{n}" for n in range(4)]) == (MIB / 8 + 1,) * 4


def test_a_graph_within_a_task_may_return_views_of_what_the_task_reads(tmp_path: Path) -> None:
    """The memory stays the outer graph's, whose later tasks read it."""

    def view_within(array: Any) -> float:
        graph = {"view": Task("view", lambda: array[1:]), "sum": Task("sum", combine, TaskRef("view"))}
        graph["end"] = Task("end", lambda view, _: view[2:], TaskRef("view"), TaskRef("sum"))
        return float(get(graph, "end").sum())

    graph: dict[str, Any] = {"x": ones("x")} | {f"seen{n}": Task(f"seen{n}", combine, TaskRef("x")) for n in range(8)}
    graph["inner"] = Task("inner", view_within, TaskRef("x"))
    graph["end"] = Task("end", lambda *found: sum(map(np.sum, found)), *map(TaskRef, [*graph]))
    with runtime(ram=8 * MIB, disk=tmp_path, workers=1) as graphs:
        assert graphs.get(graph, "end") == 10 * MIB / 8 - 3
        assert (graphs.stats()["largest_bytes"], graphs.stats()["lent"]) == (MIB, 0)
        assert graphs.stats()["resident_bytes"] == 0


def test_a_budget_is_kept_by_way_of_the_disk(tmp_path: Path) -> None:
    """Data of eight times the budget is standardized in two passes; results are equal, and what is counted stays within the stated bound."""
    x = da.random.default_rng(0).random((2048, 1024), chunks=256)  # 16 MiB in blocks of 512 KiB
    job = (((x - x.mean()) / x.std()) ** 3).sum(axis=0)
    with runtime(ram=4 * MIB, disk=tmp_path, workers=2) as graphs:
        found = job.compute()
        stats = graphs.stats()
    np.testing.assert_array_equal(found, job.compute(scheduler="threads"))
    assert stats["peak_bytes"] <= stats["budget_bytes"] + 2 * stats["largest_bytes"]
    assert stats["moved_bytes"]["ram->disk"] > 8 * MIB
    assert not list(tmp_path.iterdir())  # the file was unlinked when it was opened


def test_resident_memory_stays_within_the_bound(tmp_path: Path) -> None:
    """A process that computes on 192 MiB within 24 MiB takes no more than budget + workers x (result + temporaries), and 32 MiB for Dask itself."""
    program = f"""
import numpy as np, dask.array as da, psutil
from wrappers.dask import runtime
from benchmarks.common import peak_rss
da.ones(10, chunks=5).sum().compute(scheduler="sync")
with runtime(ram=24 << 20, disk={str(tmp_path)!r}, workers=2) as graphs:
    small = da.random.default_rng(0).random((64, 64), chunks=32); ((small - small.mean()) ** 2).sum().compute()
    before = psutil.Process().memory_info().rss
    x = da.random.default_rng(0).random((6144, 4096), chunks=512)
    ((x - x.mean()) ** 2).sum().compute()
    stats = graphs.stats()
    assert stats["moved_bytes"]["ram->disk"] > 96 << 20, stats
    bound = stats["budget_bytes"] + 2 * 3 * stats["largest_bytes"] + (32 << 20)
    assert peak_rss() - before <= bound, (peak_rss() - before, bound, stats)
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr


def test_views_share_the_memory_of_what_they_are_views_of() -> None:
    """A view, a transposed one and one of a view count nothing; a small one does not keep the large array."""
    graph = {
        "x": ones("x", 4 * MIB),
        "view": Task("view", lambda x: x[1:], TaskRef("x")),
        "turned": Task("turned", lambda x: x.reshape(1024, -1).T[::-1], TaskRef("x")),
        "small": Task("small", lambda x: x[:3], TaskRef("x")),
    }
    with runtime(ram=64 * MIB) as graphs:
        view, turned, small = graphs.get(graph, ["view", "turned", "small"])
        assert np.shares_memory(view, turned)
        assert not np.shares_memory(view, small)
        assert graphs.stats()["largest_bytes"] == 4 * MIB
        assert graphs.stats()["peak_bytes"] < 5 * MIB
        assert graphs.stats()["lent"] == 1


def test_views_come_back_from_the_disk_as_they_were(tmp_path: Path) -> None:
    """Blocks that had to leave while views of them wait: strides, order and flags are the same, and views share memory again."""

    def parts(x: Any) -> Any:
        grid = x.reshape(512, -1)
        frozen = grid[5:]
        frozen.flags.writeable = False
        return {"turned": grid.T[::-2, 3:], "frozen": frozen, "name": "grid", "more": (grid, [grid[7:]])}

    def check(found: Any, wide: float) -> Any:
        truth = parts(np.arange(MIB // 8, dtype=float))
        for name in ("turned", "frozen"):
            assert found[name].strides == truth[name].strides
            assert found[name].flags.writeable == truth[name].flags.writeable
            np.testing.assert_array_equal(found[name], truth[name])
        np.testing.assert_array_equal(found["more"][1][0], truth["more"][1][0])
        assert np.shares_memory(found["more"][0], found["turned"])
        return found["name"]

    graph = pressed(lambda: np.arange(MIB // 8, dtype=float))
    graph["parts"] = Task("parts", parts, TaskRef("made"))
    graph["end"] = Task("end", check, TaskRef("parts"), TaskRef("wide"))
    with runtime(ram=4 * MIB, disk=tmp_path, workers=1) as graphs:
        assert graphs.get(graph, "end") == "grid"
        assert graphs.stats()["moved_bytes"]["disk->ram"] >= MIB


class Odd:
    """An object that cannot be pickled, and says that it is large."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __sizeof__(self) -> int:
        return MIB


def pressed(make: Any, look: Any = lambda made, wide: made) -> dict[str, Any]:
    """A graph that makes something of a MiB, then needs 3 MiB at once for something else, then looks at it again."""
    graph: dict[str, Any] = {"made": Task("made", make)}
    for number in range(3):
        graph[f"a{number}"] = Task(f"a{number}", lambda before: np.ones(MIB // 8), TaskRef("made"))
    graph["wide"] = Task("wide", combine, *(TaskRef(f"a{number}") for number in range(3)))
    graph["end"] = Task("end", look, TaskRef("made"), TaskRef("wide"))
    return graph


def test_objects_leave_as_pickles_and_come_back(tmp_path: Path) -> None:
    """A data frame, a set of strings and a function of the program survive a trip to the disk."""
    frame = {"a": np.arange(100_000), "b": ["x", "yz"] * 50_000}
    words = {f"word {number}" for number in range(20_000)}
    with runtime(ram=4 * MIB, disk=tmp_path, workers=1) as graphs:
        pd.testing.assert_frame_equal(graphs.get(pressed(lambda: pd.DataFrame(frame)), "end"), pd.DataFrame(frame))
        assert graphs.get(pressed(lambda: words.copy()), "end") == words
        assert graphs.stats()["moved_bytes"]["disk->ram"] >= MIB


def test_what_cannot_be_pickled_stays(tmp_path: Path) -> None:
    """It is counted for good, something else leaves in its place, and without anything else the graph does not fit."""
    graph = pressed(Odd)
    with runtime(ram=4 * MIB, disk=tmp_path, workers=1) as graphs, pytest.raises(DoesNotFit, match="'wide', which reads"):
        graphs.get(graph, "end")
    graph["more"] = Task("more", lambda made: np.ones(MIB // 8), TaskRef("made"))
    graph |= {f"a{number}": Task(f"a{number}", lambda made, more: np.ones(MIB // 8), TaskRef("made"), TaskRef("more")) for number in range(3)}
    graph["end"] = Task("end", lambda made, more, wide: made, TaskRef("made"), TaskRef("more"), TaskRef("wide"))
    with runtime(ram=4 * MIB + MIB // 2, disk=tmp_path, workers=1) as graphs:
        assert isinstance(graphs.get(graph, "end"), Odd)
        assert graphs.stats()["moved_bytes"]["disk->ram"] >= MIB


def test_what_is_lent_counts_until_the_program_lets_go(tmp_path: Path) -> None:
    """A result and a view of it pin its bytes; with them a graph does not fit, and without them it does."""
    needs_all = {"x": ones("x", 3 * MIB), "y": ones("y", 3 * MIB), "z": Task("z", combine, TaskRef("x"), TaskRef("y"))}
    with runtime(ram=8 * MIB, disk=tmp_path, workers=1) as graphs:
        view = graphs.get({"x": ones("x", 3 * MIB)}, "x")[5:]
        assert graphs.stats()["lent"] == 1
        assert graphs.stats()["resident_bytes"] >= 3 * MIB
        with pytest.raises(DoesNotFit, match=r"'z', which reads 6,291,456 B .* lent to the program"):
            graphs.get(needs_all, "z")
        del view
        gc.collect()
        assert graphs.get(needs_all, "z") == 6 * MIB / 8
        assert graphs.stats()["lent"] == 0


def test_without_a_disk_what_does_not_fit_fails() -> None:
    """The message names the task, the bytes and what to do."""
    graph: dict[str, Any] = {f"x{number}": ones(f"x{number}") for number in range(8)}
    graph["end"] = Task("end", combine, *(TaskRef(f"x{number}") for number in range(8)))
    with (
        runtime(ram=4 * MIB, workers=1) as graphs,
        pytest.raises(DoesNotFit, match=r"without a disk earlier results stay there; raise ram, name a") as refusal,
    ):
        graphs.get(graph, "end")
    assert (refusal.value.shortage.cause, refusal.value.shortage.node, refusal.value.shortage.budget) == ("taken", "ram", 4 * MIB)
    with (
        runtime(ram="1KB", workers=1) as graphs,
        pytest.raises(DoesNotFit, match=r"B of results at once, in 1,000 B of ram; raise ram, or") as refusal,
    ):
        graphs.get({"x": ones("x"), "end": Task("end", combine, TaskRef("x"), TaskRef("x"))}, "end")
    assert (refusal.value.shortage.cause, refusal.value.shortage.task, refusal.value.shortage.budget) == ("task", "end", 1000)


def test_a_full_disk_fails_the_graph_and_not_the_runtime(tmp_path: Path) -> None:
    """The next graph runs."""
    graph: dict[str, Any] = {f"x{number}": ones(f"x{number}") for number in range(8)}
    graph["end"] = Task("end", combine, *(TaskRef(f"x{number}") for number in range(8)))
    with runtime(ram=3 * MIB, disk=f"{tmp_path / 'tier'}:4MiB", workers=1) as graphs:
        with pytest.raises(DoesNotFit, match="disk is full"):
            graphs.get(graph, "end")
        with pytest.raises(DoesNotFit, match="disk is full"):
            graphs.get({"x": Task("x", lambda: [np.ones(3 * MIB // 8) for _ in range(2)])}, "x")
        assert graphs.stats()["resident_bytes"] == 0
        assert graphs.get({"x": ones("x"), "y": Task("y", combine, TaskRef("x"))}, "y") == MIB / 8


def test_data_of_the_graph_is_not_ours_to_count() -> None:
    """Views of an array that the program put into the graph are lent back as they are."""
    mine = np.arange(4 * MIB // 8)
    with runtime(ram=2 * MIB, workers=1) as graphs:
        for graph in ({"x": DataNode("x", mine), "y": Task("y", np.transpose, TaskRef("x"))}, {"y": Task("y", np.ravel, mine)}):
            assert np.shares_memory(graphs.get(graph, "y"), mine)
        assert graphs.stats()["largest_bytes"] == 0
        assert int(da.from_array(mine, chunks=1 << 15).sum().compute()) == int(mine.sum())


def test_exceptions_keep_type_and_traceback() -> None:
    """As from `dask.local`: the function that raised is in the traceback, also of fused tasks; the runtime goes on."""

    def fails(x: int) -> None:
        raise ZeroDivisionError(f"of {x}")

    with runtime(ram="64MiB") as graphs:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError, match="of 3") as caught:
                graphs.get({"x": Task("x", fails, 3)}, "x")
            assert "fails" in [entry.name for entry in caught.traceback]
        with pytest.raises(ZeroDivisionError, match="of ") as caught:
            db.from_sequence(range(3), npartitions=3).map(lambda x: x + 1).map(fails).compute()
        assert graphs.get({"x": 1}, "x") == 1


def test_rerun_exceptions_locally() -> None:
    """The task runs once more on the calling thread."""
    threads: list[int] = []

    def fails() -> None:
        threads.append(threading.get_ident())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        get({"x": Task("x", fails)}, "x", rerun_exceptions_locally=True)
    assert threads[1:] == [threading.get_ident()]


def test_keywords_are_in_the_signatures() -> None:
    """`help` and editors show them, and a wrong one is refused by the function that the program called."""
    for function in (get, runtime.get):
        parameters = inspect.signature(function).parameters
        assert [*parameters][-5:] == ["cache", "num_workers", "pool", "callbacks", "rerun_exceptions_locally"]
    with pytest.raises(TypeError, match=r"^get\(\) got an unexpected keyword argument 'rerun'"):
        get({"x": 1}, "x", rerun=True)


def test_a_graph_within_a_task_shares_the_memory() -> None:
    """A nested `compute` runs on threads of its own, within the same budget; more of them than workers do not wait for one another."""

    def inner(number: int) -> float:
        return float(da.ones(1 << 18, chunks=1 << 16).sum().compute(scheduler=get)) + number

    graph: dict[str, Any] = {f"x{number}": Task(f"x{number}", inner, number) for number in range(6)}
    graph["end"] = Task("end", lambda *found: sum(found), *(TaskRef(f"x{number}") for number in range(6)))
    with runtime(ram="64MiB", workers=2) as graphs:
        assert graphs.get(graph, "end") == 6 * (1 << 18) + 15
        assert graphs.stats()["peak_bytes"] > 0


@pytest.mark.parametrize("has_runtime", [True, False])
def test_the_result_of_a_nested_graph_counts(has_runtime: bool) -> None:
    """A task holds the result of a graph that it has computed: its bytes count, with a runtime of the program or the one that `get` opens."""

    def outer() -> tuple[int, int]:
        held = da.ones(MIB // 8, chunks=MIB // 8).compute(scheduler=get)
        runtime_of_task = _current.get()
        assert runtime_of_task is not None
        stats = runtime_of_task.stats()
        return held.nbytes, stats["resident_bytes"]

    graph = {"x": Task("x", outer)}
    if has_runtime:
        with runtime(ram="64MiB") as graphs:
            found = graphs.get(graph, "x")
    else:
        found = get(graph, "x")
    assert found == (MIB, MIB)


def test_one_worker_follows_the_order() -> None:
    """Tasks run as `dask.order` puts what is to run."""
    x = da.random.default_rng(0).normal(size=(64, 64), chunks=16)
    job = (x.dot(x.T) - x.mean(axis=0)).std()
    graph, wanted = prepare(dict(job.__dask_graph__()), job.__dask_keys__())
    found: list[Any] = []
    with Callback(pretask=lambda key, *_: found.append(key)):
        get(graph, list(wanted), num_workers=1)
    assert found == make_plan(graph, wanted, {}, keep_aliases=True).keys


def test_aliases_data_and_old_style_tasks() -> None:
    """Chains of aliases, also of what is asked for, of data and of cached values."""
    total = Task("d", lambda *found: sum(found), TaskRef("b"), TaskRef("c"), TaskRef("x"))
    graph = {"a": 1, "b": "a", "c": Alias("c", "b"), "d": total, "e": Alias("e", "d"), "f": [1, (sum, ["e", "a"])]}
    assert get(graph, ["c", ["e", "f"], "x"], cache={"x": 5}) == (1, (7, [1, 8]), 5)
    with pytest.raises(RuntimeError, match="Cycle"):
        get({"a": Alias("a", "b"), "b": Alias("b", "a"), "c": (sum, ["a"])}, "c")


def test_pools_of_threads_are_used_and_pools_of_processes_refused() -> None:
    """As the message says."""
    with ThreadPoolExecutor(1, thread_name_prefix="mine") as pool:
        assert get({"x": Task("x", lambda: threading.current_thread().name)}, "x", pool=pool).startswith("mine")
    with ProcessPoolExecutor(1) as processes, pytest.raises(TypeError, match="pool must be one of threads, got a ProcessPoolExecutor"):
        get({"x": 1, "y": (sum, ["x"])}, "y", pool=processes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ram": "2 apples"}, "ram must be a size"),
        ({"ram": 0}, "ram must be a positive number"),
        ({"workers": 0}, "at least one worker"),
        ({"disk": ""}, "disk must name a directory"),
        ({"disk": "x:big"}, "must be a size"),
    ],
)
def test_bad_budgets(arguments: dict[str, Any], message: str) -> None:
    """One sentence."""
    with pytest.raises(UsageError, match=message):
        runtime(**arguments)


def test_a_closed_runtime_says_so() -> None:
    """And Dask's configuration is what it was."""
    before = dask.config.get("scheduler", None)
    with runtime(ram="16MiB") as graphs:
        assert dask.config.get("scheduler") == graphs.get
    assert dask.config.get("scheduler", None) == before
    from scheduler import SchedulerError

    with pytest.raises(SchedulerError, match="closed; make a new one"):
        graphs.get({"x": ones("x"), "y": Task("y", combine, TaskRef("x"))}, "y")


def test_a_bag_and_a_data_frame() -> None:
    """Small results in great number, and pandas partitions."""
    bag = db.from_sequence(range(5000), npartitions=1000).map(lambda x: x * x).filter(lambda x: x % 2)
    assert bag.sum().compute(scheduler=get) == sum(x * x for x in range(5000) if x % 2)
    assert dict(bag.map(lambda x: x % 7).frequencies().compute(scheduler=get)) == dict(
        bag.map(lambda x: x % 7).frequencies().compute(scheduler="sync")
    )
    frame = pd.DataFrame({"key": np.arange(50_000) % 13, "value": np.arange(50_000.0)})
    grouped = dd.from_pandas(frame, npartitions=8).groupby("key").value.mean().compute(scheduler=get)
    pd.testing.assert_series_equal(grouped.sort_index(), frame.groupby("key").value.mean(), check_index_type=False)


ASLEEP = """
import os, signal, sys, threading, time
def wait_until_main_sleeps():  # were it still awake, it would hear anyway
    while True:
        frame = sys._current_frames()[threading.main_thread().ident]
        calls = []
        while frame is not None:
            calls.append(frame.f_code.co_name)
            frame = frame.f_back
        if calls[0] == "wait" and "sleep_until" in calls:
            return
        time.sleep(0)  # gives up the processor
"""
"""Waits until the main thread waits for the graph."""

ELSEWHERE = """
from wrappers.dask import get
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that runs in the background inherits that it is ignored
def interrupt():
    wait_until_main_sleeps()
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    threading.Event().wait(60)
try:
    get({"x": (interrupt,)}, "x", num_workers=1)
except KeyboardInterrupt:
    print("heard", flush=True)
os._exit(0)
"""


WHILE_FETCHING = """
import numpy as np
from wrappers.dask import runtime
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupt():
    wait_until_main_sleeps()
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    threading.Event().wait(60)
class Large:
    def __sizeof__(self): return 6 << 20
    def __reduce__(self): return interrupt, ()
graph = {
    "x": (Large,),
    "x is there": (lambda x: 0, "x"),
    "y": (lambda _: np.ones(7 << 20, np.uint8), "x is there"),
    "x has left": (lambda y: 1, "y"),
}
found = runtime(ram=8 << 20, disk=".", workers=1)
try:
    found.get(graph, ["x", "x has left"])
except KeyboardInterrupt:
    print("heard", flush=True)
os._exit(0)  # the thread that reads is not waited for
"""


@pytest.mark.parametrize("script", [ELSEWHERE, WHILE_FETCHING])
def test_ctrl_c_that_reaches_another_thread_is_heard(script: str, tmp_path: Path) -> None:
    """The main thread sleeps, and the system gives the signal to a worker's thread, or to that which reads results back: nobody wakes the one on
    which Python's handlers run."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", ASLEEP + script], capture_output=True, text=True, timeout=DEADLINE, check=False, cwd=tmp_path, env=environment
    )
    assert (done.stdout, done.returncode) == ("heard\n", 0), done.stderr


def test_a_thread_that_admits_its_own_request_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks compute graphs with one thread each. The request of the first waits for memory, and the thread of the second finds that all others
    sleep: it admits its own request, which fits, and runs it."""
    begun, waits = threading.Event(), threading.Event()

    def kib(number: int) -> np.ndarray:
        return np.ones(number * 128)

    def first(data: np.ndarray) -> float:
        def large() -> np.ndarray:
            begun.set()
            return kib(400)

        graph = {"large-0": Task("large-0", large), "large-1": Task("large-1", lambda before: before + 1, TaskRef("large-0"))}
        return float(get(graph, "large-1", num_workers=1)[0])

    def second(data: np.ndarray) -> float:
        def small() -> np.ndarray:
            assert waits.wait(DEADLINE)
            return kib(150)

        assert begun.wait(DEADLINE)  # requests of the graph that began first go first
        graph = {"small-0": Task("small-0", small), "small-1": Task("small-1", lambda before: before + 1, TaskRef("small-0"))}
        return float(get(graph, "small-1", num_workers=1)[0])

    graph = {"a": Task("a", kib, 100), "b": Task("b", kib, 200), "x": Task("x", first, TaskRef("a")), "y": Task("y", second, TaskRef("b"))}
    request = Ledger.request

    def noted(ledger: Ledger, asked: MemoryRequest) -> list[Action]:
        actions = request(ledger, asked)
        if asked.depth and asked.result_nbytes >= 400 << 10:
            waits.set()
        return actions

    monkeypatch.setattr(Ledger, "request", noted)
    with runtime(ram=1020 << 10, workers=2) as graphs:
        assert graphs.get(graph, ["x", "y"]) == (2.0, 2.0)
