"""Several nodes in one process, each with its runtime, over real connections on loopback: the numbers of one node, the bytes that theory says."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
from distributed.comm import connect
from support.counted_calls import count_calls
from support.dask_nodes import BATCH, LENGTH, nodes, run_of, train
from support.deadline import DEADLINE
from support.plans import shape_of

from nntask.config.run_config import RunConfig
from nntask.data import Batch
from nntask.engine.models import build_model
from nntask.engine.recorded import RecordedEngine, build_optimizer, emit_training_step, exchange_of
from nntask.errors import UsageError
from nntask.optim import adamw8bit
from nntask.optim.sharded import DataShard, buckets_of, data_shards, most_nodes
from scheduler import CapturingRuntime, Codelet, InlineRuntime, Runtime
from scheduler.api.recording import Recorder
from scheduler.drivers.disk import staging_nbytes
from scheduler.planning import AUTO
from tiles import TileTensor
from wrappers.dask.training import exchange
from wrappers.dask.training.exchange import PeerComms
from wrappers.dask.training.failures import forget_frames, portable
from wrappers.dask.training.node_memory import planned_share
from wrappers.dask.training.peers import WINDOW, Peer, PeerLost
from wrappers.dask.training.transports import ByteTransport

BOTH = {"clip": 0.5, "dtype": "bf16", "minibatch": 2}


@pytest.mark.parametrize(
    ("how", "counts"),
    [({}, (3,)), (BOTH, (2,)), pytest.param({}, (2, 4), marks=pytest.mark.long), pytest.param(BOTH, (3, 4), marks=pytest.mark.long)],
)
def test_any_number_of_nodes_gives_the_bits_of_one(how: dict[str, object], counts: tuple[int, ...]) -> None:
    """Losses, norms and weights with 4 lanes: 1, 2, 3 and 4 nodes, dropout on, with clipping, in bf16, with larger minibatches."""
    run = run_of(4, **how)  # type: ignore[arg-type]
    alone = train(1, run)
    for count in counts:
        together = train(count, run)
        assert together.outcomes == alone.outcomes
        assert together.weights == alone.weights


@pytest.mark.parametrize(
    ("optimizer", "count"), [("muon", 2), ("adamw8bit", 2), *(pytest.param(o, 3, marks=pytest.mark.long) for o in ("muon", "adamw8bit"))]
)
def test_other_optimizers_give_the_bits_of_one_node(optimizer: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon, whose matrices have one owner each, and moments in 8 bits; clipped, with room and in a quarter of the memory."""
    monkeypatch.setattr(adamw8bit, "LEAST", 256)
    run = run_of(4, clip=0.5, optimizer=optimizer)
    alone, together = train(1, run), train(count, run)
    quarter = max(order.plan.needed_bytes() for order in together.plans) // 4 + staging_nbytes(0, has_tier=True)
    short = train(count, run, ram=quarter, disk=tmp_path)
    assert [together.outcomes, short.outcomes] == [alone.outcomes] * 2
    assert [together.weights, short.weights] == [alone.weights] * 2
    assert sum(together.state_bytes) <= 1.01 * alone.state_bytes[0]


SEVERAL = [(), ("submission",), ("layers", "submission", "eager-update")]


@pytest.mark.parametrize(
    ("how", "count", "orders"),
    [
        ({"minibatch": 4}, 2, ("layers", "eager-update")),
        *(pytest.param(how, count, orders, marks=pytest.mark.long) for how in ({}, BOTH) for count in (2, 3) for orders in SEVERAL),
    ],
)
def test_planned_orders_and_small_budgets_change_no_bit(how: dict[str, object], count: int, orders: tuple[str, ...], tmp_path: Path) -> None:
    """Nodes in orders of their own, with the least memory of their plans above a disk, with a quarter of what the step needs, and without a disk."""
    run = run_of(4, **how)  # type: ignore[arg-type]
    alone = train(1, run)
    roomy = train(count, run, orders=orders or (AUTO,))
    plans = [order.plan for order in roomy.plans]
    staging = staging_nbytes(0, has_tier=True)
    least = max(plan.minimum_bytes(is_last=False, computes=True) for plan in plans) + staging
    quarter = max(plan.needed_bytes() for plan in plans) // 4 + staging
    flat = max(plan.minimum_bytes(is_last=True, computes=True) for plan in plans)
    results = [
        roomy,
        *(train(count, run, orders=orders or (AUTO,), ram=ram, disk=disk) for ram, disk in ((least, tmp_path), (quarter, tmp_path), (flat, None))),
    ]
    assert [result.outcomes for result in results] == [alone.outcomes] * 4
    assert [result.weights for result in results] == [alone.weights] * 4
    if orders:
        assert {tuple(order.name for order in result.plans) for result in results} == {tuple(orders[rank % len(orders)] for rank in range(count))}


