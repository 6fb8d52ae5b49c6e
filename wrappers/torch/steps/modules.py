"""Modules of PyTorch around a session: their tensors by name, and moving values out of them and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from nntask import UsageError

from ..guards.away import bring_back, is_away, send_away


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode with its own `eval`, and restore the changed attributes afterwards."""
    before = {child: dict(vars(child)) for child in module.modules()}
    module.eval()
    changed = [(child, {name: value for name, value in held.items() if vars(child).get(name) is not value}) for child, held in before.items()]
    try:
        yield
    finally:
        for child, attributes in changed:
            vars(child).update(attributes)


def shared_buffers(module: torch.nn.Module) -> set[str]:
    """Return the first names of buffers that share memory with another one, and would be separate in a session."""
    names: dict[int, list[str]] = {}
    for name, value in first_values(module).items():
        if not value.is_meta and not is_away(value):
            names.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    return {name for group in names.values() if len(group) > 1 for name in group}


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers by every name, tied ones several times; sparse and empty ones stay in the module and are skipped."""
    for name, value in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        if is_lazy(value) or (value.layout == torch.strided and value.numel()):
            yield name, value


def is_frozen(value: torch.Tensor) -> bool:
    """Return whether a tensor is a frozen parameter."""
    return isinstance(value, torch.nn.Parameter) and not value.requires_grad


def first_values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their first names."""
    tensors, seen = {}, set[int]()
    for name, value in named_tensors(module):
        if id(value) not in seen:
            tensors[name] = value
            seen.add(id(value))
    return tensors


def saved_tensors(module: torch.nn.Module) -> dict[str, Any]:
    """Return the content of a module's `state_dict`, with the tensors themselves; an override without PyTorch's arguments is bypassed."""
    try:
        found: dict[str, Any] = module.state_dict(keep_vars=True)
    except TypeError:
        found = torch.nn.Module.state_dict(module, keep_vars=True)
    return found


def let_go(module: torch.nn.Module) -> ExitStack:
    """Free a module's values, as `send_away` does, and refuse to load others until the result is closed."""
    for _, value in named_tensors(module):
        send_away(value)
    guards = ExitStack()
    for child in module.modules():
        guards.callback(child._register_load_state_dict_pre_hook(_refuse_loading).remove)
    return guards


def _refuse_loading(*_: Any) -> None:
    raise UsageError(
        "load_state_dict() of a module whose weights are in a session has no memory for them",
        "use load_state_dict() of the session, or load_into(module) before",
    )


def saved_names(module: torch.nn.Module) -> dict[str, str]:
    """Return the names under which a module saves its parameters and buffers: first name of the tensor -> name in `state_dict`.

    A wrapper may save parts under other names than those in the module tree (`checkpoint_wrapper`).
    """
    first: dict[int, str] = {}
    for name, value in named_tensors(module):
        first.setdefault(id(value), name)
    names: dict[str, str] = {}
    for name, value in saved_tensors(module).items():
        if id(value) in first:
            names.setdefault(first[id(value)], name)
    return names


def give(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give a module values for its tensors of these names; tensors without memory are replaced by new ones, with the same ties."""
    own = dict(named_tensors(module))
    replacements: dict[int, torch.Tensor] = {}
    for name, value in values.items():
        bring_back(own[name], None if own[name].is_meta else value)
        if own[name].is_meta:
            is_parameter = isinstance(own[name], torch.nn.Parameter)
            replacements[id(own[name])] = torch.nn.Parameter(value, own[name].requires_grad) if is_parameter else value
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            for name, tensor in table.items():
                if id(tensor) in replacements:
                    table[name] = replacements[id(tensor)]
