"""Several nodes in one process, each with its runtime, over real connections on loopback: the numbers of one node, the bytes that theory says."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
from distributed.comm import connect

from nntask.data import Batch
from nntask.errors import UsageError
from nntask.models.config import GPT2Config
from nntask.sharding import buckets_of, most_nodes, shares
from nntask.trainer.prepare import with_tiles
from nntask.trainer.recorded import RecordedEngine, outcome_of
from nntask.trainer.rules import resolve
from nntask.trainer.settings import TrainSettings
from scheduler import InlineRuntime, Runtime
from tiles import TileTensor
from wrappers.dask import exchange
from wrappers.dask.carriers import Carriers, MessageCarriers
from wrappers.dask.exchange import PeerComms
from wrappers.dask.failures import forget_frames, portable
from wrappers.dask.peers import WINDOW, Peer, PeerLost

CONFIG = GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.1, embd_pdrop=0.0, attn_pdrop=0.0)
BATCH, LENGTH = 8, 16


def settings_of(lanes: int, *, clip: float = 0.0, dtype: str = "fp32", minibatch: int = 1, **resources: object) -> TrainSettings:
    """A little training."""
    asked = TrainSettings()
    asked = replace(
        asked,
        tiling=replace(asked.tiling, batch=BATCH, minibatch=minibatch, lanes=lanes, vocab_tile=64, embd_tile=16),
        model=replace(asked.model, dtype=dtype, seq_len=LENGTH),  # type: ignore[arg-type]
        optimizer=replace(asked.optimizer, lr=1e-2, grad_clip=clip, weight_decay=0.1),
        resources=replace(asked.resources, **resources),  # type: ignore[arg-type]
    )
    return resolve(asked, CONFIG)


@contextmanager
def nodes(count: int, carriers: Callable[[int], Carriers] = lambda rank: MessageCarriers()) -> Iterator[list[PeerComms]]:
    """Connected nodes, with carriers by rank."""
    comms = [PeerComms("job", rank, listen_on="tcp://127.0.0.1:0", carriers=carriers(rank)) for rank in range(count)]
    try:
        addresses = [each.listen() for each in comms]
        for rank in range(count):  # a node waits for those above it, which connect to those below
            comms[rank].begin_to_connect(addresses)
        for each in comms:
            each.wait_connected()
        yield comms
    finally:
        for each in comms:
            each.close()


@dataclass
class Result:
    """What training leaves."""

    outcomes: list[tuple[float, float]]
    weights: dict[str, bytes]
    sent: list[int]
    state_bytes: list[int]


def train(
    count: int,
    settings: TrainSettings,
    *,
    steps: int = 2,
    ram: int = 1 << 26,
    workers: int = 1,
    carriers: Callable[[int], Carriers] = lambda rank: MessageCarriers(),
) -> Result:
    """Train on `count` nodes."""
    settings, tiling = with_tiles(settings, CONFIG)
    rng = np.random.default_rng(0)
    batches = [Batch(*rng.integers(0, 128, (2, BATCH, LENGTH), np.int32)) for _ in range(steps)]
    size = settings.tiling.minibatch
    every = shares(BATCH // size, settings.tiling.lanes or 1, count)
    with nodes(count, carriers) as comms:
        runtimes = [Runtime(workers, lanes=settings.tiling.lanes or 1, ram=ram) for _ in range(count)]
        try:
            engines = [
                RecordedEngine(CONFIG, tiling, runtime, settings, share=share, transport=each if count > 1 else None)
                for runtime, share, each in zip(runtimes, every, comms, strict=True)
            ]
            outcomes = []
            for number, batch in enumerate(batches, 1):
                rows = [[m * size + row for m in share.minibatches for row in range(size)] for share in every]
                flights = [
                    engine.start(number, 1e-2, Batch(batch.tokens[own], batch.targets[own])) for engine, own in zip(engines, rows, strict=True)
                ]
                parts = [flight.part() for flight in flights]
                losses = {m: loss for share, (found, _) in zip(every, parts, strict=True) for m, loss in zip(share.minibatches, found, strict=True)}
                squares = parts[0][1]
                assert squares is not None
                outcome = outcome_of([losses[m] for m in range(BATCH // size)], squares)
                outcomes.append((outcome.loss, outcome.grad_norm))
            weights = [{name: tensor.read().tobytes() for name, tensor in engine.model_tensors().items()} for engine in engines]
            assert all(each == weights[0] for each in weights)
            state = [runtime.stats()["peak_bytes_by_class"]["ram"].get("optimizer", 0) for runtime in runtimes]
            return Result(outcomes, weights[0], [sum(each.sent_bytes.values()) for each in comms], state)
        finally:
            for runtime in runtimes:
                runtime.close()


@pytest.mark.parametrize("how", [{}, {"clip": 0.5, "dtype": "bf16", "minibatch": 2}])
def test_any_number_of_nodes_gives_the_bits_of_one(how: dict[str, object]) -> None:
    """Losses, norms and weights with 4 lanes: 1, 2, 3 and 4 nodes, dropout on, with clipping, in bf16, with larger minibatches."""
    settings = settings_of(4, **how)  # type: ignore[arg-type]
    alone = train(1, settings)
    for count in (2, 3, 4):
        together = train(count, settings)
        assert together.outcomes == alone.outcomes
        assert together.weights == alone.weights


def test_lanes_that_nodes_cannot_share_evenly() -> None:
    """5 lanes on 2 and 3 nodes: a node's lanes are several parts of the tree."""
    settings = settings_of(5)
    alone = train(1, settings, steps=2)
    assert [train(count, settings, steps=2).outcomes for count in (2, 3)] == [alone.outcomes] * 2


