"""A server of a model whose tokenizer is hostile: its requests fail, those of others do not, and the server ends when it is told to."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from support.deadline import DEADLINE
from support.served import Alone, Served, served, write_served_model

EXPONENTIAL: dict[str, Any] = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SLOW = ("a" * 29 + "b") * 1000
"""A text that takes hours, and at no place as many steps as the package gives up at."""


@pytest.fixture
def model_with(tmp_path: Path) -> Callable[..., Path]:
    """A model directory whose tokenizer.json has other sections."""

    def write(**sections: Any) -> Path:
        directory = write_served_model(tmp_path / "small")
        content = json.loads((directory / "tokenizer.json").read_text())
        (directory / "tokenizer.json").write_text(json.dumps({**content, **sections}))
        return directory

    return write


def until_busy(server: Served) -> None:
    """Until a process of the server has worked for a while."""
    children = psutil.Process(server.process.pid).children()
    begin = sum(child.cpu_times().user for child in children)
    while sum(child.cpu_times().user for child in children) < begin + 0.2:
        assert server.process.poll() is None


def test_a_hostile_prompt(model_with: Callable[..., Path], tmp_path: Path) -> None:
    """It is refused in OpenAI's shape, and the next one gets its text."""
    model = model_with(pre_tokenizer={"type": "Sequence", "pretokenizers": [EXPONENTIAL, LEVEL]})
    alone = Alone(write_served_model(tmp_path / "other"))
    with served(model) as server, server.client() as client:
        with pytest.raises(openai.BadRequestError, match=r"the tokenizer in .* fails at a text .*; change the text") as refusal:
            client.completions.create(model="small", prompt="a" * 60 + "b", max_tokens=2)
        assert refusal.value.type == "invalid_request_error"
        assert client.completions.create(model="small", prompt="b", max_tokens=8, temperature=0).choices[0].text == alone.text("b", 8)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DEADLINE) == 0
        assert server.process.communicate()[1].count("\n") <= 1  # the note that it is confined
    alone.close()


def test_a_prompt_that_does_not_end(model_with: Callable[..., Path]) -> None:
    """It does not keep the server from ending."""
    model = model_with(pre_tokenizer={"type": "Sequence", "pretokenizers": [EXPONENTIAL, LEVEL]})
    with served(model, "--grace-seconds", "0") as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.completions.create, model="small", prompt=SLOW, max_tokens=2)
        until_busy(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DEADLINE) == 0
        error = asked.exception(DEADLINE)
        assert isinstance(error, openai.APIError)
        assert "shutting down" in str(error)


def test_a_process_that_others_end(model_with: Callable[..., Path]) -> None:
    """The request is refused with the name of what is missing, and the next one gets another process."""
    model = model_with(pre_tokenizer={"type": "Sequence", "pretokenizers": [EXPONENTIAL, LEVEL]})
    with served(model, "--grace-seconds", "0") as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.completions.create, model="small", prompt=SLOW, max_tokens=2)
        until_busy(server)
        for child in psutil.Process(server.process.pid).children():
            child.kill()
        error = asked.exception(DEADLINE)
        assert isinstance(error, openai.APIStatusError)
        assert (error.status_code, error.code) == (503, "tokenizer_unavailable")
        assert client.completions.create(model="small", prompt="b", max_tokens=2).usage is not None


def test_a_hostile_decoder(model_with: Callable[..., Path]) -> None:
    """A text that takes too much to be written ends with an error; the server goes on."""
    double = {"type": "Replace", "pattern": {"Regex": "[^q]"}, "content": "qq"}
    twice = {"type": "Replace", "pattern": {"String": "q"}, "content": "qq"}
    model = model_with(decoder={"type": "Sequence", "decoders": [double, *[twice] * 40]})
    with served(model) as server, server.client() as client:
        for options in ({}, {"logprobs": 1}, {"logprobs": 1, "echo": True, "max_tokens": 0}):
            asked: dict[str, Any] = {"model": "small", "prompt": "b", "max_tokens": 4, **options}
            with pytest.raises(openai.InternalServerError, match="takes more memory than it may have") as refusal:
                client.completions.create(**asked)
            assert refusal.value.code == "undecodable"
        with server.http() as http:
            assert http.get("/health").status_code == 200
