from .model_directory import read_config

__all__ = ["read_config"]
