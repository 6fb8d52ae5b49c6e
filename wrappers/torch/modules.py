"""Modules of PyTorch around a session: what it can train, and how their values leave them and come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nntask import UsageError

_TABLES: Final = ("_parameters", "_buffers", "_modules")


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
    saved = module.state_dict().keys()
    owners: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in named_tensors(module):
        if value.is_meta and not (has_weights and name in saved):
            raise UsageError(f"{name} has no values (it is on the meta device); give weights=DIR, or values of a buffer that no file has")
        if not (has_weights and name in saved) and _is_empty(value):
            raise UsageError(
                f"{name} has no values, since a session has them, or had them when it was closed; bring them back first with load_into(module) of "
                "that session, or close() of its trainer, or give weights=DIR of what was saved"
            )
        if value.device.type not in ("cpu", "meta"):
            raise UsageError(f"{name} is on {value.device}, and a module must be in CPU memory; move it with module.cpu()")
        if value.numel() == 0:
            raise UsageError(f"{name} has no elements (shape {tuple(value.shape)}), and tensors of a module must have some; leave it out")
        if not value.is_meta and owners.setdefault(value.untyped_storage().data_ptr(), (name, value))[1] is not value:
            other = owners[value.untyped_storage().data_ptr()][0]
            raise UsageError(f"{name} and {other} are two tensors of one memory, and would be apart in a session; use one tensor for both, or a copy")
        if getattr(value, "_backward_hooks", None) or getattr(value, "_post_accumulate_grad_hooks", None):
            raise UsageError(f"{name} has hooks of its gradient, which a session does not call; remove them, or hook the module around it")
        if value.is_complex():
            raise UsageError(f"{name} is of type {value.dtype}, and parameters must be real; keep real and imaginary parts apart")
    for name, child in module.named_modules():
        if isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag) and child.sparse:
            raise UsageError(f"{name or 'the module'} has sparse gradients, and gradients must be dense; make it with sparse=False")


@contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Give a module and those below it the attributes back that they had before the block."""
    before = [(child, dict(vars(child)), [dict(vars(child)[table]) for table in _TABLES]) for child in module.modules()]
    try:
        yield
    finally:
        for child, attributes, tables in before:
            vars(child).clear()
            vars(child).update(attributes)
            for table, content in zip(_TABLES, tables, strict=True):
                vars(child)[table].clear()
                vars(child)[table].update(content)


def modes_of(module: torch.nn.Module) -> dict[torch.nn.Module, bool]:
    """Which of a module and those below it are in training mode while the module trains: as they are, or all if the module itself is not."""
    return {child: child.training or not module.training for child in module.modules()}


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by every name, tied ones several times."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def is_frozen(value: torch.Tensor) -> bool:
    """Whether a tensor is a parameter that is not learnt."""
    return isinstance(value, torch.nn.Parameter) and not value.requires_grad


def first_values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by their first names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def let_go(module: torch.nn.Module) -> None:
    """Let go of a module's values, as `empty` does."""
    for _, value in named_tensors(module):
        empty(value)


def empty(value: torch.Tensor) -> None:
    """Let go of a tensor's values: it keeps its shape and type, over one element."""
    if not value.is_meta:
        one = torch.full((1,) * value.dim(), float("nan") if value.is_floating_point() else 0, dtype=value.dtype)
        value.data = one.expand(value.shape)


def _is_empty(value: torch.Tensor) -> bool:
    """Whether `empty` has let go of a tensor's values, as far as that shows: it has several elements over one NaN."""
    if value.device.type != "cpu" or not value.is_floating_point() or value.numel() < 2:
        return False
    return value.untyped_storage().nbytes() == value.element_size() and bool(value[(0,) * value.dim()].isnan())


def give(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give a module values for its tensors of these names; tensors without memory become new ones, tied as they were."""
    own = dict(named_tensors(module))
    for name, value in values.items():
        if not own[name].is_meta:
            own[name].data = value
    made: dict[int, torch.Tensor] = {}
    for name, value in values.items():
        if own[name].is_meta:
            is_parameter = isinstance(own[name], torch.nn.Parameter)
            made[id(own[name])] = torch.nn.Parameter(value, own[name].requires_grad) if is_parameter else value
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            for name, tensor in table.items():
                if id(tensor) in made:
                    table[name] = made[id(tensor)]


def refuse_call(module: torch.nn.Module, _: Any) -> None:
    """Hook of a module that a session has: while its values are away, a call would compute with NaN. In a capture it has fake tensors."""
    if any(not isinstance(value, FakeTensor) and (value.is_meta or _is_empty(value)) for value in module.parameters()):
        raise UsageError(
            "the weights of the module are in a session, or went with one; use the session's predict (a trainer's), or bring them back with "
            "load_into(module) (a trainer's close())"
        )
