"""A little GPT-2 that trains on whatever devices a runtime has, emulated or real, for comparing losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from support.training import OPTIMIZERS

from nntask.models.gpt2 import GPT2, GPT2Config
from nntask.tiling.model_tiling import ModelTiling
from scheduler import Runtime


@dataclass(frozen=True)
class Training:
    """Steps of two minibatches of two sequences, two in flight.

    Args:
        lr: learning rate; gradients are clipped at 1.
        optimizer: value of --optimizer.
    """

    config: GPT2Config
    tiling: ModelTiling
    steps: int
    lr: float
    optimizer: str = "adamw"

    def ids(self) -> np.ndarray:
        """Tokens  # (steps, 2, 2, T + 1)."""
        return np.random.default_rng(0).integers(0, self.config.vocab_size, (self.steps, 2, 2, self.config.n_positions + 1)).astype(np.int32)

    def losses(self, runtime: Runtime, dropout: float = 0.0, *, dtype: Any = np.float32, weights: dict[str, np.ndarray] | None = None) -> list[float]:
        """Of each step; `weights` takes the ones of the beginning. Closes the runtime."""
        with runtime:
            model = GPT2(self.config.with_dropout(dropout), self.tiling, runtime, seed=3, dtype=dtype)
            if weights is not None:
                weights.update({name: tensor.read() for name, tensor in model.tensors().items()})
            optimizer = OPTIMIZERS[self.optimizer](model, 0.0, self.lr, max_norm=1.0)
            inputs = [model.input_tensors(2) for _ in range(2)]
            kept = []
            with runtime.record() as step:
                model.train()
                for number, (tokens, targets) in enumerate(inputs):
                    loss = model(tokens, targets, scale=0.5, minibatch=number)
                    loss.backward()
                    kept.append(loss.data)
                optimizer.step()
            found: list[float] = []
            for number, ids in enumerate(self.ids()):
                for (tokens, targets), part in zip(inputs, ids, strict=True):
                    tokens.write(part[:, :-1])
                    targets.write(part[:, 1:])
                model.dropout_key.write(np.array([3, number], np.uint64))
                optimizer.prepare(number + 1)
                ticket = step.replay()
                found.append(sum(float(ticket.read(loss)[0]) for loss in kept))
            return found


def on_gpus(gpus: list[Any], nbytes: int, ram: int, **more: Any) -> Runtime:
    """A runtime that computes on GPUs alone."""
    return Runtime(0, gpus=gpus, gpu_memory=nbytes, ram=ram, **more)
