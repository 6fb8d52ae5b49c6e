"""File access: checks of output paths, atomic writes, untrusted JSON, safetensors files of tile tensors, GGUF headers and strided ranges;
and sizes, rates and durations as text."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
