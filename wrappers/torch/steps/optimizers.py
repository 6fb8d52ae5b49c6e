"""PyTorch's optimizers as those of nntask: by name, or from an instance over the module's parameters.

The instance of torch.optim holds the options, which every step reads, so that schedulers work; it never updates. The state (moments, masters, numbers
of steps) is in the session, in nntask's optimizer. While the session is open, reading or changing the state of the instance raises an error.

As in torch.optim, a step ignores a parameter without a gradient: no decay, no moments, and no change of its own number of steps.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch.optim import optimizer as torch_hooks

from nntask import SGD, Adam, AdamW, DataError, Group, Parameter, UsageError
from nntask.optim import AdamW8bit, Muon, Optimizer, Options

from .muon import AdamW8bitOptions, MuonWithAdamW, members_of, muon_of, newton_schulz_of, paired

_NAMES: Final[Mapping[str, type[torch.optim.Optimizer]]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "muon": MuonWithAdamW,
    "adamw8bit": AdamW8bitOptions,
}
_ZERO: Final = {"amsgrad": False, "maximize": False, "nesterov": False, "dampening": 0, "decoupled_weight_decay": False}
"""Options of PyTorch's optimizers that are not implemented -> the only allowed value."""
_FIXED: Final = (*_ZERO, "ns_coefficients", "ns_steps", "adjust_lr_fn")
"""Options that may not change while a session is open."""
_OPTIONS: Final = ("lr", "betas", "momentum", "weight_decay", "eps")
"""Options that every step reads if an optimizer has them; they may change between steps and differ between groups."""


