"""Exchange of values between a step and the program: inputs and constants before it, tensors that it leaves in Python after it.

A step replaces the fake tensors of its capture by values, and writes constants and inputs that it has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from nntask import UsageError
from scheduler import Handle, Ticket

from ..capture.batches import memory_of
from ..capture.recorder import whole
from ..capture.values import HostValues
from ..guards.snapshots import RandomState, Slot, Snapshot
from ..guards.world import World
from ..steps.captures import PassUse
from ..steps.emission import write_inputs
from ..steps.state import ModuleState, array_of
from ..tasks.calls import Capture, Carried, Ref, Storage
from ..tasks.kernels import tensor_of
from .recording import RecordedStep


@dataclass(frozen=True, slots=True)
class Leaving:
    """Tensors that one pass of a step will leave in Python.

    Attributes:
        use: use of the pass.
        targets: tensors of the program that are its constants in this step.
        minibatch: inputs of the pass.
    """

    use: PassUse
    targets: Mapping[Storage, torch.Tensor]
    minibatch: Mapping[str, Any]

    @property
    def is_any(self) -> bool:
        """Whether the pass leaves anything, or has changed plain state of Python, which is restored if the step fails."""
        captured = self.use.tasks.captured
        return bool(self.use.has_effects or self.use.carried or captured.written or captured.changed or captured.outer)


def write_step(
    recorded: RecordedStep, uses: Sequence[PassUse], minibatches: Sequence[Mapping[str, Any]], world: World, state: ModuleState
) -> list[Leaving]:
    """Write the inputs of a step, and update constants to the values of the program's tensors.

    Args:
        recorded: the step.
        uses: uses of its passes.
        minibatches: arguments of each minibatch, by name.
        world: state of Python, in which constants are found by their paths.
        state: owner of the constants.

    Returns:
        The tensors that each pass will leave in Python.

    Raises:
        UsageError: tensors of a minibatch share memory that its pass changes.
    """
    write_inputs(recorded.inputs, minibatches, [use.host for use in uses])
    now_in_python, leavings = world.now(), list[Leaving]()
    tensors, fresh = now_in_python.tensors, set[tuple[Storage, int]]()
    for use, minibatch in zip(uses, minibatches, strict=True):
        given, targets = dict(use.constants), dict[Storage, torch.Tensor]()
        for storage in use.tasks.constants:
            now = given.get(storage)
            if now is None:
                now = tensors[storage.name][0] if storage.name in tensors else storage.tensor
            if now is not None and not isinstance(now, FakeTensor):
                if (storage, id(now)) not in fresh:  # several minibatches share a pass
                    state.refresh(storage, now)
                    fresh.add((storage, id(now)))
                targets[storage] = now
        check_changed(use.tasks.captured, minibatch)
        leavings.append(Leaving(use if use.ran else replace(use, carried=_where_now(use.carried, now_in_python)), targets, minibatch))
    return leavings


def _where_now(carried: Sequence[Carried], now: Snapshot) -> tuple[Carried, ...]:
    """Return carried tensors at their current places, when containers may differ from those of the capture."""
    refs = {each.path: each.ref for each in carried if each.path in now.tensors}
    return tuple(
        Carried(slot, now.tensors[path][0], ref, path) for path, ref in refs.items() for slot in (now.tensors[path][1], *now.aliases.get(path, ()))
    )


@contextmanager
def undone_on_failure(world: World) -> Iterator[Callable[[], None]]:
    """Restore the current state of Python, including random numbers, if the block raises or when the yielded function is called."""
    before, numbers = world.now(), RandomState()

    def undo() -> None:
        before.restore()
        numbers.restore()

    try:
        with world.looked_at_once():
            yield undo
    except BaseException:
        undo()
        raise


def host_values(minibatch: Mapping[str, Any], seed: Sequence[int], world: World, state: ModuleState) -> HostValues:
    """Return the values of tensors at the beginning of the next step.

    Args:
        minibatch: the inputs by name.
        seed: seed, numbers of the step and of the minibatch.
        world: state of Python, in which constants are found by their paths.
        state: owner of the other tensors.
    """
    tensors = state.tensors()

    def value_of(storage: Storage) -> torch.Tensor:
        if storage.role == "constant":
            entry = world.now().tensors.get(storage.name)
            now = storage.tensor if entry is None else entry[0]
            assert now is not None
            return whole(now)
        if storage.role == "input":
            return torch.from_numpy(array_of(memory_of(minibatch[storage.name])).reshape(-1).view(np.uint8))
        return torch.from_numpy(tensors[storage.name].read().reshape(-1).view(np.uint8))

    return HostValues(value_of, seed)


def check_changed(captured: Capture, minibatch: Mapping[str, Any]) -> None:
    """Check that no tensors of a batch share memory that the pass changes.

    Raises:
        UsageError: two do; the message names both.
    """
    for name in captured.changed:
        for other, value in minibatch.items():
            if (
                other != name
                and isinstance(value, torch.Tensor)
                and value.untyped_storage().data_ptr() == minibatch[name].untyped_storage().data_ptr()
            ):
                raise UsageError(
                    f"{name} and {other} of the batch share memory, and the module changes {name} in place", "give a copy of one of them"
                )


def bring_into_python(leavings: Sequence[Leaving], kept: Sequence[Mapping[Storage, Handle]], ticket: Ticket, state: ModuleState) -> None:
    """Write the tensors that the passes of a step have left to their places in the program.

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
        _add_gradients(leaving, handles, ticket)


def _replace(carried: Sequence[Carried], handles: Mapping[Storage, Handle], ticket: Ticket, state: ModuleState) -> None:
    """Replace fake tensors by values; several may be in one tuple, and one in several places."""
    tensors: dict[Ref, torch.Tensor] = {}
    slots: dict[tuple[int, Any], tuple[Slot, dict[int, torch.Tensor]]] = {}
    for each in carried:
        is_constant = each.ref.storage.role == "constant"
        if each.ref not in tensors:
            memory = state.constant_value(each.ref.storage) if is_constant else torch.from_numpy(ticket.read(handles[each.ref.storage]))
            tensors[each.ref] = tensor_of(memory, each.ref).clone(memory_format=torch.contiguous_format)
        if is_constant:
            state.forget_stamp(each.ref.storage)
        slots.setdefault((id(_owner_of(each.slot)), each.slot.key), (each.slot, {}))[1][id(each.fake)] = tensors[each.ref]
    for slot, values in slots.values():
        assert slot.write is not None  # `capture` refuses other slots
        slot.write(slot.key, tree_map_only(torch.Tensor, lambda tensor, values=values: values.get(id(tensor), tensor), slot.value))


def _owner_of(slot: Slot) -> Any:
    """Return the object that a slot belongs to."""
    return slot.write.args[0] if isinstance(slot.write, partial) else getattr(slot.write, "__self__", slot.write)


def _add_gradients(leaving: Leaving, handles: Mapping[Storage, Handle], ticket: Ticket) -> None:
    """Add the gradients of learnable tensors outside the module to their `grad`, as a backward pass does."""
    for tensor, ref in leaving.use.outer:
        if tensor is not None:
            gradient = tensor_of(torch.from_numpy(ticket.read(handles[ref.storage])), ref).clone().reshape(tensor.shape)
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
