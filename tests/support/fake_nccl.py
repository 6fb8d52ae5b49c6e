"""NCCL between threads of one process, each with GPUs of host memory (`gpu.FakeGpu`): ranks wait for each other as on cards. Faults can be planted.

A rank that joins waits for the other one. Ranks on one card return from joining one after another. Joining may wait for the whole card, and thus for
a peer of a transfer on it, so no rank may join on a card that has begun to transfer.

A send blocks its stream until the other rank's stream has reached the matching receive, and vice versa; only then bytes are copied. Aborting a rank
ends the work on its stream and does not notify the other rank, as between cards with peer access. Different sizes, or two sends that meet, end both
ranks with an error. A call that copies returns at once or, as in CUDA if host memory is not page-locked, when all earlier work has ended; the choice
is random.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from typing import Final, NamedTuple, cast

from scheduler.drivers import Gpu, Stream, UniqueId
from scheduler.drivers.nccl import CupyCommunicator
from scheduler.testing import FakeGpu, FakeStream

_APART_SECONDS: Final = 0.01
"""Seconds between the ends of two joins on a card, enough for a rank that does not wait for all of them to begin a transfer."""

COMMUNICATOR_NBYTES = 3 << 20
"""Bytes of a card's memory that each rank on it takes."""


class _Transfer(NamedTuple):
    is_send: bool
    address: int
    nbytes: int


class _Pair:
    """A communicator: for each rank, whether it has joined or was aborted, the transfer that blocks its stream, and the number of ended transfers."""

    def __init__(self) -> None:
        self.joined = [False, False]
        self.aborted = [False, False]
        self.standing: list[_Transfer | None] = [None, None]
        self.num_done = [0, 0]
        self.error = ""


class FakeNetwork:
    """The connection between the nodes of a test.

    Attributes:
        stands_after: number of transfers after which none ends any more, without an error; None for never.
        fails_after: number of transfers after which none ends any more and `CupyCommunicator.check` raises; None for never.
        lets_go: event that is set while `CupyCommunicator.abort` may return.
        num_asked: number of sends and receives put on streams.
        num_transfers: number of transfers that have ended.
    """

    def __init__(self) -> None:
        self.stands_after: int | None = None
        self.fails_after: int | None = None
        self.lets_go = threading.Event()
        self.lets_go.set()
        self.num_asked = self.num_transfers = 0
        self.changed = threading.Condition()
        self._pairs: dict[UniqueId, _Pair] = {}
        self._is_down = False

    def new_id(self) -> UniqueId:
        """Return the id of a new communicator."""
        with self.changed:
            number = len(self._pairs)
            unique_id = number.to_bytes(8, "big")
            self._pairs[unique_id] = _Pair()
            return unique_id

    def join(self, unique_id: UniqueId, rank: int, number: int, carries: Callable[[], bool]) -> _Pair:
        """Wait for the other rank, and return the pair.

        Args:
            unique_id: id of the communicator.
            rank: rank to join as.
            number: number of the join, among those on the card.
            carries: function that returns whether a transfer was put on a stream of the card.

        Raises:
            RuntimeError: the other rank will not join, or the card has begun to transfer.
        """
        with self.changed:
            pair = self._pairs[unique_id]
            assert not pair.joined[rank], "a rank of a communicator is taken twice"
            pair.joined[rank] = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: all(pair.joined) or self._is_down)
            if not all(pair.joined):
                raise RuntimeError("planted: the other rank does not join")
            self.changed.wait_for(carries, number * _APART_SECONDS)
            if carries():
                raise RuntimeError("planted: a card transfers bytes while a rank on it still joins")
            return pair

    def take_down(self) -> None:
        """Wake the ranks that wait for another one to join; they get an error."""
        with self.changed:
            self._is_down = True
            self.changed.notify_all()

    def wait_transfers(self, number: int, timeout: float) -> bool:
        """Wait until `number` transfers have ended; return whether they have."""
        with self.changed:
            return self.changed.wait_for(lambda: self.num_transfers >= number, timeout)

    def wait_asked(self, number: int, timeout: float) -> bool:
        """Wait until `number` sends and receives have been put on streams; return whether they have."""
        with self.changed:
            return self.changed.wait_for(lambda: self.num_asked >= number, timeout)

    def is_past(self, number: int | None) -> bool:
        """Return whether `number` transfers have ended; False for None."""
        return number is not None and self.num_transfers >= number


