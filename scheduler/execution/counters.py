"""The counters of a runtime that `Runtime.stats` returns."""

from __future__ import annotations

from typing import Any

from ..core.conditions import Conditions
from ..core.memory.status import MemoryStatus
from ..core.stalls import Stalls
from .workers import WorkerPool, worker_name


def counters_of(memory: MemoryStatus, stalls: Stalls, pool: WorkerPool, conditions: Conditions) -> dict[str, Any]:
    """Return the counters since the start; to be called under the lock of the machine, so that they agree with each other."""
    nodes, threads = memory.usage(), pool.workers
    return {
        "tasks": sum(thread.num_tasks for thread in threads.values()),
        "evictions": memory.num_evictions,
        "hits": memory.num_hits,
        "misses": memory.num_misses,
        "moved_bytes": memory.moved_by_name(),
        "resident_bytes": {node.name: node.used for node in nodes},
        "peak_bytes": {node.name: node.peak for node in nodes},
        "peak_bytes_by_class": {node.name: node.peak_by_class for node in nodes},
        "recent_peak_bytes": {node.name: node.recent_peak for node in nodes},
        "budget_bytes": {node.name: node.budget for node in nodes},
        "pinned_bytes": pool.pinned_nbytes,
        "stall_seconds": stalls.nanoseconds / 1e9,
        "worker_stall_seconds": {worker_name(thread.worker): stalls.by_worker.get(number, 0) / 1e9 for number, thread in threads.items()},
        "busy_seconds": {worker_name(thread.worker): thread.busy_ns / 1e9 for thread in threads.values()},
        "skipped_tasks": conditions.num_skipped + sum(thread.num_skipped for thread in threads.values()),
        "conditional_hits": conditions.num_hits,
        "conditional_misses": conditions.num_misses,
        "recomputed_tasks": sum(thread.num_clones for thread in threads.values()),
        "recompute_seconds": sum(thread.clone_ns for thread in threads.values()) / 1e9,
    }
