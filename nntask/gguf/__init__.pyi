from .model_file import GgufModel, is_gguf, open_gguf

__all__ = ["GgufModel", "is_gguf", "open_gguf"]
