from .conversion import Conversion, Converted, Convertible
from .gguf_file import write_gguf
from .huggingface import export
from .merged_weights import weights_of
from .peft import export_adapters
from .quantised_directory import write_quantised
from .state_file import check_state_file, export_state

__all__ = [
    "Conversion",
    "Converted",
    "Convertible",
    "check_state_file",
    "export",
    "export_adapters",
    "export_state",
    "weights_of",
    "write_gguf",
    "write_quantised",
]
