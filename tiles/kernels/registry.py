"""Registry of kernels: (operation, backend) -> function.

A kernel is a plain function on arrays, ``kernel(*tiles, **constants)``, that writes its outputs in place; `register` is its decorator.
`register_activation` does the same for an activation function.

Such a kernel never sees 16-bit floats: a task with 16-bit tiles gets fp32 copies in scratch memory declared to the scheduler, and its outputs are
rounded back. So no operation needs a 16-bit kernel. An operation that gains from one registers a second kernel with `register_bf16`, which takes
bf16 tiles without copies. It runs if oneDNN and the processor can multiply bf16 (`cpu.onednn`).

A program's own registrations replace the built-in kernels in all tasks submitted from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from scheduler.machine import KernelChain, Many

Backend = Literal["reference", "cpu", "cuda"]
Kernel = Callable[..., None]
FlopCount = Callable[[Sequence[Any], Mapping[str, Any]], float]
K = TypeVar("K", bound=Kernel)

BF16: Final = np.dtype(ml_dtypes.bfloat16)
NARROW: Final = frozenset({BF16, np.dtype(np.float16)})
BUFFER_ELEMENTS: Final = 1024
"""Elements in each of NumPy's casting and broadcasting buffers while a CPU kernel runs. NumPy's default of 8192 is 64 KiB of fp64 per operand."""


class Native(NamedTuple):
    """A kernel that takes bf16 tiles without fp32 copies.

    Attributes:
        kernel: function on the tiles of the task, then its scratch memory, if it has any.
        takes: function of the task's views and constants: whether the kernel supports this task. Its 16-bit tiles are always bf16.
        scratch_nbytes: function of the same arguments: working memory in bytes.
    """

    kernel: Kernel
    takes: Callable[[Sequence[Any], Mapping[str, Any]], bool]
    scratch_nbytes: Callable[[Sequence[Any], Mapping[str, Any]], int]


class Activation(NamedTuple):
    """An activation function that the program has registered.

    Attributes:
        forward: forward(x, y) overwrites y with f(x); equal shapes, any number of axes.
        backward: backward(x, dy, dx) overwrites dx with dy * f'(x); None for that of the built-in activation of the same name.
    """

    forward: Kernel
    backward: Kernel | None


BUILT_IN_ACTIVATIONS: Final = ("gelu_new", "gelu", "relu", "silu", "tanh")

_kernels: dict[tuple[str, Backend], Kernel] = {}
_activations: dict[str, Activation] = {}
_native: dict[str, Native] = {}
_flops: dict[tuple[str, Backend], FlopCount] = {}
_many: dict[Kernel, Many] = {}
_chains: dict[Kernel, list[KernelChain]] = {}


def register(op: str, backend: Backend, *, flops: FlopCount | None = None, is_bounded: bool = False) -> Callable[[K], K]:
    """Register a kernel of operation `op`; tasks that are submitted or recorded afterwards use it. The latest registration wins.

    A program's CPU kernel also replaces the built-in kernels for bf16 tiles and for GPUs: the operation then runs on CPU workers, unless the program
    registers a "cuda" kernel as well.

    Args:
        op: name of the operation.
        backend: "reference", "cpu" or "cuda".
        flops: function of the tiles' views (objects with ``shape``) and the constants that returns the number of floating-point operations. Without
            it, the count of another backend is used.
        is_bounded: whether the kernel uses none of NumPy's buffers; a CPU kernel then avoids the 3 us that limiting them takes.
    """

    def enter(kernel: K) -> K:
        if backend == "cpu" and (op, backend) in _kernels:
            _native.pop(op, None)
            ours = _kernels.get((op, "cuda"))
            if ours is not None and ours.__module__.startswith(f"{__package__}."):
                del _kernels[op, "cuda"]
        _kernels[op, backend] = _bounded(kernel) if backend == "cpu" and not is_bounded else kernel
        if flops is not None:
            _flops[op, backend] = flops
        return kernel

    return enter


def register_activation(kind: str, *, backward: Kernel | None = None) -> Callable[[K], K]:
    """Register the function ``forward(x, y)`` as activation `kind` on the CPU: a replacement of a built-in activation, or a new one.

    The operations `activation`, `linear_activation` and `gate`, which models consist of, call it at every element type: 16-bit tiles are widened
    around it. With GPUs, these operations then run on CPU workers. The gated unit `silu_gate` is a separate operation. The function must not
    change `x`; it must overwrite all of `y`, with the same bits every time.

    Args:
        kind: name of the activation, as layers accept it.
        backward: ``backward(x, dy, dx)``, which writes dy * f'(x); None for the gradient of the built-in activation `kind`, which `forward` must then
            compute.

    Raises:
        ValueError: `kind` is not a built-in activation, and `backward` is None.
    """
    if backward is None and kind not in BUILT_IN_ACTIVATIONS:
        raise ValueError(f"a new activation needs its gradient, and {kind!r} is none of {', '.join(BUILT_IN_ACTIVATIONS)}; pass backward=")

    def enter(forward: K) -> K:
        _activations[kind] = Activation(forward, backward)
        return forward

    return enter


def activations() -> list[str]:
    """Return the names of all activations, built in and registered."""
    return [*BUILT_IN_ACTIVATIONS, *sorted(set(_activations) - set(BUILT_IN_ACTIVATIONS))]


def own_activation(kind: str) -> Activation | None:
    """Return the functions that the program has registered as activation `kind`; None if the built-in activation is in use."""
    return _activations.get(kind)


def register_bf16(
    op: str,
    *,
    takes: Callable[[Sequence[Any], Mapping[str, Any]], bool],
    scratch_nbytes: Callable[[Sequence[Any], Mapping[str, Any]], int] = lambda views, constants: 0,
) -> Callable[[K], K]:
    """Register a kernel of operation `op` that takes bf16 tiles without fp32 copies; the arguments are the fields of `Native`."""

    def enter(kernel: K) -> K:
        _native[op] = Native(_bounded(kernel), takes, scratch_nbytes)
        return kernel

    return enter


def _bounded(kernel: Kernel) -> Kernel:
    """Return `kernel` with NumPy's buffers limited to `BUFFER_ELEMENTS`; the setting belongs to the thread and is restored."""

    @wraps(kernel)
    def run(*tiles: Any, **constants: Any) -> None:
        before = np.setbufsize(BUFFER_ELEMENTS)
        try:
            kernel(*tiles, **constants)
        finally:
            np.setbufsize(before)

    return run


