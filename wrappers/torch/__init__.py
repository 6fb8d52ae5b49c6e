"""PyTorch on the scheduler: training of any module (`Session`), transformers' Trainer, conversion of tile tensors and of models.

Each name is imported at its first use, so importing this package does not import torch.
"""

from typing import Any

import lazy_loader

_attached, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _attached(name)
    except (ImportError, AttributeError) as error:  # torch or transformers is missing, or lacks what a module here imports
        if name in __all__:
            from .releases import explain

            explain(error, of_trainer=name == "Trainer")
        raise
