"""Counters and gauges of a server in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from .engine import TextEngine

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The metrics under ``/metrics``.

    Args:
        engine: engine whose counters are reported.
    """

    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._answers = Counter("nntask_serve_responses", "Responses by path and status", ["path", "status"], registry=self._registry)
        about = "Seconds until the first byte of a stream, or until a response without a stream was complete"
        self._seconds = Histogram("nntask_serve_response_seconds", about, ["path"], buckets=_SECONDS, registry=self._registry)
        self._registry.register(self)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count a response."""
        self._answers.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self) -> tuple[bytes, str]:
        """Return the metrics as text, and the content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def describe(self) -> list[Any]:
        """Return an empty list: the names appear when the metrics are collected."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the counters and gauges of the engine and the runtime."""
        engine, batch = self._engine, self._engine.batch
        yield GaugeMetricFamily("nntask_serve_texts_running", "Texts in the running batch", engine.num_running)
        yield GaugeMetricFamily("nntask_serve_texts_waiting", "Texts that wait for a slot or for pages", max(0, engine.num_open - engine.num_running))
        yield CounterMetricFamily("nntask_serve_tokens_said", "Generated tokens", engine.num_said)
        yield CounterMetricFamily("nntask_serve_tokens_read", "Prompt tokens of texts that have started", engine.num_read)
        if batch is not None:
            yield CounterMetricFamily("nntask_serve_tokens_shared", "Prompt tokens that were in the cache already", batch.num_shared)
            about = "Pages of the cache: held by texts, kept for common prefixes, and in total"
            pages = GaugeMetricFamily("nntask_serve_pages", about, labels=["state"])
            for state, count in (("held", batch.pool.num_held), ("kept", batch.pool.num_kept), ("all", batch.pool.num_pages)):
                pages.add_metric([state], count)
            yield pages
            steps = CounterMetricFamily("nntask_serve_steps", "Steps by kind of work", labels=["work"])
            for work, count in list(batch.num_steps.items()):
                steps.add_metric([work], count)
            yield steps
        yield from self._memory()

    def _memory(self) -> Iterator[Any]:
        if self._engine.batch is None:
            return
        stats = self._engine.batch.runtime.stats()
        for name, about, values in (
            ("nntask_serve_resident_bytes", "Bytes in use, by memory", stats["resident_bytes"]),
            ("nntask_serve_peak_bytes", "Maximum bytes in use so far, by memory", stats["peak_bytes"]),
            ("nntask_serve_budget_bytes", "Budget in bytes, by memory", stats["budget_bytes"]),
        ):
            family = GaugeMetricFamily(name, about, labels=["memory"])
            for node, nbytes in values.items():
                family.add_metric([node], nbytes)
            yield family
        yield CounterMetricFamily("nntask_serve_evictions", "Tiles evicted from a full memory", stats["evictions"])
        hits, misses = stats["conditional_hits"], stats["conditional_misses"]
        if hits + misses:
            yield CounterMetricFamily("nntask_serve_experts_chosen", "Weights of experts that tokens chose, in tiles", hits + misses)
            yield CounterMetricFamily("nntask_serve_experts_in_memory", "Those of them that were in memory when they were chosen", hits)
