"""PyTorch: any module in training on the scheduler (`Session`), transformers' Trainer on it; tile tensors as torch tensors, models as modules.

Each name is imported at its first use, so that importing this package imports no torch.
"""

from typing import Any

import lazy_loader

_attached, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _attached(name)
    except (ImportError, AttributeError) as error:  # also of a release that lacks what a module here imports
        if name in __all__:
            from .releases import explain

            explain(error, of_trainer=name == "Trainer")
        raise
