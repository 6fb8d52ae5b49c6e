"""Situations that users of other servers of OpenAI's interface have reported (listed in docs/results), on small inputs over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from support.served import LETTERS, Alone, Served, served

ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
TALK: list[Any] = [{"role": "user", "content": "what?"}]
TEXT: dict[str, Any] = {"model": "small", "prompt": "once upon", "temperature": 0, "max_tokens": 30}


@pytest.fixture(scope="module")
def text(alone: Alone) -> str:
    """The greedy text of the prompt."""
    return alone.text("once upon", 30)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a template that refuses, as those of Mistral and Gemma do."""
    template = tmp_path_factory.mktemp("template") / "alternates.jinja"
    template.write_text(ALTERNATES)
    with served(model, "--chat-template", str(template), "--ram", "256MiB") as found:
        yield found


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's client."""
    with server.client() as found:
        yield found


def both_ways(client: openai.OpenAI, **more: Any) -> list[tuple[str, str | None]]:
    """The text and its end, whole and streamed."""
    whole = client.completions.create(**{**TEXT, **more}).choices[0]
    events = list(client.completions.create(**{**TEXT, **more}, stream=True))
    streamed = "".join(event.choices[0].text for event in events), events[-1].choices[0].finish_reason
    return [(whole.text, whole.finish_reason), streamed]


def test_the_beginning_of_a_stop_word_is_told_when_the_text_ends(client: openai.OpenAI, text: str) -> None:
    """Held back while the word may still come, and told in full at the last token."""
    assert both_ways(client, stop=text[-4:] + "QQQ") == [(text, "length")] * 2


def test_stop_words_that_begin_alike(client: openai.OpenAI, text: str) -> None:
    """One that never comes and one that does, which begin with the same letters: nothing is told twice, nothing is lost."""
    word = text[12:15]
    want = text[: text.index(word)]
    assert both_ways(client, stop=[word + "QQ", word, word[:2] + "QQQ"]) == [(want, "stop")] * 2


def test_a_shorter_stop_word_inside_a_longer_one(client: openai.OpenAI, text: str) -> None:
    """The one that is complete first ends the text, wherever the other one begins."""
    inner = text[14]
    first = text.index(inner)
    longer = text[max(0, first - 2) : first + 6]
    assert both_ways(client, stop=[longer, inner]) == [(text[:first], "stop")] * 2


def test_a_prompt_that_ends_inside_a_character_does_not_show(client: openai.OpenAI) -> None:
    """Ids whose last one is half of a letter: no piece of the prompt is told as text of the answer."""
    prompt = [LETTERS.index(letter) for letter in "Hello"] + [LETTERS.index("\u00c3")]
    for first in ("\u00a9", "q"):
        found = both_ways(client, prompt=prompt, max_tokens=4, logit_bias={str(LETTERS.index(first)): 100})
        assert found[0] == found[1]
        assert "Hello" not in found[0][0]


def test_offsets_of_a_stream_with_its_prompt(client: openai.OpenAI) -> None:
    """The same as of the whole answer, from the first token of the prompt to the last new one."""
    asked = {**TEXT, "echo": True, "logprobs": 1, "max_tokens": 8}
    whole = client.completions.create(**asked).choices[0]
    pieces = [event.choices[0] for event in client.completions.create(**asked, stream=True)]
    assert whole.logprobs is not None
    assert whole.logprobs.text_offset == list(range(17))  # each token is a sign, if only that of a half
    assert [at for piece in pieces if piece.logprobs for at in piece.logprobs.text_offset or []] == whole.logprobs.text_offset
    assert [token for piece in pieces if piece.logprobs for token in piece.logprobs.tokens or []] == whole.logprobs.tokens