class Nowhere:
    """A transport of steps that are captured and never run."""

    send = Codelet("send", host=lambda done, *tiles, **constants: None)
    receive = Codelet("receive", host=lambda done, *tiles, **constants: None)


def exchanges_of(run: RunConfig, shard: DataShard) -> list[tuple[int, int, str]]:
    """The exchanges of a node as (from, to, key), in the order in which it emits them."""
    runtime = CapturingRuntime(run.step.lanes)
    model = build_model(run.model, runtime)
    exchange = exchange_of(model, run.optimizer, shard, Nowhere())
    optimizer = build_optimizer(model, run.optimizer, exchange.tiles_of)
    inputs = [model.inputs(run.step.minibatch, LENGTH) for _ in shard.minibatches]
    with runtime.record():
        emit_training_step(model, optimizer, inputs, exchange)
    ends = [(runtime.plan.tasks[position].name, runtime.plan.tasks[position].constants) for position in runtime.plan.turns]
    peers = [(name, int(str(constants["peer"])), str(constants["key"])) for name, constants in ends]
    return [(shard.rank, peer, key) if name == "send" else (peer, shard.rank, key) for name, peer, key in peers]


@pytest.mark.parametrize("how", [{}, {"clip": 0.5}, {"optimizer": "muon"}])
def test_exchanges_have_one_sequence_on_all_nodes(how: dict[str, object]) -> None:
    """If nodes carry out their exchanges strictly one after another, each begins when both nodes have reached it, and all of them end."""
    run = run_of(5, **how)  # type: ignore[arg-type]
    for count in (2, 3, 5):
        left = [deque(exchanges_of(run, shard)) for shard in data_shards(8, 5, count)]
        while any(left):
            due = [queue[0] for queue in left if queue]
            common = [exchange for exchange in due if left[exchange[0]] and left[exchange[1]] and left[exchange[0]][0] == left[exchange[1]][0]]
            assert common, due
            for end in common[0][:2]:
                left[end].popleft()


@pytest.mark.long
def test_lanes_that_nodes_cannot_share_evenly() -> None:
    """5 lanes on 2 and 3 nodes: a node's lanes are several parts of the tree."""
    run = run_of(5)
    alone = train(1, run, steps=2)
    assert [train(count, run, steps=2).outcomes for count in (2, 3)] == [alone.outcomes] * 2


def test_each_node_sends_what_theory_says_and_keeps_its_own_state() -> None:
    """(n - 1) / n of the gradient's and the parameters' bytes per node and step; the optimizer's state is spread."""
    run, steps = run_of(4), 4
    alone = train(1, run, steps=1)
    model_bytes = sum(map(len, alone.weights.values()))
    for count in (2, 4):
        found = train(count, run, steps=steps)
        theory = (count - 1) / count * 2 * model_bytes * steps
        assert sum(found.sent) / count == pytest.approx(theory, rel=0.1)
        assert max(found.state_bytes) < 0.75 * alone.state_bytes[0]


@pytest.mark.parametrize("how", [{}, {"optimizer": "muon"}])
def test_a_node_runs_the_share_that_its_check_has_captured(how: dict[str, object]) -> None:
    """Task by task what it would record by itself; neither captured nor planned again. Both agree on the owners of matrices."""
    run = run_of(4, **how)  # type: ignore[arg-type]
    with nodes(2) as comms:
        for shard, own in zip(data_shards(8, 4, 2), comms, strict=True):
            with Runtime(1, lanes=4, ram=1 << 26) as runtime:
                planned = planned_share(run, shard, own, "tcp://a:1")
                engine = RecordedEngine(run, runtime, shard=shard, transport=own, planned=planned)
                assert count_calls(lambda engine=engine: engine.step, Recorder.finish) == [0]
                assert engine.order is planned.order
                recorded = RecordedEngine(run, runtime, shard=shard, transport=own).step.plan
                assert recorded is not None
                assert shape_of(recorded) == shape_of(planned.order.plan)


