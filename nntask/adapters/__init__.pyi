from .lora import merged_arrays

__all__ = ["merged_arrays"]
