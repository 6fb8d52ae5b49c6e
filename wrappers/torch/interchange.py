"""Exchange with PyTorch: tile tensors as torch tensors and back, through DLPack; modules of transformers as models, and models or runs as modules.

torch is imported inside the functions, so importing this module does not need it. A tile is borrowed without a copy, as DLPack does; a whole tensor
is copied once, because its tiles are not contiguous.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nntask import DataError, ModelTiling, UsageError
from nntask.adapters import merged_arrays
from nntask.checkpoints import find_checkpoint
from nntask.data import TOKENIZER_FILE, Special, load_tokenizer
from nntask.export import weights_of
from nntask.io import first_not_finite
from nntask.models import FAMILIES, LanguageModel, build
from scheduler import Handle, Mode, TaskRuntime
from tiles import TileTensor

if TYPE_CHECKING:
    import torch

_BF16 = np.dtype(ml_dtypes.bfloat16)
_AUTO: Final = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classify": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
"""Objective -> transformers' class of modules with its head."""


@contextmanager
def lend_tile(runtime: TaskRuntime, handle: Handle, mode: Mode = "R") -> Iterator[torch.Tensor]:
    """Wait for a tile and borrow it as a torch tensor over the same memory: ``with lend_tile(runtime, x[0, 0], "RW") as tile``.

    Args:
        runtime: the tile's runtime.
        handle: the tile.
        mode: R, W or RW. A tile borrowed with R must not be written; torch cannot enforce that.
    """
    with runtime.acquire(handle, mode) as view:
        yield _as_torch(view)


def to_tensor(tensor: TileTensor) -> torch.Tensor:
    """Return the whole tile tensor as a torch tensor of the same shape and element type, after the tasks that write it."""
    return _as_torch(tensor.read())


def from_tensor(values: torch.Tensor, tensor: TileTensor) -> None:
    """Overwrite a tile tensor with a torch tensor of its shape, converting to its element type.

    Raises:
        UsageError: the shapes differ.
    """
    array = _as_numpy(values)
    if array.shape != tensor.shape:
        raise UsageError(f"{tensor.name or 'the tile tensor'} has shape {tensor.shape}, got a torch tensor of shape {array.shape}", "make them equal")
    tensor.write(array)


def from_torch(module: Any, runtime: TaskRuntime, tiling: ModelTiling | None = None, *, dtype: npt.DTypeLike = np.float32) -> LanguageModel:
    """Return a model on a runtime with a copy of the weights of a transformers module, whose family must be one of nntask's.

    Args:
        module: the module.
        runtime: the runtime.
        tiling: tile sizes; None for whole tensors.
        dtype: element type of parameters and activations.

    Raises:
        UsageError: the module is of another family, or its config breaks a rule.
        DataError: a weight is missing, has another shape than the config says, or is not finite.
    """
    values = module.config.to_dict() if hasattr(module, "config") and hasattr(module.config, "to_dict") else {}
    kind = values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        known, what = ", ".join(FAMILIES), type(module).__name__ if kind is None else f"model_type {kind!r}"
        raise UsageError(f"from_torch takes modules of transformers of the families {known}, got {what}", "use one of these")
    config = family.config.from_dict({**values, "architectures": [type(module).__name__]}, f"the config of {type(module).__name__}")
    model = build(config, tiling or ModelTiling(), runtime, dtype=dtype, seed=None)
    state = {name: _as_numpy(value) for name, value in module.state_dict().items()}
    for name, array in state.items():
        if (bad := first_not_finite(array)) is not None:
            raise DataError(f"{name} holds {bad}, and weights must be finite", "use a module of a training that did not diverge")
    model.load(config.names.from_hf(state, config))
    return model


def to_torch(source: LanguageModel | str | os.PathLike[str]) -> Any:
    """Return a transformers module in evaluation mode from a model, a run directory or a checkpoint, in its element type; adapters are merged.

    Raises:
        DataError: there is no checkpoint, or it is broken.
    """
    import transformers

    if isinstance(source, LanguageModel):
        config, arrays, ids = source.config, merged_arrays(source), Special()
    else:
        checkpoint = find_checkpoint(source)
        config, arrays = checkpoint.config, {}
        ids = load_tokenizer(checkpoint.path).special if (checkpoint.path / TOKENIZER_FILE).is_file() else Special()
        for name, weight in weights_of(checkpoint).items():
            arrays[name] = np.empty(weight.shape, weight.dtype)
            weight.read(arrays[name])
    values = config.to_dict()
    state = {name: _as_torch(np.ascontiguousarray(array)) for name, array in config.names.to_module(arrays, config).items()}
    module = getattr(transformers, _AUTO[config.objective]).from_config(
        transformers.AutoConfig.for_model(**json.loads(json.dumps(values)), **ids.to_dict()), dtype=next(iter(state.values())).dtype
    )
    module.load_state_dict(state)
    return module.eval()


def _as_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a torch tensor over the memory of an array."""
    import torch

    if array.dtype == _BF16:  # not an element type of NumPy's DLPack
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _as_numpy(values: torch.Tensor) -> npt.NDArray[Any]:
    """Return an array over the memory of a torch tensor on the CPU; a copy of a tensor on another device."""
    import torch

    values = values.detach().cpu()
    if values.dtype == torch.bfloat16:
        found: npt.NDArray[Any] = np.from_dlpack(values.contiguous().view(torch.int16)).view(_BF16)
        return found
    return np.from_dlpack(values)
