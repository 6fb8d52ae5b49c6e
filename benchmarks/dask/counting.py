"""A cluster on this machine whose scheduler counts the messages it handles, for `cluster.py --suite cost`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def train_messages(after: dict[str, int], before: dict[str, int], seconds: float, steps: int) -> dict[str, Any]:
    """Messages of a run at the scheduler; heartbeats, which follow time and not steps, are told apart."""
    new = {op: number - before.get(op, 0) for op, number in after.items() if number > before.get(op, 0)}
    beats = sum(number for op, number in new.items() if "heartbeat" in op)
    own = sum(new.values()) - beats
    return {"per_node_and_step": own / (2 * steps), "heartbeats_per_second": beats / seconds, "by_name": new}


class counted_cluster:
    """A cluster on this machine whose scheduler counts the messages it handles.

    Args:
        workers: how many.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def __enter__(self) -> tuple[str, Callable[[], dict[str, int]]]:
        from distributed import Client, LocalCluster

        # without certificates, as local_cluster makes them: the training is another process, which would not have them
        self.cluster = LocalCluster(n_workers=self.workers, threads_per_worker=1, memory_limit=0, host="127.0.0.1", dashboard_address=":0")
        self.client = Client(self.cluster)
        self.client.run_on_scheduler(_count_messages)
        return self.cluster.scheduler_address, lambda: self.client.run_on_scheduler(_counted)

    def __exit__(self, *error: object) -> None:
        self.client.close()
        self.cluster.close()


def _count_messages(dask_scheduler: Any) -> None:
    """Let every handler of the scheduler count its calls; runs there."""
    import functools
    import inspect

    counts = dask_scheduler.counted = {}

    def counting(name: str, handler: Any) -> Any:
        @functools.wraps(handler)
        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return handler(*args, **kwargs)

        @functools.wraps(handler)
        async def count_async(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return await handler(*args, **kwargs)

        return count_async if inspect.iscoroutinefunction(handler) else count

    for table in (dask_scheduler.handlers, dask_scheduler.stream_handlers):
        for name, handler in list(table.items()):
            table[name] = counting(name, handler)


def _counted(dask_scheduler: Any) -> dict[str, int]:
    return dict(dask_scheduler.counted)
