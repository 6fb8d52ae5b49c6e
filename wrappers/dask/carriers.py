"""How the bytes of buckets get from node to node, seen from `exchange`: inside its messages, unless other `Carriers` take them beside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Tiles = Sequence[npt.NDArray[Any]]


class Carrier(Protocol):
    """What carries bytes between this node and one peer, both ways. Every method is called by the thread of the event loop.

    Attributes:
        is_beside: whether bytes travel beside the messages, which then only say how many there are.
    """

    is_beside: bool

    def put(self, tiles: Tiles) -> Any:
        """Begin to send the bytes of tiles, one after another; they stay as they are until the peer has them.

        Returns:
            What the message says of them.
        """

    def take(self, said: Any, tiles: Tiles, arrived: Callable[[], None]) -> None:
        """Fill tiles with the bytes that a message speaks of; calls `arrived` when they are there, in the order of the messages.

        Raises:
            ValueError: those are not as many bytes as the tiles have.
        """

    def stop(self, stopped: Callable[[], None]) -> None:
        """Carry nothing more; calls `stopped` when no tile is read or written any more."""


class Carriers(Protocol):
    """The carriers of a node. Every method but `close` is called by the thread of the event loop.

    Attributes:
        num_steps: how many `steps` has.
    """

    num_steps: int

    def hello(self, rank: int) -> Any:
        """What the carrier of a peer has to know of this node; it travels in the first message.

        Raises:
            NntaskError: this node cannot carry anything.
        """

    def carrier(self, rank: int, theirs: Any, fail: Callable[[BaseException], None]) -> Carrier:
        """Begin to connect to a peer.

        Args:
            theirs: its hello.
            fail: called by the thread of the event loop if something breaks.
        """

    def steps(self) -> Iterable[tuple[int, Awaitable[None]]]:
        """What has to happen before bytes can travel, one after another, once there is a carrier for each peer: (rank of a peer, to be awaited)."""

    def close(self) -> None:
        """End everything. No tile is read or written any more, unless the network has not let go of it for `nccl.STOP_SECONDS`.

        Called by any thread.
        """


class MessageCarriers:
    """Bytes are a part of the messages."""

    num_steps = 0

    def hello(self, rank: int) -> None:
        """Nothing."""

    def carrier(self, rank: int, theirs: Any, fail: Callable[[BaseException], None]) -> Carrier:
        """The same for all."""
        return MessageCarrier()

    def steps(self) -> Iterable[tuple[int, Awaitable[None]]]:
        """None."""
        return ()

    def close(self) -> None:
        """Nothing to do."""


class MessageCarrier:
    """Bytes are a part of the message."""

    is_beside = False

    def put(self, tiles: Tiles) -> Any:
        """The bytes; of a single tile without a copy."""
        from distributed.protocol import to_serialize

        flat = [bytes_of(tile) for tile in tiles]
        return to_serialize(flat[0] if len(flat) == 1 else np.concatenate(flat))

    def take(self, said: Any, tiles: Tiles, arrived: Callable[[], None]) -> None:
        """Copy them out of the message."""
        source, offset = np.frombuffer(said, np.uint8), 0
        check_nbytes(source.nbytes, tiles)
        for tile in tiles:
            target = bytes_of(tile)
            target[:] = source[offset : offset + target.nbytes]
            offset += target.nbytes
        arrived()

    def stop(self, stopped: Callable[[], None]) -> None:
        """Nothing is under way."""
        stopped()


def bytes_of(tile: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """A tile's memory, byte by byte."""
    return tile.reshape(-1).view(np.uint8)


def nbytes_of(tiles: Tiles) -> int:
    """Of all tiles together."""
    return sum(tile.nbytes for tile in tiles)


def check_nbytes(come: int, tiles: Tiles) -> None:
    """Compare what comes with what is expected.

    Raises:
        ValueError: the numbers differ.
    """
    if come != nbytes_of(tiles):
        raise ValueError(f"{come} bytes came where {nbytes_of(tiles)} were expected")
