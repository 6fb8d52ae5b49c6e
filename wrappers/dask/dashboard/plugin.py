"""The plugin of a Dask scheduler that shows training: the page "nntask" of its dashboard, and gauges on ``/metrics``.

`install` adds the plugin; `publish`, called with a client or a worker, reports a step in a message of the topic "nntask". The scheduler keeps the
latest steps of the latest jobs and nothing else. Its environment needs bokeh for the page and prometheus-client for the gauges; without one of them
that part is omitted, and `install` reports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from distributed.diagnostics.plugin import SchedulerPlugin

from .board import Board

if TYPE_CHECKING:
    from distributed import Client, Worker

TOPIC: Final = "nntask"
PAGE: Final = "nntask"
"""Path of the page relative to the dashboard, and its name in the dashboard's menu."""
_NUMBERS: Final = ("loss", "tokens_per_second")
_BYTES: Final = ("resident_bytes", "budget_bytes")


@dataclass(frozen=True, slots=True)
class Installed:
    """Addresses at which a cluster shows its runs.

    Args:
        page: address of the page; None if the scheduler has no bokeh, or its dashboard is off.
        metrics: address of the gauges; None if the scheduler has no prometheus-client.
    """

    page: str | None
    metrics: str | None


def publish(to: Client | Worker, record: Mapping[str, Any]) -> None:
    """Report a step to the dashboard by a message to the scheduler; with a worker this does not wait.

    Args:
        to: a client or a worker.
        record: ``job`` and ``node``, strings; ``step``, an integer; optional: ``loss``; ``tokens_per_second`` of the node; ``resident_bytes`` and
            ``budget_bytes``, dictionaries from the name of a memory to bytes.

    Raises:
        ValueError: a field of the record is missing, unknown or of another type.
    """
    check_record(record)
    to.log_event(TOPIC, dict(record))


def check_record(record: Mapping[str, Any]) -> None:
    """Check the fields of a record for `publish`.

    Raises:
        ValueError: a field of the record is missing, unknown or of another type.
    """
    for name in ("job", "node"):
        if not isinstance(record.get(name), str):
            raise ValueError(f"{name} of a record must be a string, got {record.get(name)!r}; add one")
    if type(record.get("step")) is not int:
        raise ValueError(f"step of a record must be an integer, got {record.get('step')!r}; count steps from 1")
    for name in _NUMBERS:
        if not _is_number(record.get(name, 0.0)):
            raise ValueError(f"{name} of a record must be a number, got {record[name]!r}; leave it out if it is unknown")
    for name in _BYTES:
        values = record.get(name, {})
        if not isinstance(values, Mapping) or not all(isinstance(key, str) and _is_number(value) for key, value in values.items()):
            raise ValueError(f"{name} of a record must map names of memories to bytes, got {values!r}; for example {{'ram': 1024}}")
    known = ("job", "node", "step", *_NUMBERS, *_BYTES)
    if unknown := sorted(set(record).difference(known)):
        raise ValueError(f"a record must have {', '.join(known)} and nothing else, got {', '.join(unknown)}; remove it")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def install(client: Any) -> Installed:
    """Install the page and the gauges on the scheduler of a cluster; does nothing if they are installed already.

    Args:
        client: a connected synchronous client.
    """
    client.register_plugin(Dashboard())
    installed: dict[str, bool] = client.run_on_scheduler(_found_on)
    try:
        link = client.dashboard_link or ""
    except KeyError:  # the scheduler serves no dashboard
        link = ""
    prefix = link.removesuffix("status") if link.endswith("status") else None
    return Installed(
        f"{prefix}{PAGE}" if prefix and installed["page"] else None,
        f"{prefix}metrics" if prefix and installed["metrics"] else None,
    )


def _found_on(dask_scheduler: Any) -> dict[str, bool]:
    """Return whether the plugin of a scheduler serves the page and the gauges."""
    plugin = dask_scheduler.plugins[Dashboard.name]
    return {"page": plugin.has_page, "metrics": plugin.has_metrics}


