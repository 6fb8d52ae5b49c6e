"""The registry of model families: class of configs, class of models, and configs of usual sizes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from scheduler import TaskRuntime

from ..errors import UsageError
from ..tiling.model_tiling import ModelTiling
from . import bert, gemma, gpt2, gpt_neo, gpt_neox, llama, mistral, mlp_mixer, opt, phi, phi3, qwen, t5
from .config_checks import check_object, config_values, shown
from .gpt2 import GPT2, GPT2Config
from .interface import ModelConfig
from .language import LanguageModel
from .llama import Llama, LlamaConfig
from .transformer import Transformer


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models, which differ only in the numbers of their configs.

    Args:
        config: class of the configs, a `ModelConfig` with ``from_dict``.
        model: class of the models, with the arguments of `build`.
        presets: name -> config of usual sizes.
    """

    config: Any
    model: Callable[..., LanguageModel] = Transformer
    presets: Mapping[str, ModelConfig] = field(default_factory=dict)


FAMILIES: Final[dict[str, Family]] = {
    GPT2Config.model_type: Family(GPT2Config, GPT2, gpt2.PRESETS),
    LlamaConfig.model_type: Family(LlamaConfig, Llama, llama.PRESETS),
    mistral.MistralConfig.model_type: Family(mistral.MistralConfig, presets=mistral.PRESETS),
    qwen.Qwen2Config.model_type: Family(qwen.Qwen2Config, presets=qwen.PRESETS),
    qwen.Qwen3Config.model_type: Family(qwen.Qwen3Config, presets=qwen.PRESETS_3),
    gemma.Gemma2Config.model_type: Family(gemma.Gemma2Config, presets=gemma.PRESETS_2),
    gemma.Gemma3Config.model_type: Family(gemma.Gemma3Config, presets=gemma.PRESETS),
    gpt_neo.GPTNeoConfig.model_type: Family(gpt_neo.GPTNeoConfig, presets=gpt_neo.PRESETS),
    gpt_neox.GPTNeoXConfig.model_type: Family(gpt_neox.GPTNeoXConfig, presets=gpt_neox.PRESETS),
    phi.PhiConfig.model_type: Family(phi.PhiConfig, presets=phi.PRESETS),
    phi3.Phi3Config.model_type: Family(phi3.Phi3Config, presets=phi3.PRESETS),
    opt.OPTConfig.model_type: Family(opt.OPTConfig, presets=opt.PRESETS),
    bert.BertConfig.model_type: Family(bert.BertConfig, presets=bert.PRESETS),
    bert.RobertaConfig.model_type: Family(bert.RobertaConfig, presets=bert.PRESETS_ROBERTA),
    t5.T5Config.model_type: Family(t5.T5Config, presets=t5.PRESETS),
    mlp_mixer.MlpMixerConfig.model_type: Family(mlp_mixer.MlpMixerConfig, mlp_mixer.MlpMixer, mlp_mixer.PRESETS),
}
"""model_type -> family. A program registers a family of its own by adding it here."""

PRESETS: Final[dict[str, ModelConfig]] = {name: config for family in FAMILIES.values() for name, config in family.presets.items()}
"""Name -> config of usual sizes, of every family."""

_UNNAMED: Final = GPT2Config.model_type
"""model_type of a config without one, as in NNTile's files."""


def config_from_dict(values: Mapping[str, Any], source: str = "the config") -> ModelConfig:
    """A config from decoded JSON, of the family that its model_type names.

    Args:
        values: the decoded JSON.
        source: name of the file or object that holds the values, for error messages.

    Raises:
        UsageError: `values` is no JSON object, names an unknown family, or breaks a rule of its family.
    """
    check_object(values, source, "model_type")
    kind = values.get("model_type", _UNNAMED)
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UsageError(f"model_type in {source} must be one of {', '.join(FAMILIES)}, got {shown(kind)}; use the config of such a model")
    config: ModelConfig = FAMILIES[kind].config.from_dict(values, source)
    return config


def config_notes(values: Mapping[str, Any], source: str) -> list[str]:
    """Sentences about a config that `config_from_dict` takes, for the caller to print: keys that no model reads.

    Args:
        values: the decoded JSON.
        source: name of the file or object that holds the values.
    """
    kind = values.get("model_type", _UNNAMED)
    if kind not in FAMILIES:
        return []
    family = FAMILIES[kind].config
    unread = family.unread(values)
    return (
        [f"{source} has keys that {family.title} does not have, here or in transformers, and they are ignored: {', '.join(unread)}"] if unread else []
    )


def untiled_type(values: Mapping[str, Any]) -> str:
    """The model_type of a config whose family is not here; "" for one of a family that is, and for what is no model_type."""
    kind = values.get("model_type", _UNNAMED) if isinstance(values, Mapping) else _UNNAMED
    return kind if isinstance(kind, str) and kind not in FAMILIES else ""


def config_from_json(path: str | os.PathLike[str], advice: str = "check --config-path") -> ModelConfig:
    """A config from a file in Hugging Face's format.

    Args:
        path: the file, or the directory of a ``config.json``.
        advice: remedy in the error message about a file that cannot be read.

    Raises:
        DataError: the file cannot be read or is not JSON.
        UsageError: the config names an unknown family, or breaks a rule of its family.
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
    flash: bool = True,
    library: bool = False,
) -> LanguageModel:
    """Build the model that a config describes.

    Args:
        config: the model's shape and hyperparameters.
        tiling: tile sizes.
        runtime: the runtime that executes the tasks.
        dtype: element type of parameters and activations.
        seed: seed of the initial weights; None leaves the weights unwritten, to be loaded.
        flash: whether attention avoids the full matrix of scores.
        library: whether cuDNN may compute it on GPUs.
    """
    return family_of(config).model(config, tiling, runtime, dtype=dtype, seed=seed, flash=flash, library=library)
