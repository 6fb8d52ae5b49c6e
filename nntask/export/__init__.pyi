from .conversion import Conversion, Converted, Convertible
from .gguf_file import write_gguf
from .huggingface import export
from .merged_weights import weights_of
from .peft import export_adapters
from .quantised_directory import write_quantised

__all__ = ["Conversion", "Converted", "Convertible", "export", "export_adapters", "weights_of", "write_gguf", "write_quantised"]
