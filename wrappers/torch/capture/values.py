"""Values of tensors that a capture needs, computed on the host by the calls that lead to them.

A decision by a value (``if mask.all()``), and a shape that depends on values (`nonzero`), follows the tensors of the current batch. The value that
was read becomes a `Guard`: it is recomputed before each replay, and if it differs the pass is captured anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..tasks.calls import Call, Guard, HostTensors, Ref, Storage
from ..tasks.kernels import Program, generator_of, tensor_of

ValueOf = Callable[[Storage], torch.Tensor]
"""Function that returns the bytes, (nbytes,) uint8 and read-only, of a storage that exists before the pass."""


class HostValues:
    """Values of the tensors of one pass, computed on the host before a step.

    Args:
        value_of: function that returns values of storages that exist before the pass.
        seed: seed, number of the step and of the minibatch, which determine random numbers.
    """

    def __init__(self, value_of: ValueOf, seed: Sequence[int]) -> None:
        self._value_of, self._seed = value_of, tuple(seed)
        self._known: dict[tuple[Storage, Call | None], torch.Tensor] = {}  # key: a storage and the last call that has written it
        self._given: dict[Storage, torch.Tensor] = {}

    def given(self, storage: Storage) -> torch.Tensor:
        """Return the bytes that were noted for a storage."""
        return self._given[storage]

    def enter(self, storages: Iterable[Storage], tensors: Iterable[torch.Tensor]) -> None:
        """Note the values of storages that the host has computed."""
        self._given.update((storage, _bytes_of(tensor)) for storage, tensor in zip(storages, tensors, strict=True))

    def tensor(self, calls: Sequence[Call], ref: Ref) -> torch.Tensor:
        """Return the value of a tensor after some calls of its pass; it must not be modified."""
        at = len(calls)
        while at and ref.storage not in calls[at - 1].writes:
            at -= 1
        key = ref.storage, calls[at - 1] if at else None
        if key not in self._known:
            self._known[key] = self._computed(calls[:at], ref.storage)
        return tensor_of(self._known[key], ref)

    def run(self, host: HostTensors) -> list[torch.Tensor]:
        """Compute an operation whose shapes depend on values, and note the results."""
        results = self.results(host.calls, host.func, host.args, host.kwargs)
        if tuple(tuple(each.shape) for each in results) == host.shapes:
            self.enter(host.storages, results)
        return results

    def results(self, calls: Sequence[Call], func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Compute an operation after some calls of its pass."""
        given, named = tree_map_only(Ref, lambda ref: self.tensor(calls, ref), (args, dict(kwargs)))
        with torch.no_grad():
            result = func(*given, **named)
        return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    def holds(self, guard: Guard) -> bool:
        """Return whether a value is the same as in the capture."""
        return value_bytes(self.tensor(guard.calls, guard.ref)) == guard.expected

    def _computed(self, calls: Sequence[Call], storage: Storage) -> torch.Tensor:
        """Return the bytes of a storage after some calls, computing only those that lead to it."""
        origin = origin_of_values(calls, {storage})
        memory = {each: self._first(each).clone() for each in origin.leaves}
        if origin.calls:
            with torch.inference_mode():
                Program(origin.calls, range(len(origin.calls))).run(memory, lambda call: {"generator": generator_of((*self._seed, call.draw))})
        if storage not in memory:  # allocated, and never filled
            memory[storage] = torch.zeros(storage.nbytes, dtype=torch.uint8)
        return memory[storage].clone()

    def _first(self, storage: Storage) -> torch.Tensor:
        return self._given[storage] if storage in self._given else self._value_of(storage)


class Origin(NamedTuple):
    """The calls that lead to some values.

    Attributes:
        calls: the calls, in order.
        leaves: storages that exist before the pass and that the calls read.
        is_random: whether a call draws random numbers.
    """

    calls: tuple[Call, ...]
    leaves: frozenset[Storage]
    is_random: bool


def origin_of_values(calls: Sequence[Call], storages: Iterable[Storage]) -> Origin:
    """Return those of the calls so far that lead to the values of some storages."""
    needed, chosen = set(storages), list[Call]()
    for call in reversed(calls):
        if not needed.isdisjoint(call.writes):
            chosen.append(call)
            needed |= call.reads
    made = {storage for call in chosen for storage in call.made}
    return Origin(tuple(reversed(chosen)), frozenset(needed - made), any(call.is_random for call in chosen))


def value_bytes(value: torch.Tensor) -> bytes:
    """Return the elements of a tensor in order, as bytes."""
    return bytes(_bytes_of(value).numpy())


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor's elements, in order  # any shape -> (nbytes,) uint8."""
    whole = value.detach().resolve_conj().resolve_neg().contiguous().clone()
    return whole.reshape(-1).view(torch.uint8) if whole.dim() == 0 or whole.numel() else torch.empty(0, dtype=torch.uint8)
