"""Execution of PyTorch in a task: on a CPU worker's memory, or on a GPU's, with PyTorch's own CUDA kernels on the scheduler's stream.

This is the only module that turns the view of a tile into a tensor on a device, sets the current stream, and translates errors of a card. On a GPU:

- Lent memory becomes a tensor without a copy by ``__cuda_array_interface__``. Its memory stays the scheduler's.
- The worker's stream is PyTorch's current stream while a task's kernels are started, so PyTorch's caching allocator hands memory that a task has
  freed only to later work on the same stream: nothing must be kept until kernels have ended.
- The host never waits: no value comes back from the device, and the seed is read there (`rules`).
- Results that PyTorch allocates are counted in the task's scratch, as on the CPU, although the card holds them outside of it.
- Sessions with GPUs make PyTorch use deterministic kernels (`hosting.GpuTerms`), since kernels that add by atomics differ from run to run.
On an emulated device tensors are in host memory, and everything else is the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import ml_dtypes
import numpy as np
import torch

from nntask import DoesNotFit
from scheduler import DeviceFailed, Shortage
from tiles.kernels import DeviceArray, StreamPointer, device

HOST: Final = torch.device("cpu")

DTYPES: Final[dict[torch.dtype, np.dtype[Any]]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.bool: np.dtype(np.bool_),
}
"""Element types of tensors -> those of tiles."""
_OF_TILES: Final = {tile: tensor for tensor, tile in DTYPES.items()}

KEYS: Final = ("CPU", "CUDA") if torch.backends.cuda.is_built() else ("CPU",)
"""Dispatch keys of the devices that this PyTorch can compute on; the last one is that of GPUs, which a PyTorch without CUDA emulates."""
_COMPOSITE: Final = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")


def has_kernel(func: Any, *keys: str) -> bool:
    """Return whether an overload has its own kernel for each of these dispatch keys."""
    return all(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys)


def runs_on_gpu(func: Any) -> bool:
    """Return whether an overload runs on GPUs, by a kernel for them or by other operations."""
    return any(has_kernel(func, key) for key in (KEYS[-1], *_COMPOSITE))


class _CudaArray:
    """Lent device memory in a form that PyTorch accepts, as bytes."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2}


def as_bytes(view: Any, where: torch.device = HOST) -> torch.Tensor:
    """Return the memory of a tile as bytes for PyTorch, without a copy  # any shape -> (nbytes,) uint8.

    Args:
        view: array of host memory, or `DeviceArray`.
        where: the device that computes.
    """
    if not isinstance(view, DeviceArray):
        return torch.from_numpy(view.reshape(-1).view(np.uint8))
    if where.type == "cuda":
        return torch.as_tensor(_CudaArray(view.address, view.nbytes), device=where)
    memory = (ctypes.c_char * view.nbytes).from_address(view.address)
    return torch.from_numpy(np.ndarray((view.nbytes,), np.uint8, buffer=memoryview(memory)))


def as_tensor(view: Any, shape: Sequence[int], where: torch.device = HOST) -> torch.Tensor:
    """Return a tile as a tensor of another shape of the same size, without a copy; `view` and `where` are those of `as_bytes`."""
    return as_bytes(view, where).view(_OF_TILES[view.dtype]).view(shape)


def compute_on_gpu(compute: Callable[[torch.device], None]) -> None:
    """Let `compute` start PyTorch's kernels on the stream of the GPU whose worker thread calls this.

    Raises:
        DoesNotFit: the card has no memory left for PyTorch, which allocates outside the budget.
        DeviceFailed: the card has stopped working.
    """

    def start(stream: StreamPointer) -> None:
        if stream.card is None:
            with torch.inference_mode():
                compute(HOST)
            return
        try:
            with torch.cuda.stream(_external(stream.card, stream.pointer)), torch.inference_mode():
                compute(torch.device("cuda", stream.card))
        except RuntimeError as error:
            raise _told(stream, error) from error

    device().start_external(start)


@cache
def _external(card: int, pointer: int) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(pointer, device=torch.device("cuda", card))


def _told(stream: StreamPointer, error: RuntimeError) -> Exception:
    """Return the error that a program receives for an error of PyTorch on a card."""
    if isinstance(error, torch.OutOfMemoryError):
        size, available, _ = str(error).partition(" is free")
        shortage = Shortage("outside", stream.name, 0, 0, task="PyTorch", detail=size + available)
        return DoesNotFit(shortage.fact, "lower gpu_memory=, or end other programs that use the card", shortage=shortage)
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
        return DeviceFailed(stream.name, str(error), "resume from the last save(), on another GPU or after a reset")
    return error
