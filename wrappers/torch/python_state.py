"""What a step leaves in the program's Python state: values in place of the fake tensors of its capture, and of constants that it has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.utils._pytree import tree_map_only

from scheduler import Handle, Ticket

from .calls import Carried, Storage
from .captures import PassUse
from .kernels import tensor_of
from .recorder import whole
from .state import ModuleState


def bring_into_python(uses: Sequence[PassUse], kept: Sequence[Mapping[Storage, Handle]], ticket: Ticket, state: ModuleState) -> None:
    """Write what the passes of a step have left to where the program finds it.

    Args:
        uses: of the step's passes, which have ended.
        kept: handles of what each pass has returned.
        ticket: of the step.
        state: has the constants.
    """
    for use, handles in zip(uses, kept, strict=True):
        held = dict(use.constants)
        for storage in use.tasks.captured.written:
            target = held.get(storage, storage.tensor)
            if target is not None and not any(each.ref.storage is storage for each in use.carried):
                with torch.no_grad():
                    whole(target).copy_(state.constant_value(storage))
                state.note_constant(storage, target)
        _replace(use.carried, handles, ticket, state)


def _replace(carried: Sequence[Carried], handles: Mapping[Storage, Handle], ticket: Ticket, state: ModuleState) -> None:
    """Put values where fake tensors stand; several may be parts of one tuple."""
    slots: dict[int, tuple[Carried, dict[int, torch.Tensor]]] = {}
    for each in carried:
        if each.ref.storage.role == "constant":
            memory = state.constant_value(each.ref.storage)
        else:
            memory = torch.from_numpy(ticket.read(handles[each.ref.storage]))
        value = tensor_of(memory, each.ref).clone()
        slots.setdefault(id(each.slot.value), (each, {}))[1][id(each.fake)] = value
    for each, values in slots.values():
        assert each.slot.write is not None
        each.slot.write(each.slot.key, tree_map_only(torch.Tensor, lambda tensor, values=values: values.get(id(tensor), tensor), each.slot.value))
