"""Fast CPU kernels: in place, cache-blocked, one thread each, the GIL released in the heavy calls.

Importing this package sets NumPy's BLAS to one thread for the whole process: parallelism comes from the workers, and a kernel's bits must not depend
on the number of idle cores.
"""

from importlib.metadata import version

from . import (  # noqa: F401
    activation,
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
    stored_attention,
    tokens,
)
from .blas import fp32_products, set_blas_threads
from .onednn import bf16, bf16_attention  # noqa: F401

set_blas_threads(1)


def kernel_versions() -> dict[str, str]:
    """Return the versions of the libraries that compute on the CPU, by name. With other versions, durations and last bits differ."""
    return {**{package: version(package) for package in ("numpy", "numba")}, "fp32_products": fp32_products()}
