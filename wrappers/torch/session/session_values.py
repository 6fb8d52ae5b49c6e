"""Values of a module's parameters and buffers that a session holds: reading them, checking new ones, and naming them as files do."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nntask import UsageError
from tiles import TileTensor

from ..guards.away import is_away
from ..steps.modules import is_frozen, named_tensors, saved_names, saved_tensors
from ..steps.state import ModuleState, tensor_from


class SessionValues:
    """Values of the tensors of a module.

    Args:
        module: the module, whose own tensors have no values.
        state: its tensors on the runtime.
        own: id -> first name of the tensors that the session holds.
    """

    def __init__(self, module: torch.nn.Module, state: ModuleState, own: Mapping[int, str]) -> None:
        self._module, self._state, self._own = module, state, own

    def by_first_name(self) -> dict[str, torch.Tensor]:
        """Return copies of all parameters and buffers, by their first names."""
        tensors = self._state.tensors()
        values = {self._own[id(value)]: value for _, value in named_tensors(self._module) if id(value) in self._own}
        return {name: tensor_from(tensors[name].read(), value).clone() for name, value in values.items()}

    def by_every_name(self) -> dict[str, torch.Tensor]:
        """Return copies of the parameters and buffers that are away, by every name."""
        tensors, aliases = self._state.tensors(), self._first_names()
        return {
            name: tensor_from(tensors[aliases[id(value)]].read(), value)
            for name, value in named_tensors(self._module)
            if name in tensors and is_away(value)
        }

    def state_dict(self, *, frozen: bool) -> dict[str, torch.Tensor]:
        """Return copies under all names of the module's `state_dict`; tied tensors share memory.

        Args:
            frozen: whether to include frozen parameters.
        """
        tensors, first, seen = self._state.tensors(), self._first_names(), dict[int, torch.Tensor]()
        copies: dict[str, torch.Tensor] = {}
        for name, value in saved_tensors(self._module).items():
            if not isinstance(value, torch.Tensor) or (not frozen and is_frozen(value)):
                continue
            if first.get(id(value)) not in tensors:  # it has no elements, or the session has not taken it
                seen[id(value)] = value.detach().clone()
            elif id(value) not in seen:
                seen[id(value)] = tensor_from(tensors[first[id(value)]].read(), value)
            copies[name] = seen[id(value)]
        return copies

    def checked(self, values: Mapping[str, torch.Tensor], *, strict: bool) -> dict[str, torch.Tensor]:
        """Return values to overwrite the module's with, by first names, in the types of its tensors.

        Args:
            values: new values, by names of the module's `state_dict`.
            strict: whether all names of the `state_dict` must be present.

        Raises:
            UsageError: a name or a shape is not the module's, or with `strict` one is missing.
        """
        first, own = self._first_names(), dict(named_tensors(self._module))
        known = {name: first[id(value)] for name, value in saved_tensors(self._module).items() if id(value) in first}
        if unknown := sorted(values.keys() - known.keys()):
            raise UsageError(f"{unknown[0]} is no parameter or buffer of the module", "give names of session.state_dict()")
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                raise UsageError(f"{name} must be a tensor, got a {type(value).__name__}", "give torch.as_tensor of it")
            shape = tuple(own[known[name]].shape)
            if tuple(value.shape) != shape:
                raise UsageError(f"{name} has shape {shape}, got values of shape {tuple(value.shape)}", "give values of its shape")
        if strict and (missing := sorted(known.keys() - values.keys())):
            raise UsageError(f"{missing[0]} is missing among the values", "give all of session.state_dict(), or strict=False")
        return {known[name]: value.to(own[known[name]].dtype) for name, value in values.items()}

    def saved(self, *, frozen: bool) -> dict[str, TileTensor]:
        """Return the tensors of the module's `state_dict` by their names in it, tied ones once.

        Args:
            frozen: whether to include frozen parameters.

        Raises:
            UsageError: a tensor cannot be stored in a file.
        """
        values, tensors = dict(named_tensors(self._module)), self._state.tensors()
        names, own = saved_names(self._module), {id(value) for value in values.values()}
        for name, value in saved_tensors(self._module).items():
            is_known = isinstance(value, torch.Tensor) and (id(value) in own or not value.numel() or value.layout != torch.strided)
            if not is_known and value is not None:
                raise UsageError(
                    f"{name} of the module's state_dict() is neither a parameter nor a buffer, and cannot be saved", "take its hook away"
                )
        for first, name in names.items():
            if first not in tensors:
                raise UsageError(f"{name} was registered after the session was made, and cannot be saved with it", "register it before")
            if values[first].is_complex():
                raise UsageError(f"{name} is complex, and files of weights hold real numbers", "register the buffer with persistent=False")
        return {name: tensors[first] for first, name in names.items() if frozen or not is_frozen(values[first])}

    def _first_names(self) -> dict[int, str]:
        """Return the first name of each tensor that the module has now, by id."""
        return {id(value): self._own[id(value)] for _, value in named_tensors(self._module) if id(value) in self._own}
