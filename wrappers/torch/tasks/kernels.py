"""Computation of a call into lent memory, by the first of these ways that an operation has:

- a rule (`rules`), for operations that are a fill, a copy or an indexed sum;
- its own ``out=`` overload, if that is a kernel of each kind of device and not one that allocates, computes and copies;
- the operation itself, into memory of PyTorch, and a copy. That memory is counted as scratch of the task.

All three give the bits of the operation itself. A chain (`chains`) writes into lent memory; its own temporaries are counted as scratch, too.
A random operation draws from its own generator, whose seed comes with the task, so that the numbers depend neither on the order of tasks nor
on the worker. On a GPU, random operations take uniform numbers of ours (`rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch

from nntask import UsageError

from .calls import Call, Ref, Storage, aten
from .chains import Chain
from .devices import HOST, KEYS, has_kernel, runs_on_gpu
from .rules import INTO, RANDOM, Into

EMPTY: Final = frozenset({aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default})
"""Operations that only allocate memory."""
_METADATA: Final = frozenset({aten.as_strided_.default, aten.resize_.default, aten.t_.default, aten.transpose_.default, aten.squeeze_.dim})
"""In-place operations on the shape of a tensor alone, which later references already have."""
_NOT_RANDOM: Final = frozenset({aten._scaled_dot_product_flash_attention_for_cpu.default})
"""Operations that PyTorch tags as random although they are not: they are only called without dropout on the CPU."""


def draws(call: Call) -> bool:
    """Return whether a call needs a generator."""
    return call.is_random and call.func not in _NOT_RANDOM


def does_nothing(call: Call) -> bool:
    """Return whether a call computes nothing: it allocates memory or changes a shape."""
    return call.func in EMPTY or call.func in _METADATA


def into_of(call: Call) -> Into | None:
    """Return the rule or the ``out=`` overload that computes a call into given memory; None if its result must be copied there.

    Raises:
        UsageError: the call is random and does not accept a generator.
    """
    if draws(call):
        rule = RANDOM[call.func].cpu if call.func in RANDOM else None
        if rule is None and not any(argument.name == "generator" for argument in call.func._schema.arguments):
            raise UsageError(
                f"{call.func} cannot be given a seed of its own",
                "use dropout, rand, randn, randint, randperm, bernoulli, uniform_ or normal_ in the model",
            )
        return rule
    if isinstance(call.func, Chain):
        return call.func.into
    if _divides_by_count(call) or _normalises_strided(call):
        return None
    return INTO.get(call.func) or _out_overload(call.func)


def gpu_rule_of(call: Call) -> Into | None:
    """Return the rule that computes a random call on a GPU; None if there is none."""
    return RANDOM[call.func].gpu if call.func in RANDOM else None


def has_cuda_kernel(call: Call) -> bool:
    """Return whether a GPU can compute a call; other calls are left to CPU workers."""
    if draws(call):
        return gpu_rule_of(call) is not None
    return does_nothing(call) or call.func in INTO or runs_on_gpu(call.func)


def torch_nbytes(call: Call) -> int:
    """Return the bytes that a call takes from PyTorch's allocator for its results."""
    if does_nothing(call) or into_of(call) is not None:
        return 0
    return sum(storage.nbytes for storage in call.made)


def _divides_by_count(call: Call) -> bool:
    """Return whether a call is the gradient of a table whose rows are divided by how often their ids occur."""
    return call.func is aten.embedding_dense_backward.default and bool(call.args[4])


def _normalises_strided(call: Call) -> bool:
    """Return whether a call normalises a batch of strided input, for which PyTorch's ``out=`` kernel omits the mean."""
    if call.func is not aten.native_batch_norm.default:
        return False
    ref = call.args[0]
    like = torch.empty(ref.shape, device="meta")
    layouts = [tuple(like.stride())]
    if len(ref.shape) in (4, 5):
        kind = torch.channels_last if len(ref.shape) == 4 else torch.channels_last_3d
        layouts.append(tuple(like.to(memory_format=kind).stride()))
    return ref.strides not in layouts


def buffer_nbytes(call: Call) -> int:
    """Return the bytes that a call takes from PyTorch's allocator for values between its loops."""
    return call.func.compiled.nbytes if isinstance(call.func, Chain) else 0


def tensor_of(memory: torch.Tensor, ref: Ref) -> torch.Tensor:
    """Return a tensor over the bytes of its storage  # (nbytes,) uint8 -> ref.shape."""
    typed = memory.view(ref.dtype)
    tensor = typed.as_strided(ref.shape, ref.strides, typed.storage_offset() + ref.offset)
    if ref.is_conj:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if ref.is_neg else tensor


class OperationFailed(Exception):
    """An error of an operation of PyTorch; the message names the operation, `__cause__` is the original error."""

    def __init__(self, call: Call, error: Exception) -> None:
        said = next(iter(str(error).splitlines()), "").rstrip(".;: ")
        super().__init__(f"{call.func} failed: {said or type(error).__name__}")


