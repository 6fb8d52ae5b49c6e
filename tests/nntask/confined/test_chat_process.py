"""Chat templates of hostile models, in the process that renders them: each gets an error, and the next conversation is written."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.deadline import DEADLINE
from support.objective_data import CHATML, Learner, lines_in, opened

from nntask import DataError, ProcessUnavailable
from nntask.config.settings import DataSettings
from nntask.data import ChatSource
from nntask.data.chat import ChatTemplate
from nntask.data.chat_blocks import FIXED
from nntask.data.chat_process import LONGEST, ChatProcess
from nntask.data.json_lines import Record
from nntask.data.objectives import Objective
from nntask.data.row_counts import RowCounts

TALK: list[dict[str, Any]] = [{"role": "user", "content": "is it é or 😀?"}]
MOST = 10_000
EVIL: list[dict[str, Any]] = [{"role": "user", "content": "evil"}]
HOSTILE = {
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s of processor time"),
    "macros that call themselves": ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "more than 1 s"),
    "a text beyond memory": ("{{ messages[0].role * 10**10 }}", "more memory than it may have"),
    "a text that doubles": ("{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "more memory than"),
    "a constant beyond memory": ("{{ 'a' * 10**10 }}", "more memory than it may have"),
    "a filter beyond memory": ("{{ messages[0].role | center(10**10) }}", "more memory than it may have"),
    "a large number": ("{{ (messages | length + 9) ** (10 ** 9) }}", "more than 1 s of processor time"),
    "a long text": ("{{ messages[0].role * 5000 }}", "writes 20,032 characters of at most 10,000"),
    "a date beyond memory": ("{{ strftime_now(messages[0].role * 10**8) }}", "more memory than it may have"),
    "a bug": ("{{ messages | sort(attribute='role') | round }}", "the request is not for the chat template"),
}

ENDLESS = "{% if messages[0].content == 'evil' %}" + HOSTILE["loops"][0] + "{% endif %}" + CHATML


@pytest.fixture(scope="module")
def processes() -> Iterator[list[ChatProcess]]:
    """Those that a test has begun."""
    found: list[ChatProcess] = []
    yield found
    for each in found:
        each.close()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if "macros" in name or "number" in name else name for name in HOSTILE])
def test_hostile_conversations(name: str, processes: list[ChatProcess]) -> None:
    """A conversation whose rendering is without bound is refused within seconds and bytes; one that is not so is written as without a process."""
    piece, words = HOSTILE[name]
    source = ChatSource("{% if messages | length == 1 and messages[0].content == 'evil' %}" + piece + "{% endif %}" + CHATML, "t.jinja", {})
    ours = ChatProcess(source, MOST, cpu_seconds=1)
    processes.append(ours)
    want = ChatTemplate(CHATML, "t.jinja", {}).prompt(TALK, "the request")
    with pytest.raises(DataError, match=words) as refusal:
        ours.prompt(EVIL, "the request")
    assert "\n" not in str(refusal.value)
    assert ours.prompt(TALK, "the request") == want


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 'a' * 200000000 ~ 'b' }}", "the chat template of t.jinja takes more memory"),
        ("{{ 10**(10**9) }}", "the chat template of t.jinja takes more than 1 s of processor time"),
        ("{% for %}", "the chat template of t.jinja has an error"),
    ],
)
def test_hostile_sources(source: str, words: str) -> None:
    """What is without bound already where it is compiled, or has an error, is refused before there is a server."""
    with pytest.raises(DataError, match=rf"{words}.*--chat-template FILE"):
        ChatProcess(ChatSource(source, "t.jinja", {}), MOST, cpu_seconds=1)


@pytest.fixture
def begun(processes: list[ChatProcess]) -> Callable[..., tuple[ChatProcess, psutil.Process]]:
    """Begins a template's process; returns its two sides."""

    def begin(source: str = CHATML, **terms: Any) -> tuple[ChatProcess, psutil.Process]:
        before = set(psutil.Process().children())
        processes.append(ChatProcess(ChatSource(source, "t.jinja", {}), MOST, **terms))
        (found,) = set(psutil.Process().children()) - before
        return processes[-1], found

    return begin


def test_a_process_that_was_killed_comes_again(begun: Callable[..., tuple[ChatProcess, psutil.Process]]) -> None:
    """The next conversation does not notice."""
    ours, other = begun()
    want = ours.prompt(TALK, "the request")
    other.kill()
    psutil.wait_procs([other], DEADLINE)
    assert ours.prompt(TALK, "the request") == want


