"""Readable NumPy kernels: the oracle of every other backend. Clarity first; they may allocate and be slow."""

from . import (  # noqa: F401
    attention,
    cache,
    elementwise,
    embedding,
    experts,
    loss,
    matmul,
    moments,
    muon,
    norm,
    optimizer,
    pages,
    quantised,
    random,
    select,
    tokens,
)
