"""Adapters on quantised weights (QLoRA, Dettmers et al. 2023) beside PEFT on the decoded ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.peft_oracle import losses_of_both
from support.quantised_directories import wide, write_decoded, write_plain, write_quantised

from nntask.adapters.frozen_base import FrozenBase
from nntask.adapters.lora import LoRA, add_adapters
from nntask.hf.model_directory import read_config
from nntask.models.registry import build
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime
from tiles import QuantisedTensor

TILING = ModelTiling(minibatch_tile=2, seq_tile=9, embd_tile=32, inner_tile=64, head_tile=2, vocab_tile=50)


@pytest.mark.parametrize(("family", "kind"), [("gpt2", "q4_0"), ("llama", "q8_0"), ("llama", "q4_0")])
def test_losses_are_pefts(tmp_path: Path, family: str, kind: str) -> None:
    """20 steps of AdamW with decay and clipping, from the same first values: within 1e-5 of PEFT on torch, in fp32."""
    write_decoded(write_plain(tmp_path / "plain", wide(family)), tmp_path / "decoded", write_quantised(tmp_path / "plain", tmp_path / "small", kind))
    config = read_config(tmp_path / "small")
    model = build(config, TILING, InlineRuntime(), seed=None)
    add_adapters(model, LoRA(3, 6.0), seed=1)
    FrozenBase("directory", str(tmp_path / "small")).attach(model)
    assert sum(isinstance(tensor, QuantisedTensor) for tensor in model.frozen_tensors().values()) >= 12
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "decoded", dtype=torch.float32)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (3, config.n_positions + 1)).astype(np.int32)
    losses = losses_of_both(model, theirs, [(ids[:, :-1], ids[:, 1:])] * 20, 2e-3)
    assert max(abs(ours - his) for ours, his in losses) < 1e-5
    assert losses[-1][1] < losses[0][1] - 0.05  # it learnt, so the comparison says something
