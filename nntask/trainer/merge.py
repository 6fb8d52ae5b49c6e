"""What a checkpoint stands for as whole weights, read piece by piece; of a run with adapters, what they add is in them.

A weight W (K, N) beside adapters A (r, K) and B (N, r) becomes W + alpha / r * A^T B^T, added in fp32 (fp64 for fp64) to W as the run used it, that
is in the element type of the run, and rounded once, to the type that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from scheduler import InlineRuntime
from scheduler.capture import CapturingRuntime
from tiles import TileTensor

from ..checkpoints import MODEL, STATE, Checkpoint
from ..init import stream_of
from ..lora import adapted, merged, product, wide
from ..models.language import LanguageModel
from ..module import Parameter
from ..tensorfile import TensorFile
from ..tiling import ModelTiling
from .base import base_of
from .recorded import build_model
from .settings import TrainSettings, from_dict

Array = npt.NDArray[Any]


class Weight(Protocol):
    """A weight, or a window of one; a `FileRange` is one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""

    def __getitem__(self, slices: Sequence[slice], /) -> Weight:
        """The part within one slice per axis."""

    def read(self, out: Array, /) -> None:
        """Fill `out`, a C-contiguous array of this shape, converting to its element type."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A weight that is made again from the seed."""

    make: Callable[[], Array]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    window: tuple[slice, ...]

    def __getitem__(self, slices: Sequence[slice]) -> _Made:
        bounds = [each.indices(extent) for each, extent in zip(slices, self.shape, strict=True)]
        window = tuple(slice(of.start + start, of.start + stop) for of, (start, stop, _) in zip(self.window, bounds, strict=True))
        return _Made(self.make, tuple(stop - start for start, stop, _ in bounds), self.dtype, window)

    def read(self, out: Array) -> None:
        out[...] = self.make()[self.window]


@dataclass(frozen=True, slots=True)
class _Merged:
    """A frozen weight in the element type of its run, with left @ right added to it, if there is any."""

    base: Weight
    dtype: np.dtype[Any]
    left: Array | None = None
    right: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def __getitem__(self, slices: Sequence[slice]) -> _Merged:
        if self.left is None or self.right is None:
            return _Merged(self.base[slices], self.dtype)
        rows, columns = slices
        return _Merged(self.base[slices], self.dtype, self.left[rows], self.right[:, columns])

    def read(self, out: Array) -> None:
        values = np.empty(self.shape, self.dtype)
        self.base.read(values)
        if self.left is not None and self.right is not None:
            values = merged(values, self.left, self.right)
        out[...] = values


def weights_of(checkpoint: Checkpoint) -> Mapping[str, Weight]:
    """Every weight of a checkpoint's model, by our names; nothing is read but headers, and what adapters add.

    Raises:
        DataError: the checkpoint is broken, or the weights that its adapters stand beside are not there or are others.
    """
    checkpoint.verify(MODEL)
    with TensorFile(checkpoint.path / MODEL) as file:
        stored = file.ranges()
    base = base_of(checkpoint)
    if base is None:
        return dict(stored)
    model = sketch_of(checkpoint)
    frozen = {name: p for name, p in model.named_parameters().items() if not p.trainable}
    places = base.weights({name: (p.shape, p.dtype) for name, p in frozen.items()})
    below: dict[str, Weight] = {name: where for name, (_, where) in places.items()} if places is not None else _made(checkpoint, frozen)
    found: dict[str, Weight] = {name: _Merged(below[name], p.dtype) for name, p in frozen.items()}
    adapters = adapter_arrays(checkpoint, model)
    for members in adapted(model).values():
        for name, layer in members.items():
            assert layer.lora is not None  # the sketch has its run's adapters
            down, up = (adapters[id(factor)] for factor in (layer.lora.A, layer.lora.B))
            found[f"{name}.weight"] = _Merged(below[f"{name}.weight"], layer.weight.dtype, *product(layer, down, up))
    return found


def sketch_of(checkpoint: Checkpoint) -> LanguageModel:
    """The model of a checkpoint, uncut and without data."""
    return build_model(checkpoint.config, ModelTiling(), CapturingRuntime(1), _settings(checkpoint), fill=False)


def _settings(checkpoint: Checkpoint) -> TrainSettings:
    return from_dict(checkpoint.state["settings"], str(checkpoint.path / STATE))


def adapter_arrays(checkpoint: Checkpoint, model: LanguageModel) -> dict[int, Array]:
    """What the checkpoint holds of the parameters that are learnt, in fp32 (fp64 for fp64), by their id.

    Raises:
        DataError: a tensor is missing or of another shape or type.
    """
    found = {}
    learnt = {name: p for name, p in model.named_parameters().items() if p.trainable}
    with TensorFile(checkpoint.path / MODEL) as file:
        file.check({name: (p.shape, p.dtype) for name, p in learnt.items()}, exact=True)
        ranges = file.ranges()
    for name, parameter in learnt.items():
        values = np.empty(parameter.shape, parameter.dtype)
        ranges[name].read(values)
        found[id(parameter)] = values.astype(wide(parameter.dtype))
    return found


def _made(checkpoint: Checkpoint, parameters: Mapping[str, Parameter]) -> dict[str, Weight]:
    """The first weights of a model, of which one at a time is in memory."""
    seed = _settings(checkpoint).data.seed

    @lru_cache(maxsize=1)
    def make(name: str) -> Array:
        parameter = parameters[name]
        tensor = TileTensor(InlineRuntime(1), parameter.shape, (-1,) * len(parameter.shape), parameter.dtype)
        parameter.init(tensor, seed, stream_of(name))
        return tensor.read()

    return {name: _Made(partial(make, name), p.shape, p.dtype, tuple(slice(0, extent) for extent in p.shape)) for name, p in parameters.items()}
