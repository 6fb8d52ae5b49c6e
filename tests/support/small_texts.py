"""What tests of generation share: two small models, tilings of them, prompts, and every kind of machine."""

from __future__ import annotations

from typing import Any

import numpy as np
from support import llama_oracle

from nntask.inference.generator import Generator
from nntask.models.gpt2 import GPT2, GPT2Config
from nntask.models.llama import Llama
from nntask.tiling.model_tiling import ModelTiling
from scheduler import Runtime

SMALL = GPT2Config(vocab_size=61, n_positions=48, n_embd=24, n_layer=2, n_head=4, initializer_range=0.2)
LLAMA = llama_oracle.random_config(
    0, vocab_size=61, num_hidden_layers=2, max_position_embeddings=48, num_attention_heads=4, num_key_value_heads=2, hidden_size=24
)
COARSE = ModelTiling(seq_tile=10, inner_tile=48, head_tile=2, vocab_tile=31)
CUT = ModelTiling(minibatch_tile=2, seq_tile=5, embd_tile=10, inner_tile=40, head_tile=2, vocab_tile=25)


def prompts_of(vocab_size, *lengths):
    """Random prompts."""
    rng = np.random.default_rng(1)
    return [[int(i) for i in rng.integers(0, vocab_size, length)] for length in lengths]


def everywhere(config, ram, device, folder, write) -> dict[str, Any]:
    """What `write` gives with a generator on one and two workers, devices, and with RAM that holds a piece of weights and cache, by machine.

    Args:
        ram, device: bytes that hold a piece.
        folder: of the disk tier.
    """
    machines: dict[str, dict[str, Any]] = {
        "plain": {"cpu_workers": 2},
        "one worker": {"cpu_workers": 1},
        "two workers, lws": {"cpu_workers": 2, "sched": "lws"},
        "device": {"cpu_workers": 0, "sim_gpus": 2, "gpu_memory": device},
        "disk": {"cpu_workers": 2, "ram": ram, "disk": folder},
        "disk, fifo, late": {"cpu_workers": 1, "ram": ram, "disk": folder, "evict": "fifo", "prefetch": False, "sched": "eager"},
    }
    found = {}
    for name, machine in machines.items():
        with Runtime(**{"ram": 1 << 26, **machine}) as runtime:
            model = (GPT2 if config is SMALL else Llama)(config, COARSE, runtime, seed=4)
            found[name] = write(Generator(model, runtime, 48))
            runtime.wait()
            assert (runtime.stats()["evictions"] > 0) == (name.startswith("disk") or name == "device"), name
    return found
