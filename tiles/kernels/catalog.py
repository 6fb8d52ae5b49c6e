"""Lookup of kernels: imports the built-in ones at first use; the program's own registrations take precedence.

Kernel modules register themselves (`registry`). Lookups go through this module, so that the registry is complete by then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from . import registry
from .registry import Backend, FlopCount, K, Kernel, Native


@cache
def load() -> None:
    """Import the kernel modules, which register themselves."""
    from . import cpu, cuda, reference  # noqa: F401


def register(op: str, backend: Backend, *, flops: FlopCount | None = None, is_bounded: bool = False) -> Callable[[K], K]:
    """Register the program's kernel of operation `op` as `registry.register` does; built-in kernels are imported first, so that it replaces them."""
    load()
    return registry.register(op, backend, flops=flops, is_bounded=is_bounded)


def kernel(op: str, backend: Backend) -> Kernel:
    """Return the kernel of operation `op` on `backend`.

    Raises:
        KeyError: no kernel is registered.
    """
    load()
    function = registry.registered(op, backend)
    if function is None:
        raise KeyError(f"no {backend} kernel for {op!r}; there are {', '.join(operations(backend))}")
    return function


def operations(backend: Backend) -> list[str]:
    """Return the names of all operations that have a kernel on `backend`."""
    load()
    return registry.registered_operations(backend)


def has_cuda(op: str) -> bool:
    """Return whether operation `op` has a kernel for GPUs."""
    load()
    return registry.registered(op, "cuda") is not None


def bf16_kernel(op: str) -> Native | None:
    """Return the kernel of operation `op` for bf16 tiles; None if there is none."""
    load()
    return registry.registered_bf16(op)
