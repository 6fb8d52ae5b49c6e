"""`nntask serve` as OpenAI's Python client sees it: texts, streams, conversations, probabilities, words that stop, seeds, counts, refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.served import CONFIG, KEY, Alone, Served, served, text_of

TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is it?"}]
RENDERED = "<|system|>be brief<|end|><|user|>what is it?<|end|><|assistant|>"


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a key, few slots and small limits."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.touch(0o600)
    key.write_text(f"{KEY}\n")
    flags = ("--slots", "3", "--queue", "5", "--api-key-file", str(key), "--max-body", "8KiB", "--receive-seconds", "2", "--ram", "256MiB")
    with served(model, *flags) as found:
        yield found
        assert found.end()[0] == 0


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's client."""
    with server.client() as found:
        yield found


def test_models(client: openai.OpenAI, server: Served) -> None:
    """The list, and the one."""
    assert [each.id for each in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).owned_by == "nntask"
    with pytest.raises(openai.NotFoundError) as refusal:
        client.models.retrieve("other")
    assert refusal.value.code == "model_not_found"


def test_a_completion(client: openai.OpenAI, alone: Alone) -> None:
    """The greedy text of the model by itself, with counts."""
    found = client.completions.create(model="small", prompt="once upon", temperature=0, max_tokens=20)
    assert found.choices[0].text == alone.text("once upon", 20)
    assert (found.object, found.choices[0].finish_reason) == ("text_completion", "length")
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (9, 20, 29)
    assert len(client.completions.create(model="small", prompt="x", temperature=0).choices[0].text) <= 16


def test_several_prompts_and_texts(client: openai.OpenAI, alone: Alone) -> None:
    """Text and ids, two of each; drawn by the seed and the number of the text, whatever runs beside."""
    ids = alone.ids.prompt("abc")
    found = client.completions.create(model="small", prompt=["once upon", "abc"], n=2, temperature=0.9, seed=7, max_tokens=12)
    again = client.completions.create(model="small", prompt=[ids], n=2, temperature=0.9, seed=7, max_tokens=12)
    assert [each.index for each in found.choices] == [0, 1, 2, 3]
    assert [each.text for each in found.choices[2:]] == [each.text for each in again.choices]
    assert found.choices[0].text == alone.text("once upon", 12, temperature=0.9, seed=7)
    assert found.choices[0].text != found.choices[1].text
    other = client.completions.create(model="small", prompt="once upon", temperature=0.9, max_tokens=12)
    assert other.choices[0].text != client.completions.create(model="small", prompt="once upon", temperature=0.9, max_tokens=12).choices[0].text


def test_probabilities_and_echo(client: openai.OpenAI, alone: Alone) -> None:
    """Of new tokens, and with echo of the prompt's, the first of which has none; the prompt alone where no new token is asked for."""
    found = client.completions.create(model="small", prompt="abcd", temperature=0, max_tokens=3, logprobs=2, echo=True).choices[0]
    assert found.text == "abcd" + alone.text("abcd", 3)
    told = found.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert "".join(told.tokens) == found.text
    assert told.text_offset == list(range(7))
    assert told.token_logprobs[0] is None
    assert all(each < 0 for each in told.token_logprobs[1:])
    assert all(len(each) in (2, 3) and token in each for token, each in zip(told.tokens[1:], told.top_logprobs[1:], strict=True))
    only = client.completions.create(model="small", prompt="abcd", max_tokens=0, logprobs=2, echo=True)
    assert only.choices[0].text == "abcd"
    assert only.choices[0].logprobs is not None
    assert only.choices[0].logprobs.token_logprobs == told.token_logprobs[:4]
    assert only.usage is not None
    assert only.usage.completion_tokens == 0


def test_words_that_stop(client: openai.OpenAI, alone: Alone) -> None:
    """The text ends before the first of them, in streams as well, which never show a piece of one."""
    text = alone.text("once upon", 40)
    stop = text[17:20]
    want = text[: text.index(stop)]
    for stops in (stop, ["never in it at all", stop]):
        found = client.completions.create(model="small", prompt="once upon", temperature=0, max_tokens=40, stop=stops)
        assert (found.choices[0].text, found.choices[0].finish_reason) == (want, "stop")
        pieces = list(client.completions.create(model="small", prompt="once upon", temperature=0, max_tokens=40, stop=stops, stream=True))
        assert "".join(each.choices[0].text for each in pieces) == want
        assert pieces[-1].choices[0].finish_reason == "stop"


