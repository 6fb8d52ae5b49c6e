"""Neural networks on tile tensors."""

from .autograd import Tensor, checkpoint, no_grad
from .errors import NntaskError, UsageError
from .models.config import PRESETS, GPT2Config
from .models.gpt2 import GPT2
from .module import Module, Parameter
from .optim import SGD, Adam, AdamW, Group, decay_groups
from .schedule import make_schedule
from .tiling import ModelTiling, default_tiling

__all__ = [
    "GPT2",
    "PRESETS",
    "SGD",
    "Adam",
    "AdamW",
    "GPT2Config",
    "Group",
    "ModelTiling",
    "Module",
    "NntaskError",
    "Parameter",
    "Tensor",
    "UsageError",
    "checkpoint",
    "decay_groups",
    "default_tiling",
    "make_schedule",
    "no_grad",
]
