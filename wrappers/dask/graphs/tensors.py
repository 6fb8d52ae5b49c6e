"""Dask arrays as tile tensors and back, tile by tile.

`to_array` copies nothing: a chunk is a tile, borrowed as long as a reference to the chunk exists; the tile's memory is pinned meanwhile. `from_array`
copies each chunk once, from Dask's result into the tiles that it overlaps. Where chunks and tiles agree, that is one tile at a time. The whole array
never exists in one piece.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache
from itertools import count, product
from queue import SimpleQueue
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask._task_spec import Task

from nntask import UsageError
from scheduler import Handle, SchedulerError, TaskRuntime
from tiles import TileTensor

_numbers = count()


def to_array(tensor: TileTensor) -> Any:
    """Return a tile tensor as a dask array of the same shape and element type, whose chunks are its tiles, without a copy.

    A chunk is read-only, and its task waits for the tasks that write the tile. Each live chunk pins its tile in host memory, and tasks that write the
    tile wait for the chunk to die; so compute the array, use it, and drop it.

    Returns:
        A `dask.array.Array`.
    """
    tiling, runtime = tensor.tiling, tensor.runtime
    chunks = tuple(
        tuple(min(tile, extent - begin) for begin in range(0, extent, tile)) for extent, tile in zip(tiling.shape, tiling.tile, strict=True)
    )
    name = f"tiles-{tensor.name or 'tensor'}-{next(_numbers)}"
    graph = {(name, *index): Task((name, *index), _borrow, runtime, tensor[index]) for index in product(*map(range, tiling.grid))}
    return da.Array(graph, name, chunks, dtype=tensor.dtype, meta=np.empty((0,) * len(tiling.shape), tensor.dtype))


def from_array(array: Any, tensor: TileTensor, *, scheduler: str | Callable[..., Any] | None = None) -> None:
    """Overwrite a tile tensor with a dask array of its shape, converting to its element type.

    Args:
        array: a `dask.array.Array`; Dask rechunks it first if its chunks are not the tensor's tiles.
        tensor: the tile tensor.
        scheduler: Dask scheduler that computes the array; None for Dask's choice.

    Raises:
        UsageError: the shapes differ.
    """
    if array.shape != tensor.shape:
        raise UsageError(f"{tensor.name or 'the tile tensor'} has shape {tensor.shape}, got a dask array of shape {array.shape}", "make them equal")
    da.store(array.rechunk(tensor.tiling.tile), _TileSink(tensor), lock=False, scheduler=scheduler)


class _TileSink:
    """The target of `dask.array.store`: it writes whole tiles of a tensor.

    Attributes:
        shape, dtype: shape and element type of the tensor.
    """

    def __init__(self, tensor: TileTensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self._tensor = tensor

    def __setitem__(self, region: tuple[slice, ...], chunk: npt.NDArray[Any]) -> None:
        tensor = self._tensor
        index = tuple(each.start // tile for each, tile in zip(region, tensor.tiling.tile, strict=True))
        with tensor.runtime.acquire(tensor[index], "W") as view:
            np.copyto(view, chunk, casting="unsafe")


class _Loan:
    """A tile that is pinned until no reference to its memory is left; the base of the array over it.

    NumPy keeps the first base that is no array, so views of views refer to this object, too.
    """

    is_borrowed = True  # marks memory that does not belong to a Dask result; read by `values`

    def __init__(self, loan: AbstractContextManager[Any]) -> None:
        view = loan.__enter__()
        self.__array_interface__ = {**view.__array_interface__, "data": (view.__array_interface__["data"][0], True)}
        weakref.finalize(self, _returns.put, loan).atexit = False


_returns: SimpleQueue[AbstractContextManager[Any]] = SimpleQueue()
"""Loans without references. Finalizers only append, because they may run in a thread that is inside the runtime."""


@cache
def _start_returning() -> None:
    """Start the thread that ends the loans of this queue."""

    def give_back() -> None:
        while True:
            with suppress(SchedulerError):  # the runtime was closed meanwhile
                _returns.get().__exit__(None, None, None)

    threading.Thread(target=give_back, name="nntask dask loans", daemon=True).start()


def _borrow(runtime: TaskRuntime, handle: Handle) -> npt.NDArray[Any]:
    """Return a tile as a read-only array over its own memory."""
    _start_returning()
    return np.asarray(_Loan(runtime.acquire(handle, "R", is_shared=True)))
