"""Models, each in one file that reads from top to bottom, and their configurations."""

from .config import PRESETS, GPT2Config
from .gpt2 import GPT2
from .llama import Llama
from .llama_config import LlamaConfig, RopeScaling

__all__ = ["GPT2", "PRESETS", "GPT2Config", "Llama", "LlamaConfig", "RopeScaling"]
