"""Whole weights of a checkpoint, read piece by piece, with adapters merged in.

A weight W (K, N) with adapters A (r, K) and B (N, r) becomes W + alpha / r * A^T B^T. W is rounded to the element type of the run first, as in
training, unless it is quantised: products decode it to fp32. The sum is computed in fp32 (fp64 for fp64) and rounded once, to the element type of the
export.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler import CapturingRuntime, InlineRuntime
from tiles import TileTensor

from ..adapters.lora import adapted, adapter_factors, is_factor, merge_dtype, merged
from ..checkpoints.store import MODEL, Checkpoint
from ..config.resolution import model_spec
from ..config.settings import TrainSettings
from ..config.stored_run import frozen_base_of, stored_settings
from ..engine.models import build_model
from ..io.block_ranges import BlockRange
from ..io.safetensors_file import TensorFile
from ..io.strided_ranges import Rows
from ..models.language import LanguageModel
from ..nn.initializers import stream_of
from ..nn.module import Parameter
from ..tiling.model_tiling import ModelTiling

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Made:
    """A window of a weight that is drawn from the seed when it is read; `make` returns the whole weight."""

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
    """A frozen weight in the element type of its run, plus left @ right if the weight has an adapter."""

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


Weight = Rows | BlockRange | _Made | _Merged
"""A weight, or a window of one."""


def weights_of(checkpoint: Checkpoint) -> Mapping[str, Weight]:
    """Return our name -> weight, for a checkpoint's model with its adapters merged in; only headers and the adapters are read now.

    Raises:
        DataError: the checkpoint is broken, or its frozen base weights are missing or have changed.
    """
    checkpoint.verify(MODEL)
    with TensorFile(checkpoint.path / MODEL) as file:
        stored = file.ranges()
    base = frozen_base_of(checkpoint)
    if base is None:
        checkpoint.check_size()
        return dict(stored)
    model = capture_of(checkpoint)
    parameters = {name: p for name, p in model.named_parameters().items() if not is_factor(name)}
    frozen = {name: p for name, p in parameters.items() if not p.trainable}
    in_files = base.weights({name: (p.shape, p.dtype) for name, p in parameters.items()}, checkpoint.config)
    below: dict[str, Weight] = {name: where for name, (_, where) in in_files.items()} if in_files is not None else _made(checkpoint, frozen)
    weights: dict[str, Weight] = {name: _frozen(below[name], p) if name in frozen else stored[name] for name, p in parameters.items()}
    adapters = adapter_arrays(checkpoint, model)
    for members in adapted(model).values():
        for name, layer in members.items():
            assert layer.lora is not None  # capture_of adds the adapters of the run
            down, up = (adapters[id(factor)] for factor in (layer.lora.A, layer.lora.B))
            left, right = adapter_factors(layer, down, up)
            weights[f"{name}.weight"] = replace(_frozen(below[f"{name}.weight"], layer.weight), left=left, right=right)
    return weights


def _frozen(base: Weight, parameter: Parameter) -> _Merged:
    """Return a frozen weight in the element type in which products of the run read it."""
    return _Merged(base, np.dtype(np.float32) if isinstance(base, BlockRange) else parameter.dtype)


def capture_of(checkpoint: Checkpoint) -> LanguageModel:
    """Return the model of a checkpoint on a capturing runtime: one tile per tensor, and no data."""
    return build_model(model_spec(_settings(checkpoint), checkpoint.config, ModelTiling()), CapturingRuntime(1), fill=False)


def _settings(checkpoint: Checkpoint) -> TrainSettings:
    return stored_settings(checkpoint)


def adapter_arrays(checkpoint: Checkpoint, model: LanguageModel) -> dict[int, Array]:
    """Return the trained adapters of a checkpoint, in fp32 (fp64 for fp64).

    Args:
        checkpoint: checkpoint with adapters.
        model: its model, from `capture_of`.

    Returns:
        id of a trainable parameter of `model` -> its values.

    Raises:
        DataError: a tensor is missing or has another shape or element type.
    """
    arrays = {}
    learnt = {name: p for name, p in model.named_parameters().items() if p.trainable}
    with TensorFile(checkpoint.path / MODEL) as file:
        file.check({name: (p.shape, p.dtype) for name, p in learnt.items()}, exact=True)
        ranges = file.ranges()
    for name, parameter in learnt.items():
        values = np.empty(parameter.shape, parameter.dtype)
        ranges[name].read(values)
        arrays[id(parameter)] = values.astype(merge_dtype(parameter.dtype))
    return arrays


def _made(checkpoint: Checkpoint, parameters: Mapping[str, Parameter]) -> dict[str, Weight]:
    """Return name -> initial weight, drawn from the run's seed when it is read; one weight at a time is in memory."""
    seed = _settings(checkpoint).data.seed

    @lru_cache(maxsize=1)
    def make(name: str) -> Array:
        parameter = parameters[name]
        tensor = TileTensor(InlineRuntime(1), parameter.shape, (-1,) * len(parameter.shape), parameter.dtype)
        parameter.init(tensor, seed, stream_of(name))
        return tensor.read()

    return {name: _Made(partial(make, name), p.shape, p.dtype, tuple(slice(0, extent) for extent in p.shape)) for name, p in parameters.items()}
