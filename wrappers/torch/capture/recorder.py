"""The dispatch mode that records the calls of a pass: everything that reaches PyTorch's dispatcher below autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from nntask import UsageError

from ..tasks.calls import Call, Guard, HostTensors, Ref, Role, Storage, aten, is_recomputing, refs_in
from .refusals import line_of_program
from .values import HostValues, origin_of_values, value_bytes

HOST_INPUT: Final = "on the host "
"""Prefix of the names of inputs that the host computes."""


class CallRecorder(TorchDispatchMode):  # type: ignore[misc]
    """Recorder of the calls that allocate or change memory.

    Args:
        values: values of tensors, for decisions that need them; None if there are none.
        on_gpus: whether GPUs compute the pass.
        paths: id of a tensor that is not the module's own -> path to it.

    Attributes:
        calls: calls so far.
        named: storages that were entered by role and name.
        guards, host: values that were read, and tensors that the host computes; they become fields of `Capture`.
    """

    def __init__(self, values: HostValues | None = None, paths: Mapping[int, str] | None = None, *, on_gpus: bool = False) -> None:
        super().__init__()
        self._on_gpus = on_gpus
        self.calls: list[Call] = []
        self.named: list[Storage] = []
        self.guards: dict[tuple[Ref, bytes], Guard] = {}
        self.host: list[HostTensors] = []
        self._unseeded: set[bytes] = set()
        self._values, self._paths = values, paths or {}
        self._storages: dict[int, Storage] = {}
        self._draws: dict[bytes, int] = {}
        self._learnable: dict[int, torch.Tensor] = {}
        self._dense: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of a sparse tensor -> (the tensor, its dense form)
        self._alive: list[Any] = []  # keeps storages alive; otherwise another one could get the same address

    def enter(self, tensor: torch.Tensor, role: Role, name: str) -> Storage:
        """Enter memory that exists before the pass, and return its storage."""
        self.named.append(self._enter(tensor, role, name))
        return self.named[-1]

    def learnable(self) -> list[torch.Tensor]:
        """Return the learnable tensors of the program, outside the module, that the pass has used."""
        return list(self._learnable.values())

    def known(self, tensor: torch.Tensor) -> Storage | None:
        """Return the storage of a tensor that the pass has used; None for other tensors."""
        return self._storages.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None

    def is_watched(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the program may change between passes: the pass has used it, or the state of Python has it."""
        return id(tensor) in self._paths or self.known(tensor) is not None

    def is_changed(self, copy: torch.Tensor) -> bool:
        """Return whether the pass has changed a copy of an input after making it."""
        storage = self.known(copy)
        return any(storage in call.writes and storage not in call.made for call in self.calls)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy if its memory exists before the pass, such as an input that a module returns."""
        if tensor.layout != torch.strided or self.ref(tensor).storage.role == "temporary":
            return tensor
        return tensor.clone()

    def ref(self, tensor: torch.Tensor) -> Ref:
        """Return the reference of a tensor; memory that no call has allocated is a constant of the model."""
        if tensor.layout != torch.strided:
            raise UsageError(f"tensors must be dense, got one of layout {tensor.layout}", "use dense tensors in the model")
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is None:
            storage = self._enter(tensor, "temporary" if isinstance(tensor, FakeTensor) else "constant", self._paths.get(id(tensor), ""))
        layout = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return Ref(storage, tensor.dtype, *layout, tensor.is_conj(), tensor.is_neg())

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the value of a tensor, and make it a guard of the pass.

        Raises:
            UsageError: values are not available.
        """
        ref, where = self.ref(tensor), line_of_program()
        if self._values is None:
            raise UsageError(
                f"{where} needs a value of a tensor while the step is captured, and here no values are known",
                "compute with tensors there (torch.where, masks), or move it out of the model",
            )
        with _disable_current_modes():
            value = self._values.tensor(self.calls, ref)
            self._guard(ref, value_bytes(value), where)
        return value

    def _guard(self, ref: Ref, expected: bytes, where: str) -> None:
        origin = origin_of_values(self.calls, {ref.storage})
        self._check_random(origin.is_random, where)
        if origin.leaves or origin.is_random:
            self.guards.setdefault((ref, expected), Guard(origin.calls, ref, expected, where))

    def _check_random(self, is_random: bool, where: str) -> None:
        """Refuse decisions by random numbers if the host would draw other numbers.

        Raises:
            UsageError: GPUs compute the pass.
        """
        if is_random and self._on_gpus:
            raise UsageError(f"{where} decides by random numbers, and GPUs draw others than the host", "decide by Python's random, or use ngpu=0")

    def _enter(self, tensor: torch.Tensor, role: Role, name: str) -> Storage:
        untyped = tensor.untyped_storage()
        self._alive.append(untyped)
        is_backward = torch._C._current_autograd_node() is not None
        storage = Storage(untyped.nbytes(), role, name, is_again=is_recomputing(), is_backward=is_backward)
        if role == "constant":
            storage = replace(storage, tensor=tensor)
        self._storages[untyped._cdata] = storage
        return storage

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor at the same place in memory as a tensor of the program, so that views of it refer to the same storage."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.requires_grad and tensor.is_leaf:
            self._learnable[id(tensor)] = tensor
        if tensor.layout != torch.strided:  # a constant in another layout
            with _disable_current_modes():
                dense = self._dense.setdefault(id(tensor), (tensor, tensor.to_dense()))[1]
            if self.known(dense) is None:
                storage = replace(self._enter(dense, "constant", self._paths.get(id(tensor), "")), tensor=tensor)
                self._storages[dense.untyped_storage()._cdata] = storage
            tensor = dense
        storage = self.ref(tensor).storage
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if mode is None:
            return tensor
        fake = mode.from_tensor(tensor)
        fake.item_memo = None  # PyTorch 2.15 keeps the value of a scalar there, and item() would read it without a guard
        self._alive.append(fake)
        self._storages.setdefault(fake.untyped_storage()._cdata, storage)
        return fake

    def begin(self) -> None:
        """Note the state of PyTorch's generator before the pass; numbers that do not derive from it come from a seed of the program."""
        self._unseeded.add(_generator_state())

    def _draw(self) -> int:
        number = number_of_draw(self._draws)
        self._unseeded.add(_generator_state())
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        args, kwargs = over_tensors(self.fake_of, args), over_tensors(self.fake_of, kwargs)
        given, named = over_tensors(self.ref, args), over_tensors(self.ref, kwargs)
        if func is aten.as_strided.default and torch._C._current_autograd_node() is None:
            self._check_layout(given[0])
        if torch.Tag.nondeterministic_seeded in func.tags and (
            kwargs.get("generator") is not None or _generator_state() not in self._unseeded  # the program has seeded the generator, or set its state
        ):
            return self._drawn(func, args, kwargs)
        try:
            result = _run_fake(func, args, kwargs)
        except DataDependentOutputException:
            if self._values is None:
                raise
            return self._read(func, args, kwargs)
        except DynamicOutputShapeException:
            if self._values is None:
                raise
            return self._computed(func, given, named)
        return self._note(func, given, named, result)

    def _check_layout(self, ref: Ref) -> None:
        """Check that the memory layout of a result is known, since PyTorch may predict another layout than it computes.

        Raises:
            UsageError: the result was computed from a strided tensor.
        """
        maker = next((call for call in self.calls if ref.storage in call.made), None)
        first_result = None if maker is None else maker.results[0]
        if maker is not None and maker.func is aten.constant_pad_nd.default and first_result is not None and len(first_result.shape) < 4:
            return  # always contiguous: only images keep another memory format
        refs = [] if maker is None else [each for each in tree_leaves((maker.args, dict(maker.kwargs))) if isinstance(each, Ref)]
        if any(each.shape and each.strides != tuple(torch.empty(each.shape, device="meta").stride()) for each in refs):
            raise UsageError(
                f"{line_of_program()} takes a strided view (as_strided) of the result of {maker.func if maker else ''}, whose layout in memory is "
                "not known beforehand",
                "call contiguous() on its inputs",
            )

    def _note(self, func: Any, given: Any, named: Any, result: Any) -> Any:
        """Record a call with its results."""
        new_storages = set()
        results: list[Ref | None] = []
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                is_new = leaf.layout == torch.strided and leaf.untyped_storage()._cdata not in self._storages
                results.append(self.ref(leaf))
                if is_new:
                    new_storages.add(results[-1].storage)  # type: ignore[union-attr]
            else:
                results.append(None)
        call = Call.of(func, given, results, kwargs=named, made=new_storages)
        if call.writes:
            self.calls.append(replace(call, draw=self._draw()) if call.is_random else call)
        return result

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation that gives Python a value (`item`, `equal`)."""
        values = tree_map_only(torch.Tensor, self.value, (args, kwargs))
        with _disable_current_modes():
            return func(*values[0], **values[1])

    def _computed(self, func: Any, given: Any, named: Any) -> Any:
        """Return the results of an operation whose shapes depend on values: constants that the host computes before each step."""
        assert self._values is not None
        with _disable_current_modes():
            results = self._values.results(self.calls, func, given, named)
            results = [each.contiguous().clone() for each in results]
        origin = origin_of_values(self.calls, (ref.storage for ref in refs_in((*given, *named.values()))))
        self._check_random(origin.is_random, line_of_program())
        if origin.leaves or origin.is_random:
            storages = tuple(self.enter(each, "input", f"{HOST_INPUT}{len(self.host)}.{number}") for number, each in enumerate(results))
            shapes = tuple(tuple(each.shape) for each in results)
            self.host.append(HostTensors(origin.calls, func, tuple(given), named, storages, shapes, line_of_program()))
            with _disable_current_modes():
                self._values.enter(storages, results)
            fakes = [self.fake_of(each) for each in results]
            results = [self._note(aten.clone.default, (self.ref(fake),), {}, aten.clone.default(fake)) for fake in fakes]
        return results[0] if len(results) == 1 else tuple(results)

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a random operation with a seeded generator, or with the program's own: its current numbers, as constants.

        A generator that advances is state of Python, whose change makes the pass run in the next step.
        """
        changes = [args[number] for number, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if any(tensor is each for each in changes):
                with _disable_current_modes():
                    return torch.empty(tensor.shape, dtype=tensor.dtype)
            return self.value(tensor) if isinstance(tensor, FakeTensor) else tensor

        values = tree_map_only(torch.Tensor, real, (args, kwargs))
        with _disable_current_modes():
            result = func(*values[0], **values[1])
        if changes:
            return aten.copy_.default(changes[0], result)
        return result


def _generator_state() -> bytes:
    with _disable_current_modes():
        return bytes(torch.random.get_rng_state().numpy())


def number_of_draw(numbers: dict[bytes, int]) -> int:
    """Return the number of a draw, which depends on the state of PyTorch's generator, and advance the generator by one number.

    Args:
        numbers: numbers of the draws so far, by state of the generator; the draw is added.
    """
    state = _generator_state()
    with _disable_current_modes():
        torch.rand(())
    return numbers.setdefault(state, len(numbers))


def over_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply a function to the tensors in an operation's arguments, which contain no containers but lists; faster than PyTorch's for any tree."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([over_tensors(function, each) for each in value])
    return {name: over_tensors(function, each) for name, each in value.items()} if isinstance(value, dict) else value


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor's memory, or for a sparse tensor that of its dense form  # (nbytes,) uint8."""
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return torch.empty(0, dtype=torch.uint8).set_(dense.untyped_storage())


def _run_fake(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the results of an operation as fake tensors; if PyTorch infers shapes for some element types only, the same rule serves all."""
    if func is aten._grouped_mm.default and args[0].dtype not in (torch.bfloat16, torch.float16):
        left, right = args[0], args[1]
        offsets = args[2] if len(args) > 2 else kwargs.get("offs")
        if left.dim() == 2 and right.dim() == 2:  # (M, K) @ (K, N), K in groups -> (G, M, N)
            return left.new_empty((offsets.shape[0], left.shape[0], right.shape[1]))
        return left.new_empty((*left.shape[:-1], right.shape[-1]))  # (M, K) @ (G, K, N), M in groups -> (M, N)
    result = func(*args, **kwargs)
    if func is aten._scaled_dot_product_flash_attention_for_cpu.default and result[0].dtype == torch.float64:
        return result[0], result[1].to(torch.float64)  # PyTorch 2.12 predicts fp32 sums, and computes fp64
    return result
