"""Small models that train: a job of some minibatches a step whose losses and norms are compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nntask.adapters.lora import LoRA, add_adapters
from nntask.architecture.rotary import RopeScaling
from nntask.engine.recorded import emit_training_step
from nntask.hf.model_directory import ModelDirectory
from nntask.models.gpt2 import GPT2, GPT2Config
from nntask.models.llama import Llama, LlamaConfig
from nntask.optim.adamw8bit import AdamW8bit
from nntask.optim.muon import Muon, hidden_matrices, muon_groups
from nntask.optim.optimizers import AdamW, Optimizer, decay_groups
from nntask.tiling.model_tiling import ModelTiling
from scheduler import Runtime, TaskRuntime
from tiles import TileTensor

VOCAB, LENGTH = 61, 16
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": lambda model, decay, lr, **options: AdamW(decay_groups(model, decay), lr, **options),
    "muon": lambda model, decay, lr, **options: Muon(muon_groups(model, decay), lr, pieces=hidden_matrices(model), **options),
    "adamw8bit": lambda model, decay, lr, **options: AdamW8bit(decay_groups(model, decay), lr, **options),
}
"""Value of --optimizer -> function of a model, its weight decay and a learning rate."""
ROTATIONS = RopeScaling(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8)
"""Short, long and blended wavelengths."""
GPT = GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=24, n_layer=2, n_head=3, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
LLAMA = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=8,
    max_position_embeddings=LENGTH,
    rope_scaling=ROTATIONS,
    attention_dropout=0.1,
)
MODELS = {"gpt2": (GPT2, GPT), "llama": (Llama, LLAMA)}
TILINGS = {
    "gpt2": ModelTiling(minibatch_tile=2, seq_tile=9, embd_tile=16, inner_tile=50, head_tile=2, vocab_tile=25),
    "llama": ModelTiling(minibatch_tile=2, seq_tile=9, embd_tile=16, inner_tile=30, head_tile=4, vocab_tile=25),
}
"""Nothing divides its axis; both sequences of a minibatch are in one tile, which halves the tasks of a step."""
COARSE = ModelTiling(minibatch_tile=1, embd_tile=16)
"""With four minibatches a step in these tiles has every kind of order. In the tiles above nothing is found that repeats, since tasks that make less
than a page count as making nothing; and two minibatches are too few for ``layers:G``."""
FAMILIES = ("gpt2", "llama", "gpt2 adapters", "llama adapters")
ADAPTERS = LoRA(3, 6.0, 0.1)
SEQUENCES = 4
"""In a batch."""


def build(runtime: TaskRuntime, family: str = "gpt2", *, tiling: ModelTiling | None = None, lora: LoRA | None = None, **options: Any) -> Any:
    """A model from a seed, with adapters where the family says so."""
    name, _, adapters = family.partition(" ")
    kind, config = MODELS[name]
    model = kind(config, tiling or TILINGS[name], runtime, **{"seed": 3, **options})
    if adapters:
        add_adapters(model, lora or ADAPTERS, seed=3)
    return model


class Job:
    """A clipped step with every dropout there is, recorded where the runtime records.

    Args:
        start: where the weights that are not learnt are read.
        on_cpu: whether CPU workers alone update.
        optimizer: value of --optimizer.
        options: of `build`.
    """

    def __init__(
        self,
        runtime: TaskRuntime,
        family: str = "gpt2",
        *,
        order: str = "auto",
        recompute: str = "none",
        minibatches: int = 2,
        start: ModelDirectory | None = None,
        on_cpu: bool = False,
        optimizer: str = "adamw",
        **options: Any,
    ) -> None:
        self.model = build(runtime, family, **options)
        if start is not None:
            start.attach(self.model.frozen_tensors())
        self.rate = 3e-2 if "adapters" in family else 3e-3
        self.optimizer = OPTIMIZERS[optimizer](self.model, 0.1, self.rate, max_norm=1.0, on_cpu=on_cpu)
        self.inputs = [self.model.inputs(SEQUENCES // minibatches) for _ in range(minibatches)]
        self.step = None
        if isinstance(runtime, Runtime):
            with runtime.record(order, recompute) as self.step:
                self.outputs = self.emit()

    def emit(self) -> list[TileTensor]:
        """Tensors of the losses and of the gradient norm."""
        losses, norm = emit_training_step(self.model, self.optimizer, self.inputs)
        assert norm is not None
        return [*losses, norm]

    def run(self, steps: int) -> list[bytes]:
        """Bits of losses and norms of so many steps, two of them in flight."""
        rng, found, previous = np.random.default_rng(7), [], None
        for number in range(steps):
            ids = rng.integers(0, VOCAB, (SEQUENCES, LENGTH + 1)).astype(np.int32)
            for given, piece in zip(self.inputs, np.split(ids, len(self.inputs)), strict=True):
                given["tokens"].write(piece[:, :-1])
                given["targets"].write(piece[:, 1:])
            self.model.dropout_key.write(np.array([3, number], np.uint64))
            self.optimizer.prepare(number + 1, self.rate)
            if self.step is None:
                found.append(b"".join(output.read().tobytes() for output in self.emit()))
                continue
            ticket = self.step.replay()
            if previous is not None:
                found.append(b"".join(previous.read(output).tobytes() for output in self.outputs))
            previous = ticket
        if previous is not None:
            found.append(b"".join(previous.read(output).tobytes() for output in self.outputs))
        return found
