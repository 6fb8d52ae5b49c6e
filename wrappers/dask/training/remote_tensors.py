"""Tensors that live on the nodes of a cluster, as tile tensors of the client, so that the code of checkpoints reads and writes them like any others.

A tile is read from the node that owns it; all tiles of a tensor are requested together. A written tile goes to its owner, a parameter's tile to every
node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from nntask.engine import ModelShapes
from nntask.optim import buckets_of, owners_of
from scheduler import Handle, InlineRuntime, Mode
from scheduler.machine import HandleSpec
from tiles import TileTensor

if TYPE_CHECKING:
    from .team import Team

PATIENCE: Final = 300.0
"""Time limit of the tiles of a tensor; seconds."""

UNDER_WAY: Final = 32
"""Most tiles that are written at once."""


class Mirror(InlineRuntime):
    """The runtime of the client's tensors, without data of its own and without tasks.

    Args:
        team: the nodes with the data.
        shapes: tensors of the model and the optimizer, without data.

    Attributes:
        model, optimizer: the trained tensors, and the optimizer's state, by name.
    """

    def __init__(self, team: Team, shapes: ModelShapes) -> None:
        super().__init__()
        self._team = team
        owners = owners_of(buckets_of(list(shapes.trained.values()), len(team.actors), shapes.whole))
        self._owners = {
            name: [owners[which, number] for number in range(t.tiling.num_tiles)] for which, (name, t) in enumerate(shapes.trained.items())
        }
        self._tile_names: dict[Handle, tuple[str, str, int]] = {}
        self.model = self._mirrored("model", shapes.trained)
        self.optimizer = self._mirrored("optimizer", shapes.optimizer)
        self._fetched: dict[int, npt.NDArray[np.uint8]] = {}
        self._fetched_tensor = ("", "")
        self._sent: list[Any] = []

    def _mirrored(self, table: str, tensors: Mapping[str, TileTensor]) -> dict[str, TileTensor]:
        found = {}
        for name, tensor in tensors.items():
            found[name] = own = TileTensor(self, tensor.shape, tensor.tile, tensor.dtype, name=name)
            self._tile_names.update({handle: (table, name, number) for number, handle in enumerate(own.handles)})
        return found

    def _record(self, spec: HandleSpec) -> None:
        """Return None: these handles have no memory."""

    def acquire(self, handle: Handle, mode: Mode, *, is_shared: bool = False) -> AbstractContextManager[Any]:
        """Return a context manager with a copy of a tile; a written copy is sent at the end of the block."""
        return self._borrow(handle, mode)

    @contextmanager
    def _borrow(self, handle: Handle, mode: Mode) -> Iterator[Any]:
        table, name, number = self._tile_names[handle]
        memory = np.empty(handle.nbytes, np.uint8)
        if mode != "W":
            memory[:] = self._tiles(table, name)[number]
        yield handle.view(memory, 0)
        if mode != "R":
            self._send(table, name, number, memory)

    def _tiles(self, table: str, name: str) -> Mapping[int, npt.NDArray[np.uint8]]:
        """Return all tiles of a tensor, by number; the latest tensor is cached."""
        if self._fetched_tensor != (table, name):
            self.flush()
            wanted: dict[int, list[int]] = {}
            for number, owner in enumerate(self._owners_of(table, name)):
                wanted.setdefault(owner, []).append(number)
            asked = [self._team.ask(owner, "read", table, name, numbers) for owner, numbers in wanted.items()]
            self._fetched = {}
            for numbers, arrived in zip(wanted.values(), self._team.gather(asked, PATIENCE), strict=True):
                self._fetched.update(zip(numbers, arrived, strict=True))
            self._fetched_tensor = (table, name)
        return self._fetched

    def _owners_of(self, table: str, name: str) -> Sequence[int]:
        """Return the owner of each tile. The name of an optimizer's tensor is its kind, a dot, and the name of the parameter."""
        return self._owners[name if table == "model" else name.partition(".")[2]]

    def _send(self, table: str, name: str, number: int, memory: npt.NDArray[np.uint8]) -> None:
        self._fetched_tensor = ("", "")
        owner = self._owners_of(table, name)[number]
        for rank in range(len(self._team.actors)) if table == "model" else [owner]:
            self._sent.append(self._team.ask(rank, "write", table, name, {number: memory}))
        if len(self._sent) >= UNDER_WAY:
            self.flush()

    def flush(self) -> None:
        """Wait until all written tiles have arrived."""
        sent, self._sent = self._sent, []
        self._team.gather(sent, PATIENCE)