class Dashboard(SchedulerPlugin):  # type: ignore[misc]
    """The scheduler's plugin, which receives the records of the topic and serves the page and the gauges.

    Attributes:
        has_page, has_metrics: whether the page and the gauges are served.
    """

    name = "nntask-dashboard"
    idempotent = True

    def __init__(self) -> None:
        self.has_page = self.has_metrics = False

    async def start(self, scheduler: Any) -> None:
        """Add the page and the gauges to the scheduler's server, each only if its library is installed."""
        self.board = Board()
        self._page: Any = None
        with contextlib.suppress(ImportError):  # no bokeh, or a release that Dask's dashboard does not support
            self._page = _serve_page(self.board, scheduler)
            self.has_page = self._page is not None
        with contextlib.suppress(ImportError):
            collector().boards.append(self.board)
            self.has_metrics = True

    def log_event(self, topic: str, msg: Any) -> None:
        """Enter a record on the board; malformed records are ignored, since any client may send any message."""
        if topic == TOPIC and isinstance(msg, Mapping):
            with contextlib.suppress(ValueError):
                record = {name: value for name, value in msg.items() if name != "worker"}  # Dask adds the sender
                check_record(record)
                self.board.take(record)

    async def close(self) -> None:
        """Remove the page and the gauges."""
        if self.has_metrics:
            collector().boards.remove(self.board)
            self.has_metrics = False
        if self._page is not None:
            self._page.stop()
            self._page = None


class _Collector:
    """Prometheus collector with the gauges of all schedulers in this process."""

    def __init__(self) -> None:
        self.boards: list[Board] = []

    def collect(self) -> Iterable[Any]:
        """Return the families of gauges with their current values."""
        from prometheus_client.core import GaugeMetricFamily

        labels = ["job", "node"]
        step = GaugeMetricFamily("nntask_step", "Latest optimizer step", labels=labels)
        loss = GaugeMetricFamily("nntask_loss", "Loss of the latest step", labels=labels)
        speed = GaugeMetricFamily("nntask_tokens_per_second", "Tokens per second of the latest step", labels=labels)
        held = GaugeMetricFamily("nntask_resident_bytes", "Bytes in use in a memory of the node", labels=[*labels, "memory"])
        budget = GaugeMetricFamily("nntask_budget_bytes", "Budget of that memory", labels=[*labels, "memory"])
        for board in self.boards:
            for job, node, state in board.nodes():
                latest = zip((step, loss, speed), state.steps[-1], strict=True)
                for family, value in latest:
                    if value is not None:
                        family.add_metric([job, node], value)
                for family, values in ((held, state.resident), (budget, state.budget)):
                    for memory, nbytes in values.items():
                        family.add_metric([job, node, memory], nbytes)
        return [step, loss, speed, held, budget]


_collectors: list[_Collector] = []
"""The registered collector of this process, if there is one: Dask serves one registry for all schedulers in a process."""


def collector() -> _Collector:
    """Return the collector of this process, registering it at the first call.

    Raises:
        ImportError: prometheus-client is not installed.
    """
    if not _collectors:
        from prometheus_client import REGISTRY

        new = _Collector()
        REGISTRY.register(new)
        _collectors.append(new)
    return _collectors[0]


def _serve_page(board: Board, scheduler: Any) -> Any:
    """Add the page to a scheduler's server and to the dashboard's menu; None if the dashboard is off.

    Raises:
        ImportError: bokeh is not installed.
    """
    from bokeh.server.tornado import BokehTornado
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import template_variables
    from tornado.ioloop import IOLoop

    from .page import document

    own = next((each for each in scheduler.http_application.applications if isinstance(each, BokehTornado)), None)
    if own is None:
        return None
    variables = template_variables(scheduler)
    if PAGE not in variables["pages"]:
        variables["pages"].append(PAGE)
    pages = {f"/{PAGE}": lambda _, extra, doc: document(board, extra, doc)}
    served: Any = BokehApplication(pages, scheduler, prefix=own.prefix, template_variables=variables)
    served.initialize(IOLoop.current())
    scheduler.http_application.add_application(served)
    served.start()
    return served
