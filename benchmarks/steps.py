"""Training steps that several benchmarks time: the recorded step of a GPT-2, and steps of PyTorch with AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, Final

import common
import numpy as np

LEARNING_RATE: Final = 3e-4
Batches = Sequence[tuple[Any, Any]]
"""Pairs of (B, T) token ids and targets."""


def batches(vocab: int, batch: int, length: int, number: int) -> list[tuple[Any, Any]]:
    """Return `number` random pairs of (B, T) token ids and targets, the same for every side."""
    streams = np.random.default_rng(0).integers(0, vocab, (number, batch, length + 1), dtype=np.int64)
    return [(stream[:, :-1].copy(), stream[:, 1:].copy()) for stream in streams]


def figures(seconds: float, loss: float, steps: int, num_tokens: int) -> dict[str, float]:
    """Return the measurement of a side from the seconds of all timed steps, the last loss, and the tokens of a step."""
    return {
        "tokens_per_second": steps * num_tokens / seconds,
        "seconds_per_step": seconds / steps,
        "peak_rss_bytes": common.peak_rss(),
        "loss_last": loss,
    }


def run_ours(config: Any, data: Batches, warmup: int, workers: int, dtype: Any = np.float32) -> tuple[float, float]:
    """Train nntask's GPT-2; two steps are in flight, as in training.

    Returns:
        seconds of the steps after the first `warmup`, and the last loss.
    """
    from nntask import GPT2, AdamW, default_tiling
    from scheduler import Runtime

    batch, length = data[0][0].shape
    with Runtime(cpu_workers=workers) as runtime:
        model = GPT2(config, default_tiling(config, batch, length), runtime, dtype=dtype)
        optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
        tokens, targets = model.input_tensors(batch=batch, seq_len=length)
        with runtime.record() as step:
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
        begin = perf_counter()
        for number, (ids, following) in enumerate(data):
            if number == warmup:
                runtime.wait()
                begin = perf_counter()
            tokens.write(ids)
            targets.write(following)
            optimizer.prepare(number + 1)
            ticket = step.replay()
        value = ticket.read(loss)
        runtime.wait()
        return perf_counter() - begin, float(value.reshape(()))


def run_torch(
    model: Callable[[Any, Any], Any],
    parameters: Iterable[Any],
    data: Batches,
    warmup: int,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[float, float]:
    """Train a model of PyTorch, a function of tokens and targets that returns the loss, with its forward pass in `precision`.

    Returns:
        seconds of the steps after the first `warmup`, and the last loss.
    """
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    value, begin = 0.0, perf_counter()
    for number, (tokens, targets) in enumerate(data):
        if number == warmup:
            begin = perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with precision():
            loss = model(torch.from_numpy(tokens), torch.from_numpy(targets))
        loss.backward()
        optimizer.step()
        value = loss.item()
    return perf_counter() - begin, value


def torch_step(module: Any, batch: dict[str, Any], *, compiled: bool) -> Callable[[], float]:
    """Return a function that trains a module, whose result has a loss, for a step on one batch."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    call = torch.compile(module) if compiled else module

    def step() -> float:
        optimizer.zero_grad()
        loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    return step
