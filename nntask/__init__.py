"""Neural networks on tile tensors.

Names are imported when they are first asked for: the command line lives on this package's errors and settings long before it needs the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .autograd import Tensor, checkpoint, no_grad, on_tape
    from .errors import NntaskError, UsageError
    from .lora import LoRA, add_adapters
    from .models.config import PRESETS, GPT2Config
    from .models.gpt2 import GPT2
    from .models.llama import Llama
    from .models.llama_config import LlamaConfig, RopeScaling
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
    "Llama",
    "LlamaConfig",
    "LoRA",
    "ModelTiling",
    "Module",
    "NntaskError",
    "Parameter",
    "RopeScaling",
    "Tensor",
    "UsageError",
    "add_adapters",
    "checkpoint",
    "decay_groups",
    "default_tiling",
    "make_schedule",
    "no_grad",
    "on_tape",
]

_HOMES = {
    "autograd": ("Tensor", "checkpoint", "no_grad", "on_tape"),
    "errors": ("NntaskError", "UsageError"),
    "models": ("GPT2", "PRESETS", "GPT2Config", "Llama", "LlamaConfig", "RopeScaling"),
    "lora": ("LoRA", "add_adapters"),
    "module": ("Module", "Parameter"),
    "optim": ("SGD", "Adam", "AdamW", "Group", "decay_groups"),
    "schedule": ("make_schedule",),
    "tiling": ("ModelTiling", "default_tiling"),
}


def __getattr__(name: str) -> Any:
    """Import a public name."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
