"""One table of kernels: (operation, backend) -> function; and the codelets made from it.

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
from functools import cache, wraps
from math import prod
from typing import Any, Final, Literal, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from scheduler import SCRATCH, Access, Codelet, Cost, Mode, TaskRuntime, W

Backend = Literal["reference", "cpu", "cuda"]
Kernel = Callable[..., None]
FlopCount = Callable[[Sequence[Any], Mapping[str, Any]], float]
K = TypeVar("K", bound=Kernel)

BF16: Final = np.dtype(ml_dtypes.bfloat16)
NARROW: Final = frozenset({BF16, np.dtype(np.float16)})
_ALIGNMENT: Final = 64
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


BUILT_IN_ACTIVATIONS: Final = ("gelu_new", "gelu", "relu", "silu")

_kernels: dict[tuple[str, Backend], Kernel] = {}
_activations: dict[str, Activation] = {}
_native: dict[str, Native] = {}
_flops: dict[str, FlopCount] = {}


def register(op: str, backend: Backend, *, flops: FlopCount | None = None, is_bounded: bool = False) -> Callable[[K], K]:
    """Register a kernel of operation `op`; the latest registration wins, over kernels of ours for bf16 tiles and for GPUs, too: with GPUs, an
    operation whose CPU kernel a program has replaced runs on CPU workers, until the program brings its "cuda" kernel as well.

    Tasks that are submitted or recorded afterwards use it.

    Args:
        flops: from the tiles' views (objects with ``shape``) and the constants to a floating-point operation count.
        is_bounded: it uses no buffers of NumPy's, so a CPU kernel need not spend the 3 us that bounding them takes.
    """

    def enter(kernel: K) -> K:
        if not kernel.__module__.startswith(f"{__package__}."):
            load()  # ours come first, whenever they are imported
        if backend == "cpu" and (op, backend) in _kernels:
            _native.pop(op, None)
            ours = _kernels.get((op, "cuda"))
            if ours is not None and ours.__module__.startswith(f"{__package__}."):
                del _kernels[op, "cuda"]
        _kernels[op, backend] = _bounded(kernel) if backend == "cpu" and not is_bounded else kernel
        if flops is not None:
            _flops[op] = flops
        for cached in (codelet, _cpu_codelet, _cuda_codelet, _native_codelet, _widening_codelet):
            cached.cache_clear()
        return kernel

    return enter


def register_activation(kind: str, *, backward: Kernel | None = None) -> Callable[[K], K]:
    """Register the function ``forward(x, y)`` as activation `kind` on the CPU: a way of its own to compute a built-in one, or a new one.

    The operations `activation` and `linear_activation`, which models are made of, call it at every element type: 16-bit tiles are widened around
    it. With GPUs, they run on CPU workers then. The gated unit `silu_gate` is an operation of its own. The function must release nothing of `x`,
    overwrite all of `y`, and give the same bits every time.

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
        _native_codelet.cache_clear()
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


def kernel(op: str, backend: Backend) -> Kernel:
    """The registered kernel.

    Raises:
        KeyError: there is none.
    """
    load()
    try:
        return _kernels[op, backend]
    except KeyError:
        known = sorted(name for name, where in _kernels if where == backend)
        raise KeyError(f"no {backend} kernel for {op!r}; there are {', '.join(known)}") from None


def operations(backend: Backend) -> list[str]:
    """Names of all operations that have a kernel on `backend`."""
    load()
    return sorted(op for op, where in _kernels if where == backend)


def has_cuda(op: str) -> bool:
    """Whether operation `op` has a kernel for GPUs."""
    load()
    return (op, "cuda") in _kernels


def native_kernels() -> dict[str, Native]:
    """The kernels that take bf16 tiles as they are, by operation."""
    load()
    return dict(_native)


@cache
def load() -> None:
    """Import the kernel modules, which register themselves."""
    from . import cpu, cuda, reference  # noqa: F401


@cache
def codelet(op: str) -> Codelet:
    """The codelet of operation `op`."""
    return Codelet(op, cpu=kernel(op, "cpu"), cuda=_kernels.get((op, "cuda")), cost=_cost(op))


