from .adapters.lora import LoRA, add_adapters
from .errors import ClusterError, DataError, Diverged, DoesNotFit, NntaskError, ProcessUnavailable, StorageError, UsageError
from .models.gpt2 import GPT2, GPT2Config
from .models.llama import Llama, LlamaConfig
from .models.registry import PRESETS
from .nn.autograd import Tensor, checkpoint, no_grad, on_tape
from .nn.module import Module, Parameter
from .optim.optimizers import SGD, Adam, AdamW, Group, decay_groups
from .tiling.model_tiling import ModelTiling, default_tiling

__all__ = [
    "GPT2",
    "PRESETS",
    "SGD",
    "Adam",
    "AdamW",
    "ClusterError",
    "DataError",
    "Diverged",
    "DoesNotFit",
    "GPT2Config",
    "Group",
    "Llama",
    "LlamaConfig",
    "LoRA",
    "ModelTiling",
    "Module",
    "NntaskError",
    "Parameter",
    "ProcessUnavailable",
    "StorageError",
    "Tensor",
    "UsageError",
    "add_adapters",
    "checkpoint",
    "decay_groups",
    "default_tiling",
    "no_grad",
    "on_tape",
]
