"""Fast CPU kernels: in place, cache-blocked, one thread each, the GIL released in the heavy calls."""

from . import elementwise  # noqa: F401
