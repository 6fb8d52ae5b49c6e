"""Fast CPU kernels: in place, cache-blocked, one thread each, the GIL released in the heavy calls.

Importing them sets NumPy's BLAS to one thread for the whole process: workers are the parallelism, and a kernel's bits must not depend on how
many cores happen to be free.
"""

from . import attention, bf16, bf16_attention, elementwise, embedding, loss, matmul, norm, optimizer, random, select  # noqa: F401
from .blas import set_blas_threads

set_blas_threads(1)