@cache
def _cpu_codelet(op: str) -> Codelet:
    return Codelet(op, cpu=kernel(op, "cpu"), cost=_cost(op))


@cache
def _cuda_codelet(op: str) -> Codelet:
    return Codelet(op, cuda=kernel(op, "cuda"), cost=_cost(op))


@cache
def _native_codelet(op: str) -> Codelet:
    return Codelet(op, cpu=_native[op].kernel, cost=_cost(op))


@cache
def _widening_codelet(op: str, modes: tuple[Mode, ...]) -> Codelet:
    return Codelet(op, cpu=_widened(kernel(op, "cpu"), modes), cost=_cost(op))


def _cost(op: str) -> Callable[[Sequence[Any], Mapping[str, Any]], Cost]:
    def cost(views: Sequence[Any], constants: Mapping[str, Any]) -> Cost:
        count = _flops.get(op)
        return Cost(count(views, constants) if count else 0.0, float(sum(view.nbytes for view in views)))

    return cost


def _widened(kernel: Kernel, modes: tuple[Mode, ...]) -> Kernel:
    """`kernel` behind fp32 copies of its 16-bit arrays; its last argument is the scratch they live in."""

    def run(*arrays: Any, **constants: Any) -> None:
        from .cpu.elementwise import convert

        *tiles, scratch = arrays
        wide, offset = [], 0
        for array, mode in zip(tiles, modes, strict=False):
            if array.dtype in NARROW:
                copy = np.ndarray(array.shape, np.float32, buffer=scratch, offset=offset)
                offset += _aligned(copy.nbytes)
                if mode != W:
                    convert(array, copy)
                wide.append(copy)
            else:
                wide.append(array)
        # a REDUX access that does not accumulate has garbage in its copy, which the kernel overwrites
        kernel(*wide, **constants)
        for array, copy, mode in zip(tiles, wide, modes, strict=False):
            if array is not copy and mode != "R":
                convert(copy, array)

    return run


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def emit(runtime: TaskRuntime, op: str, accesses: Sequence[Access], *, priority: int = 0, **constants: Any) -> None:
    """Submit one task of operation `op` over tile handles; 16-bit tiles go to a kernel for them or are widened around the kernel.

    Where there are GPUs, kernels for them take fp32 and bf16 tiles as they are. Activations that the program has registered run on the CPU.
    """
    views: list[Any] = [handle.view for handle, _ in accesses]
    narrow = [view for view in views if view.dtype in NARROW]
    own = runtime.has_gpus and constants.get("kind") in _activations
    if not narrow:
        runtime.submit(_cpu_codelet(op) if own else codelet(op), accesses, constants, priority=priority)
        return
    if runtime.has_gpus and not own and has_cuda(op) and all(view.dtype == BF16 for view in narrow):
        runtime.submit(_cuda_codelet(op), accesses, constants, priority=priority)
        return
    native = native_for(op, views, constants)
    if native is None:
        nbytes = sum(_aligned(4 * prod(view.shape)) for view in narrow)
        found = _widening_codelet(op, tuple(mode for _, mode in accesses))
    else:
        nbytes = native.scratch_nbytes(views, constants)
        found = _native_codelet(op)
    if nbytes:
        accesses = [*accesses, (scratch(runtime, nbytes), SCRATCH)]
    runtime.submit(found, accesses, constants, priority=priority)


def native_for(op: str, views: Sequence[Any], constants: Mapping[str, Any]) -> Native | None:
    """The kernel that takes these tiles as they are, if there is one and this machine can run it."""
    load()
    native = _native.get(op)
    if native is None or any(view.dtype == np.float16 for view in views) or not native.takes(views, constants):
        return None
    if constants.get("kind") in _activations:
        return None
    from .cpu import onednn

    return native if onednn.available() else None


def scratch(runtime: TaskRuntime, nbytes: int) -> Any:
    """A handle of `nbytes` bytes of working memory for one task: pass it with mode SCRATCH; the kernel gets a uint8 array."""
    from ..tensor import TileView

    return runtime.handle(nbytes, TileView((nbytes,), np.dtype(np.uint8)), name="scratch", data_class="scratch")
