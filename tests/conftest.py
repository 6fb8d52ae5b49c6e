"""What all tests share: caches of their own, so that no test reads or changes the user's."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.search import register_profiles

register_profiles()
gc.set_threshold(20_000, 10, 10)  # what tests import later, torch above all, is a million objects, which every few recorded steps would go through


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
