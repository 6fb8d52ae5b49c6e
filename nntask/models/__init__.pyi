from .config_checks import config_values
from .interface import ModelConfig
from .language import LanguageModel
from .registry import FAMILIES, build, config_from_dict, config_from_json, config_notes, untiled_type

__all__ = [
    "FAMILIES",
    "LanguageModel",
    "ModelConfig",
    "build",
    "config_from_dict",
    "config_from_json",
    "config_notes",
    "config_values",
    "untiled_type",
]
