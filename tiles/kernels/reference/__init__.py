"""Readable NumPy kernels: the oracle of every other backend. Clarity first; they may allocate and be slow."""

from . import elementwise  # noqa: F401
