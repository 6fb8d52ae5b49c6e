"""PyTorch's optimizers as those of nntask: by name, or from an instance over the module's parameters, whose learning rate every step reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from nntask import SGD, Adam, AdamW, Group, Parameter, UsageError
from nntask.optim import Optimizer

_NAMES: Final[Mapping[str, type[torch.optim.Optimizer]]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
_ZERO: Final = {"amsgrad": False, "maximize": False, "nesterov": False, "dampening": 0, "decoupled_weight_decay": False}
"""Options of PyTorch's optimizers that are not implemented -> the only value they may have."""
_OPTIONS: Final = ("betas", "eps", "momentum", "weight_decay", *_ZERO)
"""Options that a session takes over."""


def torch_optimizer(
    optimizer: str | torch.optim.Optimizer, module: torch.nn.Module, lr: float | None, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer that a session was given, as PyTorch's: it holds the options and the learning rate, and never runs.

    Args:
        optimizer: a name, or an instance.
        module: whose parameters it is for.
        lr: learning rate of one that is named; None for PyTorch's default.
        options: further options of one that is named.

    Raises:
        UsageError: there is no such optimizer, it is not implemented here, or an option is not.
    """
    if isinstance(optimizer, str):
        if optimizer not in _NAMES:
            raise UsageError(f'optimizer must be one of {", ".join(_NAMES)} or an instance of torch.optim, got {optimizer!r}; for example "adamw"')
        learnt = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not learnt:
            raise UsageError("the module has no parameter that is learnt; set requires_grad of one")
        given = {**({} if lr is None else {"lr": lr}), **options}
        try:
            made = _NAMES[optimizer](learnt, **given)
        except (TypeError, ValueError) as error:
            raise UsageError(f"torch.optim.{_NAMES[optimizer].__name__} refuses {given}: {error}; see its documentation") from None
        return _checked(made)
    if lr is not None or options:
        raise UsageError("an optimizer that is an instance has its options; leave out lr= and the other options, or give its name")
    return _checked(optimizer)


def _checked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if type(optimizer) not in _NAMES.values():
        names = ", ".join(f"torch.optim.{each.__name__}" for each in _NAMES.values())
        raise UsageError(f"optimizer must be one of {names}, got {type(optimizer).__name__}; use one of them")
    first = optimizer.param_groups[0]
    for group in optimizer.param_groups:
        for option, value in _ZERO.items():
            is_adamw = option == "decoupled_weight_decay" and isinstance(optimizer, torch.optim.AdamW)
            if group.get(option, value) != value and not is_adamw:
                raise UsageError(f"{option} of {type(optimizer).__name__} must be {value}, got {group[option]}; leave it out")
        for option in ("lr", "betas", "eps", "momentum"):
            if group.get(option) != first.get(option):
                raise UsageError(
                    f"{option} must be the same in all parameter groups, got {first[option]} and {group[option]}; only weight_decay may differ"
                )
    if optimizer.state:
        raise UsageError("the optimizer has taken steps already, and its state would be lost; make a new one, and resume with session.resume")
    return optimizer


def terms_of(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> dict[str, Any]:
    """What a session has taken from an optimizer and a module for good, by name: everything but the learning rate."""
    found: dict[str, Any] = {f"requires_grad of {name}": parameter.requires_grad for name, parameter in module.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        found.update({f"{option} of group {number}": value for option, value in group.items() if option in _OPTIONS})
    return found


def rate_of(optimizer: torch.optim.Optimizer, module: torch.nn.Module, terms: Mapping[str, Any]) -> float:
    """The learning rate of the next step.

    Args:
        terms: `terms_of` when the session was made.

    Raises:
        UsageError: groups have different rates, or something else has changed.
    """
    for name, value in terms_of(optimizer, module).items():
        if terms.get(name) != value:
            raise UsageError(
                f"{name} must stay {terms.get(name)} while the session is open, got {value}; make a new session, and resume what save() wrote"
            )
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if len(rates) > 1:
        raise UsageError(
            f"lr must be the same in all parameter groups, got {', '.join(f'{rate:g}' for rate in sorted(rates))}; use one schedule for all"
        )
    return rates.pop()


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that a step was taken, as a step of the optimizer itself does for PyTorch's schedulers."""
    optimizer._opt_called = True


def optimizer_on(optimizer: torch.optim.Optimizer, module: torch.nn.Module, parameters: Mapping[str, Parameter], max_norm: float) -> Optimizer:
    """The optimizer over a session's parameters.

    Raises:
        UsageError: the optimizer lacks a parameter that is learnt, or has one that the module lacks.
    """
    by_id = {id(parameter): name for name, parameter in module.named_parameters()}
    groups, seen = [], set()
    for group in optimizer.param_groups:
        names = [by_id.get(id(parameter), "") for parameter in group["params"]]
        if "" in names:
            raise UsageError("the optimizer has a parameter that the module lacks; make it with module.parameters()")
        seen.update(names)
        groups.append(Group([parameters[name] for name in names], float(group["weight_decay"])))
    if missing := sorted(name for name, parameter in parameters.items() if parameter.trainable and name not in seen):
        raise UsageError(f"the optimizer lacks {missing[0]}, which is learnt; give it all parameters, or freeze that one with requires_grad_(False)")
    options = optimizer.param_groups[0]
    lr = float(options["lr"])
    if isinstance(optimizer, torch.optim.SGD):
        return SGD(groups, lr, momentum=float(options["momentum"]), max_norm=max_norm)
    first, second = map(float, options["betas"])
    kind = AdamW if isinstance(optimizer, torch.optim.AdamW) else Adam
    return kind(groups, lr, betas=(first, second), eps=float(options["eps"]), max_norm=max_norm)
