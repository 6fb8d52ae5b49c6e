"""The planned order of a recorded step: candidate orders, forecasts of their traffic and time, the choice, and lower bounds."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
