"""Flags as text and as settings: tables of flags, the help, and the sources of settings."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