def test_what_the_process_has(begun: Callable[..., tuple[ChatProcess, psutil.Process]], monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the environment's secrets, no file that it could open or write, bounded memory, and the first place where the kernel ends somebody."""
    monkeypatch.setenv("NNTASK_API_KEY", "secret")
    monkeypatch.setenv("TZ", "UTC")
    _, other = begun()
    assert "secret" not in other.environ().values()
    assert other.environ()["TZ"] == "UTC"
    assert {other.rlimit(kind) for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)} == {(0, 0)}
    assert other.rlimit(resource.RLIMIT_AS)[0] < other.memory_info().vms + (300 << 20)
    assert Path(f"/proc/{other.pid}/oom_score_adj").read_text().strip() == "1000"


def test_no_limit_of_a_request_gives_a_template_more(processes: list[ChatProcess]) -> None:
    """Memory and characters are bounded where requests may have gigabytes."""
    before = set(psutil.Process().children())
    processes.append(ChatProcess(ChatSource(CHATML, "t.jinja", {}), 1 << 40))
    (other,) = set(psutil.Process().children()) - before
    assert other.rlimit(resource.RLIMIT_AS)[0] < other.memory_info().vms + (800 << 20)
    with pytest.raises(DataError, match=r"gets at most 16,777,216 characters, got 16,777,232; change the messages"):
        processes[-1].prompt([{"role": "user", "content": "a" * (LONGEST + 1)}], "the request")


@pytest.mark.parametrize(
    "piece", ["{{ lipsum(1) | length > 0 }}", "{{ 'a b' | wordwrap(1) }}", "{{ {'a': 'é'} | tojson }}", "{{ strftime_now('%d') }}"]
)
def test_what_is_imported_late(piece: str, processes: list[ChatProcess]) -> None:
    """Filters and functions of templates do not miss the files that they can no longer be imported from."""
    processes.append(ChatProcess(ChatSource(piece, "t.jinja", {}), MOST, now=lambda: FIXED))
    found = processes[-1].prompt(TALK, "the request")
    assert found == ChatTemplate(piece, "t.jinja", {}).prompt(TALK, "the request")


def until_busy(other: psutil.Process) -> None:
    """Until a process has worked for a while."""
    begin = other.cpu_times().user
    while other.cpu_times().user < begin + 0.2:
        assert other.is_running()


