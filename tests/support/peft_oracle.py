"""PEFT's adapters on torch as the oracle of ours: equal first values, equal batches, the losses of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from support import gpt2_oracle

from nntask.adapters.lora import adapted
from nntask.models.language import LanguageModel
from nntask.nn.module import Parameter
from nntask.optim.optimizers import AdamW

_IN_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""PEFT takes modules of these names for experts, so that of other feed-forward layers it adapts the parameters."""
_PREFIX = "base_model.model."


def joined_factors(model: LanguageModel, read: Callable[[Parameter], np.ndarray]) -> dict[str, np.ndarray]:
    """Return what `read` returns for our adapters by PEFT's names; those of all experts of a block are one array, as ``ParamWrapper`` reshapes it."""
    arrays: dict[str, np.ndarray] = {}
    experts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for name, layers in adapted(model).items():
        adapters = [layer.lora for layer in layers.values() if layer.lora is not None]
        pair = read(adapters[0].A), np.concatenate([read(each.B) for each in adapters])
        array, _, last = name.rpartition(".")
        if last.isdigit():
            experts.setdefault(array, []).append(pair)
        else:
            arrays |= {f"{_PREFIX}{name}.lora_{letter}.weight": value for letter, value in zip("AB", pair, strict=True)}
    for array, pairs in experts.items():
        module, _, last = array.rpartition(".")
        place = f"{_PREFIX}{module}{'.base_layer' if last == 'gate_up_proj' else ''}"
        arrays[f"{place}.lora_A.weight"] = np.stack([a for a, _ in pairs]).reshape(-1, pairs[0][0].shape[1])  # (E, r, K) -> (E r, K)
        arrays[f"{place}.lora_B.weight"] = np.stack([b for _, b in pairs]).transpose(1, 2, 0).reshape(pairs[0][1].shape[0], -1)  # (N, r E)
    return arrays


def peft_module(model: LanguageModel, theirs: torch.nn.Module) -> Any:
    """Return transformers' model with PEFT's adapters of rank 3 and alpha 6, of the values of ours."""
    import peft  # takes seconds

    names = [name for name in adapted(model) if not name.rpartition(".")[2].isdigit()]
    inner = [name for name in names if model.config.names.stacked and name.endswith(_IN_EXPERTS)]
    more: dict[str, Any] = {"fan_in_fan_out": theirs.config.model_type == "gpt2"}
    if len(names) < len(adapted(model)):
        more["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj", *(f"{name}.weight" for name in inner)]
        names = [name for name in names if name not in inner]
    targets = sorted({name.rpartition(".")[2] for name in names})
    module = peft.get_peft_model(theirs, peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, **more))
    first, state = joined_factors(model, lambda factor: factor.read()), peft.get_peft_model_state_dict(module)
    assert set(state) == set(first)
    assert model.num_trained == sum(value.numel() for value in state.values())
    peft.set_peft_model_state_dict(module, {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in first.items()})
    return module


def losses_of_both(
    model: LanguageModel, theirs: torch.nn.Module, batches: Iterable[tuple[np.ndarray, np.ndarray]], lr: float
) -> list[tuple[float, float]]:
    """Train a model with adapters of rank 3 and alpha 6, and transformers' model with PEFT's, by AdamW with decay and clipping.

    Args:
        model: ours, with adapters.
        theirs: transformers' model with the same weights, without adapters.
        batches: tokens and targets of each step, (B, T) int32.
        lr: learning rate of both.

    Returns:
        our loss and PEFT's of each step.
    """
    module = peft_module(model, theirs)
    learnt = [parameter for parameter in module.parameters() if parameter.requires_grad]
    torch_optimizer = torch.optim.AdamW(learnt, lr=lr, weight_decay=0.1)
    optimizer = AdamW(model.parameters(), lr, weight_decay=0.1, max_norm=0.5)
    tokens, targets = model.input_tensors(3)
    losses = []
    for step, (x, y) in enumerate(batches, 1):
        expected = gpt2_oracle.hf_loss(module, x, y)
        torch_optimizer.zero_grad()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 0.5)
        torch_optimizer.step()
        tokens.write(x)
        targets.write(y)
        optimizer.prepare(step)
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        losses.append((float(loss.read()[0]), expected.item()))
    return losses
