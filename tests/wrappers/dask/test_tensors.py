"""Dask arrays as tile tensors and back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import dask.array as da
import numpy as np
import pytest

from nntask.errors import UsageError
from scheduler import Runtime
from tiles import TileTensor
from wrappers.dask import from_array, get, to_array


@pytest.fixture
def machine() -> Iterator[Runtime]:
    """Two workers."""
    with Runtime(cpu_workers=2, ram=16 << 20) as runtime:
        yield runtime


def test_tiles_are_chunks_without_a_copy(machine: Runtime) -> None:
    """A chunk is the tile's own memory, read-only; ragged edges too; arithmetic sees the values."""
    values = np.arange(70.0 * 50).reshape(70, 50)
    tensor = TileTensor(machine, (70, 50), (32, 32), np.float64, name="x")
    tensor.write(values)
    array = to_array(tensor)
    assert array.chunks == ((32, 32, 6), (32, 18))
    np.testing.assert_array_equal(array.compute(scheduler=get), values)
    chunk = get(dict(array.__dask_graph__()), (array.name, 2, 1))
    with machine.acquire(tensor[2, 1], "R") as view:
        assert np.shares_memory(chunk, view)
    assert not chunk.flags.writeable
    assert float((array @ array.T).sum().compute(scheduler=get)) == pytest.approx(float((values @ values.T).sum()))


def test_a_lent_tile_is_given_back_with_its_last_view(machine: Runtime) -> None:
    """A writer waits for the views, and runs when they are gone."""
    tensor = TileTensor(machine, (64,), (64,), np.float64)
    tensor.write(np.zeros(64))
    array = to_array(tensor)
    view = get(dict(array.__dask_graph__()), (array.name, 0))[3:]
    host = machine._executor.machine.program
    assert len(host.assigned) == 1
    del view
    gc.collect()
    tensor.write(np.ones(64))  # hangs unless the tile was given back
    np.testing.assert_array_equal(tensor.read(), np.ones(64))


@pytest.mark.parametrize("chunks", [(32, 32), (20, 50)])
def test_arrays_become_tiles(machine: Runtime, chunks: tuple[int, int]) -> None:
    """Whatever the chunks; the element type is the tensor's."""
    values = np.arange(70 * 50).reshape(70, 50)
    tensor = TileTensor(machine, (70, 50), (32, 32), np.float32, name="x")
    from_array(da.from_array(values, chunks=chunks), tensor, scheduler=get)
    np.testing.assert_array_equal(tensor.read(), values.astype(np.float32))


def test_shapes_must_agree(machine: Runtime) -> None:
    """The message has both."""
    tensor = TileTensor(machine, (4,), (4,), np.float32, name="x")
    with pytest.raises(UsageError, match=r"x has shape \(4,\), got a dask array of shape \(5,\)"):
        from_array(da.ones(5), tensor)