def register_many(kernel: Kernel) -> Callable[[Many], Many]:
    """Register a function that runs several independent tasks of a "cuda" kernel with few launches, with the same bits as one launch per task."""

    def enter(many: Many) -> Many:
        _many[kernel] = many
        return many

    return enter


def registered_many(kernel: Kernel | None) -> Many | None:
    """Return the function that runs several tasks of a "cuda" kernel at once; None if there is none."""
    return None if kernel is None else _many.get(kernel)


def register_chain(chain: KernelChain) -> None:
    """Register a kernel for a chain of "cuda" kernels; a chain that is registered earlier takes precedence."""
    _chains.setdefault(chain.kernels[0], []).append(chain)


def registered_chains(kernel: Kernel | None) -> Sequence[KernelChain]:
    """Return the chains that begin with a kernel."""
    return () if kernel is None else tuple(_chains.get(kernel, ()))


def registered(op: str, backend: Backend) -> Kernel | None:
    """Return the kernel of operation `op` on `backend`; None if none is registered yet."""
    return _kernels.get((op, backend))


def registered_bf16(op: str) -> Native | None:
    """Return the kernel of operation `op` for bf16 tiles; None if none is registered yet."""
    return _native.get(op)


def registered_bf16_operations() -> list[str]:
    """Return the names of all operations with a registered kernel for bf16 tiles."""
    return sorted(_native)


def registered_operations(backend: Backend) -> list[str]:
    """Return the names of all operations with a registered kernel on `backend`."""
    return sorted(op for op, where in _kernels if where == backend)


def registered_flops(op: str, backend: Backend) -> FlopCount | None:
    """Return the function that counts floating-point operations of operation `op` on `backend`; None if none is registered for any backend."""
    order: tuple[Backend, ...] = (backend, "cpu", "cuda", "reference")
    return next((_flops[op, each] for each in order if (op, each) in _flops), None)
