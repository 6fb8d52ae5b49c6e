"""One table of kernels: (operation, backend) -> function.

A kernel is a plain function on arrays: ``kernel(*tiles, **constants)``, writing its outputs in place. Registering it is one line::

    @register("scale", "cpu")
    def scale(x, out, *, alpha): ...

Arrays of 16-bit floats do not reach such a kernel: a task that touches any is given fp32 copies in scratch memory declared to the
scheduler, and its outputs are rounded back. So no operation needs a kernel for 16 bits.

Where it pays, an operation has a second kernel, registered with `register_bf16`, that takes bf16 tiles as they are. It is used where
oneDNN and the processor can multiply bf16 (`cpu.onednn`), and the copies everywhere else.

A program's own registrations replace ours, here and everywhere the kernel is used from then on::

    @register_activation("gelu_new")
    def gelu(x, y): ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from scheduler.machine import Many

Backend = Literal["reference", "cpu", "cuda"]
Kernel = Callable[..., None]
FlopCount = Callable[[Sequence[Any], Mapping[str, Any]], float]
K = TypeVar("K", bound=Kernel)

BF16: Final = np.dtype(ml_dtypes.bfloat16)
NARROW: Final = frozenset({BF16, np.dtype(np.float16)})
BUFFER_ELEMENTS: Final = 1024
"""Elements in each of NumPy's casting and broadcasting buffers while a CPU kernel runs; its default of 8192 is 64 KiB of fp64 per operand."""


class Native(NamedTuple):
    """A kernel for bf16 tiles as they are.

    Attributes:
        kernel: gets the tiles of the task, and last the scratch memory it asked for, if any.
        takes: from the task's views and constants: whether it can do this task. A 16-bit tile it is offered is always bf16.
        scratch_nbytes: from the same: working memory in bytes.
    """

    kernel: Kernel
    takes: Callable[[Sequence[Any], Mapping[str, Any]], bool]
    scratch_nbytes: Callable[[Sequence[Any], Mapping[str, Any]], int]


class Activation(NamedTuple):
    """An activation function that the program has registered.

    Attributes:
        forward: forward(x, y) overwrites y with f(x); equal shapes, any number of axes.
        backward: backward(x, dy, dx) overwrites dx with dy * f'(x); None for the one of the built-in activation of that name.
    """

    forward: Kernel
    backward: Kernel | None


BUILT_IN_ACTIVATIONS: Final = ("gelu_new", "gelu", "relu", "silu", "tanh")

_kernels: dict[tuple[str, Backend], Kernel] = {}
_activations: dict[str, Activation] = {}
_native: dict[str, Native] = {}
_flops: dict[str, FlopCount] = {}
_many: dict[Kernel, Many] = {}


def register(op: str, backend: Backend, *, flops: FlopCount | None = None, is_bounded: bool = False) -> Callable[[K], K]:
    """Register a kernel of operation `op`; the latest registration wins, over kernels of ours for bf16 tiles and for GPUs, too: with GPUs, an
    operation whose CPU kernel a program has replaced runs on CPU workers, until the program brings its "cuda" kernel as well.

    Tasks that are submitted or recorded afterwards use it.

    Args:
        flops: from the tiles' views (objects with ``shape``) and the constants to a floating-point operation count.
        is_bounded: it uses no buffers of NumPy's, so a CPU kernel need not spend the 3 us that bounding them takes.
    """

    def enter(kernel: K) -> K:
        if backend == "cpu" and (op, backend) in _kernels:
            _native.pop(op, None)
            ours = _kernels.get((op, "cuda"))
            if ours is not None and ours.__module__.startswith(f"{__package__}."):
                del _kernels[op, "cuda"]
        _kernels[op, backend] = _bounded(kernel) if backend == "cpu" and not is_bounded else kernel
        if flops is not None:
            _flops[op] = flops
        return kernel

    return enter


def register_activation(kind: str, *, backward: Kernel | None = None) -> Callable[[K], K]:
    """Register the function ``forward(x, y)`` as activation `kind` on the CPU: a way of its own to compute a built-in one, or a new one.

    The operations `activation`, `linear_activation` and `gate`, which models are made of, call it at every element type: 16-bit tiles are widened
    around it. With GPUs, they run on CPU workers then. The gated unit `silu_gate` is an operation of its own. The function must release nothing of
    `x`, overwrite all of `y`, and give the same bits every time.

    Args:
        kind: its name, as layers take it.
        backward: ``backward(x, dy, dx)``, which writes dy * f'(x); None keeps that of the built-in activation, whose function it then must be.

    Raises:
        ValueError: there is no built-in activation of that name, and no backward.
    """
    if backward is None and kind not in BUILT_IN_ACTIVATIONS:
        raise ValueError(f"a new activation needs its gradient, and {kind!r} is none of {', '.join(BUILT_IN_ACTIVATIONS)}; pass backward=")

    def enter(forward: K) -> K:
        _activations[kind] = Activation(forward, backward)
        return forward

    return enter


def activations() -> list[str]:
    """Names of all activations, built in and registered."""
    return [*BUILT_IN_ACTIVATIONS, *sorted(set(_activations) - set(BUILT_IN_ACTIVATIONS))]


def own_activation(kind: str) -> Activation | None:
    """What the program has registered as activation `kind`; None for the built-in one."""
    return _activations.get(kind)


def register_bf16(
    op: str,
    *,
    takes: Callable[[Sequence[Any], Mapping[str, Any]], bool],
    scratch_nbytes: Callable[[Sequence[Any], Mapping[str, Any]], int] = lambda views, constants: 0,
) -> Callable[[K], K]:
    """Register the kernel of operation `op` for bf16 tiles as they are; arguments as of `Native`."""

    def enter(kernel: K) -> K:
        _native[op] = Native(_bounded(kernel), takes, scratch_nbytes)
        return kernel

    return enter


def _bounded(kernel: Kernel) -> Kernel:
    """`kernel` with NumPy's buffers of `BUFFER_ELEMENTS`; the setting belongs to the thread and is put back."""

    @wraps(kernel)
    def run(*tiles: Any, **constants: Any) -> None:
        before = np.setbufsize(BUFFER_ELEMENTS)
        try:
            kernel(*tiles, **constants)
        finally:
            np.setbufsize(before)

    return run


def register_many(kernel: Kernel) -> Callable[[Many], Many]:
    """Register a function that runs several tasks of a "cuda" kernel with few starts, bit by bit as the kernel would one after another; none of them
    writes what another one uses."""

    def enter(many: Many) -> Many:
        _many[kernel] = many
        return many

    return enter


def registered_many(kernel: Kernel | None) -> Many | None:
    """What runs several tasks of a "cuda" kernel at once, if there is something."""
    return None if kernel is None else _many.get(kernel)


def registered(op: str, backend: Backend) -> Kernel | None:
    """The kernel of operation `op` on `backend`, if one is registered by now."""
    return _kernels.get((op, backend))


def registered_bf16(op: str) -> Native | None:
    """The kernel of operation `op` for bf16 tiles as they are, if one is registered by now."""
    return _native.get(op)


def registered_bf16_operations() -> list[str]:
    """Names of all operations with a kernel for bf16 tiles as they are by now."""
    return sorted(_native)


def registered_operations(backend: Backend) -> list[str]:
    """Names of all operations with a kernel on `backend` by now."""
    return sorted(op for op, where in _kernels if where == backend)


def registered_flops(op: str) -> FlopCount | None:
    """The count of floating-point operations that was registered with operation `op`, if any."""
    return _flops.get(op)
