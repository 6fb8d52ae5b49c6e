"""Adapters on quantised weights (QLoRA, Dettmers et al. 2023) beside PEFT on the decoded ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support import gpt2_oracle
from support.quantised_directories import wide, write_decoded, write_plain, write_quantised

from nntask.adapters.frozen_base import FrozenBase
from nntask.adapters.lora import LoRA, adapted, add_adapters
from nntask.hf.model_directory import read_config
from nntask.models.registry import build
from nntask.optim.optimizers import AdamW
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime
from tiles import QuantisedTensor

TILING = ModelTiling(minibatch_tile=2, seq_tile=9, embd_tile=32, inner_tile=64, head_tile=2, vocab_tile=50)


@pytest.mark.parametrize(("family", "kind"), [("gpt2", "q4_0"), ("llama", "q8_0"), ("llama", "q4_0")])
def test_losses_are_pefts(tmp_path: Path, family: str, kind: str) -> None:
    """20 steps of AdamW with decay and clipping, from the same first values: within 1e-5 of PEFT on torch, in fp32."""
    import peft  # takes seconds

    write_decoded(write_plain(tmp_path / "plain", wide(family)), tmp_path / "decoded", write_quantised(tmp_path / "plain", tmp_path / "small", kind))
    config = read_config(tmp_path / "small")
    model = build(config, TILING, InlineRuntime(), seed=None)
    add_adapters(model, LoRA(3, 6.0), seed=1)
    FrozenBase("directory", str(tmp_path / "small")).attach(model)
    assert sum(isinstance(tensor, QuantisedTensor) for tensor in model.frozen_tensors().values()) >= 12
    groups = adapted(model)
    names = sorted({name.rpartition(".")[2] for name in groups})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "decoded", dtype=torch.float32)
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=3, lora_alpha=6, target_modules=names, fan_in_fan_out=family == "gpt2"))
    first = {f"base_model.model.{name}.lora_A.weight": next(iter(layers.values())).lora.A.read() for name, layers in groups.items()}
    state = peft.get_peft_model_state_dict(theirs)
    assert {name for name in state if "lora_A" in name} == set(first)
    peft.set_peft_model_state_dict(theirs, state | {name: torch.from_numpy(value) for name, value in first.items()})
    learnt = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    torch_optimizer = torch.optim.AdamW(learnt, lr=2e-3, weight_decay=0.1)
    optimizer = AdamW(model.parameters(), 2e-3, weight_decay=0.1, max_norm=0.5)
    tokens, targets = model.input_tensors(3)
    losses = []
    rng = np.random.default_rng(0)
    ids = rng.integers(0, config.vocab_size, (3, config.n_positions + 1))
    for step in range(1, 21):
        expected = gpt2_oracle.hf_loss(theirs, ids[:, :-1], ids[:, 1:])
        torch_optimizer.zero_grad()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 0.5)
        torch_optimizer.step()
        tokens.write(ids[:, :-1].astype(np.int32))
        targets.write(ids[:, 1:].astype(np.int32))
        optimizer.prepare(step)
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        losses.append((float(loss.read()[0]), expected.item()))
    assert max(abs(ours - his) for ours, his in losses) < 1e-5
    assert losses[-1][1] < losses[0][1] - 0.05  # it learnt, so the comparison says something
