"""Registry of model families: class of configs, class of models, and configs of usual sizes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from scheduler import TaskRuntime

from ..architecture.config_checks import check_object, config_values, shown
from ..architecture.family_config import ModelConfig
from ..errors import UsageError
from ..tiling.model_tiling import ModelTiling
from . import bert, gemma, gpt2, gpt_neo, gpt_neox, llama, mistral, mixtures, mlp_mixer, opt, phi, phi3, qwen, t5
from .gpt2 import GPT2, GPT2Config
from .language import LanguageModel
from .llama import Llama, LlamaConfig
from .transformer import Transformer


@dataclass(frozen=True, slots=True)
class Family:
    """Family of models that differ only in the numbers of their configs.

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
    mixtures.MixtralConfig.model_type: Family(mixtures.MixtralConfig, presets=mixtures.PRESETS_MIXTRAL),
    mixtures.OlmoeConfig.model_type: Family(mixtures.OlmoeConfig, presets=mixtures.PRESETS_OLMOE),
    mixtures.Qwen2MoeConfig.model_type: Family(mixtures.Qwen2MoeConfig, presets=mixtures.PRESETS_QWEN2),
    mixtures.Qwen3MoeConfig.model_type: Family(mixtures.Qwen3MoeConfig, presets=mixtures.PRESETS_QWEN3),
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

_HEADS: Final = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")
"""Suffix of a class name of transformers, after the name of its family."""
_OF_GPT2: Final = frozenset({"n_embd", "n_layer", "n_head", "n_positions"})
"""Keys of a GPT-2 that no other family here has."""


def type_of(values: Mapping[str, Any], source: str = "the config") -> str:
    """Return the model_type of a config: its own, else that of its architectures, else GPT-2 if it has the keys of a GPT-2, like NNTile's files.

    Args:
        values: decoded JSON object.
        source: name of the file or object that holds the values, for error messages.

    Raises:
        UsageError: the family cannot be derived from the values, or it is unknown.
    """
    names = ", ".join(FAMILIES)
    if "model_type" in values:
        kind = values["model_type"]
        if not isinstance(kind, str) or kind not in FAMILIES:
            raise UsageError(f"model_type in {source} must be one of {names}, got {shown(kind)}", "use the config of such a model")
        return kind
    if classes := values.get("architectures"):
        families = {_HEADS.sub("", family.config.architecture): kind for kind, family in FAMILIES.items()}
        listed = classes if isinstance(classes, list) else [classes]
        kinds = {families.get(_HEADS.sub("", each)) if isinstance(each, str) else None for each in listed}
        if len(kinds) == 1 and (only_kind := kinds.pop()) is not None:
            return only_kind
        reason = f"its architectures are {shown(classes)}, not of one family here"
    else:
        unread = GPT2Config.unread(values)
        if _OF_GPT2 & values.keys() and not unread:
            return GPT2Config.model_type
        reason = f"a GPT-2, the default, has no key {unread[0]}" if unread else "its keys are not those of a GPT-2, the default"
    raise UsageError(f"{source} lacks model_type, and {reason}", f"add the model_type of its family, one of {names}")


def config_from_dict(values: Mapping[str, Any], source: str = "the config") -> ModelConfig:
    """Return a config from decoded JSON, of the family that `type_of` finds.

    Args:
        values: decoded JSON.
        source: name of the file or object that holds the values, for error messages.

    Raises:
        UsageError: `values` is no JSON object, names no family or an unknown one, or breaks a rule of its family.
    """
    check_object(values, source, "model_type")
    config: ModelConfig = FAMILIES[type_of(values, source)].config.from_dict(values, source)
    return config


def config_notes(values: Mapping[str, Any], source: str) -> list[str]:
    """Return sentences for the caller to print about an accepted config: a family that was derived, and keys that no model reads.

    Args:
        values: decoded JSON.
        source: name of the file or object that holds the values.
    """
    if values.get("model_type", GPT2Config.model_type) not in FAMILIES:
        return []
    kind, notes = type_of(values, source), []
    family = FAMILIES[kind].config
    if "model_type" not in values:
        what = "architectures are" if values.get("architectures") else "keys are"
        notes.append(f'{source} lacks model_type; its {what} those of {family.title}, and it is read as one (add "model_type": "{kind}")')
    if unread := family.unread(values):
        notes.append(f"{source} has keys that {family.title} does not have, here or in transformers, and they are ignored: {', '.join(unread)}")
    return notes


def untiled_type(values: Mapping[str, Any]) -> str:
    """Return the model_type of a config if its family is not in `FAMILIES`; "" if it is, or if there is no model_type."""
    kind = values.get("model_type") if isinstance(values, Mapping) else None
    return kind if isinstance(kind, str) and kind not in FAMILIES else ""


def config_from_json(path: str | os.PathLike[str], advice: str = "check --config-path") -> ModelConfig:
    """Return a config from a file in Hugging Face's format.

    Args:
        path: the file, or the directory of a ``config.json``.
        advice: remedy in the error message about a file that cannot be read.

    Raises:
        DataError: the file cannot be read or is not JSON.
        UsageError: the config names an unknown family, or breaks a rule of its family.
    """
    return config_from_dict(*config_values(path, advice))


def family_of(config: ModelConfig) -> Family:
    """Return the family of a config."""
    return FAMILIES[config.model_type]


def build(config: ModelConfig, tiling: ModelTiling, runtime: TaskRuntime, **how: Any) -> LanguageModel:
    """Build the model that a config describes.

    Args:
        config: shape and hyperparameters of the model.
        tiling: tile sizes.
        runtime: runtime that executes the tasks.
        how: the keywords of `Transformer`: dtype, seed, flash and library.
    """
    return family_of(config).model(config, tiling, runtime, **how)
