"""Muon in PyTorch's terms: torch.optim.Muon for the matrices of a module and torch.optim.AdamW for the rest, as one optimizer of a session.

Both only hold options, like every optimizer of a session. AdamW with 8-bit moments, which torch.optim lacks, has the options of torch.optim.AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from nntask import UsageError
from tiles.ops import muon as muon_ops

_OF_MUON: Final = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
"""Options that torch.optim.Muon has and AdamW lacks."""


class AdamW8bitOptions(torch.optim.AdamW):  # type: ignore[misc]
    """Options of AdamW with 8-bit moments."""


class MuonWithAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """One optimizer of the parameter groups of several, which are shared, so that their schedulers work.

    Args:
        members: a torch.optim.Muon and, unless the module has matrices only, a torch.optim.AdamW.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.members = tuple(members)
        super().__init__([group for member in members for group in member.param_groups], {})


def members_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers of PyTorch that an optimizer consists of: itself, or its members."""
    return optimizer.members if isinstance(optimizer, MuonWithAdamW) else (optimizer,)


def paired(given: Sequence[torch.optim.Optimizer]) -> MuonWithAdamW:
    """Return several optimizers as one.

    Raises:
        UsageError: they are not one Muon and at most one AdamW.
    """
    kinds = [type(member) for member in given]
    if kinds.count(torch.optim.Muon) != 1 or len(kinds) > 2 or any(kind not in (torch.optim.Muon, torch.optim.AdamW) for kind in kinds):
        names = ", ".join(kind.__name__ for kind in kinds) or "none"
        raise UsageError(f"several optimizers must be a torch.optim.Muon and a torch.optim.AdamW, got {names}", "use these two, or one optimizer")
    return MuonWithAdamW(given)


def hidden_weights(module: torch.nn.Module) -> set[int]:
    """Return the ids of the learnt matrices of hidden layers: those of two axes, except embeddings and the head of a model of transformers."""
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    outer = {id(p) for each in module.modules() if isinstance(each, embeddings) for p in each.parameters()}
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    outer |= set() if head is None else {id(p) for p in head.parameters()}
    return {id(p) for p in module.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in outer}


def muon_of(module: torch.nn.Module, options: Mapping[str, Any], *, vectors_decay: bool = True) -> MuonWithAdamW:
    """Return Muon for the matrices of a module's hidden layers and AdamW for the rest, including arrays of experts, which have three axes.

    Args:
        options: options of both; the rate of AdamW suits Muon, unless `adjust_lr_fn` is given. eps is that of AdamW. The weight decay of both is
            AdamW's 0.01 by default, not the 0.1 of torch.optim.Muon.
        vectors_decay: whether parameters with fewer than two axes have weight decay.

    Raises:
        UsageError: the module has no such matrix.
        TypeError, ValueError: PyTorch refuses an option.
    """
    inner = hidden_weights(module)
    if not inner:
        raise UsageError("Muon needs a matrix of a hidden layer that is learnt, got none", 'use another optimizer, for example "adamw"')
    learnt = [p for p in module.parameters() if p.requires_grad]
    options = {"weight_decay": 0.01, **options}
    of_muon = {"adjust_lr_fn": "match_rms_adamw", **{name: value for name, value in options.items() if name not in ("betas", "eps")}}
    of_adamw = {name: value for name, value in options.items() if name not in _OF_MUON}
    members: list[torch.optim.Optimizer] = [torch.optim.Muon([p for p in learnt if id(p) in inner], **of_muon)]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in learnt if id(p) not in inner and p.dim() > 1]},
        {"params": [p for p in learnt if p.dim() <= 1], **({} if vectors_decay else {"weight_decay": 0.0})},
    ]
    groups = [group for group in groups if group["params"]]
    if groups:
        members.append(torch.optim.AdamW(groups, **of_adamw))
    return MuonWithAdamW(members)


def newton_schulz_of(group: Mapping[str, Any]) -> muon_ops.NewtonSchulz | None:
    """Return the constant options of a group of torch.optim.Muon; None for a group of another optimizer."""
    if "ns_steps" not in group:
        return None
    nesterov, coefficients, steps, adjusted = (group[name] for name in _OF_MUON[1:])
    return muon_ops.NewtonSchulz(bool(nesterov), tuple(coefficients), int(steps), adjusted or "original")
