"""`nntask serve` under many clients at once: what they get, how fast, and whether anything is lost, mixed up or above the budget.

    python benchmarks/serve.py                  # ten minutes; writes benchmarks/results/serve.json
    python benchmarks/serve.py --minutes 1 --output=      # a quick look, written nowhere

A model with random weights, whose tokens are words, so that every token shows in a text. First one client asks for each of `PROMPTS` texts, one after
the other: greedy, of unequal prompts and lengths. Then `CLIENTS` clients ask for them at random, half of them as streams; a tenth of the requests
vanish before their answer is complete. In the middle the server is killed and started again, and clients ask once more for what they have lost. Every
complete text is compared with that of the one client. At the end the server is asked for the most memory it has used, and told to end.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import common
import httpx
import numpy as np
import quantised

CLIENTS: Final = 32
PROMPTS: Final = 32
RAM: Final = "1GiB"
SLOTS: Final = 16
SHAPES: Final = {"whole": (4096, 512, 384, 6, 6), "tiny": (256, 192, 32, 2, 4)}
"""Vocabulary, positions, width, layers, heads."""


def write_model(folder: Path, shape: tuple[int, int, int, int, int]) -> Path:
    """A model directory with random weights and a tokenizer of words."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    from nntask import GPT2Config

    vocab, positions, width, layers, heads = shape
    config, rng = GPT2Config(vocab_size=vocab, n_positions=positions, n_embd=width, n_layer=layers, n_head=heads), np.random.default_rng(1)
    tensors = {name: np.full(shape, "ln_" in name and name.endswith("weight"), np.float32) for name, shape in quantised.shapes_of(config).items()}
    for values in tensors.values():
        if values.ndim == 2:
            values += np.float32(0.1) * rng.standard_normal(values.shape, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "eos_token_id": None, "bos_token_id": 0}))
    inner = Tokenizer(models.WordLevel({f"w{at}": at for at in range(vocab)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w0"}))
    return folder


def requests_of(shape: tuple[int, int, int, int, int]) -> list[dict[str, Any]]:
    """What is asked for; a quarter of the prompts begin as another one."""
    rng, found = np.random.default_rng(3), []
    beginning = rng.integers(1, shape[0], 80).tolist()
    for number in range(PROMPTS):
        own = rng.integers(1, shape[0], int(rng.integers(1, 60))).tolist()
        found.append({"prompt": beginning + own if number % 4 == 0 else own, "max_tokens": int(rng.integers(16, 64)), "temperature": 0})
    return found


class Server:
    """The server's process, which can be killed and started again.

    Attributes:
        url: of it.
        exit_codes: of what has ended by a request.
    """

    def __init__(self, model: Path) -> None:
        self._model, self._port = model, 0
        self.url = ""
        self.start()

    def start(self) -> None:
        """Start it and wait until it listens."""
        flags = ["--port", str(self._port), "--slots", str(SLOTS), "--queue", "64", "--ram", RAM, "--name", "served"]
        command = [sys.executable, "-m", "nntask", "serve", str(self._model), *flags]
        environment = {**os.environ, **common.one_thread_blas(), "PYTHONPATH": str(common.ROOT)}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("listening on "):
                self.url = line.split()[-1]
                self._port = int(self.url.rpartition(":")[2])
                return
        raise SystemExit("the server has not begun to listen")

    def kill(self) -> None:
        """As kill -9 does."""
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Ask it to end; its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait()

    def metrics(self) -> dict[str, float]:
        """Everything under /metrics, by line."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


@dataclass
class Tally:
    """What clients have got."""

    texts: int = 0
    tokens: int = 0
    vanished: int = 0
    again: int = 0
    wrong: list[str] = field(default_factory=list)


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any], *, stream: bool, leaves_after: int | None = None) -> tuple[str, int] | None:
    """The text and its number of tokens; None for a client that vanishes after some events of its stream.

    Raises:
        httpx.HTTPError: the server is gone.
        ValueError: the answer is no text.
    """
    body = {"model": "served", **body, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
    if not stream:
        answer = (await client.post(f"{url}/v1/completions", json=body)).json()
        if "choices" not in answer:
            raise ValueError(str(answer))
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
    text, count, is_complete = "", 0, False
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        events = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                is_complete = True
                break
            event = json.loads(line[6:])
            if "choices" not in event:
                raise ValueError(str(event))
            text += "".join(choice["text"] for choice in event["choices"])
            count = (event.get("usage") or {}).get("completion_tokens", count)
            events += 1
            if events == leaves_after:
                return None
    if not is_complete:
        raise httpx.ReadError("the stream has ended before its time")
    return text, count


async def one_by_one(server: Server, bodies: list[dict[str, Any]]) -> tuple[list[str], float]:
    """The texts by one client, and its tokens a second."""
    async with httpx.AsyncClient(timeout=None) as client:
        await ask(client, server.url, bodies[0], stream=False)
        begin, texts, tokens = perf_counter(), [], 0
        for number, body in enumerate(bodies):
            found = await ask(client, server.url, body, stream=bool(number % 2))
            assert found is not None
            texts.append(found[0])
            tokens += found[1]
        return texts, tokens / (perf_counter() - begin)


async def many(server: Server, bodies: list[dict[str, Any]], wants: list[str], seconds: float, tally: Tally, *, kills: bool) -> None:
    """Clients ask for texts until the time is over; with `kills` the server is killed and started again in the middle."""
    end, up = perf_counter() + seconds, asyncio.Event()
    up.set()

    async def one(number: int) -> None:
        draw = random.Random(number)
        async with httpx.AsyncClient(timeout=None) as client:
            while perf_counter() < end:
                which, vanishes = draw.randrange(len(bodies)), draw.random() < 0.1
                stream = vanishes or draw.random() < 0.5
                try:
                    found = await ask(client, server.url, bodies[which], stream=stream, leaves_after=draw.randrange(1, 8) if vanishes else None)
                except httpx.HTTPError:
                    tally.again += 1
                    await up.wait()
                    await asyncio.sleep(0.05)
                    continue
                except ValueError as error:
                    tally.wrong.append(str(error))
                    continue
                if found is None:
                    tally.vanished += 1
                    continue
                tally.texts += 1
                tally.tokens += found[1]
                if found[0] != wants[which]:
                    tally.wrong.append(f"text {which}: {found[0][:60]!r} instead of {wants[which][:60]!r}")

    async def kill() -> None:
        await asyncio.sleep(seconds / 2)
        up.clear()
        server.kill()
        await asyncio.to_thread(server.start)
        up.set()

    await asyncio.gather(*(one(number) for number in range(CLIENTS)), *([kill()] if kills else []))


def measure(case: str, minutes: float) -> dict[str, Any]:
    """Everything, on one server."""
    with tempfile.TemporaryDirectory() as folder:
        bodies = requests_of(SHAPES[case])
        server = Server(write_model(Path(folder), SHAPES[case]))
        try:
            wants, alone = asyncio.run(one_by_one(server, bodies))
            fast, soak = Tally(), Tally()
            begin = perf_counter()
            asyncio.run(many(server, bodies, wants, minutes * 20, fast, kills=False))
            together = fast.tokens / (perf_counter() - begin)
            peaks = [server.metrics()['nntask_serve_peak_bytes{memory="ram"}']]
            asyncio.run(many(server, bodies, wants, minutes * 40, soak, kills=True))
            told = server.metrics()
            peaks.append(told['nntask_serve_peak_bytes{memory="ram"}'])
            code = server.end()
        except BaseException:
            server.kill()
            raise
    for line in [*fast.wrong, *soak.wrong][:5]:
        print(line, file=sys.stderr)
    return {
        "alone_tokens_per_second": alone,
        "together_tokens_per_second": together,
        "texts": fast.texts + soak.texts,
        "vanished": fast.vanished + soak.vanished,
        "asked_again": fast.again + soak.again,
        "wrong": len(fast.wrong) + len(soak.wrong),
        "peak_bytes": max(peaks),
        "budget_bytes": told['nntask_serve_budget_bytes{memory="ram"}'],
        "left_running": told["nntask_serve_texts_running"] + told['nntask_serve_pages{state="held"}'],
        "shared_tokens": told["nntask_serve_tokens_shared_total"],
        "exit_code": code,
    }


def comparisons(found: dict[str, float]) -> list[dict[str, Any]]:
    """The bars."""
    whole = f"{CLIENTS} clients at once, {SLOTS} slots"
    speed, wrong = (f"{whole}: {what}" for what in ("tokens a second", "texts that are lost or not those alone"))
    speeds = [found[f"{which}_tokens_per_second"] for which in ("together", "alone")]
    memory = [found["peak_bytes"], found["budget_bytes"]]
    return [
        common.compare(speed, "tokens/s", speeds[0], "one client at a time", speeds[1], better="more", bar="ratio >= 4.0"),
        common.compare(wrong, "texts", found["wrong"], "of", found["texts"], better="less", bar="ours <= 0"),
        common.compare(f"{whole}: most memory", "bytes", memory[0], "its budget", memory[1], better="less", bar="ratio <= 1.0"),
    ]


def main() -> None:
    parser = common.parser(__doc__, "serve")
    parser.add_argument("--case", default="whole", choices=list(SHAPES))
    parser.add_argument("--minutes", type=float, default=10.0, help="that the clients ask for texts")
    parser.add_argument("--rounds", type=int, default=1, help="ignored: clients are many")
    options = parser.parse_args()
    machine = common.machine()
    found = measure(options.case, options.minutes)
    print(json.dumps(found), file=sys.stderr)
    assert found["exit_code"] == 0, "the server has ended with another code than 0"
    assert found["left_running"] == 0, "texts of clients that have left still run"
    settings = {"rounds": 1, "clients": CLIENTS, "slots": SLOTS, "ram": RAM, "minutes": options.minutes, "shape": SHAPES[options.case]}
    packages = ("nntask", "numpy", "starlette", "uvicorn")
    common.finish(options.output, machine, packages, settings, comparisons(found), keep=options.case != "tiny", measured=found)


if __name__ == "__main__":
    main()
