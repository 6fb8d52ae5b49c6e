from .model_file import file_notes, is_gguf

__all__ = ["file_notes", "is_gguf"]