def torch_optimizer(
    optimizer: str | torch.optim.Optimizer | Sequence[torch.optim.Optimizer], module: torch.nn.Module, lr: float | None, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return the optimizer of a session as an instance of PyTorch's; it holds the options and the learning rate, and never runs.

    Args:
        optimizer: a name, an instance, or a torch.optim.Muon and a torch.optim.AdamW.
        module: module whose parameters it updates.
        lr: learning rate of an optimizer given by name; None for PyTorch's default.
        options: further options of an optimizer given by name.

    Raises:
        UsageError: there is no such optimizer, it is not implemented here, or an option is not.
    """
    if isinstance(optimizer, str):
        if optimizer not in _NAMES:
            raise UsageError(f"optimizer must be one of {', '.join(_NAMES)} or an instance of torch.optim, got {optimizer!r}", 'for example "adamw"')
        learnt = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not learnt:
            raise UsageError("the module has no parameter that is learnt", "set requires_grad of one")
        given = {**({} if lr is None else {"lr": lr}), **options}
        _check_names(optimizer, options)
        try:
            instance = muon_of(module, given) if optimizer == "muon" else _NAMES[optimizer](learnt, **given)
        except UsageError:
            raise
        except (TypeError, ValueError) as error:
            kind = {"muon": "Muon", "adamw8bit": "AdamW"}.get(optimizer, _NAMES[optimizer].__name__)
            raise UsageError(f"torch.optim.{kind} refuses {given}: {error}", "see its documentation") from None
        return _checked(instance)
    if options:
        raise UsageError(f"Session has no argument {next(iter(options))}=, and an optimizer that is an instance has its options", "leave it out")
    if lr is not None:
        raise UsageError("an optimizer that is an instance has its options", "leave out lr= and the other options, or give its name")
    if isinstance(optimizer, Sequence):
        return _checked(paired(optimizer))
    return _checked(paired([optimizer]) if isinstance(optimizer, torch.optim.Muon) else optimizer)


def _check_names(optimizer: str, options: Collection[str]) -> None:
    """Check that each keyword that belongs to no group of a session's arguments is an option of the optimizer.

    Raises:
        UsageError: one is not.
    """
    kinds = (torch.optim.Muon, torch.optim.AdamW) if optimizer == "muon" else (_NAMES[optimizer],)
    known = {name for kind in kinds for name in inspect.signature(kind).parameters}
    for name in options:
        if name not in known:
            raise UsageError(f"{name}= is neither an argument of Session nor an option of {optimizer}", "leave it out, or see help(Session)")


def _checked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if type(optimizer) not in _NAMES.values():
        names = ", ".join(f"torch.optim.{name}" for name in ("SGD", "Adam", "AdamW", "Muon"))
        raise UsageError(f"optimizer must be one of {names}, got {type(optimizer).__name__}", "use one of them")
    for number, group in enumerate(optimizer.param_groups):
        for option, value in _ZERO.items():
            is_free = option == "decoupled_weight_decay" and "amsgrad" in group and not _has_l2(optimizer)
            is_free |= option == "nesterov" and newton_schulz_of(group) is not None
            if group.get(option, value) != value and not is_free:
                raise UsageError(f"{option} of {type(optimizer).__name__} must be {value}, got {group[option]}", "leave it out")
        options_of(number, group)
    for member in members_of(optimizer):
        _check_hooks(member)
        if isinstance(member.state, _StateElsewhere):
            raise UsageError("the optimizer is that of another session, which is open", "close that session first, or make another optimizer")
        if member.state:
            raise UsageError("the optimizer has taken steps already, and its state would be lost", "make a new one, and resume with session.resume")
    return optimizer


def _has_l2(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether weight decay is added to the gradient."""
    return not isinstance(optimizer, torch.optim.AdamW | MuonWithAdamW)


def options_of(number: int, group: Mapping[str, Any]) -> Options:
    """Return the current options of a parameter group.

    Args:
        number: number of the group, for messages.

    Raises:
        UsageError: an option is out of range.
    """
    name, decays = ("betas", group["betas"]) if "betas" in group else ("momentum", (group["momentum"], 0.0))
    first, second = map(float, decays)
    options = Options(float(group["lr"]), float(group["weight_decay"]), first, second, float(group.get("eps", 0.0)))
    if not (0 <= first < 1 and 0 <= second < 1):
        raise UsageError(f"{name} of group {number} must be at least 0 and below 1, got {group[name]}", "correct it, or its schedule")
    for name in ("weight_decay", "eps"):
        if not 0 <= getattr(options, name) < math.inf:
            raise UsageError(f"{name} of group {number} must be at least 0, got {group[name]}", "correct it, or its schedule")
    return options


def optimizer_on(optimizer: torch.optim.Optimizer, module: torch.nn.Module, parameters: Mapping[str, Parameter], max_norm: float) -> Optimizer:
    """Return the optimizer over a session's parameters, with a group for each, because each counts its own steps.

    Raises:
        UsageError: the optimizer lacks a trainable parameter, or has one that the module lacks.
    """
    groups = [
        Group([parameters[name]], options.weight_decay, newton_schulz_of(group))
        for names, options, group in zip(_names_in_groups(optimizer, module), _all_options(optimizer), optimizer.param_groups, strict=True)
        for name in names
        if name in parameters  # an empty parameter stays in the module
    ]
    seen = {group.parameters[0].name for group in groups}
    if missing := sorted(name for name, parameter in parameters.items() if parameter.trainable and name not in seen):
        raise UsageError(
            f"the optimizer lacks {missing[0]}, which is learnt", "give it all parameters, or freeze that one with requires_grad_(False)"
        )
    first = options_of(0, optimizer.param_groups[0])
    if isinstance(optimizer, torch.optim.SGD):
        return SGD(groups, first.lr, momentum=max(options.first for options in _all_options(optimizer)), max_norm=max_norm)
    if isinstance(optimizer, MuonWithAdamW):
        return Muon(groups, first.lr, max_norm=max_norm)  # every step writes the options of each group
    kind = AdamW8bit if isinstance(optimizer, AdamW8bitOptions) else AdamW if isinstance(optimizer, torch.optim.AdamW) else Adam
    return kind(groups, first.lr, betas=(first.first, first.second), eps=first.eps, max_norm=max_norm)


def _all_options(optimizer: torch.optim.Optimizer) -> list[Options]:
    """Return the current options of each parameter group."""
    return [options_of(number, group) for number, group in enumerate(optimizer.param_groups)]


def _names_in_groups(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> list[list[str]]:
    """Return the names of the parameters of each group.

    Raises:
        UsageError: the module lacks one of them.
    """
    by_id = {id(parameter): name for name, parameter in module.named_parameters()}
    if any(id(parameter) not in by_id for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError("the optimizer has a parameter that the module lacks", "make it with module.parameters()")
    return [[by_id[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


class SessionOptimizer:
    """The optimizer of a session: options from torch.optim, state in nntask's optimizer, and the number of steps of each parameter.

    Args:
        options: the instance of torch.optim.
        module: module whose parameters it updates.
        parameters: parameters of the session, by name.
        max_norm: norm to which the gradient is clipped; 0 is off.

    Attributes:
        options, max_norm: these arguments.
        updates: nntask's optimizer, which emits the updates and holds the state.

    Raises:
        UsageError: the optimizer lacks a trainable parameter, or has one that the module lacks.
    """

    def __init__(self, options: torch.optim.Optimizer, module: torch.nn.Module, parameters: Mapping[str, Parameter], max_norm: float) -> None:
        self.options, self.max_norm, self._module = options, max_norm, module
        self.updates = optimizer_on(options, module, parameters, max_norm)
        group_of = {name: number for number, names in enumerate(_names_in_groups(options, module)) for name in names}
        self._rows = {p.name: group_of[p.name] for group in self.updates.groups for p in group.parameters}  # name -> number of its group
        self._skipped = dict.fromkeys(self._rows, 0)  # number of steps so far without a gradient of the parameter
        self._terms, self._members = self._terms_now(), self._members_now()

    @property
    def has_twin(self) -> bool:
        """Whether an optimizer of PyTorch takes the same steps from the same state, up to rounding in fp32."""
        return not isinstance(self.options, MuonWithAdamW | AdamW8bitOptions)

    def check(self) -> None:
        """Check that the optimizer was changed only by the options of its groups.

        Raises:
            UsageError: something else has changed; the message names it.
        """
        state = self.options.state
        if not isinstance(state, _StateElsewhere):
            raise UsageError(f"optimizer.state must stay as it is while a session is open, got another {type(state).__name__}", _STATE_REMEDY)
        for member in members_of(self.options):
            _check_hooks(member)
        members = self._members_now()
        if members != self._members:
            before, now = ([len(each) for each in groups] for groups in (self._members, members))
            raise UsageError(
                "the optimizer must keep its parameters, each in its group, while a session is open",
                f"it had {before} parameters in the groups, got {'others' if now == before else now}; put them back, or make a new session",
            )
        for name, value in self._terms_now().items():
            first = self._terms.get(name)
            if name not in self._terms:
                name = name.removeprefix("requires_grad of ")
                raise UsageError(f"{name} is a parameter that the module did not have when its session was made", "make a new session")
            if first != value:
                raise UsageError(
                    f"{name} must stay {first} while the session is open, got {value}", "make a new session, and resume what save() wrote"
                )

    def prepare_step(self, number: int, updated: Collection[str]) -> None:
        """Write the numbers of a step, before its replay.

        Args:
            number: number of the step, from 1.
            updated: names of the parameters that it updates.

        Raises:
            UsageError: an option is out of range.
        """
        options = _all_options(self.options)
        steps = [number - skipped if name in updated else 1 for name, skipped in self._skipped.items()]
        self.updates.prepare_groups(steps, [options[group] for group in self._rows.values()])

    def note_step(self, updated: Collection[str]) -> None:
        """Count a step that has begun; PyTorch's schedulers see it like a step of the optimizer itself."""
        self._skip(1, [name for name in self._skipped if name not in updated])
        for member in members_of(self.options):
            member._opt_called = True

    def note_left_out(self, updated: Collection[str], *, keeps_number: bool) -> None:
        """Note that a step that had begun has failed and was left out.

        Args:
            updated: names of the parameters that it would have updated.
            keeps_number: whether it still counts among the steps of the session, because a later one had begun.
        """
        if keeps_number:
            self._skip(1, updated)
        else:
            self._skip(-1, [name for name in self._skipped if name not in updated])

    def _skip(self, count: int, names: Collection[str]) -> None:
        for name in names:
            self._skipped[name] += count

    def num_steps_of(self, name: str, number: int) -> int:
        """Return the number of steps that a parameter has taken when the session has taken `number`."""
        return number - self._skipped.get(name, 0)

    def reset(self) -> None:
        """Emit the tasks that reset the state, keeping the current parameters."""
        self.updates.reset()
        self._skipped = dict.fromkeys(self._skipped, 0)

    def counters(self) -> dict[str, Any]:
        """Return the state that a session saves besides tensors: options of each group, and numbers of skipped steps that are not 0."""
        groups = [
            {name: list(map(float, group[name])) if name == "betas" else float(group[name]) for name in _OPTIONS if name in group}
            for group in self.options.param_groups
        ]
        return {"groups": groups, "skipped": {name: count for name, count in self._skipped.items() if count}}

    def restore(self, state: Mapping[str, Any], source: Path) -> None:
        """Restore the result of `counters`; a session that was saved without it has one learning rate and no skipped steps.

        Args:
            state: content of session.json.
            source: the directory, for messages.

        Raises:
            DataError: the groups or the parameters differ.
        """
        own, skipped = self.options.param_groups, state.get("skipped", {})
        groups = state.get("groups", [{"lr": state["lr"]}] * len(own))
        if "groups" in state and [set(saved) for saved in groups] != [{name for name in _OPTIONS if name in group} for group in own]:
            raise DataError(f"{source} has {len(groups)} parameter groups, which differ from the optimizer's {len(own)}", "make it as it was then")
        if not skipped.keys() <= self._skipped.keys() or not all(0 <= count <= state["step"] for count in skipped.values()):
            raise DataError(f"{source} counts steps of other parameters than the optimizer has", "make module and optimizer as they were then")
        for group, saved in zip(own, groups, strict=True):
            group.update({name: tuple(value) if name == "betas" else value for name, value in saved.items()})
        self._skipped = {**dict.fromkeys(self._skipped, 0), **skipped}

    def _terms_now(self) -> dict[str, Any]:
        """Return the values that must not change while the session is open, by name."""
        terms: dict[str, Any] = {}
        for name, parameter in self._module.named_parameters():
            if name not in self._skipped:  # frozen when the session was made, so without state; trainable parameters may be frozen for a while
                terms[f"requires_grad of {name}"] = parameter.requires_grad
        for number, group in enumerate(self.options.param_groups):
            terms.update({f"{option} of group {number}": value for option, value in group.items() if option in _FIXED})
            if "momentum" in group and newton_schulz_of(group) is None:
                terms[f"whether group {number} has momentum"] = bool(group["momentum"])
        return terms

    def _members_now(self) -> list[list[int]]:
        """Return the ids of the parameters in each group."""
        return [list(map(id, group["params"])) for group in self.options.param_groups]


_STATE_REMEDY: Final = "save() and resume() of the session keep the state, and its reset_optimizer() clears it"


class _StateElsewhere(defaultdict[Any, Any]):
    """`state` of an optimizer while a session holds the state: reading or changing it raises an error."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError("optimizer.state cannot be read or changed while a session is open, because the session has the state", _STATE_REMEDY)

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __or__ = __ior__ = _refuse
    get = keys = values = items = clear = pop = popitem = setdefault = update = copy = _refuse


@contextmanager
def guarded(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Refuse reading or changing the state of an optimizer in the block; afterwards it can be used again, without state."""

    def refuse(name: str) -> NoReturn:
        raise UsageError(f"{name} of the optimizer cannot be called while a session is open, because the session has the state", _STATE_REMEDY)

    whole = {id(each): each for each in (optimizer, *members_of(optimizer))}.values()
    hooks = [each.register_state_dict_pre_hook(lambda *_: refuse("state_dict()")) for each in whole]
    hooks += [each.register_load_state_dict_pre_hook(lambda *_: refuse("load_state_dict()")) for each in whole]
    before = [each.state for each in whole]
    for each in whole:
        each.state = _StateElsewhere()
    try:
        yield
    finally:
        for each, state in zip(whole, before, strict=True):
            each.state = state
        for hook in hooks:
            hook.remove()


def _check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Check that no hooks run around the steps of an optimizer.

    Raises:
        UsageError: the optimizer has hooks, or all optimizers have.
    """
    tables = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    of_all = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    count = sum(len(getattr(optimizer, name, ())) for name in tables) + sum(len(getattr(torch_hooks, name, ())) for name in of_all)
    if count:
        raise UsageError(
            f"the optimizer must have no step hooks, which a session does not call, got {count}", "remove them, and do that after step()"
        )
