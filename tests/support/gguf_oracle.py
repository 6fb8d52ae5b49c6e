"""GGUF files of small models of every family, read here and computed by transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.transformers_oracle import CONFIGS

from nntask.hf.model_directory import ModelDirectory
from nntask.inference.generator import Generator
from nntask.inference.pretrained import ModelSource
from nntask.inference.sampling import Sampling
from nntask.models.gemma import Gemma2Config, Gemma3Config
from nntask.models.gpt2 import GPT2Config
from nntask.models.qwen import FULL, SLIDING
from nntask.models.registry import build
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime, Runtime

COUNT = 9


def expressible(name: str) -> Any:
    """A config of the table that the keys of a file can say."""
    config = CONFIGS[name]
    if name == "qwen2":
        return replace(config, use_sliding_window=False)
    if name == "gemma2":
        return replace(config, query_pre_attn_scalar=8)
    if name == "gemma3":
        return replace(config, query_pre_attn_scalar=8, layer_types=(SLIDING,) * 5 + (FULL,), num_hidden_layers=6)
    if name == "qwen3_moe":
        return replace(config, mlp_only_layers=())
    return config


MIXTURES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma3", "phi", "gemma2", "phi3", *MIXTURES)


def wide(config: Any) -> Any:
    """The config with matrices of whole blocks."""
    if isinstance(config, GPT2Config):
        return replace(config, n_embd=64, n_head=4, n_inner=96)
    more = {"query_pre_attn_scalar": 16} if isinstance(config, Gemma2Config | Gemma3Config) else {}
    more |= {key: 96 for key in ("moe_intermediate_size", "shared_expert_intermediate_size") if hasattr(config, key)}
    return replace(config, **more, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)


def big(name: str) -> Any:
    """A config whose matrices are whole blocks of 256 weights."""
    config = expressible(name)
    if name == "gpt2":
        return replace(config, n_embd=256, n_head=4, n_inner=512)
    more = {key: 256 for key in ("moe_intermediate_size", "shared_expert_intermediate_size") if hasattr(config, key)}
    return replace(wide(config), **more, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)


def read(path: Path, tiling: ModelTiling) -> dict[str, np.ndarray]:
    """Our name -> weight, read tile by tile."""
    directory = ModelDirectory.open(path)
    model = build(directory.config, tiling, InlineRuntime(), seed=None)
    directory.attach(model.tensors())
    return {name: tensor.read() for name, tensor in model.tensors().items()}


def of_transformers(theirs: Any, config: Any) -> dict[str, np.ndarray]:
    """Our name -> weight."""
    state = {name: tensor.float().numpy() for name, tensor in theirs.state_dict().items()}
    return config.names.from_hf(state, config)


def greedy(path: Path, prompt: list[int]) -> list[int]:
    """New tokens of ours."""
    source = ModelSource.open(path)
    with Runtime(2) as runtime:
        model = source.build(runtime, ModelTiling())
        generator = Generator(model, runtime, source.context)
        return [int(tokens[0]) for tokens in generator.stream([prompt], COUNT, Sampling(temperature=0))]


def their_greedy(theirs: Any, prompt: list[int]) -> list[int]:
    """New tokens of transformers."""
    with torch.no_grad():
        found = theirs.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0)
    return found[0, len(prompt) :].tolist()
