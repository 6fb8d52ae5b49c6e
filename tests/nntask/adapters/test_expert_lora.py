"""Adapters of experts beside PEFT's for transformers' arrays of all experts: gradients, losses, the same bits, idle experts, what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from support.cuda_emulator import COMPILER
from support.gpt2_oracle import relative
from support.quantised_directories import wide, write_decoded, write_plain, write_quantised
from support.transformers_oracle import BATCH, CONFIGS, EAGER_EXPERTS, LENGTH, hf_loss, hf_model, our_model, random_batch, tiles

from nntask.adapters.frozen_base import FrozenBase
from nntask.adapters.lora import LoRA, adapted, add_adapters, largest_rank, merged_arrays, num_idle_factors
from nntask.errors import UsageError
from nntask.hf.model_directory import read_config
from nntask.inference.generator import Generator
from nntask.inference.sampling import Sampling
from nntask.models.blocks import Mixture
from nntask.models.registry import build
from nntask.nn.autograd import no_grad
from nntask.optim.optimizers import AdamW, decay_groups
from nntask.tiling.model_tiling import ModelTiling, generation_tiling
from scheduler import InlineRuntime, Runtime, TaskRuntime
from tiles import QuantisedTensor

KINDS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
LORA = LoRA(3, 6.0, experts=True)
IN_BLOCKS = ("gate_proj", "up_proj", "down_proj")
"""Last names of feed-forward matrices; of those outside experts PEFT adapts the parameters, since it takes modules of these names for experts."""


def peft_model(theirs: Any, model: Any) -> Any:
    """PEFT's adapters for a module of transformers, with the first values of ours."""
    import peft  # takes seconds

    modules = [name for name in adapted(model) if not name.rpartition(".")[2].isdigit()]
    inner = [f"{name}.weight" for name in modules if name.endswith(IN_BLOCKS)]
    names = [name for name in modules if not name.endswith(IN_BLOCKS)]
    config = peft.LoraConfig(
        r=LORA.rank, lora_alpha=LORA.alpha, target_modules=names, target_parameters=["experts.gate_up_proj", "experts.down_proj", *inner]
    )
    module = peft.get_peft_model(theirs, config)
    given = joined(model, lambda parameter: parameter.read())
    state = peft.get_peft_model_state_dict(module)
    assert set(state) == set(given)
    peft.set_peft_model_state_dict(module, {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in given.items()})
    return module


def joined(model: Any, read: Any) -> dict[str, np.ndarray]:
    """Values of our adapters, or others of their shapes, by the names of PEFT's files, as the formulas of its ``ParamWrapper`` want them."""
    arrays: dict[str, np.ndarray] = {}
    experts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for name, layers in adapted(model).items():
        adapters = [layer.lora for layer in layers.values()]
        pair = read(adapters[0].A), np.concatenate([read(each.B) for each in adapters])
        array, _, last = name.rpartition(".")
        if last.isdigit():
            experts.setdefault(array, []).append(pair)
        else:
            arrays |= {f"base_model.model.{name}.lora_{letter}.weight": value for letter, value in zip("AB", pair, strict=True)}
    for array, pairs in experts.items():
        module, _, last = array.rpartition(".")
        place = f"base_model.model.{module}{'.base_layer' if last == 'gate_up_proj' else ''}"
        arrays[f"{place}.lora_A.weight"] = np.stack([a for a, _ in pairs]).reshape(-1, pairs[0][0].shape[1])
        arrays[f"{place}.lora_B.weight"] = np.stack([b for _, b in pairs]).transpose(1, 2, 0).reshape(pairs[0][1].shape[0], -1)
    return arrays


def written(model: Any, batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Tensors of a batch."""
    given: dict[str, Any] = model.inputs(*batch["tokens"].shape, tuple(batch))
    for name, tensor in given.items():
        tensor.write(batch[name])
    return given


def away_from_zero(model: Any) -> None:
    """B begins at zero, where A has no gradient."""
    rng = np.random.default_rng(7)
    for tensor in model.trained_tensors().values():
        tensor.write((rng.standard_normal(tensor.shape) * 0.2).astype(tensor.dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_are_pefts(kind: str) -> None:
    """First gradients within 1e-5 and losses within 2e-5, by AdamW with decay and clipping, in tiles that divide nothing."""
    config = CONFIGS[kind]
    theirs = hf_model(config)
    model = our_model(theirs, config, tiles(config), InlineRuntime())
    add_adapters(model, LORA, seed=1)
    away_from_zero(model)
    module = peft_model(theirs, model)
    learnt = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert model.num_trained == sum(parameter.numel() for parameter in learnt.values())
    reference = torch.optim.AdamW(learnt.values(), lr=1e-2, weight_decay=0.1)
    ours = AdamW(model.parameters(), 1e-2, weight_decay=0.1, max_norm=0.5)
    first = 0.0
    for step in range(10):
        batch = random_batch(config, step % 2)
        expected = hf_loss(module, config, batch)
        reference.zero_grad()
        expected.backward()
        loss = model(**written(model, batch))
        loss.backward()
        if not step:
            first = expected.item()
            gradients = joined(model, lambda parameter: parameter.gradient.read())
            for name, parameter in learnt.items():
                assert relative(gradients[name.replace(".default", "")], parameter.grad.numpy()) < 1e-5, name
        torch.nn.utils.clip_grad_norm_(learnt.values(), 0.5)
        reference.step()
        ours.prepare(step + 1)
        ours.step()
        model.zero_grad()
        assert float(loss.read()[0]) == pytest.approx(expected.item(), rel=2e-5)
    assert expected.item() < first - 0.05  # it learnt, so the comparison says something
