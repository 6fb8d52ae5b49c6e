"""Data-parallel training on several nodes: which node computes which shard of a step, and the tasks in which nodes exchange their results.

Every node has the whole model and computes some lanes of the gradient sums, with the minibatches of these lanes. It sums them along the fixed tree of
lanes as far as both halves are its own. Each tile of a parameter has one owner. The owner receives the other nodes' partial sums of the gradient,
completes the sum in the tree's order, updates the tile and sends it to the others; it alone holds the tile's optimizer state (ZeRO-1: Rajbhandari et
al., 2020). The numbers are those of one node with the same lanes, whatever the number n of nodes. Each node sends (n - 1) / n of the bytes of the
gradient and of the parameters.

Tiles travel in buckets: one large tile, some small ones, or all of a matrix that is updated as a whole, in the order in which backward passes
complete their gradients. Transfers are tasks of the recorded step, emitted in one sequence, of which each node has its part, so that all of them end
(`Dispatch.take_turns`): a bucket travels in its turn once it is final, during the backward pass, and the next step's tasks wait only for the tiles
they read. A receiver allocates a bucket only when its own part of it is final. A `Transport` carries the bytes; nothing here depends on a network.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod
from operator import itemgetter
from typing import Final, Protocol

from scheduler import Access, Codelet, Handle, R, W
from scheduler.machine import labelled, tree
from tiles import TileTensor
from tiles.ops import optimizer as optimizer_ops

from ..errors import UsageError
from ..nn.module import Parameter
from .optimizers import Optimizer, Tiles, complete

BUCKET: Final = 1 << 20
"""Smallest bucket in bytes of parameters, for smaller tiles; buckets are smaller if nodes could not share a small model evenly otherwise."""

BUCKETS: Final = 8
"""Number of buckets that each node should own, if tiles are small enough."""

LAG: Final = 2
"""Number of buckets per node whose gradients travel before the parameters of a bucket: the owner has updated it by then, so that its transfer, which
has its turn there, holds back none that is due."""

NO_MATRICES: Final[Mapping[str, str]] = {}
"""No parameter that one node updates as a whole."""

URGENT: Final = 1 << 20
"""Priority of tasks that other nodes wait for: sums, updates and norms, before the rest of the backward pass."""


@dataclass(frozen=True, slots=True)
class DataShard:
    """The data-parallel shard of a step that one of several nodes computes.

    Attributes:
        rank: rank of the node, from 0.
        lanes: lanes of each node, in order of ranks; a lane is a partial accumulator of a sum over minibatches.
        minibatches: minibatches of this node, numbered within the step.
        num_minibatches: number of minibatches of the step.
    """

    rank: int
    lanes: tuple[range, ...]
    minibatches: tuple[int, ...]
    num_minibatches: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the cluster."""
        return len(self.lanes)

    @property
    def num_lanes(self) -> int:
        """Number of lanes that the step uses."""
        return self.lanes[-1].stop

    @property
    def peers(self) -> list[int]:
        """Ranks of the other nodes, the next one first, so that not all nodes begin with the same peer."""
        return [(self.rank + step) % self.num_nodes for step in range(1, self.num_nodes)]

    def partial_sums_of(self, rank: int) -> list[int]:
        """Return the first lane of each partial sum that a node sends; each sum is a whole branch of the tree of lanes."""
        here = set(self.lanes[rank])
        firsts = set(here)
        for a, b, end in tree(self.num_lanes):
            if here.issuperset(range(a, end)):
                firsts.discard(b)
        return sorted(firsts)


def most_nodes(num_minibatches: int, lanes: int) -> int:
    """Return the largest number of nodes that can share a step: each needs a lane with a minibatch."""
    return min(num_minibatches, lanes)


