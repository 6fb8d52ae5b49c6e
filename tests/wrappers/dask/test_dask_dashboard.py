"""The page nntask of the Dask dashboard and the gauges on /metrics, on a cluster in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from time import monotonic

import pytest
from bokeh.client import pull_session
from distributed import Client, LocalCluster
from support.dask_command import read
from support.deadline import DEADLINE

from wrappers.dask.dashboard.board import MOST_JOBS, MOST_STEPS, Board
from wrappers.dask.dashboard.page import GIB, View
from wrappers.dask.dashboard.plugin import check_record, install, publish

RECORD = {
    "job": "run",
    "node": "left",
    "step": 3,
    "loss": 2.5,
    "tokens_per_second": 1000.0,
    "resident_bytes": {"ram": 1 << 29, "disk": 1 << 20},
    "budget_bytes": {"ram": 1 << 30},
}


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of a cluster of one worker, with a dashboard."""
    with LocalCluster(1, processes=False, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as found:
        yield found


def gauges(address: str | None) -> dict[str, float]:
    """Ours, as Prometheus would read them."""
    return {name: float(value) for name, value in re.findall(r"^(nntask_\S+) (\S+)$", read(address), re.MULTILINE)}


def test_page_and_gauges_show_what_was_published(client: Client) -> None:
    """From a client and from a worker; installing twice changes nothing; after the cluster nothing is left in the registry."""
    found = install(client)
    assert gauges(found.metrics) == {}
    publish(client, RECORD)

    def on_worker(dask_worker: object) -> None:
        publish(dask_worker, {**RECORD, "node": "right", "step": 4, "loss": 2.25})  # type: ignore[arg-type]

    client.run(on_worker)
    limit = monotonic() + DEADLINE  # messages of workers go out in batches
    while len(told := gauges(found.metrics)) < 12 and monotonic() < limit:
        client.run_on_scheduler(lambda: None)
    assert told == {
        'nntask_step{job="run",node="left"}': 3.0,
        'nntask_step{job="run",node="right"}': 4.0,
        'nntask_loss{job="run",node="left"}': 2.5,
        'nntask_loss{job="run",node="right"}': 2.25,
        **{f'nntask_tokens_per_second{{job="run",node="{node}"}}': 1000.0 for node in ("left", "right")},
        **{f'nntask_resident_bytes{{job="run",memory="ram",node="{node}"}}': float(1 << 29) for node in ("left", "right")},
        **{f'nntask_resident_bytes{{job="run",memory="disk",node="{node}"}}': float(1 << 20) for node in ("left", "right")},
        **{f'nntask_budget_bytes{{job="run",memory="ram",node="{node}"}}': float(1 << 30) for node in ("left", "right")},
    }
    assert install(client) == found
    assert gauges(found.metrics) == told
    assert "dask_scheduler_workers" in read(found.metrics)
    assert all(read(address).count('<a href="nntask">') == 1 for address in (found.page, client.dashboard_link))
    session = pull_session(url=found.page)
    heading, throughput, loss, memory = session.document.roots[0].children
    session.close()
    assert heading.text == "<b>run</b>: step 4, 2 nodes, 2,000 tokens/s, loss 2.2500"
    assert [plot.title.text for plot in (throughput, loss, memory)] == ["throughput by node", "loss", "memory by node, within its budget"]
    assert memory.y_range.factors == ["run right disk", "run right ram", "run left disk", "run left ram"]


def test_a_later_cluster_begins_anew(client: Client) -> None:
    """Gauges of clusters that are closed are gone."""
    found = install(client)
    assert gauges(found.metrics) == {}
    publish(client, {"job": "other", "node": "", "step": 1})
    assert gauges(found.metrics) == {'nntask_step{job="other",node=""}': 1.0}


def test_messages_that_are_no_records_are_left_out(client: Client) -> None:
    """Anybody may send anything to the topic."""
    found = install(client)
    for message in ("text", {"job": 3}, {**RECORD, "loss": "low"}, {**RECORD, "more": 1}):
        client.log_event("nntask", message)
    client.log_event("another", RECORD)
    assert gauges(found.metrics) == {}


def test_a_cluster_without_a_dashboard_has_no_page() -> None:
    """`install` says so; gauges are there all the same."""
    with (
        LocalCluster(1, processes=False, threads_per_worker=1, dashboard_address=":0", scheduler_kwargs={"dashboard": False}) as cluster,
        Client(cluster) as client,
    ):
        found = install(client)
        assert found.page is None
        publish(client, RECORD)
        assert gauges(found.metrics)['nntask_step{job="run",node="left"}'] == 3.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"job": None}, "job of a record must be a string, got None"),
        ({"step": 1.5}, "step of a record must be an integer, got 1.5"),
        ({"loss": "low"}, "loss of a record must be a number, got 'low'"),
        ({"resident_bytes": {"ram": "much"}}, "resident_bytes of a record must map names of memories to bytes, got {'ram': 'much'}"),
        ({"budget": 3}, "and nothing else, got budget; remove it"),
    ],
)
def test_records_are_checked(change: dict[str, object], words: str) -> None:
    """The field, the rule and the value."""
    with pytest.raises(ValueError, match=re.escape(words)):
        check_record({**RECORD, **change})


def test_the_board_forgets_what_is_old() -> None:
    """The latest steps of the latest jobs; steps that are done again replace what was told of them."""
    board = Board()
    for step in range(1, MOST_STEPS + 11):
        board.take({"job": "long", "node": "a", "step": step})
    assert [step for step, _, _ in board.jobs["long"]["a"].steps] == list(range(11, MOST_STEPS + 11))
    board.take({"job": "long", "node": "a", "step": 15, "loss": 1.0})
    assert [*board.jobs["long"]["a"].steps] == [(11, None, None), (12, None, None), (13, None, None), (14, None, None), (15, 1.0, None)]
    for number in range(MOST_JOBS):
        board.take({"job": f"job {number}", "node": "a", "step": 1})
    assert list(board.jobs) == [f"job {number}" for number in range(MOST_JOBS)]


def test_the_page_draws_the_board() -> None:
    """Curves by node, bars of memory within budgets, a sentence per job; later records move them."""
    board = Board()
    view = View(board)
    view.update()
    assert view.heading.text == "No run has reported a step yet."
    for step in (1, 2):
        board.take({**RECORD, "step": step, "loss": 3.0 - step})
        board.take({**RECORD, "step": step, "node": "right", "loss": 3.0 - step, "tokens_per_second": 500.0})
    view.update()
    assert view.losses.data["name"] == ["run left", "run right"]
    assert view.losses.data["ys"] == [[2.0, 1.0], [2.0, 1.0]]
    assert view.speeds.data["xs"][1] == [1, 2]
    assert view.memories.data["name"][0] == "run left ram"
    assert view.memories.data["used"][0] == (1 << 29) / GIB
    assert view.memories.data["share"][:2] == ["50%", ""]
    assert view.heading.text == "<b>run</b>: step 2, 2 nodes, 1,500 tokens/s, loss 1.0000"
