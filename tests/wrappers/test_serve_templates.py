"""Chat templates of hostile models, in the process that renders them for `nntask serve`: each gets an error, and the next conversation is written."""

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
from support.objective_data import CHATML

from nntask import DataError
from nntask.data import ChatSource, ChatTemplate
from wrappers.serve.errors import TemplateUnavailable
from wrappers.serve.template_process import LONGEST, TemplateProcess

TALK: list[dict[str, Any]] = [{"role": "user", "content": "is it é or 😀?"}]
MOST = 10_000
EVIL: list[dict[str, Any]] = [{"role": "user", "content": "evil"}]
HOSTILE = {
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s of a processor"),
    "macros that call themselves": ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "more than 1 s"),
    "a text beyond memory": ("{{ messages[0].role * 10**10 }}", "more memory than it may have"),
    "a text that doubles": ("{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "more memory than"),
    "a constant beyond memory": ("{{ 'a' * 10**10 }}", "more memory than it may have"),
    "a filter beyond memory": ("{{ messages[0].role | center(10**10) }}", "more memory than it may have"),
    "a large number": ("{{ (messages | length + 9) ** (10 ** 9) }}", "more than 1 s of a processor"),
    "a long text": ("{{ messages[0].role * 5000 }}", "writes 20,032 characters of at most 10,000"),
    "a bug": ("{{ messages | sort(attribute='role') | round }}", "the request is not for the chat template"),
}

ENDLESS = "{% if messages[0].content == 'evil' %}" + HOSTILE["loops"][0] + "{% endif %}" + CHATML


@pytest.fixture(scope="module")
def processes() -> Iterator[list[TemplateProcess]]:
    """Those that a test has begun."""
    found: list[TemplateProcess] = []
    yield found
    for each in found:
        each.close()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if "macros" in name or "number" in name else name for name in HOSTILE])
def test_hostile_conversations(name: str, processes: list[TemplateProcess]) -> None:
    """A conversation whose rendering is without bound is refused within seconds and bytes; one that is not so is written as without a process."""
    piece, words = HOSTILE[name]
    source = ChatSource("{% if messages | length == 1 and messages[0].content == 'evil' %}" + piece + "{% endif %}" + CHATML, "t.jinja", {})
    ours = TemplateProcess(source, MOST, cpu_seconds=1)
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
        ("{{ 10**(10**9) }}", "the chat template of t.jinja takes more than 1 s of a processor"),
        ("{% for %}", "the chat template of t.jinja has a mistake"),
    ],
)
def test_hostile_sources(source: str, words: str) -> None:
    """What is without bound already where it is compiled, or has a mistake, is refused before there is a server."""
    with pytest.raises(DataError, match=rf"{words}.*--chat-template FILE"):
        TemplateProcess(ChatSource(source, "t.jinja", {}), MOST, cpu_seconds=1)


@pytest.fixture
def begun(processes: list[TemplateProcess]) -> Callable[..., tuple[TemplateProcess, psutil.Process]]:
    """Begins a template's process; returns its two sides."""

    def begin(source: str = CHATML, **terms: Any) -> tuple[TemplateProcess, psutil.Process]:
        before = set(psutil.Process().children())
        processes.append(TemplateProcess(ChatSource(source, "t.jinja", {}), MOST, **terms))
        (found,) = set(psutil.Process().children()) - before
        return processes[-1], found

    return begin


def test_a_process_that_was_killed_comes_again(begun: Callable[..., tuple[TemplateProcess, psutil.Process]]) -> None:
    """The next conversation does not notice."""
    ours, other = begun()
    want = ours.prompt(TALK, "the request")
    other.kill()
    psutil.wait_procs([other], DEADLINE)
    assert ours.prompt(TALK, "the request") == want


