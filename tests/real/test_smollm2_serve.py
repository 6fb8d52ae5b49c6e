"""SmolLM2-135M-Instruct behind `nntask serve`: conversations of OpenAI's client beside transformers and llama.cpp's own server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.served import Served, served

NAME = "SmolLM2-135M-Instruct"
COUNT = 32
TALKS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "What colour is the sky?"}],
    [
        {"role": "user", "content": "My name is Ada. Remember it."},
        {"role": "assistant", "content": "Hello Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
]


@pytest.fixture(scope="module")
def server(smollm_file: Path) -> Iterator[Served]:
    """A server of the file."""
    with served(smollm_file, "--slots=2", "--max-context=512") as found:
        yield found


@pytest.fixture(scope="module")
def theirs(smollm_directory: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm_directory).eval()
    return model, transformers.AutoTokenizer.from_pretrained(smollm_directory)


def expected(theirs: tuple[Any, Any], talk: list[dict[str, str]]) -> tuple[str, int, int]:
    """The answer of transformers, and the numbers of tokens of the prompt and of the answer with its end."""
    model, tokenizer = theirs
    given = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    first = given["input_ids"].shape[1]
    new = model.generate(**given, max_new_tokens=COUNT, do_sample=False)[0, first:].tolist()
    return tokenizer.decode(new, skip_special_tokens=True), first, len(new)


@pytest.mark.parametrize("talk", TALKS, ids=range(len(TALKS)))
def test_conversations(server: Served, theirs: tuple[Any, Any], figure: Callable[..., None], talk: list[dict[str, str]]) -> None:
    """The answer, whole and as a stream, is that of transformers on the same template, and so are the counts of tokens."""
    text, prompt, new = expected(theirs, talk)
    client = server.client()
    given: dict[str, Any] = {"model": server.model, "messages": talk, "temperature": 0, "max_tokens": COUNT}
    answer = client.chat.completions.create(**given)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == ("length" if new == COUNT and text else "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt
    pieces = client.chat.completions.create(**given, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text
    figure(NAME, f"a conversation of {prompt} tokens, {answer.usage.completion_tokens} new", "transformers", "equal, whole and streamed")


def test_llama_cpps_server_answers_the_same(server: Served, smollm_decoded: Path, llama_cpp: Any, figure: Callable[..., None]) -> None:
    """The same requests to llama.cpp's server on the decoded weights."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(smollm_decoded), 512, 1, False
    opened = xllamacpp.Server(params)
    client = server.client()
    for talk in TALKS:
        answer = opened.handle_chat_completions({"messages": talk, "temperature": 0, "max_tokens": COUNT})
        ours = client.chat.completions.create(model=server.model, messages=talk, temperature=0, max_tokens=COUNT)  # type: ignore[arg-type]
        assert ours.choices[0].message.content == answer["choices"][0]["message"]["content"]
        assert ours.choices[0].finish_reason == answer["choices"][0]["finish_reason"]
        assert ours.usage is not None
        assert ours.usage.prompt_tokens == answer["usage"]["prompt_tokens"]
    figure(NAME, f"{len(TALKS)} conversations", "llama.cpp's server, weights decoded", "equal")
