"""Models on a runtime: new ones, and those of checkpoints with their adapters and frozen weights."""

from __future__ import annotations

import shlex
from typing import Any, Final

import ml_dtypes
import numpy as np

from scheduler import TaskRuntime

from ..adapters.frozen_base import FrozenBase
from ..adapters.lora import add_adapters
from ..checkpoints.store import Checkpoint
from ..config.resolution import dtype_of
from ..config.run_config import ModelSpec
from ..config.stored_run import frozen_base_of, stored_settings
from ..errors import UsageError
from ..models.language import LanguageModel
from ..models.registry import build

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "fp32": np.dtype(np.float32),
    "tf32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp64": np.dtype(np.float64),
}


def build_model(spec: ModelSpec, runtime: TaskRuntime, *, fill: bool = True) -> LanguageModel:
    """Build a model, with adapters if the spec has some.

    Args:
        fill: whether to emit the tasks that write the first weights; False for weights that are loaded. Adapters are always written.
    """
    model = build(
        spec.config,
        spec.tiling,
        runtime,
        dtype=DTYPES[spec.dtype],
        seed=spec.seed if fill else None,
        flash=spec.flash,
        library=spec.library,
    )
    if spec.adapters is not None:
        add_adapters(model, spec.adapters, seed=spec.seed)
    return model


def load_model(checkpoint: Checkpoint, spec: ModelSpec, runtime: TaskRuntime, *, read: bool = True) -> LanguageModel:
    """Return the model of a checkpoint, with its adapters and their frozen weights, for inference.

    Args:
        spec: specification of its run's model, whose element type may be another.
        read: whether the checkpoint's own weights are read.

    Raises:
        DataError: the checkpoint is broken, or the frozen weights of its adapters are missing or changed.
        UsageError: `spec` has a finer element type than the one in which the adapters were trained.
    """
    frozen_base, stored = frozen_base_of(checkpoint), stored_settings(checkpoint)
    trained, asked = DTYPES[dtype_of(stored.model.dtype)], DTYPES[spec.dtype]
    if frozen_base is not None and asked.itemsize > trained.itemsize:
        raise UsageError(
            f"{checkpoint.path} holds adapters for weights in {trained.name}, and reading these in {asked.name} changes their values",
            f"drop --dtype, or use a whole model: nntask export {shlex.quote(str(checkpoint.path))} DIR --merge",
        )
    if frozen_base is None:
        checkpoint.check_size()
        model = build_model(spec, runtime, fill=False)
    else:
        model = model_beside(frozen_base, spec, runtime)
    if read:
        checkpoint.load(model.trained_tensors(), exact=False)  # a text may be scored in another type than it was trained in
    return model


def model_beside(frozen_base: FrozenBase, spec: ModelSpec, runtime: TaskRuntime) -> LanguageModel:
    """Return a model with untrained adapters and the frozen weights of `frozen_base`, which are read at their first use."""
    model = build_model(spec, runtime, fill=frozen_base.kind == "seed")
    model.fill(frozen_base.attach(model), spec.seed)
    return model
