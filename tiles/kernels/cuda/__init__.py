"""Kernels for CUDA GPUs: sources in CUDA C, and the functions that start them. Importing needs no GPU and no CUDA library."""

from . import attention, cache, chains, elementwise, experts, norm, pages, quantised, tables, tokens, updates  # noqa: F401
