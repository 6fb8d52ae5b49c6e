from .huggingface import export
from .merged_weights import weights_of
from .peft import export_adapters

__all__ = ["export", "export_adapters", "weights_of"]
