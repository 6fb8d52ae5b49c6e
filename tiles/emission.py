"""Submission of one task for an operation over tile handles: its codelet, and fp32 copies around kernels that do not support 16-bit floats.

A kernel written for fp32 never sees 16-bit arrays: a task with 16-bit tiles gets fp32 copies in scratch memory declared to the scheduler, and its
outputs are rounded back. If an operation has a kernel for bf16 tiles (`kernels.registry.register_bf16`), and oneDNN and the processor can multiply
bf16, that kernel is used instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from scheduler import SCRATCH, Access, Codelet, Condition, Cost, Mode, Tail, TaskRuntime, W

from .kernels.catalog import bf16_kernel, has_cuda, kernel
from .kernels.registry import BF16, NARROW, Backend, Kernel, Native, own_activation, registered, registered_chains, registered_flops, registered_many
from .view import TileView

_ALIGNMENT: Final = 64


class _End(NamedTuple):
    """The operation that another one ends with; `reads`, `writes` and `constants` are the fields of `scheduler.Tail`."""

    op: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    constants: tuple[str, ...]


_ENDS: Final = {"linear_activation": _End("activation", reads=(-2,), writes=(-1,), constants=("kind",))}
"""Operation -> the operation that its kernels end with, if they have one. The results of that end can be recomputed without the rest."""


def codelet(op: str, *, has_gpus: bool = False) -> Codelet:
    """Return the codelet of operation `op`; the same object as long as its kernels are the same.

    Args:
        has_gpus: whether GPUs may run it; its cost is then that of its kernel for GPUs.
    """
    cuda = registered(op, "cuda")
    return _codelet_of(op, kernel(op, "cpu"), cuda, "cuda" if has_gpus and cuda is not None else "cpu")


def _codelet_of(op: str, cpu: Kernel | None, cuda: Kernel | None, costs_on: Backend = "cpu") -> Codelet:
    return _codelet(op, cpu, cuda, _tail(_ENDS[op], op, cpu, cuda) if op in _ENDS else None, costs_on)


@cache
def _codelet(op: str, cpu: Kernel | None, cuda: Kernel | None, tail: Tail | None, costs_on: Backend) -> Codelet:
    return Codelet(op, cpu=cpu, cuda=cuda, cost=_cost(op, costs_on), tail=tail, cuda_many=registered_many(cuda), chains=registered_chains(cuda))


@cache
def _cpu_only(codelet: Codelet) -> Codelet:
    """Return the same codelet restricted to CPU workers."""
    return Codelet(codelet.name, cpu=codelet.cpu, cost=codelet.cost, cpu_only=True)


def _tail(end: _End, op: str, cpu: Kernel | None, cuda: Kernel | None) -> Tail:
    """Return the tail of an operation with these kernels; it runs on the kinds of workers that the operation runs on."""
    native, bare = bf16_kernel(op), bf16_kernel(end.op)
    if native is not None and bare is not None and cpu is native.kernel:
        own: Kernel | None = bare.kernel
    else:
        own = None if cpu is None else kernel(end.op, "cpu")
    return Tail(_codelet_of(end.op, own, None if cuda is None else kernel(end.op, "cuda")), end.reads, end.writes, end.constants)


@cache
def _widening_codelet(op: str, cpu: Kernel, modes: tuple[Mode, ...]) -> Codelet:
    return Codelet(op, cpu=_widened(cpu, modes), cost=_cost(op, "cpu"))


def _cost(op: str, backend: Backend) -> Callable[[Sequence[Any], Mapping[str, Any]], Cost]:
    def cost(views: Sequence[Any], constants: Mapping[str, Any]) -> Cost:
        count = registered_flops(op, backend)
        return Cost(count(views, constants) if count else 0.0, float(sum(view.nbytes for view in views)))

    return cost


def _widened(kernel: Kernel, modes: tuple[Mode, ...]) -> Kernel:
    """Return `kernel` with fp32 copies of its 16-bit arrays around it; the last argument of the result is the scratch memory of the copies."""

    def run(*arrays: Any, **constants: Any) -> None:
        from .kernels.cpu.elementwise import convert

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


def emit(
    runtime: TaskRuntime, op: str, accesses: Sequence[Access], *, priority: int = 0, condition: Condition | None = None, **constants: Any
) -> None:
    """Submit one task of operation `op` over tile handles; 16-bit tiles go to a kernel that supports them, or are widened around the kernel.

    If the runtime has GPUs, their kernels get fp32 and bf16 tiles unchanged. Activations that the program has registered run on the CPU. `condition`
    is the argument of `TaskRuntime.submit`.
    """
    views: list[Any] = [handle.view for handle, _ in accesses]
    narrow = [view for view in views if view.dtype in NARROW]
    own = runtime.has_gpus and own_activation(constants.get("kind", "")) is not None
    if not narrow:
        chosen = _codelet_of(op, kernel(op, "cpu"), None) if own else codelet(op, has_gpus=runtime.has_gpus)
        runtime.submit(chosen, accesses, constants, priority=priority, condition=condition)
        return
    if runtime.has_gpus and not own and has_cuda(op) and all(view.dtype == BF16 for view in narrow):
        runtime.submit(_codelet_of(op, None, kernel(op, "cuda"), "cuda"), accesses, constants, priority=priority, condition=condition)
        return
    cpu_codelet, accesses = _on_cpu(runtime, op, accesses, constants)
    runtime.submit(cpu_codelet, accesses, constants, priority=priority, condition=condition)


def emit_on_cpu(runtime: TaskRuntime, op: str, accesses: Sequence[Access], *, priority: int = 0, **constants: Any) -> None:
    """Submit one task as `emit` does, but for CPU workers only."""
    cpu_codelet, accesses = _on_cpu(runtime, op, accesses, constants)
    runtime.submit(_cpu_only(cpu_codelet), accesses, constants, priority=priority)


def _on_cpu(runtime: TaskRuntime, op: str, accesses: Sequence[Access], constants: Mapping[str, Any]) -> tuple[Codelet, Sequence[Access]]:
    """Return the codelet of an operation on the CPU, and the accesses with the scratch memory that 16-bit tiles need there."""
    views: list[Any] = [handle.view for handle, _ in accesses]
    narrow = [view for view in views if view.dtype in NARROW]
    if not narrow:
        return _codelet_of(op, kernel(op, "cpu"), None), accesses
    native = native_for(op, views, constants)
    if native is None:
        nbytes = sum(_aligned(4 * prod(view.shape)) for view in narrow)
        chosen = _widening_codelet(op, kernel(op, "cpu"), tuple(mode for _, mode in accesses))
    else:
        nbytes = native.scratch_nbytes(views, constants)
        chosen = _codelet_of(op, native.kernel, None)
    return chosen, [*accesses, (scratch(runtime, nbytes), SCRATCH)] if nbytes else accesses


def native_for(op: str, views: Sequence[Any], constants: Mapping[str, Any]) -> Native | None:
    """Return the kernel that takes these tiles without widening; None if there is none or this machine cannot run it."""
    native = bf16_kernel(op)
    if native is None or any(view.dtype == np.float16 for view in views) or not native.takes(views, constants):
        return None
    if own_activation(constants.get("kind", "")) is not None:
        return None
    from .kernels.cpu.onednn import library as onednn

    return native if onednn.has_bf16_products() else None


def scratch(runtime: TaskRuntime, nbytes: int) -> Any:
    """Return a handle of `nbytes` bytes of working memory for one task: pass it with mode SCRATCH; the kernel gets a uint8 array."""
    return runtime.handle(nbytes, TileView((nbytes,), np.dtype(np.uint8)), name="scratch", data_class="scratch")
