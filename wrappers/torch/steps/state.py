"""The tensors of a module on a runtime: parameters, buffers and constants, one tile each except large parameters (`cuts`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from nntask import Parameter, UsageError
from nntask.hardware import give_back_freed
from nntask.nn import ParameterEdge, initializers
from scheduler import CapturingRuntime, Handle, Runtime, SchedulerError, TaskRuntime
from tiles import TileTensor

from ..capture.recorder import whole
from ..guards.away import bring_back, send_away
from ..tasks.calls import Storage, TileKey
from ..tasks.devices import as_tensor
from ..tasks.step import numpy_dtype, shape_of
from .modules import first_values

_WIDTH: Final = 1024
"""Number of 8-byte words in a row of `fingerprint`."""
_WEIGHTS: Final = np.random.default_rng(1).integers(1 << 63, size=1024, dtype=np.uint64) | np.uint64(1)
"""Factors of rows, which make swapped rows change the fingerprint."""
FREED_NBYTES: Final = 32 << 20
"""Bytes of values after which the memory that they occupied is returned to the system while a session takes them over."""


class ModuleState:
    """The tensors of a module, without values.

    Args:
        module: module with the names, shapes, element types and `requires_grad` of the tensors.
        runtime: owner of the tensors.
        tiles: (rows, rows of a tile) of each parameter that is cut along its first axis, by name.

    Attributes:
        parameters: parameters by their first names; tied ones once.
        buffers: buffers by their first names; tied ones once.
    """

    def __init__(self, module: torch.nn.Module, runtime: Runtime | CapturingRuntime, tiles: Mapping[str, tuple[int, int]]) -> None:
        self.runtime, self.tiles = runtime, tiles
        self.parameters: dict[str, Parameter] = {}
        self.buffers: dict[str, TileTensor] = {}
        self._constants: WeakKeyDictionary[Storage, _Constant] = WeakKeyDictionary()  # dropping a pass drops its constants
        self._by_path: dict[str, _Constant] = {}
        tensors = first_values(module)
        for name, value in tensors.items():
            if not isinstance(value, torch.nn.Parameter):
                continue
            shape = shape_of(value)
            rows = tiles[name][1] if name in tiles else -1
            parameter = self.parameters[name] = Parameter(shape, (rows, *(-1,) * (len(shape) - 1)), initializers.constant(0.0))
            parameter.allocate(runtime, name, numpy_dtype(value.dtype, name), None)
            if not value.requires_grad:
                parameter.freeze()
        for name, value in tensors.items():
            if not isinstance(value, torch.nn.Parameter):
                self.buffers[name] = tensor_of_one_tile(runtime, value, name, data_class="parameters")

    def tensors(self) -> dict[str, TileTensor]:
        """Return parameters and buffers by name."""
        return {**{name: parameter.data for name, parameter in self.parameters.items()}, **self.buffers}

    def gradients(self, tiles: Iterable[TileKey]) -> dict[TileKey, Handle]:
        """Return new gradients of parameters, or of their pieces, which the optimizer will read."""
        handles = {}
        for name, piece in tiles:
            edge = self.parameters[name].edge
            assert isinstance(edge, ParameterEdge)  # a frozen parameter has no gradient
            handles[name, piece] = edge.accumulator().handles[piece]
        return handles

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the tensors with the names in `values`."""
        tensors = self.tensors()
        for name, value in values.items():
            tensors[name].write(array_of(value).reshape(tensors[name].shape))

    @contextmanager
    def take(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Take over the values of the tensors in `values`; each tensor is sent away after its values are copied, so that memory holds them once.

        If that fails, or the block does, the tensors get their values back, unless the runtime has lost them.
        """
        tensors, taken, freed = self.tensors(), list[str](), 0
        try:
            for name, value in values.items():
                self.write({name: value})
                taken.append(name)
                send_away(value)
                freed += tensors[name].nbytes
                if freed >= FREED_NBYTES:  # the budget does not count memory that the allocator keeps
                    give_back_freed()
                    freed = 0
            give_back_freed()
            yield
        except BaseException:
            with suppress(SchedulerError):
                for name in taken:
                    bring_back(values[name], tensor_from(tensors[name].read(), values[name]))
            raise

    def handles(self, storages: Iterable[Storage], inputs: Mapping[str, TileTensor]) -> dict[Storage, Handle]:
        """Return the handles of storages that exist before a pass; new constants have no values before `fill_constants`.

        Args:
            storages: storages with roles and names.
            inputs: the inputs of a minibatch, by name.
        """
        tables = {"parameter": {name: parameter.data for name, parameter in self.parameters.items()}, "buffer": self.buffers, "input": inputs}
        handles = {}
        for storage in storages:
            tensor = self._constant(storage).tile if storage.role == "constant" else tables[storage.role][storage.name]
            handles[storage] = tensor.handles[storage.piece]
        return handles

    def _constant(self, storage: Storage) -> _Constant:
        """Return the tile of a constant, shared by all passes that reach memory of one size by the same path."""
        if storage not in self._constants:
            constant = self._by_path.get(storage.name) if storage.name else None
            if constant is None or constant.nbytes != storage.nbytes:
                tile = TileTensor(self.runtime, (max(storage.nbytes, 1),), (-1,), np.uint8, kind="persistent", data_class="data", name="constant")
                constant = _Constant(tile, storage.nbytes)
            if storage.name:
                self._by_path[storage.name] = constant
            self._constants[storage] = constant
        return self._constants[storage]

    def fill_constants(self, storages: Iterable[Storage]) -> None:
        """Give the constants among `storages` that have no values yet those of the program's tensors."""
        for storage in storages:
            if storage.role == "constant" and not (constant := self._constant(storage)).is_filled:
                assert storage.tensor is not None
                constant.write(whole(storage.tensor))

    def refresh(self, storage: Storage, now: torch.Tensor) -> None:
        """Update a constant to the current values of its tensor, if they have changed.

        Args:
            storage: the constant.
            now: the current tensor in whose memory the constant lies.
        """
        constant, memory = self._constant(storage), whole(now)
        stamp = _stamp_of(memory)
        if constant.stamp != stamp:
            constant.write(memory)
            constant.stamp = stamp

    def constant_value(self, storage: Storage) -> torch.Tensor:
        """Return the bytes of a constant that passes have changed  # (nbytes,) uint8."""
        return torch.from_numpy(self._constants[storage].tile.read())[: storage.nbytes]

    def forget_stamp(self, storage: Storage) -> None:
        """Note that no tensor of the program is known to have the values of a constant."""
        self._constants[storage].stamp = None

    def note_constant(self, storage: Storage, now: torch.Tensor) -> None:
        """Note that a tensor of the program has the values of a constant."""
        self._constants[storage].stamp = _stamp_of(whole(now))


@dataclass
class _Constant:
    """A constant on the runtime.

    Attributes:
        tile: bytes of the constant; at least one.
        nbytes: size of the memory.
        stamp: memory of the program from which the tile was filled, and its fingerprint; None if no tensor is known to have its values.
        is_filled: whether the tile has values.
    """

    tile: TileTensor
    nbytes: int
    stamp: tuple[int, int, int] | None = None
    is_filled: bool = False

    def write(self, memory: torch.Tensor) -> None:
        """Overwrite the tile  # (nbytes,) uint8."""
        values = np.zeros(self.tile.shape, np.uint8)
        values[: self.nbytes] = memory.numpy()
        self.tile.write(values)
        self.is_filled = True


def _stamp_of(memory: torch.Tensor) -> tuple[int, int, int]:
    return memory.data_ptr(), memory.numel(), fingerprint(memory)


def fingerprint(memory: torch.Tensor) -> int:
    """Return a hash of the sums over rows and columns of a table of all bytes, which changes whenever a few bytes change  # (nbytes,) uint8."""
    values = memory.numpy()
    rest = len(values) % (8 * _WIDTH)
    head = values[: len(values) - rest].view(np.uint64).reshape(-1, _WIDTH) if len(values) >= 8 * _WIDTH else np.zeros((0, _WIDTH), np.uint64)
    result = hash(values[len(values) - rest :].tobytes())
    for first in range(0, len(head), len(_WEIGHTS)):
        rows = head[first : first + len(_WEIGHTS)]
        result = hash((result, (rows * _WEIGHTS[: len(rows), None]).sum(0).tobytes(), rows.sum(1).tobytes()))
    return result


def gradient_dtype_of(parameter: torch.Tensor, name: str) -> np.dtype[np.generic]:
    """Return the element type of a parameter's gradient: fp32 if the parameter is narrower, else the parameter's type."""
    dtype = numpy_dtype(parameter.dtype, name)
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def tensor_of_one_tile(runtime: TaskRuntime, like: torch.Tensor, name: str, *, kind: str = "persistent", data_class: str = "data") -> TileTensor:
    """Return a tensor of one tile with the shape and type of `like`; a scalar has shape (1,), complex numbers have a further axis of two parts."""
    shape = (*like.shape, 2) if like.is_complex() else shape_of(like)
    return TileTensor(
        runtime,
        shape,
        (-1,) * len(shape),
        numpy_dtype(like.dtype.to_real() if like.is_complex() else like.dtype, name),
        kind=kind,  # type: ignore[arg-type]
        data_class=data_class,  # type: ignore[arg-type]
        name=name,
    )


def array_of(value: torch.Tensor) -> npt.NDArray[np.generic]:
    """Return the values of a tensor as an array of its shape, (1,) for a scalar; it shares memory if possible.

    Raises:
        UsageError: the tensor has no values, or is not in CPU memory.
    """
    if value.device.type != "cpu":
        raise UsageError(f"tensors must be in CPU memory, got one on {value.device}", "move it with .cpu()")
    value = value.detach().resolve_conj().resolve_neg().contiguous()
    value = torch.view_as_real(value) if value.is_complex() else value.reshape(shape_of(value))
    if value.dtype == torch.bfloat16:
        value = value.view(torch.int16)
        return np.asarray(value.numpy()).view(ml_dtypes.bfloat16)
    return np.asarray(value.numpy())


def tensor_from(array: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    """Return the values of a tile as a tensor of the shape and type of `like`; it shares memory."""
    if like.is_complex():
        return torch.view_as_complex(as_tensor(array, (*like.shape, 2)))
    return as_tensor(array, like.shape)
