"""Entry points for Dask graphs: the scheduler function `get`, and `runtime`, which gives it budgets.

The contract is that of `dask.threaded.get`: values in the shape of the requested keys, lists as tuples, exceptions with their type and traceback,
callbacks, and the keywords `num_workers`, `pool`, `cache`, `callbacks` and `rerun_exceptions_locally`. Other keywords are refused.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing.pool import Pool, ThreadPool
from typing import Any

from dask import config
from dask.callbacks import local_callbacks

from nntask import UsageError
from nntask.config import disk_of
from nntask.io import parse_size
from scheduler import usable_cores
from scheduler.storage import DiskTier, memory_budgets

from .evaluate import evaluate
from .observe import Observers
from .plan import collector_paused, make_plan, nested, prepare
from .run import GraphRun
from .store import Store

_current: contextvars.ContextVar[GraphRuntime | None] = contextvars.ContextVar("nntask_graph_runtime", default=None)
"""Runtime that owns this worker thread: a graph that is computed within a task uses the same memory."""


def get(
    dsk: Any,
    keys: Any,
    cache: Mapping[Any, Any] | None = None,
    num_workers: int | None = None,
    pool: Executor | Pool | None = None,
    *,
    callbacks: Any = None,
    rerun_exceptions_locally: bool | None = None,
) -> Any:
    """Compute keys of a Dask graph: ``x.compute(scheduler=get)``.

    Within a task of another graph the computation shares that graph's budget; else the budget is 0.9 of free memory, without a disk. Use `runtime`
    for other budgets.

    Args:
        dsk: a graph, old or new style, or an expression.
        keys: a key or nested lists of keys.
        cache: known values by key.
        num_workers: number of threads; default the config's ``num_workers``, then one per usable core.
        pool: pool of threads to use instead of new ones; default the config's ``pool``.
        callbacks: Dask's callbacks; default the active ones.
        rerun_exceptions_locally: whether a task that raised runs once more, on the calling thread; default the config's value, then False.

    Returns:
        The value of the key; tuples of values for lists.

    Raises:
        KeyError: a key is not in the graph.
        ValueError: a task reads a key that is in neither the graph nor the cache.
        DoesNotFit: the next task, or the results together, do not fit the budget.
        BaseException: any error of a task.
    """
    options: dict[str, Any] = {"callbacks": callbacks, "rerun_exceptions_locally": rerun_exceptions_locally}
    runtime = _current.get()
    if runtime is not None:
        return runtime.get(dsk, keys, cache, num_workers, pool, **options)
    temporary = GraphRuntime()
    try:
        return temporary.get(dsk, keys, cache, num_workers, pool, **options)
    finally:
        temporary.close()


class GraphRuntime:
    """Workers and memory for Dask graphs; within ``with``, the scheduler of all of Dask's computations: ``with runtime(ram="2GiB"): x.compute()``.

    Args:
        ram: budget of the results in host memory, bytes or a size such as "2GiB"; default 0.9 of free memory.
        disk: directory of the disk tier, optionally with a size, such as "scratch:100GiB"; default none, so results beyond the budget fail.
        workers: number of threads per graph; default one per usable core.

    Raises:
        UsageError: a size cannot be parsed or is not positive, or there are no workers.
        DoesNotFit: the budget is above the memory limit of this process.
        OSError: the directory cannot be created or written.
    """

    def __init__(self, ram: int | str | None = None, disk: str | os.PathLike[str] | None = None, workers: int | None = None) -> None:
        nbytes = parse_size(ram, "ram") if isinstance(ram, str) else ram
        if workers is not None and workers < 1:
            raise UsageError(f"a runtime of Dask graphs needs at least one worker, got workers={workers}", "leave it out for one per core")
        if nbytes is not None and nbytes <= 0:
            raise UsageError(f"ram must be a positive number of bytes, got {nbytes}", "leave it out for 0.9 of the free memory")
        self.workers = workers
        budget, _ = memory_budgets(nbytes, None, 0)
        tier = None
        if disk is not None:
            location = disk_of(os.fspath(disk))
            if location is None:
                raise UsageError(f"disk must name a directory, got {disk!r}", "leave it out for no disk tier")
            file = DiskTier(location[0])
            tier = (file, location[1] or file.free_bytes())
        self.budget = budget
        self._store = Store(budget, tier)
        self._num_orders = 0
        self._config: Any = None

    def get(
        self,
        dsk: Any,
        keys: Any,
        cache: Mapping[Any, Any] | None = None,
        num_workers: int | None = None,
        pool: Executor | Pool | None = None,
        *,
        callbacks: Any = None,
        rerun_exceptions_locally: bool | None = None,
    ) -> Any:
        """Run `get` within these budgets. The returned values count against the budget until the program drops them."""
        cache = cache if cache is not None else config.get("cache", None) or {}
        with local_callbacks(callbacks) as active:
            observers = Observers(active)
            failed = True
            try:
                with collector_paused():
                    graph, wanted = prepare(dsk, keys)
                    observers.start(graph)
                    plan = make_plan(graph, wanted, cache, keep_aliases=bool(observers))
                observers.start_state({key: number for number, key in enumerate(plan.keys)}, wanted, dict(cache))
                del graph
                submit, count = self._submitter(num_workers, pool)
                with self._store.lock:
                    first, self._num_orders = self._num_orders, self._num_orders + len(plan.nodes) + 1
                    count = min(count, len(plan.nodes))
                    run = GraphRun(self._store, plan, count, observers, first, depth=self._store.depths.get(threading.get_ident(), 0))
                    self._store.clients.add(run)
                values = self._carry_out(run, submit, count, rerun_exceptions_locally)
                failed = False
            finally:
                observers.finish(failed=failed)
        return nested(keys, {**plan.data, **values})

    def _carry_out(self, run: GraphRun, submit: Callable[[Callable[[], None]], Any], count: int, rerun: bool | None) -> dict[Any, Any]:
        """Run a graph on worker threads, and return the requested values by key."""
        context = contextvars.copy_context()
        context.run(_current.set, self)
        try:
            for _ in range(count):
                submit(partial(context.copy().run, run.work))
            run.wait()
            if run.error is not None:
                if run.failed is not None and (config.get("rerun_exceptions_locally", False) if rerun is None else rerun):
                    evaluate(*run.failed)
                raise run.error
            return run.results(self._store.hand_over if self._store.failure is None else None)
        except BaseException as error:
            run.stop(error)
            raise
        finally:
            run.failed = None
            run.close()

    def _submitter(self, num_workers: int | None, pool: Executor | Pool | None) -> tuple[Callable[[Callable[[], None]], Any], int]:
        """Return the function that starts a job on a thread, and the number of threads.

        Raises:
            TypeError: the pool is one of processes, which do not share this process's memory.
        """
        pool = pool or config.get("pool", None)
        if pool is None:
            return _start_thread, num_workers or config.get("num_workers", None) or self.workers or usable_cores()
        if isinstance(pool, ProcessPoolExecutor) or (isinstance(pool, Pool) and not isinstance(pool, ThreadPool)):
            raise TypeError(f"pool must be one of threads, got a {type(pool).__name__}; use num_workers, or a ThreadPoolExecutor")
        if isinstance(pool, ThreadPool):
            return pool.apply_async, len(pool._pool)  # type: ignore[attr-defined]  # as Dask does
        return pool.submit, pool._max_workers  # type: ignore[union-attr]  # as Dask does

    def stats(self) -> dict[str, Any]:
        """Return counters since the start.

        Returns:
            "budget_bytes"; "peak_bytes" (most bytes counted at once, returned values included); "resident_bytes" (now); "largest_bytes" (the largest
            block of a result); "moved_bytes" {"ram->disk": bytes, "disk->ram": bytes}; "evictions"; "lent" (number of blocks that the program holds).
        """
        store = self._store
        with store.lock:
            ledger = store.ledger
            return {
                "budget_bytes": self.budget,
                "peak_bytes": ledger.peak,
                "resident_bytes": ledger.used,
                "largest_bytes": store.largest,
                "moved_bytes": {"ram->disk": ledger.written, "disk->ram": ledger.read},
                "evictions": ledger.num_evictions,
                "lent": store.num_handed_over - len(store.inbox),
            }

    def close(self) -> None:
        """Free the memory and close the file. Returned values stay valid. Idempotent."""
        self._store.close()

    def __enter__(self) -> GraphRuntime:
        self._config = config.set(scheduler=self.get)
        return self

    def __exit__(self, *failure: object) -> None:
        self._config.__exit__(*failure)
        self.close()


def _start_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="nntask dask", daemon=True).start()


runtime = GraphRuntime
"""The name under which programs open a runtime of graphs."""
