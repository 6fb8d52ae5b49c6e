"""Data-parallel training on several nodes: which node computes which shard of a step, and the tasks in which nodes exchange their results.

Every node has the whole model and takes some lanes of the gradient sums, with the minibatches that belong to them. It sums its lanes as far as the
fixed tree of lanes has both halves on this node. Each tile of a parameter has one owner: it receives the other nodes' partial sums of the gradient,
ends the sum in the tree's order, updates the tile, whose optimizer state only it has (ZeRO-1: Rajbhandari et al., 2020), and sends the new tile to
the others. So the numbers are those of one node with as many lanes, whatever the number of nodes; and a node sends its partial sums of the tiles that
it does not own once, and the tiles that it owns to every other node: (n - 1) / n of the gradient's bytes and as much of the parameters'.

Tiles travel in buckets: one large tile, or some small ones, in the order in which backward passes end their gradients. All of it is tasks of the
recorded step, so a bucket travels as soon as it is final, while the backward pass goes on, and the next step's tasks wait for the tiles they read. A
receiver takes memory for a bucket only when its own part of it is final. What carries bytes is a `Transport`; nothing here knows of networks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Final, Protocol

from scheduler import Access, Codelet, Handle, R, W, tree
from tiles import TileTensor
from tiles.ops import optimizer as optimizer_ops

from ..errors import UsageError
from ..nn.module import Parameter
from .optimizers import Optimizer, Tiles, complete

BUCKET: Final = 1 << 20
"""Bytes of parameters that travel together, at least, where tiles are smaller; fewer where nodes could not share a small model evenly otherwise."""

BUCKETS: Final = 8
"""Buckets that each node should own, at least, where tiles allow it."""

URGENT: Final = 1 << 20
"""Priority of what other nodes wait for: sums, updates and norms before the rest of the backward pass."""


@dataclass(frozen=True, slots=True)
class DataShard:
    """The data-parallel shard of a step that one of several nodes computes.

    Attributes:
        rank: of the node, from 0.
        lanes: of each node, in order of ranks; a lane is a partial accumulator of a sum over minibatches.
        minibatches: of this node, numbered within the step.
        num_minibatches: of the step.
    """

    rank: int
    lanes: tuple[range, ...]
    minibatches: tuple[int, ...]
    num_minibatches: int

    @property
    def num_nodes(self) -> int:
        """Nodes of the cluster."""
        return len(self.lanes)

    @property
    def num_lanes(self) -> int:
        """Lanes that the step uses."""
        return self.lanes[-1].stop

    @property
    def peers(self) -> list[int]:
        """Ranks of the other nodes, the next one first: so that not all begin with the same."""
        return [(self.rank + step) % self.num_nodes for step in range(1, self.num_nodes)]

    def partial_sums_of(self, rank: int) -> list[int]:
        """First lanes of the partial sums that a node sends: a whole branch of the tree of lanes in each."""
        here = set(self.lanes[rank])
        firsts = set(here)
        for a, b, end in tree(self.num_lanes):
            if here.issuperset(range(a, end)):
                firsts.discard(b)
        return sorted(firsts)


def most_nodes(num_minibatches: int, lanes: int) -> int:
    """Nodes that can share a step: each needs a lane with a minibatch."""
    return min(num_minibatches, lanes)


def data_shards(num_minibatches: int, lanes: int, num_nodes: int) -> list[DataShard]:
    """The shard of each node: neighbouring lanes, as many for each as can be, with every L-th minibatch.

    Raises:
        UsageError: there are more nodes than lanes in use.
    """
    used = most_nodes(num_minibatches, lanes)
    if not 1 <= num_nodes <= used:
        raise UsageError(
            f"a step of {num_minibatches} minibatches in {lanes} lanes is shared by 1 to {used} nodes, got {num_nodes}; "
            "raise --lanes, or lower --minibatch"
        )
    each, rest = divmod(used, num_nodes)
    ends = [0]
    for rank in range(num_nodes):
        ends.append(ends[-1] + each + (rank < rest))
    ranges = tuple(range(a, b) for a, b in pairwise(ends))
    minibatches = [tuple(m for m in range(num_minibatches) if m % lanes in own) for own in ranges]
    return [DataShard(rank, ranges, numbers, num_minibatches) for rank, numbers in enumerate(minibatches)]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tiles that travel together.

    Attributes:
        number: its place in the order in which backward passes end gradients.
        tiles: (number of a parameter, number of a tile of it).
        nbytes: of the parameters' tiles.
        owner: rank of the node that updates them.
    """

    number: int
    tiles: tuple[tuple[int, int], ...]
    nbytes: int
    owner: int