def test_a_process_that_others_end_or_stop(begun: Callable[..., tuple[ChatProcess, psutil.Process]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is no fault of the conversation that was being written, however long it is, and the next one is written."""
    ours, other = begun(cpu_seconds=1)
    monkeypatch.setattr("nntask.confined.process._LEAST_WALL", 4)
    long: list[dict[str, Any]] = [{"role": "user", "content": "a" * (MOST - 100)}]
    want = ours.prompt(TALK, "the request")
    other.suspend()
    with pytest.raises(ProcessUnavailable, match="did not answer within 4 s, and was stopped; try again later"):
        ours.prompt(long, "the request")
    assert not other.is_running()
    monkeypatch.undo()
    assert ours.prompt(TALK, "the request") == want
    ours, other = begun(ENDLESS)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(ours.prompt, EVIL, "the request")
        until_busy(other)
        other.kill()
        with pytest.raises(ProcessUnavailable, match="was stopped from outside, or because memory is short; try again later"):
            found.result(DEADLINE)
    assert ours.prompt(TALK, "the request") == want


def test_a_closed_process_stays_so(begun: Callable[..., tuple[ChatProcess, psutil.Process]]) -> None:
    """Under the conversation that is being written, for those that wait, and for those that come."""
    ours, other = begun(ENDLESS)
    before = set(psutil.Process().children())
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ours.prompt, EVIL, "the request") for _ in range(3)]
        until_busy(other)
        ours.close()
        for each in asked:
            error = each.exception(DEADLINE)
            assert isinstance(error, ProcessUnavailable)
            assert "the server is shutting down" in str(error)
    with pytest.raises(ProcessUnavailable, match="shutting down"):
        ours.prompt(TALK, "the request")
    assert set(psutil.Process().children()) == before - {other}


def test_a_process_that_does_not_begin_again(
    begun: Callable[..., tuple[ChatProcess, psutil.Process]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Clients are told to try again; why stands where who runs the server reads."""
    ours, other = begun()
    other.kill()
    psutil.wait_procs([other], DEADLINE)
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/nowhere/python")
        with pytest.raises(ProcessUnavailable, match="does not start again, and the log says why; try again later"):
            ours.prompt(TALK, "the request")
        assert "/nowhere/python" in capfd.readouterr().err
    assert ours.prompt(TALK, "the request")


def test_what_is_interrupted_leaves_no_process(begun: Callable[..., tuple[ChatProcess, psutil.Process]]) -> None:
    """While it begins, and while a conversation is written: the next one does not get that one's answer."""
    before = set(psutil.Process().children())

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            begun("{{ 10**(10**9) }}")
        assert set(psutil.Process().children()) == before
        ours, other = begun()
        other.suspend()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            ours.prompt([{"role": "user", "content": "another"}], "the request")
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert ours.prompt(TALK, "the request") == ChatTemplate(CHATML, "t.jinja", {}).prompt(TALK, "the request")


ANSWERED: list[dict[str, Any]] = [
    *TALK,
    {"role": "assistant", "content": "it is 😀 and \ud800", "weight": 0},
    *TALK,
    {"role": "assistant", "content": "é"},
]


def records(*rows: Any) -> list[Record]:
    """Rows of a file."""
    return [Record(row, f"x.jsonl line {number}") for number, row in enumerate(rows, 1)]


def test_rows_are_those_of_the_template_itself(processes: list[ChatProcess]) -> None:
    """More rows than are asked for ahead: texts, answers and counts are those of the template in this process."""
    processes.append(ChatProcess(ChatSource(CHATML, "t.jinja", {})))
    lines = records(*({"messages": ANSWERED * (1 + number % 5), "more": number} for number in range(100)))
    ours, theirs = RowCounts(Objective(), "training"), RowCounts(Objective(), "training")
    template = ChatTemplate(CHATML, "t.jinja", {})
    assert [*processes[-1].rows(lines, ours)] == [(line, *template.rendered(line, theirs)) for line in lines]
    assert (ours.numbers, ours.unknown) == (theirs.numbers, theirs.unknown)
    assert ours.unknown == {'"more"': 100}


def test_rows_behind_a_refused_one(processes: list[ChatProcess]) -> None:
    """The first mistake of a file is named though rows behind it are read ahead, and the process writes the next file."""
    processes.append(ChatProcess(ChatSource(CHATML, "t.jinja", {})))
    good, bad = {"messages": ANSWERED}, {"messages": TALK}

    def lines() -> Iterator[Record]:
        yield from records(good, bad, good)
        raise DataError("line 4 is not JSON")

    found, counts = processes[-1].rows(lines(), RowCounts(Objective(), "training")), RowCounts(Objective(), "training")
    next(found)
    with pytest.raises(DataError, match="line 2 has no message of the role assistant"):
        next(found)
    assert len([*processes[-1].rows(records(good, good), counts)]) == 2


@pytest.mark.parametrize("name", ["loops", "a text beyond memory", "a text that doubles", "a constant beyond memory", "a date beyond memory"])
def test_hostile_rows(name: str, processes: list[ChatProcess]) -> None:
    """A row whose rendering is without bound is named and refused within seconds and bytes."""
    piece, words = HOSTILE[name]
    source = ChatSource("{% if messages[0].content == 'evil' %}" + piece + "{% endif %}" + CHATML, "t.jinja", {})
    processes.append(ChatProcess(source, cpu_seconds=1))
    rows = records({"messages": ANSWERED}, {"messages": [*EVIL, *ANSWERED]})
    found = processes[-1].rows(rows, RowCounts(Objective(), "training"))
    next(found)
    with pytest.raises(DataError, match=rf"x.jsonl line 2 is not for .*({words})"):
        next(found)


def test_a_long_text_of_a_row(processes: list[ChatProcess]) -> None:
    """A template may write more than a row has, within a bound."""
    processes.append(
        ChatProcess(ChatSource("{{ 'ab' * messages[0].content | int }}{{ messages[0].content }}{{ messages[1].content }}", "t.jinja", {}))
    )
    rows = records(*({"messages": [{"role": "user", "content": str(count)}, {"role": "assistant", "content": "no"}]} for count in (100_000, 200_000)))
    found = processes[-1].rows(rows, RowCounts(Objective(), "training"))
    assert len(next(found)[1]) == 200_008
    with pytest.raises(DataError, match=r"line 2 is not for the chat template of t.jinja, which writes 400,008 characters of at most 26"):
        next(found)


def test_a_hostile_template_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training ends with an error that names the row, and leaves no rows behind."""
    monkeypatch.setenv("NNTASK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "t.jinja").write_text("{{ messages[0].role * 10**10 }}")
    path = lines_in(tmp_path / "x.jsonl", [{"messages": ANSWERED}])
    settings = DataSettings(dataset="jsonl", dataset_path=str(path), val_path=str(path), tokenizer="bytes", chat_template=str(tmp_path / "t.jinja"))
    before = set(psutil.Process().children())
    with pytest.raises(DataError, match=r"x.jsonl line 1 is not for the chat template of .*t.jinja, which takes more memory than it may have"):
        opened(Learner("causal", n_positions=400), settings, 100)
    assert set(psutil.Process().children()) == before
    assert not [*(tmp_path / "cache").rglob("*.rows")]