def test_likelihoods_of_evaluations(client: openai.OpenAI) -> None:
    """Several prompts of ids, each with its probabilities: as many as tokens, the first without one, and the numbers of each prompt by itself."""
    prompts = [[LETTERS.index(letter) for letter in word] for word in ("abcd", "abzz", "q")]
    asked: dict[str, Any] = {"model": "small", "max_tokens": 0, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    together = client.completions.create(prompt=prompts, **asked).choices
    for prompt, found in zip(prompts, together, strict=True):
        (alone,) = client.completions.create(prompt=prompt, **asked).choices
        assert found.logprobs is not None
        assert alone.logprobs is not None
        assert len(found.logprobs.token_logprobs or []) == len(prompt)
        assert (found.logprobs.token_logprobs or [0])[0] is None
        assert found.logprobs.token_logprobs == alone.logprobs.token_logprobs


def test_a_greedy_text_has_the_same_bits_beside_others(client: openai.OpenAI) -> None:
    """Probabilities to the last digit, alone and beside up to eleven others of all lengths."""
    asked = {**TEXT, "logprobs": 3}

    def ask(number: int) -> Any:
        if number % 4 == 0:
            return client.completions.create(**asked).choices[0]
        return client.completions.create(**{**TEXT, "prompt": "word " * number, "max_tokens": 3 * number, "temperature": 1})

    want = ask(0)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(ask, range(24)))
    assert all(found[number] == want for number in range(0, 24, 4))


def test_a_template_that_refuses(client: openai.OpenAI) -> None:
    """Status 400 with the template's sentence, in one line, and the server goes on."""
    with pytest.raises(openai.BadRequestError, match="Conversation roles must alternate user/assistant") as refusal:
        client.chat.completions.create(model="small", messages=TALK * 2)
    assert "\n" not in refusal.value.message
    assert client.chat.completions.create(model="small", messages=TALK, max_tokens=1).choices


@pytest.mark.parametrize("messages", [{"messages": TALK}, {}, [], ["hello"], [[]], [{"content": "x"}], "hello", 7], ids=str)
def test_messages_of_another_shape(messages: Any, server: Served) -> None:
    """A sentence that says what they must be, never an error of the server."""
    with server.http() as http:
        found = http.post("/v1/chat/completions", json={"model": "small", "messages": messages})
        assert found.status_code == 400
        assert "messages" in found.json()["error"]["param"]
        assert "must be" in found.json()["error"]["message"]


def test_content_in_pieces_is_content(client: openai.OpenAI) -> None:
    """Of every role, and an empty text is one."""
    plain: list[Any] = [*TALK, {"role": "assistant", "content": "hm"}, {"role": "user", "content": ""}]
    pieces: list[Any] = [{**each, "content": [{"type": "text", "text": each["content"], "cache_control": {}}]} for each in plain]
    found = [client.chat.completions.create(model="small", messages=each, temperature=0, max_tokens=9) for each in (plain, pieces)]
    assert found[0].choices == found[1].choices


def test_a_seed_and_several_texts(client: openai.OpenAI) -> None:
    """Three texts that differ, the same three again with the same seed, others with another; greedy ones are one and the same."""

    def texts(seed: int, temperature: float) -> list[str]:
        found = client.completions.create(**{**TEXT, "n": 3, "seed": seed, "temperature": temperature})
        return [choice.text for choice in found.choices]

    assert texts(5, 1.0) == texts(5, 1.0) != texts(6, 1.0)
    assert len(set(texts(5, 1.0))) == 3
    assert len({*texts(5, 0.0), *texts(6, 0.0)}) == 1


def test_what_old_clients_send_with_every_request(server: Served, text: str) -> None:
    """LangChain's first clients: a list of one prompt and every field with its default."""
    defaults = {"best_of": 1, "n": 1, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0, "top_p": 1, "suffix": None, "echo": False}
    with server.http() as http:
        found = http.post("/v1/completions", json={**TEXT, **defaults, "prompt": ["once upon"], "stream": False, "user": ""})
        assert found.json()["choices"][0]["text"] == text


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_counts_of_a_stream(path: str, server: Served) -> None:
    """One event more, without choices, before the end; it has the counts of the whole answer, and no other event has any."""
    body = {**TEXT} if path == "completions" else {"model": "small", "messages": TALK, "temperature": 0, "max_tokens": 30}
    with server.http() as http:
        want = http.post(f"/v1/{path}", json=body).json()["usage"]
        for options in (None, {}, {"include_usage": False}, {"include_usage": True}):
            lines = http.post(f"/v1/{path}", json={**body, "stream": True, "stream_options": options}).text.split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
            told = [event for event in events if event.get("usage")]
            wanted = options == {"include_usage": True}
            assert [event["usage"]["completion_tokens"] for event in told] == [want["completion_tokens"]] * wanted
            assert all(event["choices"] == [] for event in told)
            assert all(event["choices"] for event in events if event not in told)
