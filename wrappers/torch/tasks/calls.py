"""The parts of a capture: calls of aten operations on references to storages.

Memory is modelled by storages. A tensor is a reference: a storage with element type, shape, strides and offset. A view is a new reference without a
call. In-place operations write a storage. A storage that a call allocates is temporary; parameters, buffers, inputs and constants exist before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch
from torch.utils._pytree import tree_leaves

from ..guards.snapshots import Slot

Role = Literal["parameter", "buffer", "input", "constant", "temporary"]

TileKey = tuple[str, int]
"""A parameter's name, and the number of one of its pieces, which is 0 if it is not cut."""

aten: Final = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Storage:
    """A piece of memory that tensors refer to.

    Attributes:
        nbytes: size in bytes.
        role: kind of its content; a call allocates a temporary storage.
        name: name of the parameter, buffer or input; for a constant the path to it, "" if there is none.
        tensor: the tensor of the program in whose memory a constant lies.
        piece: number of this piece of a parameter that is cut along its first axis (`cuts`).
        is_again: whether its content is recomputed, in a backward pass that repeats a part of the forward pass.
        is_backward: whether a backward pass computes its content.
    """

    nbytes: int
    role: Role
    name: str = ""
    tensor: torch.Tensor | None = None
    piece: int = 0
    is_again: bool = False
    is_backward: bool = False


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor: part of a storage. Strides and offset count elements.

    Attributes:
        is_conj, is_neg: whether its values are the conjugates, or the negatives, of those in memory.
    """

    storage: Storage
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is all of its storage, in memory order."""
        numel = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != numel:
                return False
            numel *= length
        return not self.is_conj and not self.is_neg and self.offset == 0 and numel * self.dtype.itemsize == self.storage.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One operation.

    Attributes:
        func: overload of the operation.
        args, kwargs: arguments, with references in place of tensors.
        results: a reference for each tensor among its results, None for anything else, flattened.
        reads: storages of its arguments.
        writes: storages that it allocates or changes.
        made: storages that it allocates.
        draw: number of the draw of a random call: a recomputation that has reset the generator draws the same numbers.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Ref | None, ...]
    reads: frozenset[Storage]
    writes: frozenset[Storage]
    made: frozenset[Storage]
    draw: int = 0

    @classmethod
    def of(
        cls, func: Any, args: Sequence[Any], results: Sequence[Ref | None], *, kwargs: Mapping[str, Any] | None = None, made: Collection[Storage] = ()
    ) -> Call:
        """Return a call of an operation; its arguments determine `reads`, and its schema determines which of them it changes.

        Args:
            kwargs: further arguments, by name.
            made: storages of the results that it allocates.
        """
        kwargs = kwargs or {}
        reads = frozenset(ref.storage for ref in refs_in((*args, *kwargs.values())))
        writes = frozenset((*made, *_written(func, args, kwargs)))
        return cls(func, tuple(args), kwargs, tuple(results), reads, writes, frozenset(made))

    @property
    def is_random(self) -> bool:
        """Whether the results are random numbers."""
        return torch.Tag.nondeterministic_seeded in self.func.tags


@dataclass(frozen=True, slots=True)
class Guard:
    """A value that was read while a pass was captured, and must be the same in each step that replays it.

    Attributes:
        calls: calls of the pass that lead to the value.
        ref: reference of the tensor.
        expected: bytes of the tensor.
        where: line of the program that has read it.
    """

    calls: Sequence[Call]
    ref: Ref
    expected: bytes
    where: str


@dataclass(frozen=True, slots=True)
class HostTensors:
    """The results of an operation whose shapes depend on values: computed on the host before each step, and constants of the pass.

    Attributes:
        calls: calls of the pass that lead to its arguments.
        func, args, kwargs: the operation, with references in place of tensors.
        storages: storages of the results.
        shapes: shapes of the results, which must be the same in each step that replays the pass.
        where: line of the program.
    """

    calls: Sequence[Call]
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    storages: tuple[Storage, ...]
    shapes: tuple[tuple[int, ...], ...]
    where: str


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor that a pass leaves in an attribute, a container or a variable of the program.

    Attributes:
        slot: slot that holds it.
        fake: fake tensor that represents it, a part of `slot.value` or the whole.
        ref: reference of the tensor, which is an overwritten constant of the pass or one of the outputs.
        path: path of the slot, for messages.
    """

    slot: Slot
    fake: torch.Tensor
    ref: Ref
    path: str


@dataclass(frozen=True, slots=True)
class Capture:
    """The calls of one pass over one batch.

    Attributes:
        calls: calls in the order of eager PyTorch.
        outputs: result of the pass, and the references of `carried`.
        gradients: gradient of each parameter that has one.
        storages: storages that exist before the pass, without constants.
        carried: tensors that the pass leaves in Python, for the next one or for the program.
        guards: values by which the pass has made decisions.
        host: tensors whose shape depends on values, computed on the host before each step.
        outer: constants that are learnable tensors of the program -> their gradients, which are among the outputs.
        changed: inputs that the pass changes in place -> their values afterwards, which are among the outputs.
        effects: paths of Python's state that the pass has changed, other than by tensors of the same shape; it must then run in each step.
    """

    calls: Sequence[Call]
    outputs: tuple[Any, Sequence[Ref]]
    gradients: Mapping[TileKey, Ref]
    storages: Sequence[Storage]
    carried: Sequence[Carried] = ()
    guards: Sequence[Guard] = ()
    host: Sequence[HostTensors] = ()
    effects: Sequence[str] = ()
    changed: Mapping[str, Ref] = field(default_factory=dict)
    outer: Sequence[tuple[Storage, torch.Tensor, Ref]] = ()

    @property
    def result(self) -> Any:
        """Result of the pass, with references in place of tensors: the loss in training. Objects, such as a cache of keys, are None."""
        return self.outputs[0]

    @property
    def written(self) -> list[Storage]:
        """Constants that the pass changes."""
        return list(dict.fromkeys(s for call in self.calls for s in sorted(call.writes, key=id) if s.role == "constant"))


def refs_in(value: Any) -> Iterator[Ref]:
    """Yield the references among the arguments of an operation, which contain no other containers than lists."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from refs_in(each)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Storage]:
    """Yield the storages of the arguments that an operation changes according to its schema."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (ref.storage for ref in tree_leaves(value) if isinstance(ref, Ref))
    if func is aten.native_batch_norm.default and args[5]:  # its schema omits that it updates the running statistics
        yield from (ref.storage for ref in args[3:5] if ref is not None)


_IS_AGAIN: Final = ContextVar("is_again", default=False)
"""Whether the calling thread repeats a part of a forward pass, in the checkpointing of the module itself."""


def is_recomputing() -> bool:
    """Return whether the calling thread is inside `recomputing`."""
    return _IS_AGAIN.get()


@contextmanager
def recomputing() -> Iterator[None]:
    """Mark the block as recomputation, for `torch.utils.checkpoint.checkpoint(context_fn=)`, which leaves it as soon as it has all it needs."""
    token = _IS_AGAIN.set(True)
    try:
        yield
    finally:
        _IS_AGAIN.reset(token)