def data_shards(num_minibatches: int, lanes: int, num_nodes: int) -> list[DataShard]:
    """Return the shard of each node: neighbouring lanes, divided as evenly as possible, each with every L-th minibatch of L lanes.

    Raises:
        UsageError: the step uses fewer lanes than nodes.
    """
    used = most_nodes(num_minibatches, lanes)
    if not 1 <= num_nodes <= used:
        raise UsageError(
            f"a step of {num_minibatches} minibatches in {lanes} lanes is shared by 1 to {used} nodes, got {num_nodes}",
            "raise --lanes, or lower --minibatch",
        )
    per_node, rest = divmod(used, num_nodes)
    ends = [0]
    for rank in range(num_nodes):
        ends.append(ends[-1] + per_node + (rank < rest))
    ranges = tuple(range(a, b) for a, b in pairwise(ends))
    minibatches = [tuple(m for m in range(num_minibatches) if m % lanes in own) for own in ranges]
    return [DataShard(rank, ranges, numbers, num_minibatches) for rank, numbers in enumerate(minibatches)]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tiles that travel together.

    Attributes:
        number: its place in the order in which backward passes end gradients.
        tiles: (number of a parameter, number of a tile of it).
        nbytes: bytes of the parameters' tiles.
        owner: rank of the node that updates them.
    """

    number: int
    tiles: tuple[tuple[int, int], ...]
    nbytes: int
    owner: int


def buckets_of(tensors: Sequence[TileTensor], num_nodes: int, whole: Mapping[str, str] = NO_MATRICES) -> list[Bucket]:
    """Return the buckets of parameters, spread over the nodes by bytes, the same on every node.

    Args:
        tensors: learnt parameters in the model's order; backward passes complete their gradients in the opposite order.
        whole: names of tensors -> name of the matrix that they are, or are a part of, whose tiles are all in one bucket.
    """
    enough = min(BUCKET, sum(tensor.nbytes for tensor in tensors) // (BUCKETS * num_nodes))
    last_of = {whole[tensor.name]: which for which, tensor in reversed(list(enumerate(tensors))) if tensor.name in whole}  # in the order of buckets
    begun: set[str] = set()  # matrices with tiles in the bucket
    groups: list[tuple[list[tuple[int, int]], int]] = []
    tiles: list[tuple[int, int]] = []
    nbytes = 0
    for which in range(len(tensors) - 1, -1, -1):
        tensor = tensors[which]
        last = tensor.tiling.num_tiles - 1
        begun |= {whole[tensor.name]} if tensor.name in whole else set()
        for number, index in enumerate(tensor.tiling.indices()):
            tiles.append((which, number))
            nbytes += prod(tensor.tiling.extents(index)) * tensor.dtype.itemsize
            if number == last:
                begun = {matrix for matrix in begun if last_of[matrix] != which}
            if nbytes >= enough and not begun:
                groups.append((tiles, nbytes))
                tiles, nbytes = [], 0
    if tiles:
        groups.append((tiles, nbytes))
    owners = _spread([nbytes for _, nbytes in groups], num_nodes)
    return [Bucket(number, tuple(tiles), nbytes, owner) for number, ((tiles, nbytes), owner) in enumerate(zip(groups, owners, strict=True))]


def _spread(sizes: Sequence[int], num_nodes: int) -> list[int]:
    """Assign an owner to each size so that totals are balanced: each goes to the owner with the least so far (Graham, 1966).

    Of similar sizes, neighbours then have different owners, so buckets that are complete at about the same time use every node's link. Assignment
    begins with the last size, because no computation hides the transfer of the gradients that a backward pass completes last.
    """
    loads = [(0, rank) for rank in range(num_nodes)]
    owners = [0] * len(sizes)
    for number in reversed(range(len(sizes))):
        load, rank = heapq.heappop(loads)
        owners[number] = rank
        heapq.heappush(loads, (load + sizes[number], rank))
    return owners


class Transport(Protocol):
    """Carries bytes between nodes.

    Attributes:
        send: codelet of kind host over tiles that it reads, with constants `peer` (rank) and `key`.
        receive: codelet of kind host with the same constants and `count`, over `count` tiles that it writes, followed by tiles that it ignores. The
            k-th receive from a peer under a key gets the tiles of that peer's k-th send under that key.
    """

    send: Codelet
    receive: Codelet


class Exchange:
    """The part of a recorded step that follows the backward passes on one of several nodes; replaces `Optimizer.step`.

    Args:
        parameters: learnt parameters in the model's order.
        shard: shard of this node.
        transport: connection to the other nodes.
        whole: parameters that one node updates as a whole (`Optimizer.whole`).

    Attributes:
        buckets: buckets of all parameters.
        tiles_of: numbers of the tiles that this node owns, by parameter.
    """

    def __init__(self, parameters: Sequence[Parameter], shard: DataShard, transport: Transport, whole: Mapping[str, str] = NO_MATRICES) -> None:
        self.shard, self.transport = shard, transport
        self.buckets = buckets_of([p.data for p in parameters], shard.num_nodes, whole)
        self.owners = owners_of(self.buckets)
        self._names = [p.name for p in parameters]
        self.tiles_of: Tiles = {name: [] for name in self._names}
        for name, number in self._tiles(shard.rank):
            self.tiles_of[name].append(number)  # type: ignore[attr-defined]
        for numbers in self.tiles_of.values():
            numbers.sort()  # type: ignore[attr-defined]

    def _tiles(self, rank: int) -> Iterator[tuple[str, int]]:
        """Yield the parameter and the number of each tile that a node owns."""
        for bucket in self.buckets:
            if bucket.owner == rank:
                yield from ((self._names[which], number) for which, number in bucket.tiles)

    def emit(self, optimizer: Optimizer) -> None:
        """Emit everything from the end of the backward passes to the next step's parameters, and release the gradients.

        `optimizer.grad_norm` is None afterwards on nodes that do not receive the norm: without clipping, all but the first.
        """
        Emission(self, optimizer).run()


def owners_of(buckets: Sequence[Bucket]) -> dict[tuple[int, int], int]:
    """Return the owner of each tile: (number of a parameter, number of a tile of it) -> rank."""
    return {tile: bucket.owner for bucket in buckets for tile in bucket.tiles}


class Emission:
    """Emission of the tasks of an exchange, for one recorded step."""

    def __init__(self, exchange: Exchange, optimizer: Optimizer) -> None:
        self.shard, self.transport, self.optimizer = exchange.shard, exchange.transport, optimizer
        self.buckets, self.runtime = exchange.buckets, optimizer.runtime
        self.ready = {p.name: (p, gradient, group) for p, gradient, group in optimizer.take_gradients()}
        self.names = exchange._names
        gradients = [gradient for _, gradient, _ in self.ready.values()]
        self.squares = optimizer_ops.squares_of_tiles(gradients)
        firsts, first = {}, 0
        for name, (_, gradient, _) in self.ready.items():
            firsts[name] = first
            first += gradient.tiling.num_tiles
        self.firsts = firsts

    def run(self) -> None:
        """Emit the buckets one by one; with clipping in two passes, because every update waits for the norm of all gradients."""
        clips, lag = self.optimizer.max_norm > 0, LAG * self.shard.num_nodes
        with labelled(phase="update", path=""):
            for number, bucket in enumerate(self.buckets):
                self._sum(bucket)
                if not clips:
                    self._update(bucket, None)
                    if number >= lag:
                        self._publish(self.buckets[number - lag])
            for bucket in () if clips else self.buckets[-lag:]:
                self._publish(bucket)
            self.optimizer.grad_norm = norm = self._norm(everywhere=clips)
            for bucket in self.buckets if clips else ():
                self._update(bucket, norm)
                self._publish(bucket)

    def _sum(self, bucket: Bucket) -> None:
        """Combine the nodes' partial sums of a bucket's gradients at its owner."""
        me = self.shard.rank
        gradients = [self.ready[self.names[which]][1].handles[number] for which, number in bucket.tiles]
        written = [handle for handle in gradients if handle.written]
        sums = [self.runtime.partial_sums(handle, self.shard.num_lanes, priority=URGENT) for handle in written]
        if bucket.owner != me:
            for lane in self.shard.partial_sums_of(me) if written else ():
                self._send([partial[lane] for partial in sums], bucket.owner, f"gradient {bucket.number}.{lane}")
            return
        for peer in self.shard.peers if written else ():
            for lane in self.shard.partial_sums_of(peer):
                arrived = [self._like(handle, f"{handle.name} of node {peer}") for handle in written]
                self._receive(arrived, peer, f"gradient {bucket.number}.{lane}", after=written)
                for own, partial in zip(sums, arrived, strict=True):
                    own[lane] = partial
        for handle, whole in zip(written, sums, strict=True):
            for lane, partial in whole.items():
                self.runtime.add_partial_sum(handle, lane, partial)
        for which, number in bucket.tiles:
            name = self.names[which]
            gradient = self.ready[name][1]
            complete(gradient, gradient.handles[number], priority=URGENT)
            optimizer_ops.square(self.runtime, gradient.handles[number], self.squares.handles[self.firsts[name] + number], priority=URGENT)

    def _update(self, bucket: Bucket, norm: TileTensor | None) -> None:
        """Update a bucket at its owner."""
        for which, tiles in groupby(bucket.tiles if bucket.owner == self.shard.rank else (), itemgetter(0)):
            parameter, gradient, group = self.ready[self.names[which]]
            self.optimizer.update(parameter, gradient, group, norm, [number for _, number in tiles], URGENT)

    def _publish(self, bucket: Bucket) -> None:
        """Send the new parameters of a bucket from its owner to the other nodes."""
        tiles = [self.ready[self.names[which]][0].data.handles[number] for which, number in bucket.tiles]
        key = f"parameters {bucket.number}"
        if bucket.owner != self.shard.rank:
            self._receive(tiles, bucket.owner, key)
            return
        for peer in self.shard.peers:
            self._send(tiles, peer, key)

    def _norm(self, *, everywhere: bool) -> TileTensor | None:
        """Return the sum of squares of the whole gradient, on the first node or on all nodes; None on the others."""
        me, key = self.shard.rank, "squares"
        receivers = range(self.shard.num_nodes if everywhere else 1)
        for rank in range(self.shard.num_nodes):
            squares = self._squares_of(rank)
            for peer in receivers if squares else ():
                if rank == me != peer:
                    self._send(squares, peer, key)
                elif peer == me != rank:
                    self._receive(squares, rank, key)
        return optimizer_ops.sum_squares(self.squares) if me in receivers else None

    def _squares_of(self, rank: int) -> list[Handle]:
        """Return the sums of squares that a node computes."""
        return [
            self.squares.handles[self.firsts[self.names[which]] + number]
            for bucket in self.buckets
            if bucket.owner == rank
            for which, number in bucket.tiles
        ]

    def _like(self, handle: Handle, name: str) -> Handle:
        return self.runtime.handle(handle.nbytes, handle.view, name=name, data_class=handle.spec.data_class, combine=handle.combine)

    def _send(self, tiles: Sequence[Handle], peer: int, key: str) -> None:
        self.runtime.submit(self.transport.send, [(tile, R) for tile in tiles], {"peer": peer, "key": key}, priority=URGENT)

    def _receive(self, tiles: Sequence[Handle], peer: int, key: str, after: Sequence[Handle] = ()) -> None:
        """Receive tiles; allocate their memory only when the tiles of `after` are ready."""
        accesses: list[Access] = [*((tile, W) for tile in tiles), *((tile, R) for tile in after)]
        self.runtime.submit(self.transport.receive, accesses, {"peer": peer, "key": key, "count": len(tiles)}, priority=URGENT)
