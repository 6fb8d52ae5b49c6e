"""Adapters on quantised weights (QLoRA, Dettmers et al. 2023) beside PEFT on the decoded ones."""

from __future__ import annotations

from dataclasses import replace
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
from nntask.optim.optimizers import AdamW
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime, Runtime
from tiles import QuantisedTensor

TILING = ModelTiling(minibatch_tile=2, seq_tile=9, embd_tile=32, inner_tile=64, head_tile=2, vocab_tile=50)


@pytest.mark.parametrize(
    ("family", "kind", "experts"),
    [
        ("gpt2", "q4_0", False),
        ("llama", "q8_0", False),
        ("llama", "q4_0", False),
        ("qwen2_moe", "q4_0", False),
        ("mixtral", "q8_0", True),
        ("qwen3_moe", "q4_0", True),
    ],
)
def test_losses_are_pefts(tmp_path: Path, family: str, kind: str, experts: bool) -> None:
    """20 steps of AdamW with decay and clipping, from the same first values: within 1e-5 of PEFT on torch, in fp32; also with adapters of experts."""
    write_decoded(write_plain(tmp_path / "plain", wide(family)), tmp_path / "decoded", write_quantised(tmp_path / "plain", tmp_path / "small", kind))
    config = read_config(tmp_path / "small")
    model = build(config, TILING, InlineRuntime(), seed=None)
    add_adapters(model, LoRA(3, 6.0, experts=experts), seed=1)
    FrozenBase("directory", str(tmp_path / "small")).attach(model)
    assert sum(isinstance(tensor, QuantisedTensor) for tensor in model.frozen_tensors().values()) >= 12
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "decoded", dtype=torch.float32)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (3, config.n_positions + 1)).astype(np.int32)
    losses = losses_of_both(model, theirs, [(ids[:, :-1], ids[:, 1:])] * 20, 2e-3)
    assert max(abs(ours - his) for ours, his in losses) < 1e-5
    assert losses[-1][1] < losses[0][1] - 0.05  # it learnt, so the comparison says something


@pytest.mark.parametrize("experts", [False, True])
def test_tasks_of_experts_that_no_token_chose_are_skipped(tmp_path: Path, experts: bool) -> None:
    """Losses on quantised experts are those on decoded ones, bit by bit, while all tasks that decode or use other experts are skipped."""
    config = replace(wide("qwen3_moe"), num_local_experts=24, num_experts_per_tok=1)
    numbers = write_quantised(write_plain(tmp_path / "plain", config), tmp_path / "small", "q4_0")
    write_decoded(tmp_path / "plain", tmp_path / "decoded", numbers)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, config.n_positions + 1)).astype(np.int32)
    losses, counts = [], []
    for name in ("small", "decoded"):
        with Runtime(1, ram=1 << 26) as runtime:
            model = build(config, TILING, runtime, seed=None)
            add_adapters(model, LoRA(3, 6.0, experts=experts), seed=1)
            FrozenBase("directory", str(tmp_path / name)).attach(model)
            optimizer = AdamW(model.parameters(), 2e-3)
            tokens, targets = model.input_tensors(2)
            tokens.write(ids[:, :-1])
            targets.write(ids[:, 1:])
            for step in range(3):
                optimizer.prepare(step + 1)
                loss = model(tokens, targets)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.read()[0]))
            runtime.wait()
            counts.append(runtime.stats()["skipped_tasks"])
    assert losses[:3] == losses[3:]
    assert counts[0] == counts[1] * (1 + 3 * 2)  # each task of an expert follows those that decode its matrices, of two tiles each
    assert counts[1]