def test_what_the_process_has(begun: Callable[..., tuple[TemplateProcess, psutil.Process]], monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the environment's secrets, no file that it could open or write, bounded memory, and the first place where the kernel ends somebody."""
    monkeypatch.setenv("NNTASK_API_KEY", "secret")
    monkeypatch.setenv("TZ", "UTC")
    _, other = begun()
    assert "secret" not in other.environ().values()
    assert other.environ()["TZ"] == "UTC"
    assert other.rlimit(resource.RLIMIT_FSIZE) == (0, 0)
    assert other.rlimit(resource.RLIMIT_NOFILE) == (3, 3) == (other.num_fds(),) * 2
    assert other.rlimit(resource.RLIMIT_AS)[0] < other.memory_info().vms + (300 << 20)
    assert Path(f"/proc/{other.pid}/oom_score_adj").read_text().strip() == "1000"


def test_no_limit_of_a_request_gives_a_template_more(processes: list[TemplateProcess]) -> None:
    """Memory and characters are bounded where requests may have gigabytes."""
    before = set(psutil.Process().children())
    processes.append(TemplateProcess(ChatSource(CHATML, "t.jinja", {}), 1 << 40))
    (other,) = set(psutil.Process().children()) - before
    assert other.rlimit(resource.RLIMIT_AS)[0] < other.memory_info().vms + (800 << 20)
    with pytest.raises(DataError, match=r"gets at most 16,777,216 characters, got 16,777,232; change the messages"):
        processes[-1].prompt([{"role": "user", "content": "a" * (LONGEST + 1)}], "the request")


@pytest.mark.parametrize(
    "piece", ["{{ lipsum(1) | length > 0 }}", "{{ 'a b' | wordwrap(1) }}", "{{ {'a': 'é'} | tojson }}", "{{ strftime_now('%d') }}"]
)
def test_what_is_imported_late(piece: str, processes: list[TemplateProcess]) -> None:
    """Filters and functions of templates do not miss the files that they can no longer be imported from."""
    processes.append(TemplateProcess(ChatSource(piece, "t.jinja", {}), MOST))
    found = processes[-1].prompt(TALK, "the request")
    assert found == ChatTemplate(piece, "t.jinja", {}).prompt(TALK, "the request")


def until_busy(other: psutil.Process) -> None:
    """Until a process has worked for a while."""
    begin = other.cpu_times().user
    while other.cpu_times().user < begin + 0.2:
        assert other.is_running()


def test_a_process_that_others_end_or_stop(begun: Callable[..., tuple[TemplateProcess, psutil.Process]]) -> None:
    """Is no fault of the conversation that was being written, however long it is, and the next one is written."""
    ours, other = begun(wall_seconds=4)
    long: list[dict[str, Any]] = [{"role": "user", "content": "a" * (MOST - 100)}]
    want = ours.prompt(TALK, "the request")
    other.suspend()
    with pytest.raises(TemplateUnavailable, match="did not answer within 4 s, and is ended; try again later"):
        ours.prompt(long, "the request")
    assert not other.is_running()
    assert ours.prompt(TALK, "the request") == want
    ours, other = begun(ENDLESS)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(ours.prompt, EVIL, "the request")
        until_busy(other)
        other.kill()
        with pytest.raises(TemplateUnavailable, match="was ended by others, or as memory is short; try again later"):
            found.result(DEADLINE)
    assert ours.prompt(TALK, "the request") == want


def test_a_closed_process_stays_so(begun: Callable[..., tuple[TemplateProcess, psutil.Process]]) -> None:
    """Under the conversation that is being written, for those that wait, and for those that come."""
    ours, other = begun(ENDLESS)
    before = set(psutil.Process().children())
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ours.prompt, EVIL, "the request") for _ in range(3)]
        until_busy(other)
        ours.close()
        for each in asked:
            error = each.exception(DEADLINE)
            assert isinstance(error, TemplateUnavailable)
            assert "the server is shutting down" in str(error)
    with pytest.raises(TemplateUnavailable, match="shutting down"):
        ours.prompt(TALK, "the request")
    assert set(psutil.Process().children()) == before - {other}


def test_a_process_that_does_not_begin_again(
    begun: Callable[..., tuple[TemplateProcess, psutil.Process]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Clients are told to try again; why stands where who runs the server reads."""
    ours, other = begun()
    other.kill()
    psutil.wait_procs([other], DEADLINE)
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/nowhere/python")
        with pytest.raises(TemplateUnavailable, match="does not begin again, and why stands in the server's log; try again later"):
            ours.prompt(TALK, "the request")
        assert "/nowhere/python" in capfd.readouterr().err
    assert ours.prompt(TALK, "the request")


def test_what_is_interrupted_leaves_no_process(begun: Callable[..., tuple[TemplateProcess, psutil.Process]]) -> None:
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