def test_a_lost_peer_fails_what_waits_for_it() -> None:
    """A step that needs a node that is gone ends with its name, on every other node, instead of waiting."""
    run = run_of(4)
    with nodes(2) as comms, Runtime(1, lanes=4, ram=1 << 26) as runtime:
        engine = RecordedEngine(run, runtime, shard=data_shards(8, 4, 2)[0], transport=comms[0])
        own = [0, 1, 4, 5]
        batch = Batch.causal(*np.zeros((2, BATCH, LENGTH), np.int32))
        flight = engine.start(1, 1e-2, batch.rows(np.array(own)))
        comms[1].close()
        with pytest.raises(PeerLost, match="node 1") as failure:
            flight.shard_outcome()
        assert failure.value.rank == 1


def test_nodes_that_a_step_has_reached_end_it_when_another_is_gone() -> None:
    """The client dies after a step has reached nodes 0 and 1 of three: node 2 is dropped, and the two do not wait for each other's buckets, which
    tasks would make that are cancelled for the want of node 2's."""
    run, count, all_shards = run_of(4), 3, data_shards(8, 4, 3)
    with nodes(count) as comms, ExitStack() as stack:
        flights = []
        for rank in (0, 1):
            runtime = stack.enter_context(Runtime(1, lanes=4, ram=1 << 26))
            engine = RecordedEngine(run, runtime, shard=all_shards[rank], transport=comms[rank])
            rows = np.zeros((2, len(all_shards[rank].minibatches) * run.step.minibatch, LENGTH), np.int32)
            flights.append(engine.start(1, 1e-2, Batch.causal(*rows)))
        comms[2].close()
        for flight in flights:
            with pytest.raises(PeerLost, match="node 2"):
                flight.shard_outcome()


class _Raced(deque[Any]):
    """An inbox whose entries are taken in just before another one is appended."""

    def append(self, entry: Any) -> None:
        self.clear()
        super().append(entry)


def test_a_task_that_begins_while_the_inbox_is_emptied_is_taken_in() -> None:
    """The loop took what was there between a look at the inbox and the append: nobody but the newcomer can wake it again."""
    comms, ended = PeerComms("job", 0, listen_on="tcp://127.0.0.1:0"), Event()
    try:
        peer = comms._peers[1] = Peer(1, comms._loop.call_later)
        peer.lost = PeerLost(1, "gone")
        comms._inbox = _Raced([(True, 1, "before", ((), lambda error: None))])
        comms._begin_send(lambda error: ended.set(), peer=1, key="now")
        assert ended.wait(DEADLINE)
    finally:
        peer.comm = SimpleNamespace(abort=lambda: None)
        comms.close()


