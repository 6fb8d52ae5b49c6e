"""Bytes between nodes over NCCL, a fake one between threads of this process: what arrives, who is told of what breaks, that everything ends."""

from __future__ import annotations

import itertools
import json
import random
import sys
import tomllib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import LocalCluster
from support.cuda_emulator import COMPILER, Emulator
from support.dask_nodes import nodes, run_of, train
from support.fake_nccl import COMMUNICATOR_NBYTES, FakeNccl, FakeNetwork

from nntask.config.machine import request_of
from nntask.config.settings import ResourceSettings
from nntask.errors import ClusterError, DoesNotFit, UsageError
from nntask.hardware import gpus
from scheduler.drivers.cuda_cupy import CONTEXT_NBYTES, INSTALL, GpuFacts
from scheduler.drivers.gpu import NoGpu
from scheduler.drivers.nccl import INSTALL_NCCL, CupyNccl, find_library
from wrappers.cli import main
from wrappers.dask.training import exchange, nccl, nccl_link
from wrappers.dask.training.cluster import ClusterWorker
from wrappers.dask.training.cluster_engine import check_cards
from wrappers.dask.training.exchange import PeerComms
from wrappers.dask.training.nccl import NcclTransport, open_nccl_transport
from wrappers.dask.training.peers import PeerLost

LONG = 120.0
"""Seconds that nothing here takes, unless it hangs."""


@dataclass
class Transfer:
    """A bucket that one node sends to another, and what became of both ends."""

    source: list[Any]
    target: list[Any]
    ends: dict[str, Event] = field(default_factory=lambda: {"send": Event(), "receive": Event()})
    errors: dict[str, BaseException] = field(default_factory=dict)
    alive: dict[str, bool] = field(default_factory=dict)

    def wait(self) -> None:
        """Until both ends are over."""
        assert all(event.wait(LONG) for event in self.ends.values())

    def over(self, end: str, transports: NcclTransport | None = None) -> Callable[[BaseException | None], None]:
        """What an end calls."""

        def done(error: BaseException | None) -> None:
            if error is not None:
                self.errors[end] = error
            if transports is not None:
                self.alive[end] = any(not link.ended.done() for link in transports._links.values())
            self.ends[end].set()

        return done


def bucket(rng: np.random.Generator, sizes: Sequence[int]) -> Transfer:
    """Tiles of so many bytes."""
    source = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    return Transfer(source, [np.zeros_like(tile) for tile in source])


def send(comms: PeerComms, peer: int, key: str, transfer: Transfer, transports: NcclTransport | None = None) -> None:
    """Begin the task of a sender."""
    host: Any = comms.send.host
    host(transfer.over("send", transports), *transfer.source, peer=peer, key=key)


def receive(comms: PeerComms, peer: int, key: str, transfer: Transfer, transports: NcclTransport | None = None) -> None:
    """Begin the task of a receiver."""
    host: Any = comms.receive.host
    host(transfer.over("receive", transports), *transfer.target, peer=peer, key=key, count=len(transfer.target))


@contextmanager
def cluster(
    count: int, monkeypatch: pytest.MonkeyPatch, stop_seconds: float = 10 * LONG
) -> Iterator[tuple[list[PeerComms], list[NcclTransport], FakeNetwork]]:
    """Nodes whose pieces are small; at the end every thread has ended, every byte of a card is free, and nothing is left on a stream."""
    monkeypatch.setattr(nccl_link, "PIECE", 10_000)
    monkeypatch.setattr(nccl, "STOP_SECONDS", stop_seconds)
    network = FakeNetwork()
    cards = [FakeNccl(network, str(rank)) for rank in range(count)]
    transports = [NcclTransport(cards[rank], rank, count) for rank in range(count)]
    with nodes(count, lambda rank: transports[rank]) as comms:
        yield comms, transports, network
    for each in transports:
        for link in each._links.values():
            link.join(LONG)
            assert not link.is_alive()
    assert [card.free_nbytes() for card in cards] == [card.memory for card in cards]
    assert all(gpu.is_at_rest for card in cards for gpu in card.gpus)


