"""The families of models, registered once: config, model, and Hugging Face's names of the weights.

A family's `from_hf` and `to_hf` turn a state dict into arrays under our names and back. They are asked about arrays without memory as well, whose
places are then looked at (`nntask.hf.shadow`), so they may slice, split, transpose, and rename, and `to_hf` may join; neither may look at values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from scheduler import TaskRuntime

from ..errors import UsageError
from ..tiling import ModelTiling
from . import gpt2_names, llama_names
from .checks import check_object, config_values, shown
from .config import GPT2Config
from .gpt2 import GPT2
from .interface import ModelConfig
from .language import LanguageModel
from .llama import Llama
from .llama_config import LlamaConfig

Arrays = dict[str, npt.NDArray[Any]]
Translate = Callable[[Mapping[str, npt.NDArray[Any]], Any], Arrays]


@dataclass(frozen=True, slots=True)
class Family:
    """Models that differ in their numbers only.

    Args:
        config: class of the configs, a `ModelConfig` with ``from_dict``.
        model: called as `build` is.
        from_hf: Hugging Face's state dict and the config -> arrays under our names.
        to_hf: arrays under our names and the config -> Hugging Face's state dict.
    """

    config: Any
    model: Callable[..., LanguageModel]
    from_hf: Translate
    to_hf: Translate


FAMILIES: Final[dict[str, Family]] = {
    GPT2Config.model_type: Family(GPT2Config, GPT2, gpt2_names.from_hf, gpt2_names.to_hf),
    LlamaConfig.model_type: Family(LlamaConfig, Llama, llama_names.from_hf, llama_names.to_hf),
}
"""By the model_type of their configs. A program adds its own here."""

_UNNAMED: Final = GPT2Config.model_type
"""What a config without model_type is: NNTile's files have none."""


def config_from_dict(values: Mapping[str, Any], source: str = "the config") -> ModelConfig:
    """A config from decoded JSON; its model_type says of which family.

    Args:
        source: what the values came from, for messages.

    Raises:
        UsageError: it is no object, of no family, or breaks a rule of its family.
    """
    check_object(values, source, "model_type")
    kind = values.get("model_type", _UNNAMED)
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UsageError(f"model_type in {source} must be one of {', '.join(FAMILIES)}, got {shown(kind)}; use the config of such a model")
    config: ModelConfig = FAMILIES[kind].config.from_dict(values, source)
    return config


def config_from_json(path: str | os.PathLike[str], advice: str = "check --config-path") -> ModelConfig:
    """A config from a file in Hugging Face's format, or from a directory with a ``config.json``.

    Args:
        advice: what to do where it cannot be read.

    Raises:
        DataError: the file cannot be read or is not JSON.
        UsageError: see `config_from_dict`.
    """
    return config_from_dict(*config_values(path, advice))


def family_of(config: ModelConfig) -> Family:
    """The family of one of our configs."""
    return FAMILIES[config.model_type]


def build(
    config: ModelConfig,
    tiling: ModelTiling,
    runtime: TaskRuntime,
    *,
    dtype: npt.DTypeLike = np.float32,
    seed: int | None = 0,
    recompute: bool = False,
    flash: bool = True,
) -> LanguageModel:
    """The model that a config describes, on a runtime.

    Args:
        tiling: tile sizes.
        dtype: element type of parameters and activations.
        seed: of the first weights; None leaves them unwritten, for weights that are loaded.
        recompute: keep only the input of each block and compute the rest again in the backward pass.
        flash: attention without the full score matrix.
    """
    return family_of(config).model(config, tiling, runtime, dtype=dtype, seed=seed, recompute=recompute, flash=flash)
