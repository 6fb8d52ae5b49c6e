"""What all tests share: caches of their own, so that no test reads or changes the user's."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import selection
from support.search import register_profiles

register_profiles()
gc.set_threshold(20_000, 10, 10)  # what tests import later, torch above all, is a million objects, which every few recorded steps would go through


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that `make test` leaves to `make test-more`, before `-m` selects."""
    selection.mark(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Tell the report how much processor time the test took."""
    begin = selection.processor_seconds()
    yield
    item.user_properties.append((selection.SPENT, selection.processor_seconds() - begin))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests of `make test` that belong into the table of `make test-more`."""
    slow = selection.slow_ones(terminalreporter.getreports("passed"))
    if slow:
        terminalreporter.section(f"over {selection.SECONDS:g} s of processor time in `make test`: add to tests/more.txt")
        terminalreporter.write("\n".join(slow) + "\n")


def pytest_collection_finish() -> None:
    """Tests and what they have imported live to the end: garbage collections, which some tests and products ask for, need not look through them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Performance models go to a folder of this session, in this process and in those it starts."""
    folder = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder
    patch.undo()


@pytest.fixture(scope="module", autouse=True)
def own_measurements(own_caches: Path) -> Iterator[None]:
    """Durations that a module's tests have measured go with it: every runtime reads all that there are, and writes them when it closes."""
    yield
    shutil.rmtree(own_caches / "nntask" / "perf", ignore_errors=True)


@pytest.fixture(scope="session")
def cuda_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where CUDA sources that run on the CPU are built, once in a session, whichever of its processes needs them first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "cuda"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def own_kernels() -> Iterator[None]:
    """Kernels and activations that a test registers go with it."""
    from tiles.kernels import catalog, registry

    catalog.load()
    tables: list[dict[Any, Any]] = [registry._kernels, registry._native, registry._activations]
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; the cache goes there as well. Plans look for larger models and minibatches only as far as takes no time."""
    from nntask.planning import simulate

    monkeypatch.setattr(simulate, "MANY_TASKS", 2000)
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("NNTASK_", "STARPU_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NNTASK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path
