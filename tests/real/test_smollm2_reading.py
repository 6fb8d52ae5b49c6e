"""SmolLM2-135M-Instruct from its GGUF file: ids, logits, greedy texts and perplexity beside transformers and llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from support.real_checkpoints import TEXT, command, our_logits, perplexity_of, their_logits

from nntask.inference import ModelSource

NAME = "SmolLM2-135M-Instruct"
TEXTS = [
    "The capital of France is",
    "  two spaces,\n\n\ttabs and lines\r\n  end  ",
    "1234567 + 89.01 = 1,234,656.01",
    "Grüße aus Zürich, naïve café, ﬁnal ½",
    "ありがとう 안녕하세요 привет 👩🏽‍🚀🇫🇷",
    "<|im_start|>user\nHello!<|im_end|>\n",
    "don't, I'LL we've it's 'Tis",
    "\u200b\ufeffhidden\u00a0spaces",
    TEXT,
]
PROMPTS = ["The capital of France is", "Once upon a time, there was a", "def fibonacci(n):", "1, 2, 3, 5, 8,"]
COUNT = 40
DECODED = "llama.cpp, weights decoded"


@pytest.fixture(scope="module")
def theirs(smollm_directory: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm_directory).eval()
    return model, transformers.AutoTokenizer.from_pretrained(smollm_directory)


@pytest.fixture(scope="module")
def opened(llama_cpp: Any, smollm_decoded: Path) -> Any:
    """The decoded file in llama.cpp."""
    model = llama_cpp.LlamaCpp(smollm_decoded, 512)
    yield model
    model.close()


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_ids(smollm_file: Path, smollm_directory: Path, theirs: tuple[Any, Any], opened: Any, text: str) -> None:
    """Ids of texts from the file are llama.cpp's, and from the directory transformers'. (Those differ behind a fraction: transformers forgets, as it
    reads a file, that this tokenizer has digits one by one.)"""
    for path, expected in ((smollm_file, opened.ids(text)), (smollm_directory, theirs[1](text)["input_ids"])):
        source = ModelSource.open(path)
        assert source.text_ids(source.tokenizer()).prompt(text) == expected


def test_logits(smollm_file: Path, theirs: tuple[Any, Any], opened: Any, figure: Callable[..., None]) -> None:
    """Logits of every token of the text, beside both."""
    ids = theirs[1](TEXT)["input_ids"]
    ours, reference, llama = our_logits(smollm_file, ids), their_logits(theirs[0], ids), opened.logits(ids)
    for beside, found in (("transformers", reference), (DECODED, llama)):
        apart = float(np.abs(ours - found).max())
        figure(NAME, f"logits of {len(ids)} tokens", beside, f"{apart:.1e} of logits up to {np.abs(found).max():.0f}")
        assert apart < (1e-5 if beside == "transformers" else 5e-3) * np.abs(found).max()  # llama.cpp keeps keys and values in fp16
        assert (ours.argmax(1) == found.argmax(1)).all()


def test_greedy_texts(smollm_file: Path, theirs: tuple[Any, Any], opened: Any, tmp_path: Path, figure: Callable[..., None]) -> None:
    """``nntask generate`` writes what transformers and llama.cpp write."""
    model, tokenizer = theirs
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    how = ("--max-new-tokens", COUNT, "--temperature", 0, "--json")
    ran = command("generate", smollm_file, "--prompt-file", tmp_path / "prompts.txt", *how)
    texts = [json.loads(line)["text"] for line in ran.output.splitlines()]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        given = tokenizer(prompt, return_tensors="pt")
        new = model.generate(**given, max_new_tokens=COUNT, do_sample=False)[0, given["input_ids"].shape[1] :].tolist()
        ended = new[:-1] if new[-1] == tokenizer.eos_token_id else new
        assert opened.greedy(given["input_ids"][0].tolist(), COUNT, [tokenizer.eos_token_id]) == ended
        assert text == prompt + tokenizer.decode(ended)
    for beside in ("transformers", DECODED):
        figure(NAME, f"{len(PROMPTS)} greedy texts of {COUNT} tokens", beside, "equal", memory=ran.memory, seconds=ran.seconds)


def test_perplexity(smollm_file: Path, story: Path, theirs: tuple[Any, Any], opened: Any, figure: Callable[..., None]) -> None:
    """``nntask perplexity`` of the text and its end, beside both."""
    ids = [*theirs[1](TEXT)["input_ids"], theirs[1].eos_token_id]
    ran = command("perplexity", smollm_file, "--dataset", "text", "--dataset-path", story, "--seq-len", 512, "--json")
    found = json.loads(ran.output.splitlines()[-1])
    expected = {"transformers": perplexity_of(their_logits(theirs[0], ids), ids), DECODED: opened.perplexity(ids)}
    for beside, value in expected.items():
        both = f"{found['perplexity']:.5f}, {value:.5f}"
        figure(NAME, f"perplexity of {found['tokens']} tokens", beside, both, memory=ran.memory, seconds=ran.seconds)
        assert found["perplexity"] == pytest.approx(value, rel=1e-5 if beside == "transformers" else 1e-3)
    assert found["tokens"] == len(ids) - 1