def buckets_of(tensors: Sequence[TileTensor], num_nodes: int) -> list[Bucket]:
    """The buckets of parameters, spread over the nodes by bytes, the same on every node.

    Args:
        tensors: of the parameters that are learnt, in the model's order; backward passes end their gradients in the opposite one.
    """
    enough = min(BUCKET, sum(tensor.nbytes for tensor in tensors) // (BUCKETS * num_nodes))
    groups: list[tuple[list[tuple[int, int]], int]] = []
    tiles: list[tuple[int, int]] = []
    nbytes = 0
    for which in range(len(tensors) - 1, -1, -1):
        tensor = tensors[which]
        for number, index in enumerate(tensor.tiling.indices()):
            tiles.append((which, number))
            nbytes += prod(tensor.tiling.extents(index)) * tensor.dtype.itemsize
            if nbytes >= enough:
                groups.append((tiles, nbytes))
                tiles, nbytes = [], 0
    if tiles:
        groups.append((tiles, nbytes))
    owners = _spread([nbytes for _, nbytes in groups], num_nodes)
    return [Bucket(number, tuple(tiles), nbytes, owner) for number, ((tiles, nbytes), owner) in enumerate(zip(groups, owners, strict=True))]


def _spread(sizes: Sequence[int], num_nodes: int) -> list[int]:
    """An owner for each size, so that all own about as much, of neighbours too: one after another to the owner that has least (Graham, 1966).

    Where sizes are alike, what ends at about the same time then travels over every node's link. It begins with the last size, because nothing hides
    the travel of what a backward pass ends last.
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
        send: a codelet of kind host over tiles that are read, with constants `peer` (rank) and `key`.
        receive: likewise over tiles that are written, and after them tiles that it does not look at, with `count`, the number of the former. What
            it gets is what the peer sends under the same key, the k-th time what is sent for the k-th time.
    """

    send: Codelet
    receive: Codelet


class Exchange:
    """The part of a recorded step that follows the backward passes on one of several nodes, instead of `Optimizer.step`.

    Args:
        parameters: that are learnt, in the model's order.
        shard: of this node.
        transport: to the others.

    Attributes:
        buckets: of all parameters.
        tiles_of: numbers of the tiles that this node owns, by parameter.
    """

    def __init__(self, parameters: Sequence[Parameter], shard: DataShard, transport: Transport) -> None:
        self.shard, self.transport = shard, transport
        self.buckets = buckets_of([p.data for p in parameters], shard.num_nodes)
        self.owners = owners_of(self.buckets)
        self._names = [p.name for p in parameters]
        self.tiles_of: Tiles = {name: [] for name in self._names}
        for name, number in self._tiles(shard.rank):
            self.tiles_of[name].append(number)  # type: ignore[attr-defined]
        for numbers in self.tiles_of.values():
            numbers.sort()  # type: ignore[attr-defined]

    def _tiles(self, rank: int) -> Iterator[tuple[str, int]]:
        """Parameter and number of each tile that a node owns."""
        for bucket in self.buckets:
            if bucket.owner == rank:
                yield from ((self._names[which], number) for which, number in bucket.tiles)

    def emit(self, optimizer: Optimizer) -> None:
        """Emit everything from the end of the backward passes to the next step's parameters, and forget the gradients.

        `optimizer.grad_norm` is None afterwards on nodes that do not receive the norm: all but the first, where nothing is clipped by it.
        """
        Emission(self, optimizer).run()


def owners_of(buckets: Sequence[Bucket]) -> dict[tuple[int, int], int]:
    """The owner of each tile: (number of a parameter, number of a tile of it) -> rank."""
    return {tile: bucket.owner for bucket in buckets for tile in bucket.tiles}


class Emission:
    """One emission of an exchange."""

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
        """Emit bucket after bucket; with clipping in two passes, because every update waits for the norm of all."""
        clips = self.optimizer.max_norm > 0
        for bucket in self.buckets:
            self._sum(bucket)
            if not clips:
                self._update(bucket, None)
        self.optimizer.grad_norm = norm = self._norm(everywhere=clips)
        for bucket in self.buckets if clips else ():
            self._update(bucket, norm)

    def _sum(self, bucket: Bucket) -> None:
        """Bring the nodes' partial sums of a bucket's gradients together at its owner."""
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
        """Update a bucket at its owner, and let the others have it."""
        tiles = [self.ready[self.names[which]][0].data.handles[number] for which, number in bucket.tiles]
        key = f"parameters {bucket.number}"
        if bucket.owner != self.shard.rank:
            self._receive(tiles, bucket.owner, key)
            return
        for which, number in bucket.tiles:
            parameter, gradient, group = self.ready[self.names[which]]
            self.optimizer.update(parameter, gradient, group, norm, [number], URGENT)
        for peer in self.shard.peers:
            self._send(tiles, peer, key)

    def _norm(self, *, everywhere: bool) -> TileTensor | None:
        """The sum of squares of the whole gradient, on the first node or on all."""
        me, key = self.shard.rank, "squares"
        squares = [self._squares_of(rank) for rank in range(self.shard.num_nodes)]
        receivers = [me, *self.shard.peers] if everywhere else [0]
        for peer in receivers:
            if peer != me and squares[me]:
                self._send(squares[me], peer, key)
        if me not in receivers:
            return None
        for peer in self.shard.peers:
            if squares[peer]:
                self._receive(squares[peer], peer, key)
        return optimizer_ops.sum_squares(self.squares)

    def _squares_of(self, rank: int) -> list[Handle]:
        """The sums of squares that a node makes."""
        return [
            self.squares.handles[self.firsts[self.names[which]] + number]
            for bucket in self.buckets
            if bucket.owner == rank
            for which, number in bucket.tiles
        ]

    def _like(self, handle: Handle, name: str) -> Handle:
        return self.runtime.handle(handle.nbytes, handle.view, name=name, data_class=handle.data_class, combine=handle.combine)

    def _send(self, tiles: Sequence[Handle], peer: int, key: str) -> None:
        self.runtime.submit(self.transport.send, [(tile, R) for tile in tiles], {"peer": peer, "key": key}, priority=URGENT)

    def _receive(self, tiles: Sequence[Handle], peer: int, key: str, after: Sequence[Handle] = ()) -> None:
        """Receive tiles, and take memory for it not before the tiles of `after` are there."""
        accesses: list[Access] = [*((tile, W) for tile in tiles), *((tile, R) for tile in after)]
        self.runtime.submit(self.transport.receive, accesses, {"peer": peer, "key": key, "count": len(tiles)}, priority=URGENT)
