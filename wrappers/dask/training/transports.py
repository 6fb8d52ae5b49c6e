"""Transports of the bytes of buckets between nodes, as `exchange` uses them: inside its messages, or separately by another `ByteTransport`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Tiles = Sequence[npt.NDArray[Any]]


class Channel(Protocol):
    """The transport of bytes between this node and one peer, in both directions. The thread of the event loop calls every method.

    Attributes:
        is_beside: whether bytes travel outside the messages, which then only have their number.
    """

    is_beside: bool

    def put(self, tiles: Tiles) -> Any:
        """Begin to send the bytes of tiles, one after another; the tiles stay unchanged until the peer has confirmed them.

        Returns:
            The content for the message: the bytes, or their number.
        """

    def take(self, said: Any, tiles: Tiles, arrived: Callable[[], None]) -> None:
        """Fill tiles with the bytes of a message; calls `arrived` when they have arrived, in the order of the messages.

        Args:
            said: content of the message, as returned by the peer's `put`.
            tiles: the tiles.
            arrived: callback.

        Raises:
            ValueError: the number of bytes is not that of the tiles.
        """

    def stop(self, stopped: Callable[[], None]) -> None:
        """Stop moving bytes; calls `stopped` when no tile is read or written any more."""


class ByteTransport(Protocol):
    """The channels of a node. The thread of the event loop calls every method but `close`.

    Attributes:
        num_steps: number of `steps`.
    """

    num_steps: int

    def hello(self, rank: int) -> Any:
        """Return the information for the peer's end of a channel, sent in the first message.

        Raises:
            NntaskError: this node cannot move any bytes.
        """

    def open_channel(self, rank: int, theirs: Any, fail: Callable[[BaseException], None]) -> Channel:
        """Begin to connect to a peer.

        Args:
            rank: rank of the peer.
            theirs: the peer's `hello`.
            fail: called by the thread of the event loop with an error of the channel.
        """

    def steps(self) -> Iterable[tuple[int, Awaitable[None]]]:
        """Return the preparations that must be awaited one after another before bytes can travel, as (rank of a peer, awaitable).

        Each peer has a channel by then.
        """

    def close(self) -> None:
        """End all channels; callable from any thread.

        No tile is read or written afterwards, unless the network still blocks a channel after `nccl.STOP_SECONDS`.
        """


class MessageTransport:
    """Bytes travel inside the messages."""

    num_steps = 0

    def hello(self, rank: int) -> None:
        """None: a peer needs no information."""

    def open_channel(self, rank: int, theirs: Any, fail: Callable[[BaseException], None]) -> Channel:
        """Return the channel of a peer, which has no state."""
        return MessageChannel()

    def steps(self) -> Iterable[tuple[int, Awaitable[None]]]:
        """Return an empty sequence: there is nothing to prepare."""
        return ()

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


class MessageChannel:
    """Bytes travel inside the message."""

    is_beside = False

    def put(self, tiles: Tiles) -> Any:
        """Return the bytes of tiles; those of a single tile without a copy."""
        from distributed.protocol import to_serialize

        flat = [bytes_of(tile) for tile in tiles]
        return to_serialize(flat[0] if len(flat) == 1 else np.concatenate(flat))

    def take(self, said: Any, tiles: Tiles, arrived: Callable[[], None]) -> None:
        """Copy the bytes from the message to the tiles."""
        source, offset = np.frombuffer(said, np.uint8), 0
        check_nbytes(source.nbytes, tiles)
        for tile in tiles:
            target = bytes_of(tile)
            target[:] = source[offset : offset + target.nbytes]
            offset += target.nbytes
        arrived()

    def stop(self, stopped: Callable[[], None]) -> None:
        """Call `stopped` at once: no transfer is under way."""
        stopped()


def bytes_of(tile: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the memory of a tile as bytes, without a copy."""
    return tile.reshape(-1).view(np.uint8)


def nbytes_of(tiles: Tiles) -> int:
    """Return the bytes of all tiles together."""
    return sum(tile.nbytes for tile in tiles)


def check_nbytes(come: int, tiles: Tiles) -> None:
    """Compare the number of arriving bytes with that of the tiles.

    Raises:
        ValueError: the numbers differ.
    """
    if come != nbytes_of(tiles):
        raise ValueError(f"{come} bytes came where {nbytes_of(tiles)} were expected")