class _Later:
    """What an event loop would call later."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def test_what_a_node_has_got_is_told_with_what_it_says_next() -> None:
    """Or by itself: when half of a window is untold, or when nothing else is said for a while; a message in between begins that while anew."""
    told: list[BaseException | None] = []
    later: list[_Later] = []

    def call_later(seconds: float, call: Callable[[], None]) -> Any:
        later.append(_Later(seconds, call))
        return later[-1]

    peer = Peer(1, call_later)
    tiles = {name: np.zeros(nbytes, np.uint8) for name, nbytes in (("a", 1), ("b", 1), ("c", 1), ("half", WINDOW // 2))}
    for name, tile in tiles.items():
        peer.expect(name, ((tile,), told.append))
    assert peer.next_message(WINDOW) == {"want": [*tiles], "got": 0, "keys": [], "data": []}

    def arrive(name: str) -> dict[str, Any] | None:
        peer.handle({"keys": [name], "data": [tiles[name].tobytes()], "got": 0, "want": []}, WINDOW)
        return peer.next_message(WINDOW)

    assert arrive("a") is None
    assert arrive("b") is None
    assert len(later) == 1
    peer.expect("d", ((), told.append))
    assert peer.next_message(WINDOW) == {"want": ["d"], "got": 2, "keys": [], "data": []}
    assert later[0].is_cancelled
    assert peer.next_message(WINDOW) is None
    assert arrive("c") is None
    assert [each.is_cancelled for each in later] == [True, False]
    later[1].call()
    assert peer.next_message(WINDOW) == {"want": [], "got": 1, "keys": [], "data": []}
    half = arrive("half")
    assert half is not None
    assert half["got"] == 1
    assert len(later) == 2
    assert told == [None] * 4


def test_a_lost_peer_fails_everybody_once_and_what_its_channel_has_when_that_has_ended() -> None:
    """What waits fails at once, what is on the way or arriving when the channel says so; a second loss changes nothing."""
    stopped: list[Callable[[], None]] = []
    ended: list[str] = []
    channel = SimpleNamespace(is_separate=True, put=lambda tiles: None, take=lambda content, tiles, arrived: None, stop=stopped.append)

    def done(name: str) -> Callable[[BaseException | None], None]:
        return lambda error: ended.append(f"{name}: {error}")

    peer = Peer(3, lambda seconds, call: pytest.fail("there is nothing to tell"))
    peer.comm, peer.channel = SimpleNamespace(abort=lambda: None), channel  # type: ignore[assignment]
    tile = np.zeros(8, np.uint8)
    for name in ("sent", "offered"):
        peer.enqueue(name, ((tile,), done(name)))
    for name in ("arriving", "expected"):
        peer.expect(name, ((tile,), done(name)))
    peer.handle({"keys": ["arriving"], "data": [None], "got": 0, "want": ["sent"]}, WINDOW)
    message = peer.next_message(WINDOW)
    assert message is not None
    assert (message["keys"], peer.sent_bytes) == (["sent"], 8)
    peer.lose(OSError("gone"))
    peer.lose(OSError("again"))
    why = "node 3 does not answer any more: gone"
    assert ended == [f"offered: {why}", f"expected: {why}"]
    (channel_ended,) = stopped
    channel_ended()
    assert ended[2:] == [f"sent: {why}", f"arriving: {why}"]


class _Keeper:
    """Keeps an error that has passed through a frame which has it."""

    def fail(self) -> None:
        self.error = PeerLost(1, "gone")
        try:
            raise self.error
        except PeerLost as error:
            raise RuntimeError("a task has failed") from error


def _travels(keeper: _Keeper) -> None:
    """As a node tells of its errors."""
    try:
        keeper.fail()
    except RuntimeError as error:
        forget_frames(error)
        raise portable(error) from None


def test_an_error_that_travels_keeps_nothing_of_its_node() -> None:
    """A node whose client is gone ends when the last name of it does, without the garbage collector, also when its last step has failed."""
    keeper: _Keeper | None = _Keeper()
    assert keeper is not None
    gone, found = ref(keeper), None
    gc.disable()
    try:
        try:
            _travels(keeper)
        except PeerLost as error:
            found = str(error), error.rank
        keeper = None
        assert gone() is None
    finally:
        gc.enable()
    assert found == ("node 1 does not answer any more: gone", 1)


def test_nobody_takes_the_place_of_a_connected_node() -> None:
    """A second connection under a rank that is taken is closed, and so is one from a rank that does not connect here; the first stays."""

    async def say(address: str, rank: object) -> object:
        comm = await connect(address)
        await comm.write({"job": "job", "rank": rank})
        return await comm.read()

    with nodes(2) as comms:
        peer, address = comms[0]._peers[1].comm, comms[0]._listener.contact_address
        for rank in (1, 0, "1", None):
            with pytest.raises(OSError, match="closed"):
                asyncio.run(say(address, rank))
        assert comms[0]._peers[1].comm is peer


def test_connections_of_another_training_are_refused() -> None:
    """Two trainings on the same machines cannot mix, whatever addresses they get hold of."""
    ours = [PeerComms("ours", rank, listen_on="tcp://127.0.0.1:0") for rank in range(2)]
    theirs = PeerComms("theirs", 1, listen_on="tcp://127.0.0.1:0")
    try:
        addresses = [each.listen() for each in ours]
        theirs.begin_to_connect([addresses[0], theirs.listen()])
        with pytest.raises(PeerLost, match="node 0"):
            theirs.wait_connected()
    finally:
        for each in (*ours, theirs):
            each.close()


class _Held(ByteTransport):
    """Transport whose node never gets to say anything, until it is let go."""

    def __init__(self) -> None:
        self.let_go = Event()

    def hello(self, rank: int) -> None:
        self.let_go.wait()


def test_a_node_that_does_not_get_on_has_lost_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each peer is in time for itself and all together are not, for example: what ends that is no bug, but the peer that is waited for."""
    monkeypatch.setattr(exchange, "CONNECT_SECONDS", 0.2)
    held = _Held()
    comms = [PeerComms("job", rank, listen_on="tcp://127.0.0.1:0", transport=[None, held][rank]) for rank in range(2)]
    try:
        addresses = [each.listen() for each in comms]
        comms[1].begin_to_connect(addresses)
        with pytest.raises(PeerLost, match=r"node 0 .*not all connections were there within 0.4 s"):
            comms[1].wait_connected()
    finally:
        held.let_go.set()
        for each in comms:
            each.close()


