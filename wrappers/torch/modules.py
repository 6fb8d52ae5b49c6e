"""Modules of PyTorch around a session: what it can train, and how their values leave them and come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from nntask import UsageError

from .away import bring_back, is_away, send_away


def check_module(module: torch.nn.Module, *, has_weights: bool = False) -> None:
    """Refuse a module that no session can train.

    Args:
        has_weights: whether the values of its `state_dict` come from files, so that it needs none.

    Raises:
        UsageError: it is no module, or a scripted one; a tensor is on another device, complex or hooked; a session has or had the values; an
            embedding has sparse gradients.
    """
    if not isinstance(module, torch.nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise UsageError(f"a session trains a torch.nn.Module of Python, got a {type(module).__name__}; give the module itself, not scripted")
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise UsageError(f"{name} is scripted, and a session captures modules of Python; give the module that it was scripted from")
    saved = saved_tensors(module).keys()
    owners: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in named_tensors(module):
        _check_tensor(name, value, has_values=not (has_weights and name in saved))
        if not value.is_meta and not is_away(value):
            first_name, first = owners.setdefault(value.untyped_storage().data_ptr(), (name, value))
            if first is not value and (isinstance(value, torch.nn.Parameter) or isinstance(first, torch.nn.Parameter)):
                raise UsageError(
                    f"{name} and {first_name} are two tensors of one memory, and would be apart in a session; use one tensor for both, or a copy"
                )
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag) and child.sparse:
            raise UsageError(f"{name or 'the module'} has sparse gradients, and gradients must be dense; make it with sparse=False")


def _check_tensor(name: str, value: torch.Tensor, *, has_values: bool) -> None:
    """Refuse a parameter or buffer that no session can have.

    Args:
        has_values: whether it must have values, because no file has them.

    Raises:
        UsageError: see `check_module`.
    """
    if is_lazy(value):
        raise UsageError(f"{name} has no shape yet (it is of a lazy module); call the module once, with a batch, before")
    if has_values and value.is_meta:
        raise UsageError(f"{name} has no values (it is on the meta device); give weights=DIR, or values of a buffer that no file has")
    if has_values and is_away(value):
        raise UsageError(
            f"{name} has no values, since a session has them, or had them when it was closed; bring them back first with load_into(module) of "
            "that session, or close() of its trainer, or give weights=DIR of what was saved"
        )
    if value.device.type not in ("cpu", "meta"):
        raise UsageError(f"{name} is on {value.device}, and a module must be in CPU memory; move it with module.cpu()")
    if not is_away(value) and value.grad is not None:
        raise UsageError(f"{name} has a gradient from before the session, to which eager PyTorch would add; call module.zero_grad() first")
    if getattr(value, "_post_accumulate_grad_hooks", None):
        raise UsageError(f"{name} has a post-accumulate hook of its gradient, which a session does not call; use register_hook, or remove it")
    if value.is_complex() and isinstance(value, torch.nn.Parameter):
        raise UsageError(f"{name} is of type {value.dtype}, and parameters must be real; keep real and imaginary parts apart")


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, as its own `eval` does, and each of its parts back into the mode that it was in."""
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for child, is_training in modes.items():
            child.training = is_training


def shared_buffers(module: torch.nn.Module) -> set[str]:
    """Return the first names of buffers that share their memory with another one, and would be apart in a session."""
    names: dict[int, list[str]] = {}
    for name, value in first_values(module).items():
        if not value.is_meta and not is_away(value):
            names.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    return {name for group in names.values() if len(group) > 1 for name in group}


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by every name, tied ones several times; sparse ones and those without elements stay in the module and are left out."""
    for name, value in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        if is_lazy(value) or (value.layout == torch.strided and value.numel()):
            yield name, value


def is_frozen(value: torch.Tensor) -> bool:
    """Whether a tensor is a parameter that is not learnt."""
    return isinstance(value, torch.nn.Parameter) and not value.requires_grad


def first_values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by their first names."""
    found, seen = {}, set[int]()
    for name, value in named_tensors(module):
        if id(value) not in seen:
            found[name] = value
            seen.add(id(value))
    return found


def saved_tensors(module: torch.nn.Module) -> dict[str, Any]:
    """Return the content of a module's `state_dict`, with the tensors themselves, also of one that overrides it without PyTorch's arguments."""
    try:
        found: dict[str, Any] = module.state_dict(keep_vars=True)
    except TypeError:
        found = torch.nn.Module.state_dict(module, keep_vars=True)
    return found


def let_go(module: torch.nn.Module) -> ExitStack:
    """Let go of a module's values, as `send_away` does, and refuse to load others until the result is closed."""
    for _, value in named_tensors(module):
        send_away(value)
    guards = ExitStack()
    for child in module.modules():
        guards.callback(child._register_load_state_dict_pre_hook(_refuse_loading).remove)
    return guards


def _refuse_loading(*_: Any) -> None:
    raise UsageError(
        "load_state_dict() of a module whose weights are in a session has no place for them; use load_state_dict() of the session, or load_into(module) "
        "before"
    )


def saved_names(module: torch.nn.Module) -> dict[str, str]:
    """Return the names under which a module saves its parameters and buffers: first name of the tensor -> name in `state_dict`.

    A wrapper may save parts under other names than it knows them by (`checkpoint_wrapper`).
    """
    first: dict[int, str] = {}
    for name, value in named_tensors(module):
        first.setdefault(id(value), name)
    found: dict[str, str] = {}
    for name, value in saved_tensors(module).items():
        if id(value) in first:
            found.setdefault(first[id(value)], name)
    return found


def give(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give a module values for its tensors of these names; tensors without memory become new ones, tied as they were."""
    own = dict(named_tensors(module))
    made: dict[int, torch.Tensor] = {}
    for name, value in values.items():
        bring_back(own[name], None if own[name].is_meta else value)
        if own[name].is_meta:
            is_parameter = isinstance(own[name], torch.nn.Parameter)
            made[id(own[name])] = torch.nn.Parameter(value, own[name].requires_grad) if is_parameter else value
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            for name, tensor in table.items():
                if id(tensor) in made:
                    table[name] = made[id(tensor)]
