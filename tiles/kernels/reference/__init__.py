"""Readable NumPy kernels: the oracle of every other backend. Clarity first; they may allocate and be slow."""

from . import attention, cache, elementwise, embedding, experts, loss, matmul, norm, optimizer, pages, quantised, random, select, tokens  # noqa: F401
