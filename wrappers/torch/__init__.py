"""PyTorch: any module in training on the scheduler (`Session`), transformers' Trainer on it; tile tensors as torch tensors, models as modules.

Each name is imported at its first use, so that importing this package imports no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
