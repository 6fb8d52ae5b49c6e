"""GGUF, the files of llama.cpp: models in one file, with config and tokenizer, whose weights are read from their place in the file."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
