"""PEFT's adapters on torch as the oracle of ours: equal first values, equal batches, the losses of both."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from support import gpt2_oracle

from nntask.adapters.lora import adapted
from nntask.models.language import LanguageModel
from nntask.optim.optimizers import AdamW


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
    import peft  # takes seconds

    groups = adapted(model)
    names = sorted({name.rpartition(".")[2] for name in groups})
    is_transposed = theirs.config.model_type == "gpt2"
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=3, lora_alpha=6, target_modules=names, fan_in_fan_out=is_transposed))
    first = {f"base_model.model.{name}.lora_A.weight": next(iter(layers.values())).lora.A.read() for name, layers in groups.items()}
    state = peft.get_peft_model_state_dict(theirs)
    assert {name for name in state if "lora_A" in name} == set(first)
    assert model.num_trained == sum(value.numel() for value in state.values())
    peft.set_peft_model_state_dict(theirs, state | {name: torch.from_numpy(value) for name, value in first.items()})
    learnt = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    torch_optimizer = torch.optim.AdamW(learnt, lr=lr, weight_decay=0.1)
    optimizer = AdamW(model.parameters(), lr, weight_decay=0.1, max_norm=0.5)
    tokens, targets = model.input_tensors(3)
    losses = []
    for step, (x, y) in enumerate(batches, 1):
        expected = gpt2_oracle.hf_loss(theirs, x, y)
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
