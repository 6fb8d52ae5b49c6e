"""GGUF, the files of llama.cpp: models in one file, with their config and their tokenizer, read from their place in it like safetensors."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
