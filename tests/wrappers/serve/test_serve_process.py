"""A server as a process: its end by signals, by a failure and by a kill, the memory it takes, and what it refuses to begin with."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from support.commands import refuse
from support.deadline import DEADLINE
from support.quantised_directories import write_plain
from support.served import CONFIG, Alone, Served, served, write_served_model
from support.transformers_oracle import CONFIGS

from wrappers.cli import main

LONG: dict[str, Any] = {"model": "small", "prompt": "a", "temperature": 0, "max_tokens": 190}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory, whose tokenizer has no chat template."""
    return write_served_model(tmp_path_factory.mktemp("served") / "small", has_template=False)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT])
def test_a_signal_lets_streams_end(number: int, model: Path, alone: Alone) -> None:
    """What runs is said to its end, new connections are refused, and the exit code is 0."""
    with served(model) as server, server.client() as client:
        stream = client.completions.create(**LONG, stream=True)
        first = next(stream)
        server.process.send_signal(number)
        rest = "".join(event.choices[0].text for event in stream)
        assert first.choices[0].text + rest == alone.text("a", 190)
        assert server.process.wait(DEADLINE) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        assert server.process.communicate()[1] == ""


def test_the_second_signal_waits_for_nobody(model: Path) -> None:
    """Not for a client that takes its time to send, nor for one that reads nothing."""
    import socket

    with served(model, "--receive-seconds", "3600", "--grace-seconds", "3600") as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), DEADLINE) as slow:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: 50\r\n"
            slow.sendall(f"{head}expect: 100-continue\r\n\r\n".encode())
            assert slow.recv(1 << 16).startswith(b"HTTP/1.1 100")
            server.process.send_signal(signal.SIGTERM)
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(DEADLINE) == 0


def test_texts_beyond_their_grace_are_told(model: Path) -> None:
    """After the time for them, streams end with an error and whole answers are one; the exit code is 0."""
    with served(model, "--grace-seconds", "0") as server, server.client() as client:
        stream = client.completions.create(**LONG, stream=True)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert server.process.wait(DEADLINE) == 0


@contextmanager
def endless(model: Path, folder: Path, *flags: str) -> Iterator[tuple[Served, Callable[[str], Any]]]:
    """A server whose template does not end with a message "b", and what sends it a message."""
    file = folder / "t.jinja"
    file.write_text(
        "{% if messages[0].content == 'b' %}" + "{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2 + "{% endif %}{{ messages[0].content }}"
    )
    with served(model, "--chat-template", str(file), *flags) as server, server.client() as client:
        yield server, lambda word: client.chat.completions.create(model="small", messages=[{"role": "user", "content": word}], max_tokens=2)


def stopped_when_busy(server: Served) -> psutil.Process:
    """The template's process of a server, stopped when it has worked for a while."""
    (template,) = psutil.Process(server.process.pid).children()
    begin = template.cpu_times().user
    while template.cpu_times().user < begin + 0.2:
        assert server.process.poll() is None
    template.suspend()
    return template


def test_conversations_beyond_their_grace_are_told(model: Path, tmp_path: Path) -> None:
    """Also one whose template does not answer; the exit code is 0."""
    with endless(model, tmp_path, "--grace-seconds", "0") as (server, ask), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, "b")
        stopped_when_busy(server)
        server.process.send_signal(signal.SIGTERM)
        error = asked.exception(DEADLINE)
        assert isinstance(error, openai.InternalServerError)
        assert (error.status_code, error.code) == (503, "shutting_down")
        assert server.process.wait(DEADLINE) == 0


FAULT = """
from tiles.kernels.catalog import kernel, register
whole, calls = kernel("combine_pages", "cpu"), []
@register("combine_pages", "cpu")
def failing(*tiles, **constants):
    calls.append(1)
    if len(calls) > 100:
        raise OSError("planted")
    whole(*tiles, **constants)
"""


def test_a_failure_of_the_engine_ends_everything(model: Path) -> None:
    """A task fails: streams end with an error and the process with an exit code; nobody waits for ever."""
    with served(model, script=FAULT) as server, server.client() as client:
        with pytest.raises(openai.APIError, match="the server has failed"):
            list(client.completions.create(**LONG, n=2, stream=True))
        assert server.process.wait(DEADLINE) == 1
        assert "planted" in server.process.communicate()[1]


