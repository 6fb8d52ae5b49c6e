"""A small model that writes ASCII, with a tokenizer and a chat template, and a server of it as a process."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from safetensors.numpy import save_file
from support.commands import start
from support.deadline import DEADLINE
from support.objective_data import CHATML
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nntask.inference import Generator, ModelSource, Sampling, TextIds
from nntask.models.gpt2 import GPT2, NAMES, GPT2Config
from nntask.tiling import generation_tiling
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime, Runtime

LETTERS = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a", "\u00c3", "\u00a9"]
"""Printable ASCII, a space, the end of a line, and the two bytes of e with an acute accent, in the alphabet of GPT-2."""
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIG = GPT2Config(vocab_size=len(LETTERS) + 1, n_positions=192, n_embd=32, n_layer=2, n_head=4, initializer_range=0.25, **DRY)
KEY = "a-key"


def write_served_model(path: Path, config: GPT2Config = CONFIG, *, has_template: bool = True) -> Path:
    """A model directory; returns it."""
    path.mkdir()
    ours = {name: tensor.read() for name, tensor in GPT2(config, ModelTiling(), InlineRuntime(), seed=9).tensors().items()}
    tensors = {name: value.copy() for name, value in NAMES.to_hf(ours, config).items() if name != "lm_head.weight"}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**config.to_dict(), "eos_token_id": None, "bos_token_id": len(LETTERS)}))
    inner = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(LETTERS)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>"])
    inner.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", **({"chat_template": CHATML} if has_template else {})}))
    return path


def text_of(tokens: Iterable[str]) -> str:
    """The text of tokens as they are told: joined, those that are no text of their own by their bytes."""
    data = b"".join(bytes.fromhex(word[6:].replace("\\x", "")) if word.startswith("bytes:") else word.encode() for word in tokens)
    return data.decode(errors="replace")


class Served:
    """A server at work.

    Attributes:
        url: of it.
        model: its name.
        process: it.
    """

    def __init__(self, process: subprocess.Popen[str], url: str, model: str) -> None:
        self.process, self.url, self.model = process, url, model

    def client(self, key: str = KEY) -> openai.OpenAI:
        """OpenAI's client, which asks once."""
        return openai.OpenAI(api_key=key, base_url=f"{self.url}/v1", max_retries=0, timeout=DEADLINE)

    def http(self, key: str = KEY) -> httpx.Client:
        """A plain client."""
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=DEADLINE)

    def metric(self, name: str) -> float:
        """A number of ``/metrics``, by the beginning of its line."""
        with self.http() as http:
            text = http.get("/metrics").text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def until(self, name: str, value: float) -> None:
        """Ask for a number until it is `value`."""
        while self.metric(name) != value:
            assert self.process.poll() is None

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; exit code and what stands on stderr."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, err


@contextmanager
def served(model: Path, *flags: str, script: str = "", port: int = 0) -> Iterator[Served]:
    """A server of a model; killed where it still runs at the end."""
    process = start("serve", str(model), "--port", str(port), "--ncpu", "2", *flags, script=script)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("listening on "):
                yield Served(process, line.removeprefix("listening on ").strip(), model.name)
                break
        else:
            raise AssertionError(process.stderr.read() if process.stderr else "")
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


class Alone:
    """Texts of the model by itself, without a server."""

    def __init__(self, model: Path) -> None:
        source = ModelSource.open(model)
        self.ids: TextIds = source.text_ids(source.tokenizer())
        self._runtime = Runtime(cpu_workers=1, ram=1 << 28)
        self._generator = Generator(source.build(self._runtime, generation_tiling(source.config)), self._runtime, source.context)

    def tokens(self, prompt: str | Sequence[int], count: int, **how: Any) -> list[int]:
        """New tokens, greedy unless told."""
        given = self.ids.prompt(prompt) if isinstance(prompt, str) else list(prompt)
        drawn = self._generator.stream([given], count, Sampling(**{"temperature": 0, **how}), vocab_size=self.ids.vocab_size, stop=self.ids.stop)
        return [token for (token,) in drawn if token is not None]

    def text(self, prompt: str, count: int, **how: Any) -> str:
        """New characters."""
        return self.ids.tokenizer.decode(self.tokens(prompt, count, **how))

    def close(self) -> None:
        """Stop the runtime."""
        self._runtime.close()
