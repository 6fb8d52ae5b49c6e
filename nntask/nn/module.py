"""Modules: a tree of plain Python objects whose leaves are parameters.

A module's children are its attributes, in the order they were set, and the elements of attributes that are lists. Building a tree fixes shapes
and tiles and takes no memory; `Module.allocate` then gives every parameter its name, its tiles and its first values. A parameter that appears
twice (a tied head) is one parameter, under its first name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler import TaskRuntime
from scheduler.machine import labelled
from tiles import BlockFormat, QuantisedTensor, TileTensor

from ..errors import UsageError
from .autograd import ParameterEdge, Tensor
from .initializers import Init, stream_of


@dataclass(frozen=True, slots=True)
class Blocks:
    """Storage of a quantised matrix.

    Args:
        block_format: format of its blocks.
        is_turned: whether the transpose is stored; the same as in `tiles.QuantisedTensor`.
    """

    block_format: BlockFormat
    is_turned: bool = False


class Parameter(Tensor):
    """A learnt tensor. `freeze` makes it a constant without a gradient.

    Args:
        shape: extents of the whole tensor.
        tile: extents of a tile, -1 for a whole axis.
        init: function that fills the tensor with its first values.

    Attributes:
        trainable: whether the parameter is learnt; False after `freeze`.
    """

    __slots__ = ("extents", "init", "name", "tile", "trainable")

    def __init__(self, shape: Sequence[int], tile: Sequence[int], init: Init) -> None:
        self.extents = tuple(shape)
        self.tile = tuple(tile)
        self.init = init
        self.name = ""
        self.trainable = True
        self.edge = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the whole tensor; known before it has tiles."""
        return self.extents

    def allocate(self, runtime: TaskRuntime, name: str, dtype: npt.DTypeLike, seed: int | None) -> None:
        """Create the tiles and, unless `seed` is None, the tasks that fill them."""
        self.name = name
        self.data = TileTensor(runtime, self.extents, self.tile, dtype, kind="persistent", data_class="parameters", name=name)
        self.edge = ParameterEdge(self.data) if self.trainable else None
        if seed is not None:
            self.init(self.data, seed, stream_of(name))

    def hold(self, blocks: Blocks) -> None:
        """Quantise and freeze the parameter, with new tiles that are not written yet.

        Raises:
            ValueError: the parameter is not a matrix, or a tile is not a whole number of blocks.
        """
        self.data = QuantisedTensor(
            self.data.runtime, self.extents, self.tile, self.data.dtype, blocks.block_format, is_turned=blocks.is_turned, name=self.name
        )
        self.freeze()

    def freeze(self) -> None:
        """Stop learning the parameter from the next forward pass on, and release its gradient."""
        self.trainable = False
        self.edge = None

    @property
    def gradient(self) -> TileTensor | None:
        """The gradient summed so far; None before the first contribution. Set it to None to begin anew."""
        return None if self.edge is None else self.edge.gradient

    @gradient.setter
    def gradient(self, gradient: None) -> None:
        if self.edge is not None:
            self.edge.gradient = gradient

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, shape={self.extents}, tile={self.tile})"