def test_each_node_sends_what_theory_says_and_keeps_its_own_state() -> None:
    """(n - 1) / n of the gradient's and the parameters' bytes per node and step; the optimizer's state is spread."""
    settings, steps = settings_of(4), 4
    alone = train(1, settings, steps=1)
    model_bytes = sum(map(len, alone.weights.values()))
    for count in (2, 4):
        found = train(count, settings, steps=steps)
        theory = (count - 1) / count * 2 * model_bytes * steps
        assert sum(found.sent) / count == pytest.approx(theory, rel=0.1)
        assert max(found.state_bytes) < 0.75 * alone.state_bytes[0]


def test_a_lost_peer_fails_what_waits_for_it() -> None:
    """A step that needs a node that is gone ends with its name, on every other node, instead of waiting."""
    settings, tiling = with_tiles(settings_of(4), CONFIG)
    with nodes(2) as comms, Runtime(1, lanes=4, ram=1 << 26) as runtime:
        engine = RecordedEngine(CONFIG, tiling, runtime, settings, share=shares(8, 4, 2)[0], transport=comms[0])
        own = [0, 1, 4, 5]
        batch = Batch(*np.zeros((2, BATCH, LENGTH), np.int32))
        flight = engine.start(1, 1e-2, Batch(batch.tokens[own], batch.targets[own]))
        comms[1].close()
        with pytest.raises(PeerLost, match="node 1") as failure:
            flight.part()
        assert failure.value.rank == 1


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
        assert ended.wait(60)
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
        peer.hear({"keys": [name], "data": [tiles[name].tobytes()], "got": 0, "want": []}, WINDOW)
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


def test_a_lost_peer_fails_everybody_once_and_what_its_carrier_has_when_that_has_ended() -> None:
    """What waits fails at once, what is on the way or arriving when the carrier says so; a second loss changes nothing."""
    stopped: list[Callable[[], None]] = []
    ended: list[str] = []
    carrier = SimpleNamespace(is_beside=True, put=lambda tiles: None, take=lambda said, tiles, arrived: None, stop=stopped.append)

    def done(name: str) -> Callable[[BaseException | None], None]:
        return lambda error: ended.append(f"{name}: {error}")

    peer = Peer(3, lambda seconds, call: pytest.fail("there is nothing to tell"))
    peer.comm, peer.carrier = SimpleNamespace(abort=lambda: None), carrier  # type: ignore[assignment]
    tile = np.zeros(8, np.uint8)
    for name in ("sent", "offered"):
        peer.offer(name, ((tile,), done(name)))
    for name in ("arriving", "expected"):
        peer.expect(name, ((tile,), done(name)))
    peer.hear({"keys": ["arriving"], "data": [None], "got": 0, "want": ["sent"]}, WINDOW)
    message = peer.next_message(WINDOW)
    assert message is not None
    assert (message["keys"], peer.sent_bytes) == (["sent"], 8)
    peer.lose(OSError("gone"))
    peer.lose(OSError("again"))
    why = "node 3 does not answer any more: gone"
    assert ended == [f"offered: {why}", f"expected: {why}"]
    (carrier_ended,) = stopped
    carrier_ended()
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
        with pytest.raises(PeerLost, match="node 0"):
            theirs.connect([addresses[0], theirs.listen()])
    finally:
        for each in (*ours, theirs):
            each.close()


class _Held(MessageCarriers):
    """Carriers whose node never gets to say anything, until it is let go."""

    def __init__(self) -> None:
        self.let_go = Event()

    def hello(self, rank: int) -> None:
        self.let_go.wait()


def test_a_node_that_does_not_get_on_has_lost_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each peer is in time for itself and all together are not, for example: what ends that is no bug, but the peer that is waited for."""
    monkeypatch.setattr(exchange, "CONNECT_SECONDS", 0.2)
    held = _Held()
    comms = [PeerComms("job", rank, listen_on="tcp://127.0.0.1:0", carriers=[None, held][rank]) for rank in range(2)]
    try:
        addresses = [each.listen() for each in comms]
        with pytest.raises(PeerLost, match=r"node 0 .*not all connections were there within 0.4 s"):
            comms[1].connect(addresses)
    finally:
        held.let_go.set()
        for each in comms:
            each.close()


def test_shares_are_whole_lanes_and_cover_every_minibatch_once() -> None:
    """For any numbers: neighbouring lanes, in whole, none without a minibatch."""
    for num_minibatches in range(1, 13):
        for lanes in range(1, 9):
            most = most_nodes(num_minibatches, lanes)
            for count in range(1, most + 1):
                found = shares(num_minibatches, lanes, count)
                assert sorted(m for share in found for m in share.minibatches) == list(range(num_minibatches))
                assert all({m % lanes for m in share.minibatches} == set(share.lanes[share.rank]) for share in found)
            with pytest.raises(UsageError, match="shared by 1 to"):
                shares(num_minibatches, lanes, most + 1)


def test_buckets_spread_bytes_evenly() -> None:
    """Every tile has one owner; with tiles far smaller than a node's share, owners differ by little."""
    tensors = [TileTensor(InlineRuntime(), (256, 256), (64, 64), np.float32) for _ in range(6)]
    for count in (1, 2, 3, 4, 7):
        buckets = buckets_of(tensors, count)
        assert sorted(tile for bucket in buckets for tile in bucket.tiles) == [(which, number) for which in range(6) for number in range(16)]
        loads = [sum(bucket.nbytes for bucket in buckets if bucket.owner == rank) for rank in range(count)]
        assert max(loads) <= 1.2 * sum(loads) / count


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