def test_a_killed_server_comes_again(model: Path, alone: Alone) -> None:
    """Clients see the end of the connection; another process listens at the same port at once."""
    with served(model) as server, server.client() as client:
        stream = client.completions.create(**LONG, stream=True)
        next(stream)
        server.process.kill()
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError, openai.APIConnectionError)):
            list(stream)
        port = int(server.url.rpartition(":")[2])
    with served(model, port=port) as server, server.client() as client:
        assert client.completions.create(**LONG).choices[0].text == alone.text("a", 190)


def test_a_cache_beyond_memory(model: Path, alone: Alone, tmp_path: Path) -> None:
    """With RAM for a piece of it, and a disk: the same texts, never above the budget."""
    flags = ("--ram", "300KiB", "--disk", f"{tmp_path / 'disk'}:64MiB", "--slots", "8")
    with served(model, *flags) as server, server.client() as client:
        found = client.completions.create(model="small", prompt=["a", "b", "once upon"], n=2, temperature=0, max_tokens=30)
        assert [each.text for each in found.choices] == [alone.text(prompt, 30) for prompt in ("a", "a", "b", "b", "once upon", "once upon")]
        assert server.metric("nntask_serve_evictions_total") > 0
        assert server.metric('nntask_serve_peak_bytes{memory="ram"}') <= 300 << 10
        assert server.end()[0] == 0


def test_hit_rates_of_experts(tmp_path: Path) -> None:
    """The metrics have the chosen weights of a mixture, and how many of them were in memory."""
    path = write_served_model(tmp_path / "small")
    plain = write_plain(tmp_path / "plain", replace(CONFIGS["olmoe"], vocab_size=CONFIG.vocab_size, max_position_embeddings=64))
    for name in ("config.json", "model.safetensors"):
        shutil.copy(plain / name, path / name)
    with served(path, "--ram", "2MiB", "--disk", f"{tmp_path / 'disk'}:64MiB") as server, server.client() as client:
        assert client.completions.create(model="small", prompt="a", max_tokens=9).choices[0].text
        assert 0 < server.metric("nntask_serve_experts_in_memory_total") < server.metric("nntask_serve_experts_chosen_total")


@pytest.mark.parametrize("has_disk", [False, True])
def test_the_least_memory_is_enough_for_every_request(
    has_disk: bool, model: Path, alone: Alone, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a refusal names will do, and then no request needs more, one for probabilities of a prompt included."""
    flags = ("--slots", "1", *(("--disk", f"{folder / 'disk'}:64MiB") if has_disk else ()))
    _, message = refuse(capsys, ["serve", str(model), "--ram", "40KiB", *flags])
    least = message.partition("use --ram ")[2].split()[0].rstrip(",")
    with served(model, "--ram", least, *flags) as server, server.client() as client:
        found = client.completions.create(model="small", prompt="a" * 150, temperature=0, max_tokens=2, echo=True, logprobs=2)
        assert found.choices[0].text == "a" * 150 + alone.text("a" * 150, 2)
        assert server.end()[0] == 0


def test_a_quantised_gguf_file_is_served(model: Path, tmp_path: Path) -> None:
    """With its tokenizer; the texts are those of generation."""
    file = tmp_path / "small.gguf"
    assert main(["quantize", str(model), str(file), "--type", "q4_0", "--embeddings"]) == 0
    of_file = Alone(file)
    with served(file) as server, server.client() as client:
        found = client.completions.create(model="small.gguf", prompt=["once upon", "a"], temperature=0, max_tokens=20)
        assert [each.text for each in found.choices] == [of_file.text("once upon", 20), of_file.text("a", 20)]
    of_file.close()


def test_few_pages_let_texts_wait(model: Path, alone: Alone) -> None:
    """Pages for one long text: several come one after the other, and none fails."""
    with served(model, "--cache-tokens", "192") as server, server.client() as client:
        found = client.completions.create(**LONG, n=3)
        assert [each.text for each in found.choices] == [alone.text("a", 190)] * 3
        with pytest.raises(openai.BadRequestError, match="--chat-template FILE"):
            client.chat.completions.create(model="small", messages=[{"role": "user", "content": "a"}])


IMPATIENT = """
from functools import partial
import nntask.data
nntask.data.ChatProcess = partial(nntask.data.ChatProcess, cpu_seconds=1)
"""


def test_a_template_from_a_file_that_refuses(model: Path, tmp_path: Path) -> None:
    """Its refusal is the client's, and so is what it may not take, time and memory; a name for the model; a key from the environment."""
    template = tmp_path / "t.jinja"
    bug = "{% if messages[0].role == 'bug' %}{{ messages[0].role * 10**18 }}{% endif %}"
    bug += "{% if messages[0].role == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    template.write_text("{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}" + bug + "{{ messages[0].content }}")
    script = "import os\nos.environ['NNTASK_API_KEY'] = 'a-key'\n" + IMPATIENT
    with served(model, "--chat-template", str(template), "--name", "org/other", script=script) as server, server.client() as client:
        message: Any = {"role": "user", "content": "a"}
        assert client.models.retrieve("org/other").id == "org/other"
        assert client.chat.completions.create(model="org/other", messages=[message], max_tokens=2).choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="one at a time"):
            client.chat.completions.create(model="org/other", messages=[message, message])
        for role, words in (
            ("bug", "more memory than it may have; change the messages"),
            ("loop", "more than 1 s of processor time; change the messages"),
        ):
            with pytest.raises(openai.BadRequestError, match=words) as refusal:
                client.chat.completions.create(model="org/other", messages=[{**message, "role": role}])
            assert refusal.value.param == "messages"
        assert client.chat.completions.create(model="org/other", messages=[message], max_tokens=2).choices[0].message.content
        with server.client("none") as other, pytest.raises(openai.AuthenticationError):
            other.models.list()


