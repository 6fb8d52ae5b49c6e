"""Tensors that live on the nodes of a cluster, as tile tensors of the client: what reads and writes checkpoints works on them as on any others.

A tile is read from its owner, and a tensor's tiles are asked for together. One that is written goes to its owner, a parameter's to every node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from nntask.sharding import buckets_of, owners_of
from nntask.trainer.fitting import Sketch
from scheduler import Handle, InlineRuntime, Mode
from scheduler.core.records import DataClass, Kind
from scheduler.frontend import View
from tiles import TileTensor

if TYPE_CHECKING:
    from scheduler import Codelet

    from .cluster_team import Team

PATIENCE: Final = 300.0
"""Seconds that the tiles of a tensor may take."""

UNDER_WAY: Final = 32
"""Tiles that are sent at a time."""


class Mirror(InlineRuntime):
    """The runtime of a client's tensors; it has no data of its own and runs no tasks.

    Args:
        team: who has the data.
        shapes: of the model and the optimizer.

    Attributes:
        model, optimizer: the tensors that are learnt, and the optimizer's state, by name.
    """

    def __init__(self, team: Team, shapes: Sketch) -> None:
        super().__init__()
        self._team = team
        owners = owners_of(buckets_of(list(shapes.trained.values()), len(team.actors)))
        self._owners = {
            name: [owners[which, number] for number in range(t.tiling.num_tiles)] for which, (name, t) in enumerate(shapes.trained.items())
        }
        self._places: dict[Handle, tuple[str, str, int]] = {}
        self.model = self._mirrored("model", shapes.trained)
        self.optimizer = self._mirrored("optimizer", shapes.optimizer)
        self._held: dict[int, npt.NDArray[np.uint8]] = {}
        self._holding = ("", "")
        self._sent: list[Any] = []

    def _mirrored(self, table: str, tensors: Mapping[str, TileTensor]) -> dict[str, TileTensor]:
        found = {}
        for name, tensor in tensors.items():
            found[name] = own = TileTensor(self, tensor.shape, tensor.tile, tensor.dtype, name=name)
            self._places.update({handle: (table, name, number) for number, handle in enumerate(own.handles)})
        return found

    def handle(
        self,
        nbytes: int,
        view: View,
        *,
        name: str = "",
        kind: Kind = "temporary",
        data_class: DataClass = "activations",
        combine: Codelet | None = None,
    ) -> Handle:
        """A handle without memory."""
        return Handle(None, nbytes, view, name=name, kind=kind, data_class=data_class, combine=combine, inbox=None)

    def acquire(self, handle: Handle, mode: Mode) -> AbstractContextManager[Any]:
        """Lend a copy of a tile; what is written to it is sent when the block ends."""
        return self._lend(handle, mode)

    @contextmanager
    def _lend(self, handle: Handle, mode: Mode) -> Iterator[Any]:
        table, name, number = self._places[handle]
        memory = np.empty(handle.nbytes, np.uint8)
        if mode != "W":
            memory[:] = self._tiles(table, name)[number]
        yield handle.view(memory, 0)
        if mode != "R":
            self._send(table, name, number, memory)

    def _tiles(self, table: str, name: str) -> Mapping[int, npt.NDArray[np.uint8]]:
        """All tiles of a tensor; the last one that was asked for is kept."""
        if self._holding != (table, name):
            self.flush()
            wanted: dict[int, list[int]] = {}
            for number, owner in enumerate(self._owners_of(table, name)):
                wanted.setdefault(owner, []).append(number)
            asked = [self._team.ask(owner, "read", table, name, numbers) for owner, numbers in wanted.items()]
            self._held = {}
            for numbers, arrived in zip(wanted.values(), self._team.gather(asked, PATIENCE), strict=True):
                self._held.update(zip(numbers, arrived, strict=True))
            self._holding = (table, name)
        return self._held

    def _owners_of(self, table: str, name: str) -> Sequence[int]:
        """The owner of each tile; state of the optimizer is named after its parameter, behind what it is."""
        return self._owners[name if table == "model" else name.partition(".")[2]]

    def _send(self, table: str, name: str, number: int, memory: npt.NDArray[np.uint8]) -> None:
        self._holding = ("", "")
        owner = self._owners_of(table, name)[number]
        for rank in range(len(self._team.actors)) if table == "model" else [owner]:
            self._sent.append(self._team.ask(rank, "write", table, name, {number: memory}))
        if len(self._sent) >= UNDER_WAY:
            self.flush()

    def flush(self) -> None:
        """Wait until everything that was written is there."""
        sent, self._sent = self._sent, []
        self._team.gather(sent, PATIENCE)
