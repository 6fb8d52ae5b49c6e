"""Performance models: means that spikes do not move, footprints that are stable, links fitted from copies, and their file."""

from __future__ import annotations

import json
import pwd
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.plain_tasks import plain_task
from support.search import search

from scheduler import Codelet, Cost
from scheduler.core.link_model import DISK_LINK, FEW_PAIRS, LARGE, MEMORY_LINK, MOST_LATENCY, LinkModel
from scheduler.core.performance_model import KEPT, RATES, UNKNOWN_SECONDS, Models, Series, footprint
from scheduler.core.records import HandleId, HandleRecord, HandleSpec, NodeId, Task
from scheduler.storage.performance_store import MOST_SERIES, PerfStore, default_directory, machine_fingerprint
from tiles import TileView

RAM, GPU, DISK = NodeId(0), NodeId(1), NodeId(2)
KEY = ("gemm", 1, "cpu")
COST = Codelet("gemm", cost=lambda views, constants: Cost(2.0 * views[0].shape[0] ** 3, float(views[0].nbytes)))


def task(codelet: Codelet | None = None, shape: tuple[int, ...] = (4, 4), dtype: str = "float32", **constants: object) -> Task:
    """A task that reads one tile."""
    view = TileView(shape, np.dtype(dtype))
    handle = HandleRecord(HandleId(0), HandleSpec(view.nbytes, 4096, view, "", "temporary", "activations"))
    return plain_task(0, "gemm", ("cpu",), ((handle, "R"),), constants, codelet=codelet)


def test_a_series_is_a_mean_without_the_first_sample() -> None:
    """The cold first sample is dropped and a spike moves nothing."""
    series = Series()
    assert series.typical is None
    for seconds in (9.0, 1.0, 1.2, 50.0, 1.1):
        series.add(seconds)
    assert series.typical == pytest.approx(1.1)
    series.add(1.0)
    assert series.typical == pytest.approx(1.075)


@given(st.lists(st.floats(0.0, 1e3), min_size=2, max_size=3 * KEPT))
@settings(derandomize=True, deadline=None)
def test_the_estimate_is_of_the_latest(samples: list[float]) -> None:
    """The mean of the last `KEPT` without those beyond twice their median, the first ever not counted."""
    series = Series()
    for seconds in samples:
        series.add(seconds)
    latest = samples[1:][-KEPT:]
    limit = 2 * statistics.median(latest) if latest else 0.0
    assert series.typical == pytest.approx(statistics.mean(each for each in latest if each <= limit))


@given(st.lists(st.floats(0.9, 1.1), min_size=9, max_size=40), st.lists(st.floats(10.0, 1e6), max_size=4), st.randoms(use_true_random=False))
@settings(derandomize=True, deadline=None)
def test_spikes_do_not_move_the_model(samples: list[float], spikes: list[float], dice) -> None:  # type: ignore[no-untyped-def]
    """A few durations out of all proportion leave the estimate among the others."""
    series, mixed = Series(), [*samples[1:], *spikes]
    dice.shuffle(mixed)
    for seconds in (samples[0], *mixed):
        series.add(seconds)
    estimate = series.typical
    assert estimate is not None
    assert 0.9 <= estimate <= 1.1


def test_footprints_tell_apart_what_costs_differently() -> None:
    """Shapes, dtypes, modes, switches and operation counts count; seeds and offsets do not; numbers are the same in every process."""
    assert footprint(task().spec) == footprint(task().spec) == 1594697441
    varied = [task(), task(shape=(4, 8)), task(dtype="float64"), task(trans=True), task(trans=False), task(kind="relu"), task(n=3), task(COST)]
    assert len({footprint(each.spec) for each in varied}) == len(varied)
    assert footprint(task(COST, seed=1).spec) == footprint(task(COST, seed=2).spec)
    assert footprint(task(COST, causal=True).spec) != footprint(task(COST, causal=False).spec)


