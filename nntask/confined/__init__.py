"""Sandboxed processes for untrusted programs (chat templates, tokenizer rules): the kernel limits their time, memory and files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
