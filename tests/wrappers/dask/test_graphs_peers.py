"""Dask's own tests of its local schedulers, as they come with the wheel, with our scheduler in the place of theirs."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from dask.diagnostics.tests.test_profiler import test_cache_profiler, test_profiler, test_two_gets  # noqa: F401
from dask.diagnostics.tests.test_progress import (  # noqa: F401
    test_clean_exit,
    test_format_time,
    test_minimum_time,
    test_no_tasks,
    test_progressbar,
    test_register,
    test_store_time,
)
from dask.tests.test_callbacks import *  # noqa: F403
from dask.tests.test_local import (  # noqa: F401
    test_detect_malformed_graph,
    test_ensure_calculate_only_whats_needed,
    test_exceptions_propagate,
)
from dask.tests.test_threaded import *  # noqa: F403
from dask.utils_test import GetFunctionTestMixin

from wrappers.dask import get


class TestGet(GetFunctionTestMixin):
    get = staticmethod(get)


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our scheduler wherever those tests look for Dask's."""
    import dask.tests.test_callbacks

    for place in (
        "dask.threaded",
        "dask.tests.test_threaded",
        "dask.tests.test_callbacks",
        "dask.diagnostics.tests.test_progress",
        "dask.diagnostics.tests.test_profiler",
    ):
        monkeypatch.setattr(f"{place}.get", get, raising=False)
    for place in ("dask.tests.test_local", "dask.tests.test_callbacks"):
        monkeypatch.setattr(f"{place}.get_sync", get, raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background with interrupts ignored
    with dask.config.set(scheduler=get):
        yield
    signal.signal(signal.SIGINT, before)
