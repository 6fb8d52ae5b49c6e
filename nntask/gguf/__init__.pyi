from .model_file import GgufModel, file_notes, is_gguf, open_gguf

__all__ = ["GgufModel", "file_notes", "is_gguf", "open_gguf"]