class Program:
    """The calls of one task, ready to run.

    Args:
        calls: the calls, in order.
        numbers: number of each call in the whole pass.
        ends: storages that PyTorch allocates -> number of the last call that uses each, after which its memory is released.
        on_gpu: whether a GPU computes the calls; random calls then get uniform numbers instead of a generator.

    Attributes:
        draws: the random calls.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        numbers: Sequence[int],
        ends: Mapping[Storage, int] | None = None,
        *,
        on_gpu: bool = False,
    ) -> None:
        self.draws = [call for call in calls if draws(call)]
        self._steps = [
            _Step(call, gpu_rule_of(call) if on_gpu and call in self.draws else into_of(call), call in self.draws)
            for call in calls
            if not does_nothing(call)
        ]
        remaining = [number for call, number in zip(calls, numbers, strict=True) if not does_nothing(call)]
        self._dropped = [[storage for storage, end in (ends or {}).items() if end == number] for number in remaining]

    def run(self, memory: dict[Any, torch.Tensor], random: Callable[[Call], Mapping[str, Any]], where: torch.device = HOST) -> None:
        """Compute the calls.

        Args:
            memory: storage -> its bytes, (nbytes,) uint8; a missing storage is allocated by PyTorch and entered.
            random: function that returns the argument from which a random call takes its numbers, by name.
            where: device of the memory.

        Raises:
            OperationFailed: an operation refuses its values, or finds no memory.
        """
        tensors: dict[Ref, torch.Tensor] = {}

        def find(ref: Ref) -> torch.Tensor:
            tensor = tensors.get(ref)
            if tensor is None:
                tensor = tensors[ref] = tensor_of(memory[ref.storage], ref)
            return tensor

        for step, dropped in zip(self._steps, self._dropped, strict=True):
            try:
                step.run(find, memory, random, where)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise  # errors of a card
            except Exception as error:
                raise OperationFailed(step.call, error) from error
            for storage in dropped:
                memory.pop(storage, None)
                for ref in [ref for ref in tensors if ref.storage is storage]:
                    del tensors[ref]


class _Step:
    """One call of a program."""

    def __init__(self, call: Call, into: Into | None, is_random: bool) -> None:
        self.call, self.into, self.is_random = call, into, is_random
        self._has_device = call.kwargs.get("device") is not None  # captured as the CPU
        self._fresh = [(at, ref) for at, ref in enumerate(call.results) if ref is not None and ref.storage in call.made]

    def run(
        self,
        find: Callable[[Ref], torch.Tensor],
        memory: dict[Any, torch.Tensor],
        random: Callable[[Call], Mapping[str, Any]],
        where: torch.device,
    ) -> None:
        call = self.call
        args = [_resolved(value, find) for value in call.args]
        kwargs = {name: _resolved(value, find) for name, value in call.kwargs.items()}
        if self._has_device:
            kwargs["device"] = where
        if self.is_random:
            kwargs.update(random(call))
        if self.into is not None:
            results: list[torch.Tensor | None] = [None] * len(call.results)
            for at, ref in self._fresh:
                if ref.storage not in memory:
                    memory[ref.storage] = torch.empty(ref.storage.nbytes, dtype=torch.uint8, device=where)
                results[at] = find(ref)
            self.into(results, *args, **kwargs)
            return
        value_or_values = call.func(*args, **kwargs)
        leaves = list(value_or_values) if isinstance(value_or_values, tuple | list) else [value_or_values]
        for at, ref in self._fresh:
            value = leaves[at]
            if ref.storage in memory:
                find(ref).copy_(value)
            else:
                memory[ref.storage] = _bytes_of(value, ref)


def generator_of(seed: Sequence[int]) -> torch.Generator:
    """Return a generator whose numbers depend on all numbers in `seed` (splitmix64, Steele et al. 2014, folded over them)."""
    state = 0
    for number in seed:
        state = (state ^ (number & _WORD)) + 0x9E3779B97F4A7C15 & _WORD
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return torch.Generator().manual_seed(state & (_WORD >> 1))


_WORD: Final = (1 << 64) - 1


def _resolved(value: Any, find: Callable[[Ref], torch.Tensor]) -> Any:
    if isinstance(value, Ref):
        return find(value)
    if isinstance(value, list | tuple):
        return type(value)([_resolved(each, find) for each in value])
    return value


def _bytes_of(value: torch.Tensor, ref: Ref) -> torch.Tensor:
    """Return the memory of a result as bytes, in the layout of its reference; it is copied only if PyTorch has chosen other strides."""
    if tuple(value.stride()) == ref.strides and value.storage_offset() == ref.offset and value.untyped_storage().nbytes() == ref.storage.nbytes:
        return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
    memory = torch.empty(ref.storage.nbytes, dtype=torch.uint8, device=value.device)
    tensor_of(memory, ref).copy_(value)
    return memory


@cache
def _out_overload(func: Any) -> Into | None:
    """Return the overload with the same arguments and a given output, if every kind of device has a kernel for it."""
    schema = func._schema
    plain = [(argument.name, str(argument.type)) for argument in schema.arguments]
    if any(argument.alias_info is not None or argument.name == "reduction" for argument in schema.arguments):
        return None  # losses with a reduction give their result the shape of their input before they reduce it
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        outs = [argument.name for argument in overload._schema.arguments if argument.is_out]
        rest = [(argument.name, str(argument.type)) for argument in overload._schema.arguments if not argument.is_out]
        if outs and rest == plain and has_kernel(overload, *KEYS):
            return _with_outs(overload, outs)
    return None


def _with_outs(overload: Any, names: Sequence[str]) -> Into:
    def run(results: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        overload(*args, **kwargs, **dict(zip(names, results, strict=True)))

    return run
