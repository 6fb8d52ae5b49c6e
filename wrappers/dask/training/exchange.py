"""Bytes between the nodes of a training, over connections of Dask's comm layer: the `Transport` of `nntask.optim.sharded`.

Each node listens on an address of its own and has one connection to every other node. The data of a send task stays in its tile until the receive
task has memory for it and requests it. So bytes wait only in tiles, which budgets count, and at most a window and a bucket are in flight to each
peer. One message has everything that is due to a peer at that moment (`peers`): requested keys, keys and bytes that the peer has requested, and the
number of the peer's buckets that have arrived. With a subclass of `ByteTransport`, the bytes travel separately.

Tasks begin and end as host tasks of the scheduler. All state belongs to one thread with an event loop; other threads only append to its inbox. A
broken connection, or an unexpected message, fails every task that waits for that peer, now and later, with `PeerLost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from time import perf_counter
from typing import Any, Final

import numpy.typing as npt

from scheduler import Codelet

from .peers import WINDOW, Done, Peer, PeerLost, Waiting
from .transports import ByteTransport

CONNECT_SECONDS: Final = 20.0
"""Time limit of each step of connecting nodes to each other."""


class PeerComms:
    """The connections of one node.

    Args:
        job: identifier that only nodes of the same training know; connections without it are refused.
        rank: rank of this node.
        listen_on: address to listen on, such as "tls://10.0.0.2:0".
        connect_args, listen_args: arguments of Dask's comm layer, such as the cluster's TLS certificates.
        bandwidth: limit on the bytes per second that this node sends; None for no limit.
        transport: transport of the bytes of buckets; None to send them in the messages.

    Attributes:
        send, receive: codelets of `nntask.optim.sharded.Transport`.
        num_messages: number of messages sent so far.
        window: bytes in flight to a peer beyond which no further bucket is sent, the result of `peers.window_for`.
    """

    def __init__(
        self,
        job: str,
        rank: int,
        *,
        listen_on: str,
        connect_args: Mapping[str, Any] | None = None,
        listen_args: Mapping[str, Any] | None = None,
        bandwidth: float | None = None,
        transport: ByteTransport | None = None,
    ) -> None:
        self._job, self._rank, self._listen_on = job, rank, listen_on
        self._connect_args, self._listen_args = dict(connect_args or {}), dict(listen_args or {})
        self._bandwidth, self._free_at = bandwidth, 0.0
        self._transport = transport or ByteTransport()
        self.send = Codelet("send", host=self._begin_send)
        self.receive = Codelet("receive", host=self._begin_receive)
        self.num_messages = 0
        self.window = WINDOW
        self._peers: dict[int, Peer] = {}
        self._inbox: deque[tuple[bool, int, str, Waiting]] = deque()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: Any = None
        self._all_here: asyncio.Future[None] = self._loop.create_future()
        self._awaited = 0  # rank of the peer that `wait_connected` waits for
        self._num_nodes = 0
        self._connecting: Future[None] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="nntask exchange", daemon=True)
        self._thread.start()

    @property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes sent to each peer so far, framing included."""
        return {rank: peer.sent_bytes for rank, peer in self._peers.copy().items()}

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _call(self, coroutine: Any, timeout: float) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def listen(self) -> str:
        """Begin to listen; returns the address for peers."""
        address: str = self._call(self._listen(), CONNECT_SECONDS)
        return address

    async def _listen(self) -> str:
        from distributed.comm import listen

        self._listener = await listen(self._listen_on, self._answer, **self._listen_args)
        address: str = self._listener.contact_address
        return address

    def begin_to_connect(self, addresses: Sequence[str]) -> None:
        """Begin to connect to all peers.

        Args:
            addresses: addresses of all nodes by rank, as returned by their `listen`.
        """
        self._connecting = asyncio.run_coroutine_threadsafe(self._connect(addresses), self._loop)

    def wait_connected(self) -> None:
        """Wait until there is a connection to each peer.

        Raises:
            PeerLost: a peer did not answer.
            NntaskError: the transport of this node cannot begin.
        """
        assert self._connecting is not None  # begin_to_connect() comes first
        try:
            self._connecting.result(self.connect_seconds)
        except TimeoutError:
            self._connecting.cancel()
            raise PeerLost(self._awaited, f"not all connections were there within {self.connect_seconds:g} s") from None

    @property
    def connect_seconds(self) -> float:
        """Time limit of `wait_connected`."""
        return (2 + self._transport.num_steps) * CONNECT_SECONDS

    async def _connect(self, addresses: Sequence[str]) -> None:
        from distributed.comm import connect

        self._num_nodes = len(addresses)
        for rank in range(self._rank):
            self._awaited = rank
            try:
                comm = await connect(addresses[rank], timeout=CONNECT_SECONDS, **self._connect_args)
                await comm.write({"job": self._job, "rank": self._rank, "transport": self._transport.hello(rank)})
                answer = await asyncio.wait_for(comm.read(), CONNECT_SECONDS)
                if answer["job"] != self._job:
                    raise OSError("it belongs to another training")
            except (TimeoutError, OSError) as error:
                raise PeerLost(rank, error) from error
            self._welcome(rank, comm, answer["transport"])
        try:
            if len(self._peers) < self._num_nodes - 1:
                self._awaited = self._num_nodes - 1  # or another one above this node
                await asyncio.wait_for(self._all_here, CONNECT_SECONDS)
        except TimeoutError:
            missing = min(set(range(self._num_nodes)) - set(self._peers) - {self._rank})
            raise PeerLost(missing, f"it did not connect within {CONNECT_SECONDS:g} s") from None
        for rank, step in self._transport.steps():
            self._awaited = rank
            try:
                await asyncio.wait_for(step, CONNECT_SECONDS)
            except TimeoutError:
                raise PeerLost(rank, f"no data could be sent to or received from it within {CONNECT_SECONDS:g} s") from None
            except Exception as error:
                raise PeerLost(rank, error) from error

    async def _answer(self, comm: Any) -> None:
        """Accept or refuse an incoming connection."""
        try:
            hello = await asyncio.wait_for(comm.read(), CONNECT_SECONDS)
        except (TimeoutError, OSError):
            comm.abort()
            return
        rank = hello.get("rank") if isinstance(hello, dict) and hello.get("job") == self._job else None
        if type(rank) is not int or rank <= self._rank or rank in self._peers:  # not of this training, or not a peer that connects to this node
            await comm.close()
            return
        try:
            ours = self._transport.hello(rank)
        except Exception as error:  # a failure of this node, raised by its wait_connected()
            comm.abort()
            if not self._all_here.done():
                self._all_here.set_exception(error)
            return
        await comm.write({"job": self._job, "transport": ours})
        self._welcome(rank, comm, hello["transport"])

    def _welcome(self, rank: int, comm: Any, theirs: Any) -> None:
        peer = self._peers[rank] = self._peers.get(rank) or Peer(rank, self._loop.call_later)
        peer.comm = comm
        peer.channel = self._transport.open_channel(rank, theirs, partial(self._lose, peer))
        for loop in (self._read(peer), self._write(peer)):
            task = self._loop.create_task(loop)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if len(self._peers) == self._num_nodes - 1 and not self._all_here.done():
            self._all_here.set_result(None)

    def _begin_send(self, done: Done, *tiles: npt.NDArray[Any], peer: int, key: str) -> None:
        self._begin(True, peer, key, (tiles, done))

    def _begin_receive(self, done: Done, *tiles: npt.NDArray[Any], peer: int, key: str, count: int) -> None:
        self._begin(False, peer, key, (tiles[:count], done))

    def _begin(self, is_send: bool, peer: int, key: str, waiting: Waiting) -> None:
        """Enter a send or receive task; called under the runtime's lock, so that one thread at a time appends.

        Appending comes before the test: an entry that is not alone is processed by the call that processes the entry before it.
        """
        self._inbox.append((is_send, peer, key, waiting))
        if len(self._inbox) == 1:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the training has ended
                self._loop.call_soon_threadsafe(self._drain_inbox)

    def _drain_inbox(self) -> None:
        inbox = self._inbox
        while inbox:
            is_send, rank, key, waiting = inbox.popleft()
            peer = self._peers[rank]
            if peer.lost is not None:
                waiting[1](peer.lost)
            elif is_send:
                peer.enqueue(key, waiting)
            else:
                peer.expect(key, waiting)

    async def _write(self, peer: Peer) -> None:
        """Send messages to a peer as long as any is due."""
        try:
            while True:
                await peer.wake.wait()
                peer.wake.clear()
                while (message := peer.next_message(self.window)) is not None:
                    nbytes = await peer.comm.write(message)
                    peer.sent_bytes += nbytes
                    self.num_messages += 1
                    if self._bandwidth is not None:
                        now = perf_counter()
                        self._free_at = max(self._free_at, now) + nbytes / self._bandwidth
                        await asyncio.sleep(self._free_at - now)
        except Exception as error:
            self._lose(peer, error)

    async def _read(self, peer: Peer) -> None:
        """Handle the messages of a peer."""
        try:
            while True:
                peer.handle(await peer.comm.read(), self.window)
        except Exception as error:
            self._lose(peer, error)

    def _lose(self, peer: Peer, error: BaseException) -> None:
        """Mark a peer as lost, because its connection broke, and stop the exchange with all other peers.

        No step ends without the lost peer. Two other nodes, with tasks cancelled because its buckets are missing, would otherwise wait indefinitely
        for each other's buckets.
        """
        if not self._closed:
            peer.lose(error)
            assert peer.lost is not None
            for other in self._peers.values():
                other.give_up(peer.lost)

    def close(self) -> None:
        """Close all connections and end the thread; unfinished tasks never end. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._connecting is not None:
                self._connecting.cancel()
            with contextlib.suppress(Exception):  # the connections end anyway
                self._call(self._close(), CONNECT_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CONNECT_SECONDS)
            self._transport.close()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for peer in self._peers.values():
            peer.comm.abort()
        if self._listener is not None:
            self._listener.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
