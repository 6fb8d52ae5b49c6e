"""The machine of a run: GPUs, memory budgets, measured rates, imaginary machines, and the runtime that is opened on them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
