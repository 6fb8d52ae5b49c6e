"""Fast CPU kernels: in place, cache-blocked, one thread each, the GIL released in the heavy calls."""

from . import attention, elementwise, embedding, loss, matmul, norm, optimizer, random, select  # noqa: F401