@pytest.mark.parametrize("count", [2, 3])
def test_buckets_arrive_whole(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many buckets of any size, wanted before and after they are offered, in orders that nobody keeps; all are counted, and none is in a message."""
    rng, chance = np.random.default_rng(0), random.Random(0)
    with cluster(count, monkeypatch) as (comms, _, network):
        before, transfers, calls = network.num_transfers, [], []
        for number in range(150):
            origin, goal = chance.sample(range(count), 2)
            sizes = [chance.choice([1, 100, 9_999, 10_000, 10_001, 35_000]) for _ in range(chance.randint(1, 3))]
            transfers.append(bucket(rng, sizes))
            calls.append((send, comms[origin], goal, str(number), transfers[-1]))
            calls.append((receive, comms[goal], origin, str(number), transfers[-1]))
        chance.shuffle(calls)
        for call, *arguments in calls:
            call(*arguments)
        for transfer in transfers:
            transfer.wait()
            assert not transfer.errors
            assert all(np.array_equal(a, b) for a, b in zip(transfer.source, transfer.target, strict=True))
        nbytes = [sum(tile.nbytes for tile in transfer.source) for transfer in transfers]
        assert network.num_transfers - before == sum(-(-size // 10_000) for size in nbytes)
        sent = sum(sum(each.sent_bytes.values()) for each in comms)
        assert sum(nbytes) < sent < 1.1 * sum(nbytes)


def test_buckets_of_nothing_end_in_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte, alone and between others: both ends are told, in order, and NCCL is not asked for it."""
    with cluster(2, monkeypatch) as (comms, _, network):
        before, rng = network.num_asked, np.random.default_rng(0)
        transfers = [bucket(rng, sizes) for sizes in ([0], [30_000], [0, 0], [1, 0], [0])]
        for transfer in transfers:
            receive(comms[1], 0, "key", transfer)
            send(comms[0], 1, "key", transfer)
        for transfer in reversed(transfers):
            transfer.wait()
            assert not transfer.errors
            assert np.array_equal(np.concatenate(transfer.source), np.concatenate(transfer.target))
        assert network.num_asked - before == 2 * 4


def test_the_next_bucket_is_copied_while_the_last_one_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the one before it already waits for the peer, and goes to the other half at once."""
    with cluster(2, monkeypatch) as (_, transports, network):
        network.stands_after = network.num_transfers
        before, link = network.num_asked, transports[0]._links[0, 1]
        for number in range(2):
            link.put([np.zeros(10_000, np.uint8)])
            assert network.wait_asked(before + number + 1, 20)


def test_a_link_that_has_failed_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tiles that it was never to send, nor what an error drags along."""
    with cluster(2, monkeypatch) as (_, transports, network):
        network.fails_after = network.num_transfers
        link = transports[0]._links[0, 1]
        tiles = [np.zeros(1_000_000, np.uint8) for _ in range(5)]
        kept = [weakref.ref(tile) for tile in tiles]
        while tiles:
            link.put([tiles.pop()])
        link.join(LONG)
        assert not any(tile() is not None for tile in kept)


def test_training_gives_the_bits_of_one_node() -> None:
    """Two steps on two nodes over NCCL, as without."""
    network = FakeNetwork()
    together = train(2, run_of(4), transports=lambda rank: NcclTransport(FakeNccl(network), rank, 2))
    alone = train(1, run_of(4))
    assert (together.outcomes, together.weights) == (alone.outcomes, alone.weights)
    assert network.num_transfers > 8


def stuck(comms: Sequence[PeerComms], transports: Sequence[NcclTransport], network: FakeNetwork, pieces: int) -> list[Transfer]:
    """Buckets of 100 pieces between nodes 0 and 1, both ways, of which so many have gone through and nothing goes any further."""
    rng = np.random.default_rng(0)
    network.stands_after = network.num_transfers + pieces
    transfers = [bucket(rng, [1_000_000]) for _ in range(4)]
    for number, transfer in enumerate(transfers):
        here = number % 2
        receive(comms[1 - here], here, str(number), transfer, transports[1 - here])
        send(comms[here], 1 - here, str(number), transfer, transports[here])
    assert network.wait_transfers(network.stands_after, LONG)
    return transfers


def test_a_peer_that_dies_in_the_middle_of_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that waits for it fails with its name, and not before the transfer has let go of the tiles; so does what the others exchange."""
    with cluster(3, monkeypatch) as (comms, transports, network):
        transfers = stuck(comms, transports, network, 50)
        comms[1].close()
        for number, transfer in enumerate(transfers):
            end = "send" if number % 2 == 0 else "receive"
            assert transfer.ends[end].wait(LONG)
            error = transfer.errors[end]
            assert isinstance(error, PeerLost)
            assert error.rank == 1
        network.stands_after = None
        other = bucket(np.random.default_rng(1), [50_000])
        receive(comms[2], 0, "on", other)
        send(comms[0], 2, "on", other)
        for end in ("send", "receive"):
            assert other.ends[end].wait(LONG)
            error = other.errors[end]
            assert isinstance(error, PeerLost)
            assert error.rank == 1


def test_tiles_are_let_go_when_nobody_touches_them_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """While NCCL does not come back from aborting, tasks whose tiles it has do not end; others do."""
    with cluster(2, monkeypatch) as (comms, transports, network):
        transfers = stuck(comms, transports, network, 50)
        offered = bucket(np.random.default_rng(0), [1])
        send(comms[0], 1, "not wanted", offered)
        network.lets_go.clear()
        comms[0]._loop.call_soon_threadsafe(comms[0]._peers[1].comm.abort)
        assert offered.ends["send"].wait(LONG)
        assert isinstance(offered.errors["send"], PeerLost)
        assert not any(event.is_set() for transfer in transfers for event in transfer.ends.values())
        network.lets_go.set()
        for transfer in transfers:
            transfer.wait()
            assert set(transfer.errors) == {"send", "receive"}
            assert not any(transfer.alive.values())
        assert not any(link._ahead or link._under_way for each in transports for link in each._links.values())


def test_nobody_waits_for_nccl_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """If NCCL does not come back from aborting, tasks end all the same, and so does `close`."""
    with cluster(2, monkeypatch, stop_seconds=0.2) as (comms, transports, network):
        transfers = stuck(comms, transports, network, 50)
        network.lets_go.clear()
        comms[0]._loop.call_soon_threadsafe(comms[0]._peers[1].comm.abort)
        for transfer in transfers:
            transfer.wait()
            assert all(isinstance(error, PeerLost) for error in transfer.errors.values())
        for each in comms:
            each.close()
        network.lets_go.set()


def test_an_error_of_nccl_loses_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network fails in the middle, and Dask's connection does not."""
    with cluster(2, monkeypatch) as (comms, transports, network):
        network.fails_after = network.num_transfers + 50
        transfers = [bucket(np.random.default_rng(0), [1_000_000]) for _ in range(2)]
        for number, transfer in enumerate(transfers):
            send(comms[number], 1 - number, "key", transfer, transports[number])
            receive(comms[1 - number], number, "key", transfer, transports[1 - number])
        for transfer in transfers:
            transfer.wait()
            assert all(isinstance(error, PeerLost) for error in transfer.errors.values())
        assert any("planted: the network failed" in str(error) for transfer in transfers for error in transfer.errors.values())


def test_other_bytes_than_expected_lose_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that speaks of more bytes than the tiles have; nothing is written anywhere."""
    with cluster(2, monkeypatch) as (comms, _, _):
        transfer = bucket(np.random.default_rng(0), [30_000])
        transfer.target = [np.zeros(20_000, np.uint8)]
        send(comms[0], 1, "key", transfer)
        receive(comms[1], 0, "key", transfer)
        transfer.wait()
        assert "a bucket must have 20000 bytes, got 30000" in str(transfer.errors["receive"])
        assert not transfer.target[0].any()


def test_a_node_that_never_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting ends with its name; threads that NCCL keeps do not keep `close`."""
    monkeypatch.setattr(exchange, "CONNECT_SECONDS", 3.0)
    monkeypatch.setattr(nccl, "STOP_SECONDS", 0.2)
    network = FakeNetwork()
    cards = [FakeNccl(network, str(rank)) for rank in range(2)]
    cards[1].joins = False
    transports = [NcclTransport(card, rank, 2) for rank, card in enumerate(cards)]
    with pytest.raises(PeerLost, match=r"node \d .*no data could be sent to or received from it within 3 s"), nodes(2, lambda rank: transports[rank]):
        pass
    network.take_down()
    for each in transports:
        for link in each._links.values():
            link.join(LONG)
            assert not link.is_alive()


def test_nccl_that_fails_at_once() -> None:
    """Connecting ends on both nodes, on one of them with NCCL's own words, and does not wait for the limit."""
    network = FakeNetwork()
    network.take_down()
    comms = [PeerComms("job", rank, listen_on="tcp://127.0.0.1:0", transport=NcclTransport(FakeNccl(network), rank, 2)) for rank in range(2)]
    addresses = [each.listen() for each in comms]
    errors = []
    for each in comms:
        each.begin_to_connect(addresses)
    for each in comms:
        with pytest.raises(PeerLost) as failure:
            each.wait_connected()
        errors.append(str(failure.value))
    for each in comms:
        each.close()
    assert any("planted: the other rank does not join" in error for error in errors)


def test_nccl_that_fails_before_there_is_a_peer() -> None:
    """A node whose NCCL gives no id says so itself, whether it was to connect or to be connected to."""
    for broken in range(2):
        network = FakeNetwork()
        cards = [FakeNccl(network, str(rank)) for rank in range(2)]
        cards[broken].has_sockets = False
        transports = [NcclTransport(card, rank, 2, f"tcp://{rank}:1") for rank, card in enumerate(cards)]
        comms = [PeerComms("job", rank, listen_on="tcp://127.0.0.1:0", transport=each) for rank, each in enumerate(transports)]
        addresses = [each.listen() for each in comms]
        for each in comms:
            each.begin_to_connect(addresses)
        with pytest.raises(ClusterError, match=rf"cannot begin on worker tcp://{broken}:1 \(planted: no socket interface found\)"):
            comms[broken].wait_connected()
        for each in comms:
            each.close()
        assert [card.free_nbytes() for card in cards] == [card.memory for card in cards]


def test_ids_are_made_for_peers_that_ask() -> None:
    """NCCL listens for the other rank of each, and ends only when that has come."""
    card = FakeNccl(FakeNetwork())
    comms = PeerComms("job", 0, listen_on="tcp://127.0.0.1:0", transport=NcclTransport(card, 0, 8))
    comms.listen()
    comms.close()
    assert card.num_ids == 0


CARD = GpuFacts(0, "Fake", 90, 8 << 30, 6 << 30)


class Cards:
    """A card, or none; every node has another one of that name."""

    def __init__(self, *found: GpuFacts, network: FakeNetwork | None = None, libraries: Path | None = None, memory: int = 1 << 40) -> None:
        self.found, self.network, self.libraries, self.memory = list(found), network, libraries, memory
        self.made: list[FakeNccl] = []
        self.numbers = itertools.count()

    def choose(self, count: int | None) -> list[GpuFacts]:
        return self.found

    def open(self, facts: Sequence[object], *, tf32: bool, dtype: str) -> list[Any]:
        assert self.libraries is not None
        return [Emulator(self.libraries)]

    def nccl(self, facts: GpuFacts) -> CupyNccl:
        if self.network is None:
            raise NoGpu("CuPy finds no NCCL")
        self.made.append(FakeNccl(self.network, str(next(self.numbers)), self.memory))
        return self.made[-1]


@pytest.mark.skipif(COMPILER is None, reason="no g++ to run the sources with")
def test_the_command_on_two_nodes(folder: Path, cuda_libraries: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes with emulated GPUs: losses of one machine, bytes through NCCL, its memory taken out of the budget; nodes that cannot refuse."""
    shape = {"model_type": "gpt2", "vocab_size": 61, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    Path("config.json").write_text(json.dumps(shape))
    np.random.default_rng(0).integers(0, 61, 5000).astype(np.uint16).tofile("train.bin")
    flags = "--config-path=config.json --dataset=train.bin --dataset-path=. --batch=2 --minibatch=1 --lanes=2 --sample-tokens=0 --ram=64MiB --steps=3"
    network = FakeNetwork()
    monkeypatch.setattr(gpus, "cards", Cards(CARD, network=network, libraries=cuda_libraries))
    assert main(["train", *flags.split(), "--run-dir=alone"]) == 0
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, protocol="tcp", dashboard_address=":0", silence_logs=50) as found:
        command = ["train", *flags.split(), f"--dask={found.scheduler_address}", "--transport=nccl"]
        assert main([*command, "--run-dir=nodes"]) == 0
        monkeypatch.setattr(gpus.cards, "numbers", itertools.repeat(7))
        assert main([*command, "--run-dir=shared"]) == 2
        assert "both use 7 of" in capsys.readouterr().err
        monkeypatch.setattr(gpus.cards, "network", None)
        assert main([*command, "--run-dir=without"]) == 2
        assert "on worker tcp://127.0.0.1:" in capsys.readouterr().err
    losses = [[json.loads(line)["loss"] for line in Path(run, "metrics.jsonl").read_text().splitlines()] for run in ("alone", "nodes")]
    assert losses[0] == losses[1]
    assert network.num_transfers > 2
    budgets = [json.loads(Path(run, "summary.json").read_text())["budget_bytes"] for run in ("alone", "nodes")]
    taken = 2 * (2 * nccl_link.PIECE + COMMUNICATOR_NBYTES)
    assert [budgets[1][f"{rank}/cuda:0"] for rank in range(2)] == [budgets[0]["cuda:0"] - taken] * 2


def test_memory_of_the_card_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What buffers and NCCL take is measured, and taken out of the budget, of each part of the card its part."""
    with cluster(3, monkeypatch) as (_, transports, _):
        assert [each.taken_nbytes() for each in transports] == [4 * (20_000 + COMMUNICATOR_NBYTES)] * 3
    monkeypatch.setattr(gpus, "cards", Cards(CARD))
    resources = ResourceSettings()
    assert gpus.without_nccl(gpus.gpus_of(request_of(resources), "auto"), 1, 1000).nbytes == int(0.9 * ((6 << 30) - CONTEXT_NBYTES)) - 1000
    parts = gpus.gpus_of(request_of(replace(resources, split_gpu=2, gpu_memory="1GiB")), "auto")
    assert gpus.without_nccl(parts, 2, 1001) == replace(parts, nbytes=(1 << 30) - 501)
    with pytest.raises(DoesNotFit, match=r"--transport nccl has taken 3 GiB of GPU 0 \(Fake\), part 0, and --gpu-memory is 1 GiB; raise it"):
        gpus.without_nccl(parts, 2, 3 << 30)


def test_a_card_without_room_for_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All links have theirs before a peer is heard of: the node is told what to lower, nobody loses a peer, and nothing stays taken."""
    cards = Cards(CARD, network=FakeNetwork(), memory=7 * nccl_link.PIECE)
    monkeypatch.setattr(gpus, "cards", cards)
    said = r"on worker tcp://a:1 --transport nccl takes 16 MiB of the GPU for buffers, and card 0 has .*; lower --nodes, or use --transport dask"
    with pytest.raises(DoesNotFit, match=said) as refusal:
        open_nccl_transport(gpus.gpus_of(request_of(ResourceSettings()), "auto"), "tcp://a:1", 0, 3)
    assert refusal.value.shortage is not None
    assert (refusal.value.shortage.cause, refusal.value.shortage.task, refusal.value.shortage.needed) == ("outside", "NCCL", 16 << 20)
    (card,) = cards.made
    assert card.free_nbytes() == card.memory


@pytest.mark.parametrize(
    ("cards", "worker", "why"),
    [
        (Cards(), "tcp://a:1", "on worker tcp://a:1: --transport nccl sends from a GPU, and no GPU is used, since CuPy is not installed; use"),
        (Cards(CARD), "tcp://a:1", "on worker tcp://a:1: CuPy finds no NCCL"),
        (Cards(CARD, network=FakeNetwork()), "tls://a:1", "--transport nccl does not encrypt, and tls://a:1 belongs to a cluster that does"),
    ],
)
def test_a_node_that_cannot(cards: Cards, worker: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, no NCCL, a cluster with TLS."""
    monkeypatch.setattr(gpus, "cards", cards)
    with pytest.raises(UsageError) as refusal:
        open_nccl_transport(gpus.gpus_of(request_of(ResourceSettings()), "auto"), worker, 0, 2)
    assert str(refusal.value).startswith(why)


def test_cupy_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy says so by an attribute; the message names the extra."""
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(nccl=SimpleNamespace(available=False), __version__="14.0.1"))
    with pytest.raises(NoGpu, match=r"CuPy finds no NCCL \(libnccl.so.2\).*'.\[nccl13\]'"):
        find_library()


def test_a_cupy_whose_ids_are_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older than 14: refused by its version, with the package that is wanted."""
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(nccl=SimpleNamespace(available=True), __version__="13.6.0"))
    with pytest.raises(NoGpu, match=r"through CuPy 14 or newer, and 13.6.0 is installed; pip install -e '.\[cuda13\]'"):
        find_library()


def test_messages_name_extras_that_exist() -> None:
    """Those of the project."""
    extras = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names, message in ((("cuda12", "cuda13"), INSTALL), (("nccl12", "nccl13"), INSTALL_NCCL)):
        for name in names:
            assert name in extras
            assert f"'.[{name}]'" in message


def test_two_nodes_on_one_card() -> None:
    """NCCL does not take them; without NCCL, and on different machines, nobody asks."""
    machines = [ClusterWorker(f"tcp://{host}:{port}", host, False) for host, port in (("a", 1), ("a", 2), ("b", 1))]
    check_cards(machines, ["", "", ""])
    check_cards(machines, ["0000:01:00.0", "0000:02:00.0", "0000:01:00.0"])
    with pytest.raises(UsageError, match=r"workers tcp://a:1 and tcp://a:2 both use 0000:01:00.0 of a; start each with its own"):
        check_cards(machines, ["0000:01:00.0"] * 3)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("", "--transport nccl is about a Dask cluster; add --dask ADDRESS or --dask local:2, or drop it"),
        (
            "--dask=local:2",
            "--transport nccl takes a GPU for each node, and the workers of --dask local:2 share those of this machine; start each",
        ),
        ("--dask=tls://a:8786", "--transport nccl does not encrypt, and tls://a:8786 belongs to a cluster that does (TLS); use --transport dask"),
        ("--dask=tcp://a:8786 --ngpu=0", "--transport nccl sends from GPUs and --ngpu 0 leaves them out; drop one of them"),
        ("--dask=tcp://a:8786 --sim-gpu=1", "--transport nccl sends from GPUs and --sim-gpu 1 leaves them out; drop one of them"),
        ("--dask=tcp://a:8786 --transport=nccl@1GB", "--transport nccl@1GB has a rate, which is only for dask; use --transport nccl"),
    ],
)
def test_flags_that_do_not_go_with_it(flags: str, why: str, folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence and exit code 2, before anything is opened."""
    assert main(["train", "--transport=nccl", *flags.split()]) == 2
    assert why in capsys.readouterr().err