def test_probabilities_end_where_the_text_does(client: openai.OpenAI, alone: Alone) -> None:
    """Of a text that a word stops, no token of the word is told, whole or as a stream, which tells none before its characters are certain."""
    text = alone.text("once upon", 40)
    stop = text[17:20]
    want = text[: text.index(stop)]
    terms: dict[str, Any] = {"model": "small", "temperature": 0, "max_tokens": 40, "stop": stop}
    told = client.completions.create(**terms, prompt="once upon", logprobs=1).choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.text_offset is not None
    assert text_of(told.tokens) == want
    assert len(told.text_offset) == len(want)
    shown, tokens = "", list[str]()
    for event in client.completions.create(**terms, prompt="once upon", logprobs=1, stream=True):
        shown += event.choices[0].text
        if event.choices[0].logprobs is not None:
            tokens += event.choices[0].logprobs.tokens or []
        assert shown == text_of(tokens)
    assert shown == want
    talk: Any = TALK
    spoken = alone.text(RENDERED, 40)
    chat = client.chat.completions.create(**{**terms, "stop": spoken[17:20]}, messages=talk, logprobs=True)
    assert chat.choices[0].logprobs is not None
    assert text_of(each.token for each in chat.choices[0].logprobs.content or []) == spoken[: spoken.index(spoken[17:20])]


def test_biases_and_penalties(client: openai.OpenAI, alone: Alone) -> None:
    """A bias forces and forbids tokens; a frequency penalty lets no token come often."""
    (token,) = alone.ids.prompt("q")
    forced = client.completions.create(model="small", prompt="ab", temperature=0, max_tokens=5, logit_bias={str(token): 100})
    assert forced.choices[0].text == "qqqqq"
    often = client.completions.create(model="small", prompt="ab", temperature=0, max_tokens=40, logit_bias={str(token): 20}, frequency_penalty=2)
    assert often.choices[0].text.count("q") < 25


def test_streams(client: openai.OpenAI, alone: Alone) -> None:
    """Pieces of the same text, of two texts side by side, with counts at the end if they are asked for."""
    events = list(
        client.completions.create(
            model="small", prompt=["once upon", "zzz"], temperature=0, max_tokens=15, stream=True, stream_options={"include_usage": True}, logprobs=1
        )
    )
    texts = {0: "", 1: ""}
    for event in events[:-1]:
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == {0: alone.text("once upon", 15), 1: alone.text("zzz", 15)}
    assert len(events) > 10
    assert len({event.id for event in events}) == 1
    assert not events[-1].choices
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 30


