from .config_checks import config_values
from .family_config import ModelConfig

__all__ = ["ModelConfig", "config_values"]
