from .frozen_base import FrozenBase
from .lora import LoRA, add_adapters, merged_arrays

__all__ = ["FrozenBase", "LoRA", "add_adapters", "merged_arrays"]
