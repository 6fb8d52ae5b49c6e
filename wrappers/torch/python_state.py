"""What a step leaves in the program's Python state: values in place of the fake tensors of its capture, constants and inputs that it has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from nntask import UsageError
from scheduler import Handle, Ticket

from .calls import Capture, Carried, Storage
from .captures import PassUse
from .kernels import tensor_of
from .recorder import whole
from .state import ModuleState


@dataclass(frozen=True, slots=True)
class Leaving:
    """What one pass of a step will leave.

    Attributes:
        use: the pass.
        targets: the tensors of the program that are its constants in this step.
        minibatch: its inputs.
    """

    use: PassUse
    targets: Mapping[Storage, torch.Tensor]
    minibatch: Mapping[str, Any]

    @property
    def is_any(self) -> bool:
        """Whether there is anything."""
        captured = self.use.tasks.captured
        return bool(self.use.carried or captured.written or captured.changed)


def check_changed(captured: Capture, minibatch: Mapping[str, Any]) -> None:
    """Refuse a batch whose tensors share memory that the pass changes.

    Raises:
        UsageError: names both.
    """
    for name in captured.changed:
        for other, value in minibatch.items():
            if (
                other != name
                and isinstance(value, torch.Tensor)
                and value.untyped_storage().data_ptr() == minibatch[name].untyped_storage().data_ptr()
            ):
                raise UsageError(f"{name} and {other} of the batch share memory, and the module changes {name} in place; give a copy of one of them")


def bring_into_python(leavings: Sequence[Leaving], kept: Sequence[Mapping[Storage, Handle]], ticket: Ticket, state: ModuleState) -> None:
    """Write what the passes of a step have left to where the program finds it.

    Args:
        leavings: of the step's passes, which have ended.
        kept: handles of what each pass has returned.
        ticket: of the step.
        state: has the constants.
    """
    for leaving, handles in zip(leavings, kept, strict=True):
        captured = leaving.use.tasks.captured
        for storage in captured.written:
            target = leaving.targets.get(storage)
            if target is not None and not any(each.ref.storage is storage for each in leaving.use.carried):
                with torch.no_grad():
                    whole(target).copy_(state.constant_value(storage))
                state.note_constant(storage, target)
        for name, ref in captured.changed.items():
            with torch.no_grad():
                leaving.minibatch[name].detach().copy_(tensor_of(torch.from_numpy(ticket.read(handles[ref.storage])), ref))
        _replace(leaving.use.carried, handles, ticket, state)


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
        assert each.slot.write is not None  # `capture` has refused others
        each.slot.write(each.slot.key, tree_map_only(torch.Tensor, lambda tensor, values=values: values.get(id(tensor), tensor), each.slot.value))