class Module:
    """Base of layers and models; a subclass sets attributes in ``__init__`` and defines ``__call__``."""

    training = True
    names: Mapping[str, str] = {}
    path = ""

    def __init_subclass__(cls, **given: Any) -> None:
        """Label the tasks that a call of the class submits with the path of the module (`scheduler.api.labels`)."""
        super().__init_subclass__(**given)
        if "__call__" in vars(cls):
            cls.__call__ = in_module(vars(cls)["__call__"])  # type: ignore[method-assign]

    def members(self) -> Iterator[tuple[str, Module | Parameter]]:
        """Yield (name, member) of the direct children and parameters, in the order they were set; "h.3" is element 3 of the list h. `names` may
        rename attributes; the name "" leaves the attribute out of the names below it."""
        for attribute, value in vars(self).items():
            name = self.names.get(attribute, attribute)
            if isinstance(value, Module | Parameter):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if isinstance(item, Module | Parameter))

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield (dotted name, module) of this module, "" unless `prefix` is given, and of everything below it."""
        yield prefix, self
        for name, member in self.members():
            if isinstance(member, Module):
                yield from member.named_modules(_dotted(prefix, name))

    def named_parameters(self, prefix: str = "") -> dict[str, Parameter]:
        """Return parameters by dotted name, in order of first appearance; shared ones once."""
        found: dict[str, Parameter] = {}
        self._collect(prefix, found, set())
        return found

    def _collect(self, prefix: str, found: dict[str, Parameter], seen: set[int]) -> None:
        for name, member in self.members():
            if isinstance(member, Module):
                member._collect(_dotted(prefix, name), found, seen)
            elif id(member) not in seen:
                seen.add(id(member))
                found[_dotted(prefix, name)] = member

    def parameters(self) -> list[Parameter]:
        """Return all parameters, shared ones once."""
        return list(self.named_parameters().values())

    @property
    def num_parameters(self) -> int:
        """Number of weights; shared ones count once."""
        return sum(int(np.prod(p.shape)) for p in self.parameters())

    @property
    def num_trained(self) -> int:
        """Number of weights that are learnt; shared ones count once."""
        return sum(int(np.prod(p.shape)) for p in self.parameters() if p.trainable)

    def freeze(self) -> None:
        """Freeze all parameters with `Parameter.freeze`."""
        for parameter in self.parameters():
            parameter.freeze()

    def allocate(self, runtime: TaskRuntime, dtype: npt.DTypeLike, seed: int | None) -> None:
        """Give every module its path, and every parameter its name, tiles and first values.

        Args:
            dtype: element type of the parameters.
            seed: seed of the first values; None leaves them unwritten, for a model whose weights are loaded.
        """
        for path, module in self.named_modules():
            module.path = path
        for name, parameter in self.named_parameters().items():
            parameter.allocate(runtime, name, dtype, seed)

    def fill(self, names: Iterable[str], seed: int) -> None:
        """Overwrite some parameters with the first values that `allocate` gives with this seed; they must have tiles."""
        parameters = self.named_parameters()
        for name in names:
            parameters[name].init(parameters[name].data, seed, stream_of(name))

    def tensors(self) -> dict[str, TileTensor]:
        """Return the parameters' tiles by name."""
        return {name: parameter.data for name, parameter in self.named_parameters().items()}

    def trained_tensors(self) -> dict[str, TileTensor]:
        """Return the tiles of the parameters that are learnt, by name; for checkpoints."""
        return {name: parameter.data for name, parameter in self.named_parameters().items() if parameter.trainable}

    def frozen_tensors(self) -> dict[str, TileTensor]:
        """Return the tiles of the frozen parameters, by name."""
        return {name: parameter.data for name, parameter in self.named_parameters().items() if not parameter.trainable}

    def load(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Overwrite every parameter; nothing is written unless all names and shapes fit.

        Args:
            arrays: name -> values, names as in `named_parameters`.

        Raises:
            UsageError: names or shapes differ.
        """
        tensors = self.tensors()
        if wrong := sorted(set(tensors) ^ set(arrays)):
            where = "the model" if wrong[0] in tensors else "the weights"
            raise UsageError(f"weights must have the model's {len(tensors)} names, and only {where} have {wrong[0]}", "use weights of this model")
        for name, tensor in tensors.items():
            if merged_shape(arrays[name].shape, len(tensor.shape)) != tensor.shape:
                raise UsageError(
                    f"{name} has shape {tensor.shape}, got weights of shape {arrays[name].shape}", "use the config they were trained with"
                )
        for name, tensor in tensors.items():
            tensor.write(arrays[name].reshape(tensor.shape))

    def train(self, mode: bool = True) -> None:
        """Turn dropout on (or off) from the next forward pass on; recorded steps do not change."""
        for _, module in self.named_modules():
            module.training = mode

    def eval(self) -> None:
        """Turn dropout off from the next forward pass on."""
        self.train(False)

    def zero_grad(self) -> None:
        """Drop all gradients; this frees their memory and clears nothing."""
        for parameter in self.parameters():
            parameter.gradient = None


def in_module(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a module class that labels its tasks with the path of the module; every ``__call__`` does without asking."""

    @wraps(method)
    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        with labelled(path=self.path):
            return method(self, *args, **kwargs)

    return call


def _dotted(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def merged_shape(shape: Sequence[int], num_axes: int) -> tuple[int, ...]:
    """Return a shape with its first axes merged if it has more than `num_axes`: (H, D, ..), rows by head, becomes (H*D, ..)."""
    extra = max(len(shape) - num_axes, 0)
    return (prod(shape[: extra + 1]), *shape[extra + 1 :]) if shape else ()
