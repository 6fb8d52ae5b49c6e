"""Exchange of values between a step and the program: inputs and constants before it, tensors that it leaves in Python after it.

A step leaves values in place of the fake tensors of its capture, and writes constants and inputs that it has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from nntask import UsageError
from scheduler import Handle, Ticket

from .batches import memory_of
from .calls import Capture, Carried, Storage
from .captures import PassUse
from .emission import write_inputs
from .kernels import tensor_of
from .recorder import whole
from .recording import RecordedStep
from .state import ModuleState, array_of
from .values import HostValues
from .world import World


@dataclass(frozen=True, slots=True)
class Leaving:
    """Tensors that one pass of a step will leave in Python.

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
        """Whether the pass leaves anything."""
        captured = self.use.tasks.captured
        return bool(self.use.carried or captured.written or captured.changed)


def write_step(
    recorded: RecordedStep, uses: Sequence[PassUse], minibatches: Sequence[Mapping[str, Any]], world: World, state: ModuleState
) -> list[Leaving]:
    """Write the inputs of a step, and bring constants up to the values that the program's tensors have.

    Args:
        recorded: the step.
        uses: its passes.
        minibatches: the arguments of each one by name.
        world: where constants are found by their paths.
        state: owner of the constants.

    Returns:
        The tensors that each pass will leave in Python.

    Raises:
        UsageError: tensors of a minibatch share memory that its pass changes.
    """
    write_inputs(recorded.inputs, minibatches, [use.host for use in uses])
    tensors, leavings = world.now().tensors, list[Leaving]()
    for use, minibatch in zip(uses, minibatches, strict=True):
        given, targets = dict(use.constants), dict[Storage, torch.Tensor]()
        for storage in use.tasks.constants:
            now = given.get(storage)
            if now is None:
                now = tensors[storage.name][0] if storage.name in tensors else storage.tensor
            if now is not None and not isinstance(now, FakeTensor):
                state.refresh(storage, now)
                targets[storage] = now
        check_changed(use.tasks.captured, minibatch)
        leavings.append(Leaving(use, targets, minibatch))
    return leavings


def host_values(minibatch: Mapping[str, Any], seed: Sequence[int], world: World, state: ModuleState) -> HostValues:
    """Return the values of tensors as the next step finds them.

    Args:
        minibatch: the inputs by name.
        seed: seed, numbers of the step and of the minibatch.
        world: where constants are found by their paths.
        state: has the other tensors.
    """
    tensors = state.tensors()

    def value_of(storage: Storage) -> torch.Tensor:
        if storage.role == "constant":
            found = world.now().tensors.get(storage.name)
            now = storage.tensor if found is None else found[0]
            assert now is not None
            return whole(now)
        if storage.role == "input":
            return torch.from_numpy(array_of(memory_of(minibatch[storage.name])).reshape(-1).view(np.uint8))
        return torch.from_numpy(tensors[storage.name].read().reshape(-1).view(np.uint8))

    return HostValues(value_of, seed)


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
    """Write the tensors that the passes of a step have left to where the program finds them.

    Args:
        leavings: tensors that each pass has left.
        kept: handles of the results of each pass.
        ticket: ticket of the step, which has ended.
        state: owner of the constants.
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
    """Replace fake tensors by values; several may be in one tuple."""
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