def test_shards_are_whole_lanes_and_cover_every_minibatch_once() -> None:
    """For any numbers: neighbouring lanes, in whole, none without a minibatch."""
    for num_minibatches in range(1, 13):
        for lanes in range(1, 9):
            most = most_nodes(num_minibatches, lanes)
            for count in range(1, most + 1):
                found = data_shards(num_minibatches, lanes, count)
                assert sorted(m for shard in found for m in shard.minibatches) == list(range(num_minibatches))
                assert all({m % lanes for m in shard.minibatches} == set(shard.lanes[shard.rank]) for shard in found)
            with pytest.raises(UsageError, match="shared by 1 to"):
                data_shards(num_minibatches, lanes, most + 1)


def test_buckets_spread_bytes_evenly() -> None:
    """Every tile has one owner; with tiles far smaller than a node's share, owners differ by little."""
    tensors = [TileTensor(InlineRuntime(), (256, 256), (64, 64), np.float32) for _ in range(6)]
    for count in (1, 2, 3, 4, 7):
        buckets = buckets_of(tensors, count)
        assert sorted(tile for bucket in buckets for tile in bucket.tiles) == [(which, number) for which in range(6) for number in range(16)]
        loads = [sum(bucket.nbytes for bucket in buckets if bucket.owner == rank) for rank in range(count)]
        assert max(loads) <= 1.2 * sum(loads) / count


def test_buckets_keep_a_matrix_together() -> None:
    """Muon's matrices, and parts of one matrix, have one owner and one bucket each; the tiles of others are spread."""
    tensors = [TileTensor(InlineRuntime(), (256, 256), (64, 64), np.float32, name=str(number)) for number in range(4)]
    for count in (1, 2, 3):
        buckets = buckets_of(tensors, count, {"0": "a", "1": "a", "3": "3"})
        assert sorted(tile for bucket in buckets for tile in bucket.tiles) == [(which, number) for which in range(4) for number in range(16)]
        for matrix in ({0, 1}, {3}):
            assert sum(any(which in matrix for which, _ in bucket.tiles) for bucket in buckets) == 1


def test_neighbouring_buckets_have_different_owners() -> None:
    """What ends at about the same time uses every node's link; where sizes differ, nobody owns more than a largest bucket above the mean."""
    alike = [TileTensor(InlineRuntime(), (512, 512), (512, 512), np.float32) for _ in range(9)]
    for count in (2, 3, 4):
        owners = [bucket.owner for bucket in buckets_of(alike, count)]
        assert all(len(set(owners[first : first + count])) == count for first in range(len(owners) - count + 1))
    embedding = TileTensor(InlineRuntime(), (4096, 256), (2048, 256), np.float32)
    biases = [TileTensor(InlineRuntime(), (size,), (size,), np.float32) for size in (7, 100_000, 3, 400_000, 9, 300_000)]
    for count in (2, 3, 4):
        buckets = buckets_of([embedding, *biases, *alike], count)
        loads = [sum(bucket.nbytes for bucket in buckets if bucket.owner == rank) for rank in range(count)]
        assert max(loads) <= sum(loads) / count + max(bucket.nbytes for bucket in buckets)
