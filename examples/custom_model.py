"""A custom model: a small transformer with parallel attention and feed-forward layers, as in GPT-J, trained on bytes of text.

    python examples/custom_model.py --steps 60

The model is ordinary Python over tile tensors; the runtime decides where tasks run and where their data is. It runs offline, in some seconds.

Letters: B sequences of T tokens, C features, H heads of D features each, V vocabulary.
"""

import argparse
import os
from pathlib import Path

import numpy as np

from nntask import AdamW, Module
from nntask.nn import Embedding, LayerNorm, Linear, functional
from scheduler import Runtime
from tiles import TileTensor
from tiles.ops import elementwise

B, T, C, H, V = 8, 64, 64, 4, 256
D = C // H
TILE = 32  # features per tile, two heads


class Block(Module):
    """x + attention(norm(x)) + mlp(norm(x)) with one norm (Wang and Komatsuzaki, GPT-J, 2021): (B, T, C) -> (B, T, C)."""

    def __init__(self):
        self.norm = LayerNorm(C, TILE, 1e-5)
        self.q, self.k, self.v, self.out = (Linear(C, C, (TILE, TILE), std=0.02) for _ in range(4))
        self.up = Linear(C, 4 * C, (TILE, 2 * C), std=0.02, activation="gelu_new")
        self.down = Linear(4 * C, C, (2 * C, TILE), std=0.02)

    def __call__(self, x, angles):
        """(B, T, C) -> (B, T, C); angles: cos and sin, (T, D / 2) each."""
        y = self.norm(x)
        q, k = (functional.rotary(project(y), *angles, D) for project in (self.q, self.k))  # (B, T, H*D)
        a = functional.attention(q, k, self.v(y), head_size=D, scale=D**-0.5)  # (B, T, H*D)
        return x + self.out(a) + self.down(self.up(y))


class ParallelTransformer(Module):
    """A model that predicts the next byte of text; calling it returns the loss."""

    def __init__(self, runtime, num_blocks):
        self.embedding = Embedding(V, C, (V, TILE), std=0.02)
        self.blocks = [Block() for _ in range(num_blocks)]
        self.norm = LayerNorm(C, TILE, 1e-5)
        self.allocate(runtime, np.float32, seed=0)
        self.frequencies = TileTensor(runtime, (D // 2,), (-1,), np.float32, kind="input", data_class="data", name="frequencies")
        self.frequencies.write(10000.0 ** (-np.arange(0, D, 2) / D))

    def __call__(self, tokens, targets):
        """(B, T) int32 each -> (1,)."""
        angles = elementwise.rotary_angles(self.frequencies, T, T)
        x = self.embedding(tokens)  # (B, T, C)
        for block in self.blocks:
            x = block(x, angles)
        return functional.linear_cross_entropy(self.norm(x), self.embedding.weight, targets, scale=1 / (B * T))


def train(steps, num_blocks=2, workers=2):
    """Train a model and return the loss of each step."""
    text = np.frombuffer(Path(os.__file__).read_bytes(), np.uint8)
    with Runtime(cpu_workers=workers, ram=1 << 28) as runtime:
        model = ParallelTransformer(runtime, num_blocks)
        optimizer = AdamW(model.parameters(), lr=3e-3)
        ids = {"dtype": np.int32, "kind": "input", "data_class": "data"}
        tokens, targets = (TileTensor(runtime, (B, T), (4, T), name=name, **ids) for name in ("tokens", "targets"))
        with runtime.record() as step:  # captures the tasks of a whole step without running them
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
        losses = []
        for number in range(1, steps + 1):
            starts = np.random.default_rng(number).integers(0, len(text) - T - 1, B)
            windows = np.stack([text[start : start + T + 1] for start in starts])
            tokens.write(windows[:, :-1])
            targets.write(windows[:, 1:])
            optimizer.prepare(number)
            losses.append(float(step.replay().read(loss)[0]))
        print(f"{model.num_parameters:,} parameters, {step.num_tasks} tasks a step: loss {losses[0]:.3f} to {losses[-1]:.3f} in {steps} steps")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, choices=range(1, 10_001), metavar="N", help="optimizer steps, at least 1")
    train(parser.parse_args().steps)
