"""Chat templates of hostile models, in the process that renders them for `nntask serve`: each gets an error, and the next conversation is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.objective_data import CHATML

from nntask import DataError
from nntask.data import ChatSource, ChatTemplate
from wrappers.serve.template_process import TemplateProcess

TALK: list[dict[str, Any]] = [{"role": "user", "content": "is it é or 😀?"}]
MOST = 10_000
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


@pytest.fixture(scope="module")
def processes() -> Iterator[list[TemplateProcess]]:
    """Those that a test has begun."""
    found: list[TemplateProcess] = []
    yield found
    for each in found:
        each.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_conversations(name: str, processes: list[TemplateProcess]) -> None:
    """A conversation whose rendering is without bound is refused within seconds and bytes; one that is not so is written as without a process."""
    piece, words = HOSTILE[name]
    source = ChatSource("{% if messages | length == 1 and messages[0].content == 'evil' %}" + piece + "{% endif %}" + CHATML, "t.jinja", {})
    ours = TemplateProcess(source, MOST, cpu_seconds=1)
    processes.append(ours)
    want = ChatTemplate(CHATML, "t.jinja", {}).prompt(TALK, "the request")
    with pytest.raises(DataError, match=words) as refusal:
        ours.prompt([{"role": "user", "content": "evil"}], "the request")
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


def test_a_process_that_was_killed_comes_again(processes: list[TemplateProcess]) -> None:
    """The next conversation does not notice."""
    ours = TemplateProcess(ChatSource(CHATML, "t.jinja", {}), MOST)
    processes.append(ours)
    want = ours.prompt(TALK, "the request")
    ours.close()
    assert ours.prompt(TALK, "the request") == want
