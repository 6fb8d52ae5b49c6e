"""Transports of the bytes of buckets between nodes, as `exchange` uses them: inside its messages, or separately by another `ByteTransport`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Tiles = Sequence[npt.NDArray[Any]]


class Channel:
    """The transport of bytes between this node and one peer, in both directions. The event loop's thread calls all methods.

    This class puts the bytes into the messages; subclasses move them separately.

    Attributes:
        is_separate: whether bytes travel outside the messages, which then only have their number.
    """

    is_separate = False

    def put(self, tiles: Tiles) -> Any:
        """Begin to send the bytes of tiles, one after another; the tiles stay unchanged until the peer has confirmed them.

        Returns:
            The content for the message: the bytes, or their number if they travel separately.
        """
        from distributed.protocol import to_serialize

        flat = [bytes_of(tile) for tile in tiles]
        return to_serialize(flat[0] if len(flat) == 1 else np.concatenate(flat))  # a single tile is not copied

    def take(self, content: Any, tiles: Tiles, arrived: Callable[[], None]) -> None:
        """Fill tiles with the bytes of a message.

        Args:
            content: content of the message, as returned by the peer's `put`.
            tiles: the tiles.
            arrived: callback for their arrival, called in the order of the messages.

        Raises:
            ValueError: the number of bytes is not that of the tiles.
        """
        source, offset = np.frombuffer(content, np.uint8), 0
        check_nbytes(source.nbytes, tiles)
        for tile in tiles:
            target = bytes_of(tile)
            target[:] = source[offset : offset + target.nbytes]
            offset += target.nbytes
        arrived()

    def stop(self, stopped: Callable[[], None]) -> None:
        """Stop moving bytes, and call `stopped` when no tile is read or written any more."""
        stopped()


class ByteTransport:
    """The channels of a node, by default inside its messages. The event loop's thread calls all methods except `close`.

    Attributes:
        num_steps: number of `steps`.
    """

    num_steps = 0

    def hello(self, rank: int) -> Any:
        """Return the information that the peer's end of a channel needs, sent in the first message.

        Raises:
            NntaskError: this node cannot move any bytes.
        """

    def open_channel(self, rank: int, theirs: Any, fail: Callable[[BaseException], None]) -> Channel:
        """Begin to connect to a peer.

        Args:
            rank: rank of the peer.
            theirs: the peer's `hello`.
            fail: callback for an error of the channel, called by the event loop's thread.
        """
        return Channel()

    def steps(self) -> Iterable[tuple[int, Awaitable[None]]]:
        """Return preparations as (rank of a peer, awaitable), to be awaited in order before bytes can travel. Each peer has a channel by then."""
        return ()

    def close(self) -> None:
        """End all channels; callable from any thread. No tile is used afterwards, unless NCCL still blocks a link after `nccl.STOP_SECONDS`."""


def bytes_of(tile: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the memory of a tile as bytes, without a copy."""
    return tile.reshape(-1).view(np.uint8)


def nbytes_of(tiles: Tiles) -> int:
    """Return the bytes of all tiles together."""
    return sum(tile.nbytes for tile in tiles)


def check_nbytes(found: int, tiles: Tiles) -> None:
    """Compare the number of received bytes with that of the tiles.

    Raises:
        ValueError: the numbers differ.
    """
    if found != nbytes_of(tiles):
        raise ValueError(f"a bucket must have {nbytes_of(tiles)} bytes, got {found}")