def test_unmeasured_tasks_are_guessed_from_their_cost() -> None:
    """Whichever of operations and bytes binds; what was measured beats the guess; a task without cost gets a constant."""
    models, large = Models(), task(COST, (1000, 1))
    assert models.task_seconds(task(COST), "cpu") == 64 / RATES["cpu"].nbytes > 128 / RATES["cpu"].flops
    assert models.task_seconds(large, "cpu") == 2e9 / RATES["cpu"].flops > 4000 / RATES["cpu"].nbytes
    assert models.task_seconds(task(), "cpu") == UNKNOWN_SECONDS
    for seconds in (7.0, 3.0):
        models.record(task(COST), "cpu", seconds)
    assert models.task_seconds(task(COST), "cpu") == 3.0
    assert models.task_seconds(task(COST), "host") == UNKNOWN_SECONDS


def test_the_key_of_a_task_is_computed_once() -> None:
    """Later records and estimates of the same task find it in its slot."""
    models, one = Models(), task()
    models.record(one, "cpu", 1.0)
    assert one.spec.model_key == ("gemm", footprint(one.spec))
    one.spec.model_key = ("other", 5)
    models.record(one, "cpu", 1.0)
    assert ("other", 5, "cpu") in models.series


@given(
    latency=st.floats(1e-6, 1e-3),
    bandwidth=st.floats(1e8, 1e11),
    sizes=st.lists(st.integers(1 << 12, 1 << 24), min_size=12, max_size=40, unique=True),
    spikes=st.integers(0, 2),
)
@settings(derandomize=True, deadline=None)
def test_links_are_fitted_despite_spikes(latency: float, bandwidth: float, sizes: list[int], spikes: int) -> None:
    """Copies of several sizes, two of them large, give latency and bandwidth back; one in eight that took a hundred times longer changes little."""
    link = LinkModel()
    for at, nbytes in enumerate(sizes := [*sizes, 1 << 18, 1 << 22]):
        link.add(nbytes, (latency + nbytes / bandwidth) * (100.0 if at % 8 < spikes // 2 else 1.0))
    link.fit()
    for nbytes in sizes:
        assert link.seconds(nbytes) == pytest.approx(latency + nbytes / bandwidth, rel=0.3)


@given(
    latency=st.floats(1e-6, 1e-3),
    share=st.floats(3.0, 1e3),
    largest=st.integers(1 << 17, 1 << 26),
    middle=st.lists(st.floats(0.0, 1.0), max_size=14),
    noise=st.lists(st.floats(-0.5, 0.5), max_size=16),
    tiny=st.sampled_from([512, 1024, 4096]),
)
@example(latency=1e-3, share=4.0, largest=1 << 22, middle=[0.0] * 13 + [0.8], noise=[0.5] * 16, tiny=1024)
@settings(derandomize=True, deadline=None, max_examples=400)
def test_noise_of_small_copies_does_not_reach_the_bandwidth(
    latency: float, share: float, largest: int, middle: list[float], noise: list[float], tiny: int
) -> None:
    """Small copies that are up to half too fast or too slow, perhaps all in one direction: the bandwidth is within a quarter if several large copies
    are known or the transfer of each takes three times the latency. It is never above a large copy's rate by more than the latency explains."""
    bandwidth = largest / (share * latency)
    large = [int(LARGE * (largest / LARGE) ** part) for part in middle] + [largest]
    link = LinkModel()
    link.remember([(tiny, (latency + tiny / bandwidth) * (1 + each)) for each in noise] + [(size, latency + size / bandwidth) for size in large])
    link.fit()
    num_pairs = sum(one >= 2 * other for one in large for other in large)
    if num_pairs >= FEW_PAIRS or (noise and min(large) >= 3 * latency * bandwidth):
        assert link.bandwidth == pytest.approx(bandwidth, rel=0.25)
    known = 1.5 * (latency + tiny / bandwidth)
    assert link.bandwidth <= 1.001 * max(size / (t - min(known, MOST_LATENCY * t)) for size in large for t in [latency + size / bandwidth])


def test_a_disk_whose_small_copies_are_slow() -> None:
    """Writes of 1 KiB that take as long as those of 64 KiB made a disk of 1 GB/s one of more than 90; large copies of two sizes know better."""
    link = LinkModel(*DISK_LINK)
    link.remember([(1024, 6.5e-4 + at * 1e-7) for at in range(16)])
    link.remember([(1 << 16, 6.506e-4 + at * 1e-7) for at in range(13)] + [(size << 20, 5.9e-4 + (size << 20) / 1e9) for size in (1, 2, 4)])
    link.fit()
    assert link.bandwidth == pytest.approx(1e9, rel=0.1)
    alone = LinkModel(*DISK_LINK)
    alone.remember([(1024, 6.5e-4)] * 16 + [(1 << 16, 6.51e-4)] * 16)
    alone.fit()
    assert (1 << 16) / 6.51e-4 <= alone.bandwidth <= 4.001 * (1 << 16) / 6.51e-4


def test_links_of_one_size() -> None:
    """Copies of one size only cannot tell latency from bandwidth; a copy of that size is predicted right. Nonsense is ignored."""
    link = LinkModel()
    for seconds in (2.0, 2.0, 9.0, 2.0, 0.0, -1.0):
        link.add(1 << 20, seconds)
    assert (link.seconds(1 << 20), link.seconds(1 << 21)) == (2.0, 4.0)


def test_small_copies_say_nothing_of_bandwidth() -> None:
    """They cost what starting them costs: by their slope a link of 5 GB/s would be one of 0.2 GB/s. They do not drive out what large ones said."""
    link = LinkModel(1e-4, 5e9)
    for nbytes in range(4096, 16384, 256):
        link.add(nbytes, 1e-4 * (1 + nbytes / 16384))
    assert link.bandwidth == 5e9
    assert link.seconds(8192) == pytest.approx(1.6e-4, rel=0.25)
    for nbytes in (1 << 20, 1 << 22):
        link.add(nbytes, 1e-4 + nbytes / 1e9)
    for _ in range(100):
        link.add(4096, 1e-4)
    assert link.bandwidth == pytest.approx(1e9, rel=0.01)


def test_what_is_known_of_links_before_any_copy() -> None:
    """Rough rates until a copy was measured, slower ones for the disk; a link that is given stays as it is, whatever copies take."""
    models = Models()
    models.declare_links(3, storage=True)
    assert models.transfer_seconds(RAM, GPU, 10**9) == pytest.approx(10**9 / MEMORY_LINK[1], rel=1e-3)
    assert models.transfer_seconds(GPU, DISK, 10**9) == pytest.approx(10**9 / DISK_LINK[1], rel=1e-3)
    assert models.transfer_seconds(GPU, GPU, 200) == 0.0
    models.record_copy(RAM, GPU, 100, 5.0)
    models.declare_links(3, storage=True)
    assert models.transfer_seconds(RAM, GPU, 100) == 5.0
    models.declare_links(3, storage=True, given=(1.0, 100.0))
    models.record_copy(RAM, GPU, 100, 5.0)
    assert models.transfer_seconds(RAM, GPU, 200) == 3.0
    assert not models.links[RAM, GPU].samples


def store(directory: Path, *names: str, threads: int = 1) -> PerfStore:
    """The store of this machine."""
    return PerfStore(machine_fingerprint(blas_threads=threads, versions={"numpy": "1"}), names or ("ram", "gpu"), directory)


def measured() -> Models:
    """Models with a series and a link."""
    models = Models()
    for seconds in (9.0, 1.0, 2.0, 3.0):
        models.series.setdefault(KEY, Series()).add(seconds)
    models.record_copy(RAM, GPU, 1000, 0.5)
    return models


def test_models_survive_a_round_trip(tmp_path: Path) -> None:
    """What was saved is estimated again, links by the names of their nodes; nothing but the file is left in the directory."""
    assert store(tmp_path).load(Models()) == 0
    assert store(tmp_path).save(measured())
    later = Models()
    assert store(tmp_path, "ram", "sim", "gpu").load(later) == 2
    assert later.measured(KEY) == 2.0
    assert later.transfer_seconds(RAM, NodeId(2), 1000) == 0.5
    later.series.setdefault(KEY, Series()).add(100.0)  # the first of this process is cold again
    assert later.measured(KEY) == 2.0
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_saving_keeps_what_only_the_file_knew(tmp_path: Path) -> None:
    """Two runs of different models share the file."""
    store(tmp_path).save(measured())
    other = Models()
    for _ in range(2):
        other.series.setdefault(("norm", 2, "sim"), Series()).add(3.0)
    store(tmp_path).save(other)
    both = Models()
    store(tmp_path).load(both)
    assert (both.measured(KEY), both.measured(("norm", 2, "sim"))) == (2.0, 3.0)


def test_the_series_measured_last_are_kept(tmp_path: Path) -> None:
    """A file has a bounded number of series; those that no run has measured for longest go, whatever their names."""
    first, later = Models(), Models()
    for number in range(MOST_SERIES):
        first.series["task", number, "cpu"] = Series([0.5, 0.5])
    assert store(tmp_path).save(first)
    store(tmp_path).load(later)
    later.series.setdefault(("task", 0, "cpu"), Series()).add(1.0)
    later.series.setdefault(("task", 0, "cpu"), Series()).add(1.0)
    for _ in range(2):
        later.series.setdefault(("another", 1, "cpu"), Series()).add(2.0)
    assert store(tmp_path).save(later)
    found = Models()
    store(tmp_path).load(found)
    keys = list(found.series)
    assert len(keys) == MOST_SERIES
    assert {("task", 0, "cpu"), ("another", 1, "cpu")} == set(keys[-2:])
    assert ("task", 1, "cpu") not in keys


def test_another_machine_has_another_file(tmp_path: Path) -> None:
    """The number of BLAS threads makes another machine."""
    store(tmp_path).save(measured())
    assert store(tmp_path, threads=2).load(Models()) == 0
    assert store(tmp_path).path != store(tmp_path, threads=2).path


@given(st.data())
@search(150)
def test_corrupt_files_are_ignored(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Cut off, overwritten or well-formed nonsense: nothing is read, nothing raised, and the next save repairs it."""
    one = store(tmp_path_factory.mktemp("perf"))
    assert one.save(measured())
    whole = one.path.read_bytes()
    content = json.loads(whole)
    nonsense = st.sampled_from(
        [None, 7, "x", [[1]], [["a", "b"]], [["a", 1, "cpu", [-1.0]]], [["a", 1, "cpu", [float("inf")]]], [["a", "b", [[0, 1]]]]]
    )
    broken = data.draw(
        st.one_of(
            st.integers(0, len(whole) - 1).map(lambda at: whole[:at]),
            st.binary(max_size=50),
            st.tuples(st.sampled_from(["version", "machine", "tasks", "links"]), nonsense).map(
                lambda change: json.dumps({**content, change[0]: change[1]}).encode()
            ),
        )
    )
    one.path.write_bytes(broken)
    models = Models()
    assert one.load(models) == 0
    assert not models.series
    assert not models.links
    assert one.save(measured())
    assert one.load(models) == 2


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """`save` says that it has not; the run goes on."""
    (tmp_path / "file").write_text("")
    assert not store(tmp_path / "file" / "below").save(measured())


def test_where_models_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under the cache directory the environment names, else the usual one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "nntask" / "perf"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory() == tmp_path / ".cache" / "nntask" / "perf"


def test_a_user_without_a_home_keeps_no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number without a name, as in containers: nothing is found, and nothing is written, neither here nor in a directory of others."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert not store(default_directory()).save(measured())
    assert store(default_directory()).load(Models()) == 0
