"""The tensors of a module on a runtime: parameters, buffers and constants, one tile each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from nntask import Parameter, UsageError
from nntask.nn import ParameterEdge, initializers
from scheduler import CapturingRuntime, Handle, Runtime, TaskRuntime
from tiles import TileTensor

from .capture import Storage
from .step import numpy_dtype, shape_of


class ModuleState:
    """The tensors of a module, without values.

    Args:
        module: gives names, shapes, element types, and which parameters are learnt.
        runtime: owner of the tensors.

    Attributes:
        parameters: by their first names; tied ones once.
        buffers: likewise.
    """

    def __init__(self, module: torch.nn.Module, runtime: Runtime | CapturingRuntime) -> None:
        self.runtime = runtime
        self.parameters: dict[str, Parameter] = {}
        self.buffers: dict[str, TileTensor] = {}
        self._constants: dict[Storage, TileTensor] = {}
        for name, value in module.named_parameters():
            shape = shape_of(value)
            parameter = self.parameters[name] = Parameter(shape, (-1,) * len(shape), initializers.constant(0.0))
            parameter.allocate(runtime, name, numpy_dtype(value.dtype, name), None)
            if not value.requires_grad:
                parameter.freeze()
        for name, value in module.named_buffers():
            self.buffers[name] = tensor_of_one_tile(runtime, value, name, data_class="parameters")

    def tensors(self) -> dict[str, TileTensor]:
        """Parameters and buffers by name."""
        return {**{name: parameter.data for name, parameter in self.parameters.items()}, **self.buffers}

    def gradients(self, names: Iterable[str]) -> dict[str, Handle]:
        """New gradients of these parameters, which the optimizer will find, by name."""
        found = {}
        for name in names:
            edge = self.parameters[name].edge
            assert isinstance(edge, ParameterEdge)  # a frozen parameter has no gradient
            found[name] = edge.accumulator().handles[0]
        return found

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Overwrite tensors with the values of these names."""
        tensors = self.tensors()
        for name, value in values.items():
            tensors[name].write(array_of(value).reshape(tensors[name].shape))

    def handles(self, storages: Iterable[Storage], inputs: Mapping[str, TileTensor]) -> dict[Storage, Handle]:
        """The handles of storages that exist before a pass; constants get their values here.

        Args:
            storages: storages with roles and names.
            inputs: the inputs of a minibatch, by name.
        """
        tables = {"parameter": {name: parameter.data for name, parameter in self.parameters.items()}, "buffer": self.buffers, "input": inputs}
        found = {}
        for storage in storages:
            tensor = self._constant(storage) if storage.role == "constant" else tables[storage.role][storage.name]
            found[storage] = tensor.handles[0]
        return found

    def _constant(self, storage: Storage) -> TileTensor:
        if storage not in self._constants:
            assert storage.constant is not None
            memory = torch.empty(0, dtype=torch.uint8).set_(storage.constant.untyped_storage())
            tensor = TileTensor(self.runtime, (max(storage.nbytes, 1),), (-1,), np.uint8, kind="persistent", data_class="data", name="constant")
            values = np.zeros(tensor.shape, np.uint8)
            values[: storage.nbytes] = memory.numpy()
            tensor.write(values)
            self._constants[storage] = tensor
        return self._constants[storage]


def gradient_dtype_of(parameter: torch.Tensor, name: str) -> np.dtype[np.generic]:
    """Element type of a parameter's gradient: fp32 where the parameter is narrower."""
    dtype = numpy_dtype(parameter.dtype, name)
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def tensor_of_one_tile(runtime: TaskRuntime, like: torch.Tensor, name: str, *, kind: str = "persistent", data_class: str = "data") -> TileTensor:
    """A tile tensor of one tile with the shape and type of a tensor; a scalar has shape (1,)."""
    shape = shape_of(like)
    return TileTensor(
        runtime,
        shape,
        (-1,) * len(shape),
        numpy_dtype(like.dtype, name),
        kind=kind,  # type: ignore[arg-type]
        data_class=data_class,  # type: ignore[arg-type]
        name=name,
    )


def array_of(value: torch.Tensor) -> npt.NDArray[np.generic]:
    """The values of a tensor as an array of its shape, (1,) for a scalar; shares memory where it can.

    Raises:
        UsageError: the tensor has no values, or is not in CPU memory.
    """
    if value.device.type != "cpu":
        raise UsageError(f"tensors must be in CPU memory, got one on {value.device}; move it with .cpu()")
    value = value.detach().contiguous().reshape(shape_of(value))
    if value.dtype == torch.bfloat16:
        value = value.view(torch.int16)
        return np.asarray(value.numpy()).view(ml_dtypes.bfloat16)
    return np.asarray(value.numpy())