def test_conversations_wait_in_the_queue(model: Path, tmp_path: Path) -> None:
    """As many as there are places. When the template's process is killed, its conversation is told to try again, and the next one is answered."""
    with endless(model, tmp_path, "--slots", "1", "--queue", "1") as (server, ask), ThreadPoolExecutor(3) as pool:
        killed = pool.submit(ask, "b")
        template = stopped_when_busy(server)
        (full,), (waits,) = wait([pool.submit(ask, "a"), pool.submit(ask, "a")], DEADLINE, FIRST_COMPLETED)
        template.kill()
        assert isinstance(full.exception(), openai.RateLimitError)
        error = killed.exception(DEADLINE)
        assert isinstance(error, openai.InternalServerError)
        assert (error.status_code, error.code, error.type) == (503, "template_unavailable", "server_error")
        assert "try again later" in error.message
        assert waits.result(DEADLINE).choices[0].message.content


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--port", "70000"), 2, "--port must be from 0 to 65535"),
        (("--slots", "0"), 2, "--slots must be from 1 to 1024"),
        (("--queue", "-1"), 2, "--queue must be 0 or more"),
        (("--max-context", "1000"), 2, "at most the model's context of 192"),
        (("--max-body", "0"), 2, "--max-body must be at least 1 byte"),
        (("--grace-seconds", "-1"), 2, "--grace-seconds must be from 0"),
        (("--receive-seconds", "0"), 2, "--receive-seconds must be above 0"),
        (("--chat-template", "nowhere"), 4, "--chat-template nowhere cannot be read"),
        (("--api-key-file", "nowhere"), 4, "--api-key-file nowhere cannot be read"),
        (("--host", "192.0.2.1", "--api-key-file", "own"), 2, "cannot be listened to"),
        (("--api-key-file", "open"), 2, "may be read by everybody"),
        (("--api-key-file", "empty"), 4, "has no key in its first line"),
        (("--api-key-file", "odd"), 2, "printable ASCII"),
        (("--ram", "40KiB"), 3, "lower --slots or --max-context, or use --ram"),
        (("--ram", "300KiB", "--cache-tokens", "100000"), 3, "lower --cache-tokens, or use --ram"),
    ],
)
def test_refusals(flags: tuple[str, ...], code: int, words: str, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence each, before a socket or memory is taken."""
    for name, text, mode in (("own", "key", 0o600), ("open", "key", 0o644), ("empty", "\n", 0o600), ("odd", "a key\n", 0o600)):
        (folder / name).write_text(text)
        (folder / name).chmod(mode)
    found, message = refuse(capsys, ["serve", str(model), *flags])
    assert found == code, message
    assert words in message


def test_what_writes_no_texts_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that fills masks, or has an encoder."""
    pytest.importorskip("transformers")
    from support.transformers_oracle import CONFIGS

    for name, words in (("bert", "predicts masked tokens"), ("t5", "has an encoder")):
        directory = write_served_model(folder / name)
        (directory / "config.json").write_text(json.dumps({**CONFIGS[name].to_dict(), "vocab_size": 300}))
        code, message = refuse(capsys, ["serve", str(directory)])
        assert code == 2
        assert words in message


def test_help_names_every_flag(folder: Path) -> None:
    """The command's own help, as a process."""
    from support.commands import start

    with start("serve", "--help") as process:
        out, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert all(flag in out for flag in ("--slots", "--queue", "--api-key-file", "--ram"))
    assert isinstance(process, subprocess.Popen)
