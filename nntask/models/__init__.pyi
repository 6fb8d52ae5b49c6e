from .language import LanguageModel
from .registry import FAMILIES, build, config_from_dict, config_from_json, config_notes, untiled_type

__all__ = [
    "FAMILIES",
    "LanguageModel",
    "build",
    "config_from_dict",
    "config_from_json",
    "config_notes",
    "untiled_type",
]