class FakeCommunicator:
    """One of two ranks.

    Attributes:
        is_aborted: whether `abort` was called.
        num_asked: number of its sends and receives put on streams.
    """

    def __init__(self, network: FakeNetwork, pair: _Pair, rank: int) -> None:
        self._network, self._pair, self._rank = network, pair, rank
        self.is_aborted = False
        self.num_asked = 0
        self._thread = threading.current_thread()

    def send(self, address: int, nbytes: int, stream: Stream) -> None:
        """Put a send on a stream."""
        self._put(_Transfer(True, address, nbytes), stream)

    def receive(self, address: int, nbytes: int, stream: Stream) -> None:
        """Put a receive on a stream."""
        self._put(_Transfer(False, address, nbytes), stream)

    def check(self) -> None:
        """Raise an error of the network or of the pair, if any."""
        self._check_thread()
        with self._network.changed:
            if self._network.is_past(self._network.fails_after):
                raise RuntimeError("planted: the network failed")
            if self._pair.error:
                raise RuntimeError(self._pair.error)

    def abort(self) -> None:
        """Abort the communicator, once `FakeNetwork.lets_go` is set."""
        self._check_thread()
        self._network.lets_go.wait()
        with self._network.changed:
            self.is_aborted = self._pair.aborted[self._rank] = True
            self._pair.standing[self._rank] = None

    def _check_thread(self) -> None:
        assert threading.current_thread() is self._thread, "a communicator is used by two threads"

    def _put(self, transfer: _Transfer, stream: Stream) -> None:
        self._check_thread()
        number = self.num_asked
        self.num_asked += 1
        cast(FakeStream, stream).put(lambda: None, lambda: self._is_over(number, transfer))
        with self._network.changed:
            self._network.num_asked += 1
            self._network.changed.notify_all()

    def _is_over(self, number: int, transfer: _Transfer) -> bool:
        """Return whether the stream may pass a transfer; execute it if the other rank's stream has reached the matching one."""
        network, pair, here, there = self._network, self._pair, self._rank, 1 - self._rank
        with network.changed:
            if pair.aborted[here] or pair.num_done[here] > number:
                return True
            pair.standing[here] = transfer
            other = pair.standing[there]
            if other is None or network.is_past(network.fails_after) or network.is_past(network.stands_after):
                return False
            if other.is_send == transfer.is_send or other.nbytes != transfer.nbytes:
                pair.error = f"{transfer} met {other}"
                return False
            source, target = (transfer, other) if transfer.is_send else (other, transfer)
            ctypes.memmove(target.address, source.address, source.nbytes)
            pair.standing[:] = None, None
            pair.num_done = [number + 1 for number in pair.num_done]
            network.num_transfers += 1
            network.changed.notify_all()
            return True


class _Gpu(FakeGpu):
    """A GPU on which some copies return late, chosen at random."""

    def __init__(self, name: str, seed: int, memory: int) -> None:
        super().__init__(name, seed=seed, memory=memory)
        self.chance = random.Random(seed)

    def stream(self) -> FakeStream:
        """Return a new stream."""
        with self.lock:
            self._node.streams.append(_Stream(self))
            return self._node.streams[-1]

    @property
    def is_at_rest(self) -> bool:
        """Whether no stream has work left."""
        return not any(stream.steps for stream in self._node.streams)


class _Stream(FakeStream):
    _gpu: _Gpu

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes late, or wait for the stream, chosen at random."""
        super().copy(target, source, nbytes)
        if self._gpu.chance.random() < 0.5:
            self._gpu.run_until(lambda: not self.steps)


class FakeNccl:
    """NCCL of one node.

    Args:
        network: connection with the other nodes.
        card: identifier of the card, see `drivers.nccl.CupyNccl`.
        memory: bytes of the card.

    Attributes:
        gpus: GPU objects created so far.
        joins: whether a rank of this node ever joins; if not, it waits until the network is taken down.
        num_ids: number of ids created.
        has_sockets: whether the node has sockets; if not, no rank gets an id.
    """

    def __init__(self, network: FakeNetwork, card: str = "0", memory: int = 1 << 40) -> None:
        self.card = card
        self.joins = self.has_sockets = True
        self.num_ids = self._num_joins = 0
        self.gpus: list[_Gpu] = []
        self.memory = memory
        self._network = network
        self._ranks: list[FakeCommunicator] = []

    def gpu(self) -> Gpu:
        """Return a new GPU object, whose streams do not advance by calls of other objects."""
        left = self.memory - sum(gpu.reserved_nbytes for gpu in self.gpus)
        self.gpus.append(_Gpu(f"card {self.card}", len(self.gpus), left))
        return cast(Gpu, self.gpus[-1])

    def free_nbytes(self) -> int:
        """Return the bytes that neither GPU objects nor joined ranks, unless aborted, have taken."""
        ranks = sum(not rank.is_aborted for rank in self._ranks)
        return self.memory - sum(gpu.reserved_nbytes for gpu in self.gpus) - COMMUNICATOR_NBYTES * ranks

    def unique_id(self) -> UniqueId:
        """Return a new unique id.

        Raises:
            RuntimeError: this node has no sockets.
        """
        if not self.has_sockets:
            raise RuntimeError("planted: no socket interface found")
        self.num_ids += 1
        return self._network.new_id()

    def _carries(self) -> bool:
        return any(rank.num_asked for rank in self._ranks)

    def join(self, unique_id: UniqueId, rank: int) -> CupyCommunicator:
        """Join a communicator of two ranks."""
        with self._network.changed:
            number, self._num_joins = self._num_joins, self._num_joins + 1
        pair = self._network.join(unique_id if self.joins else self._network.new_id(), rank, number, self._carries)
        communicator = FakeCommunicator(self._network, pair, rank)
        self._ranks.append(communicator)
        return communicator
