from .gpt2 import GPT2
from .gpt2_config import PRESETS, GPT2Config
from .interface import ModelConfig
from .language import LanguageModel
from .llama import Llama
from .llama_config import LlamaConfig, RopeScaling
from .registry import FAMILIES, build, config_from_json, family_of, untiled_type

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
    "config_from_json",
    "family_of",
    "untiled_type",
]
