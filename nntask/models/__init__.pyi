from .config_checks import config_values
from .gpt2 import GPT2, GPT2Config
from .interface import ModelConfig
from .language import LanguageModel
from .llama import Llama, LlamaConfig
from .registry import FAMILIES, PRESETS, build, config_from_dict, config_from_json, config_notes, family_of, untiled_type
from .rotary import RopeScaling

__all__ = [
    "FAMILIES",
    "GPT2",
    "PRESETS",
    "GPT2Config",
    "LanguageModel",
    "Llama",
    "LlamaConfig",
    "ModelConfig",
    "RopeScaling",
    "build",
    "config_from_dict",
    "config_from_json",
    "config_notes",
    "config_values",
    "family_of",
    "untiled_type",
]
