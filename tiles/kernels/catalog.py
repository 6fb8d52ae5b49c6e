"""All kernels of ours, imported when one is first wanted, and those of the program over them.

Kernel modules register themselves (`registry`); lookups of kernels come here, so that the tables are full by then.
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
    """Register the program's kernel of operation `op`: see `registry.register`. Kernels of ours are imported first, so that the program's win."""
    load()
    return registry.register(op, backend, flops=flops, is_bounded=is_bounded)


def kernel(op: str, backend: Backend) -> Kernel:
    """The registered kernel.

    Raises:
        KeyError: there is none.
    """
    load()
    found = registry.registered(op, backend)
    if found is None:
        raise KeyError(f"no {backend} kernel for {op!r}; there are {', '.join(operations(backend))}")
    return found


def operations(backend: Backend) -> list[str]:
    """Names of all operations that have a kernel on `backend`."""
    load()
    return registry.registered_operations(backend)


def has_cuda(op: str) -> bool:
    """Whether operation `op` has a kernel for GPUs."""
    load()
    return registry.registered(op, "cuda") is not None


def bf16_kernel(op: str) -> Native | None:
    """The kernel that takes bf16 tiles of operation `op` as they are, if there is one."""
    load()
    return registry.registered_bf16(op)


def bf16_operations() -> list[str]:
    """Names of all operations that have a kernel for bf16 tiles as they are."""
    load()
    return registry.registered_bf16_operations()