def test_conversations(client: openai.OpenAI, alone: Alone) -> None:
    """What the template writes is continued; content in pieces; whole and as a stream; the rest of the context where no limit is given."""
    talk: Any = [TALK[0], {"role": "user", "content": [{"type": "text", "text": "what is"}, {"type": "text", "text": " it?"}]}]
    want = alone.text(RENDERED, 20)
    found = client.chat.completions.create(model="small", messages=talk, temperature=0, max_completion_tokens=20, logprobs=True, top_logprobs=2)
    assert found.choices[0].message.content == want
    assert found.choices[0].message.role == "assistant"
    told = found.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert text_of(each.token for each in told.content) == want
    assert b"".join(bytes(each.bytes or []) for each in told.content).decode(errors="replace") == want
    assert all(len(each.top_logprobs) == 2 and each.top_logprobs[0].logprob >= each.logprob - 1e-9 for each in told.content)
    events = list(client.chat.completions.create(model="small", messages=talk, temperature=0, max_tokens=20, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(each.choices[0].delta.content or "" for each in events) == want
    assert events[-1].choices[0].finish_reason == "length"
    rest = client.chat.completions.create(model="small", messages=talk, temperature=0)
    assert rest.usage is not None
    assert rest.usage.total_tokens == CONFIG.n_positions
    with client.chat.completions.stream(model="small", messages=talk, temperature=0, max_tokens=20, stop=want[9:12]) as stream:
        assert stream.get_final_completion().choices[0].message.content == want[: want.index(want[9:12])]


def test_beginnings_in_common(client: openai.OpenAI, alone: Alone) -> None:
    """The second text takes pages of the first, is told so, and says the same; of several prompts the sum of what was there is told."""
    prompt = "the same beginning of quite some length, for several pages"
    texts = [client.completions.create(model="small", prompt=prompt, temperature=0, max_tokens=9) for _ in range(2)]
    assert [each.choices[0].text for each in texts] == [alone.text(prompt, 9)] * 2
    usage = texts[1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 48
    for prompts, n, cached in (
        ([prompt, prompt], 1, 96),
        ([prompt, "another " + prompt], 1, 48),
        ([prompt], 2, 48),
        (["an unknown " + prompt], 2, 0),
    ):
        several = client.completions.create(model="small", prompt=prompts, n=n, temperature=0, max_tokens=9).usage
        assert several is not None
        assert several.prompt_tokens == sum(map(len, prompts))
        assert several.prompt_tokens_details is not None
        assert several.prompt_tokens_details.cached_tokens == cached


def test_the_whole_context(client: openai.OpenAI) -> None:
    """Prompt and new tokens fill the number of tokens that the server tells, with a limit and without one; a prompt alone may, too."""
    for prompt, limit in (("a" * 191, 1), ("a", 191), ("a" * 192, 0)):
        found = client.completions.create(model="small", prompt=prompt, temperature=0, max_tokens=limit, echo=limit == 0)
        assert found.usage is not None
        assert found.usage.total_tokens == CONFIG.n_positions


GOOD = {"model": "small", "prompt": "a", "max_tokens": 1}
BAD: dict[str, tuple[Any, int, str]] = {
    "no JSON": (b"{model", 400, "must be JSON"),
    "no object": (b"[1]", 400, "must be a JSON object"),
    "broken UTF-8": (b'{"model": "\xff"}', 400, "UTF-8"),
    "nested deeply": (b'{"prompt": ' + b"[" * 4000 + b"]" * 4000 + b"}", 400, "too deeply"),
    "no number of JSON": (b'{"model": "small", "prompt": "a", "temperature": NaN}', 400, "is not a JSON number"),
    "a number with many digits": (b'{"model": "small", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, "must be JSON"),
    "a huge number": ({**GOOD, "max_tokens": 10**18}, 400, "max_tokens must be a whole number"),
    "infinity by exponent": (b'{"model": "small", "prompt": "a", "temperature": 1e999}', 400, "temperature must be a number"),
    "negative": ({**GOOD, "max_tokens": -2}, 400, "max_tokens must be a whole number from 0"),
    "another type": ({**GOOD, "stream": "yes"}, 400, "stream must be true or false"),
    "half a surrogate pair": (b'{"model": "small", "prompt": "\\ud800"}', 400, "surrogate"),
    "no prompt": ({"model": "small"}, 400, "prompt is missing"),
    "an empty list": ({**GOOD, "prompt": []}, 400, "prompt must be"),
    "an id beyond the vocabulary": ({**GOOD, "prompt": [1, 99999]}, 400, "has the id 99999"),
    "a negative id": ({**GOOD, "prompt": [-1]}, 400, "has the id -1"),
    "too long": ({**GOOD, "prompt": "a" * 192}, 400, "at most 192 tokens together, got 192 of the prompt and a new one"),
    "too many new tokens": ({**GOOD, "max_tokens": 192}, 400, "at most 192 tokens together, got 1 of the prompt and 192 new ones"),
    "too large": ({**GOOD, "prompt": "a" * 9000}, 413, "at most 8,192 bytes"),
    "unknown model": ({**GOOD, "model": "gpt-4"}, 404, "this server has the model 'small'"),
    "not offered": ({**GOOD, "suffix": "b"}, 400, "suffix is not supported here"),
    "a name twice": (b'{"model": "small", "prompt": "a", "max_tokens": 1, "max_tokens": 1}', 400, "a duplicate name"),
    "more texts than may ever wait": ({**GOOD, "n": 100}, 400, "at most 8 texts, got 100"),
    "a hundred thousand texts": ({**GOOD, "prompt": ["a"] * 1000, "n": 100}, 400, "at most 8 texts, got 100000"),
    "many words that stop": ({**GOOD, "stop": ["x"] * 17}, 400, "stop must be"),
    "a bias of no token": ({**GOOD, "logit_bias": {"x": 1}}, 400, "logit_bias must be"),
    "best of more": ({**GOOD, "best_of": 3}, 400, "best_of must equal n"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name: str, server: Served) -> None:
    """The right status and a sentence, in OpenAI's shape; and the server goes on."""
    body, status, words = BAD[name]
    with server.http() as http:
        content = body if isinstance(body, bytes) else json.dumps(body)
        found = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert found.status_code == status, found.text
        error = found.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert words in error["message"]
        assert "\n" not in error["message"]
        assert http.post("/v1/completions", json=GOOD).status_code == 200


def test_values_of_any_depth(server: Served) -> None:
    """Whether a value is nested too deeply to be read, or just not so: refused in OpenAI's shape."""
    with server.http() as http:
        for depth in range(700, 1000):
            body = b'{"model": "small", "prompt": "a", "temperature": ' + b"[" * depth + b"]" * depth + b"}"
            found = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert found.status_code == 400, depth
            assert found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "must be a list"),
        ([{"role": "user"}], "messages[0] must be"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "the only kind of content"),
        ([{"role": "user", "content": "a" * 193}], "at most 192 tokens together"),
        ([{"role": "user", "content": "a", "tool_calls": [{"id": "b"}]}], "without tool_calls"),
    ],
)
def test_bad_conversations(messages: Any, words: str, client: openai.OpenAI) -> None:
    """Named by message."""
    with pytest.raises(openai.BadRequestError, match=words.replace("[", r"\[")):
        client.chat.completions.create(model="small", messages=messages)


def test_keys_hosts_types_paths_methods(server: Served) -> None:
    """What is looked at before a body; health and the page are open, and say nothing secret."""
    for key in ("", "wrong", "a-key2"):
        with server.client(key or "-") as client, pytest.raises(openai.AuthenticationError) as refusal:
            client.models.list()
        assert refusal.value.code == "invalid_api_key"
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/metrics").status_code == 401
        assert http.get("/health").json() == {"status": "ok"}
        page = http.get("/")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        assert KEY not in page.text
        assert http.get("/health", headers={"host": "evil.example"}).status_code == 403
    with server.http() as http:
        assert http.post("/v1/completions", content="{}", headers={"content-type": "text/plain"}).status_code == 415
        for method, path, status in (("GET", "/v1/completions", 405), ("GET", "/v2", 404), ("POST", "/v1/embeddings", 404)):
            found = http.request(method, path)
            assert found.status_code == status
            assert ("takes POST, got GET" if status == 405 else "POST /v1/completions") in found.json()["error"]["message"]


def test_slow_senders(server: Served) -> None:
    """A body that does not arrive is answered, a head that does not is cut off; both while others are served."""
    import socket

    host, port = server.url.removeprefix("http://").split(":")
    slow_body, slow_head = (socket.create_connection((host, int(port))) for _ in range(2))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\ncontent-length: 50\r\n"
    slow_body.sendall(f"{head}\r\n{{".encode())
    slow_head.sendall(head.encode())
    with server.http() as http:
        assert http.post("/v1/completions", json=GOOD).status_code == 200
    for each in (slow_body, slow_head):
        each.settimeout(60)
    with slow_body, slow_head:
        answer = b""
        while b"must arrive within 2 s" not in answer and (more := slow_body.recv(1 << 16)):  # head and body may come one by one
            answer += more
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"must arrive within 2 s" in answer
        assert slow_head.recv(1 << 16) == b""


LONG = {"model": "small", "prompt": "a", "temperature": 0, "max_tokens": 190}


def test_a_full_queue(server: Served) -> None:
    """More texts than slots and places are refused with a word; the others are answered."""
    streams = []

    def ask(client: openai.OpenAI, count: int) -> None:
        for _ in range(count):
            streams.append(client.completions.create(**LONG, stream=True))  # type: ignore[call-overload]  # noqa: PERF401 - kept when one is refused

    with server.client() as client:
        with pytest.raises(openai.RateLimitError) as refusal:
            ask(client, 200)  # those that have ended by now make place for others
        assert refusal.value.code == "queue_full"
        assert refusal.value.response.headers["retry-after"] == "1"
        texts = {"".join(event.choices[0].text for event in stream) for stream in streams}
    assert len(texts) == 1


def test_clients_that_leave(server: Served, alone: Alone) -> None:
    """From a stream and from a whole answer: their texts end, and those of others go on as if nothing had been."""
    with server.http() as http, ThreadPoolExecutor(1) as pool:
        stays = pool.submit(lambda: httpx.post(f"{server.url}/v1/completions", json=LONG, headers=http.headers, timeout=None).json())
        with http.stream("POST", "/v1/completions", json={**LONG, "stream": True, "n": 2}) as stream:
            next(stream.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json={**LONG, "n": 2}, timeout=0.05)
        assert stays.result()["choices"][0]["text"] == alone.text("a", 190)
    server.until("nntask_serve_texts_running", 0)
    server.until("nntask_serve_texts_waiting", 0)
    assert server.metric('nntask_serve_pages{state="held"}') == 0


def test_many_at_once(server: Served, alone: Alone) -> None:
    """Eight clients with texts of their own, some of which leave: nothing is lost or mixed up."""
    prompts = [f"text number {number} " + "word " * (number % 7) for number in range(24)]
    wants = [alone.text(prompt, 5 + number % 20) for number, prompt in enumerate(prompts)]
    lock = threading.Semaphore(8)  # as many as run and wait

    def ask(number: int) -> str | None:
        with lock, server.client() as client:
            stream = client.completions.create(model="small", prompt=prompts[number], temperature=0, max_tokens=5 + number % 20, stream=True)
            if number % 10 == 9:
                stream.close()
                server.until("nntask_serve_texts_waiting", 0)
                return None
            return "".join(event.choices[0].text for event in stream)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(len(prompts))))
    assert [text for text in found if text is not None] == [want for number, want in enumerate(wants) if number % 10 != 9]
