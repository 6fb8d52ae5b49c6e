"""Nodes that train together in one process, connected as on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nntask.architecture.family_config import ModelConfig
from nntask.config.resolution import resolve
from nntask.config.run_config import RunConfig
from nntask.config.settings import TrainSettings
from nntask.data import Batch
from nntask.data.objectives import random_batch
from nntask.engine.recorded import RecordedEngine, outcome_of
from nntask.models.gpt2 import GPT2Config
from nntask.optim.sharded import data_shards
from scheduler import Runtime
from scheduler.planning import AUTO, PlannedOrder
from wrappers.dask.training.exchange import PeerComms
from wrappers.dask.training.transports import ByteTransport

CONFIG = GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.1, embd_pdrop=0.0, attn_pdrop=0.0)


BATCH, LENGTH = 8, 16


def run_of(
    lanes: int,
    *,
    clip: float = 0.0,
    dtype: str = "fp32",
    minibatch: int = 1,
    config: ModelConfig = CONFIG,
    length: int = LENGTH,
    labels: Path | None = None,
    optimizer: str = "adamw",
    **resources: object,
) -> RunConfig:
    """A little training; `labels` is a file of texts with labels, for a config that learns these."""
    asked = TrainSettings()
    asked = replace(
        asked,
        tiling=replace(asked.tiling, batch=BATCH, minibatch=minibatch, lanes=lanes, vocab_tile=64, embd_tile=16),
        model=replace(asked.model, dtype=dtype, seq_len=length),  # type: ignore[arg-type]
        optimizer=replace(asked.optimizer, optimizer=optimizer, lr=1e-2, grad_clip=clip, weight_decay=0.1),
        resources=replace(asked.resources, **resources),  # type: ignore[arg-type]
    )
    if labels is not None:
        asked = replace(asked, data=replace(asked.data, dataset="jsonl", dataset_path=str(labels)))
    return resolve(asked, config)


@contextmanager
def nodes(count: int, transports: Callable[[int], ByteTransport] = lambda rank: ByteTransport()) -> Iterator[list[PeerComms]]:
    """Connected nodes, with transports by rank."""
    comms = [PeerComms("job", rank, listen_on="tcp://127.0.0.1:0", transport=transports(rank)) for rank in range(count)]
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
    plans: list[PlannedOrder]


def train(
    count: int,
    run: RunConfig,
    *,
    steps: int = 2,
    ram: int = 1 << 26,
    workers: int = 1,
    orders: Sequence[str] = (AUTO,),
    disk: Path | None = None,
    transports: Callable[[int], ByteTransport] = lambda rank: ByteTransport(),
) -> Result:
    """Train on `count` nodes, each in one of `orders` in turn."""
    rng = np.random.default_rng(0)
    if run.model.config is CONFIG:
        batches = [Batch.causal(*rng.integers(0, 128, (2, BATCH, LENGTH), np.int32)) for _ in range(steps)]
    else:
        batches = [random_batch(run.data.objective, BATCH, run.model.config.vocab_size, number) for number in range(steps)]
    size = run.step.minibatch
    every = data_shards(BATCH // size, run.step.lanes, count)
    with nodes(count, transports) as comms:
        runtimes = [Runtime(workers, lanes=run.step.lanes, ram=ram, disk=disk) for _ in range(count)]
        try:
            engines = [
                RecordedEngine(run.in_order(orders[rank % len(orders)]), runtime, shard=shard, transport=each if count > 1 else None)
                for rank, (runtime, shard, each) in enumerate(zip(runtimes, every, comms, strict=True))
            ]
            outcomes = []
            for number, batch in enumerate(batches, 1):
                rows = [[m * size + row for m in shard.minibatches for row in range(size)] for shard in every]
                flights = [engine.start(number, 1e-2, batch.rows(np.array(own))) for engine, own in zip(engines, rows, strict=True)]
                parts = [flight.shard_outcome() for flight in flights]
                losses = {m: loss for shard, (found, _) in zip(every, parts, strict=True) for m, loss in zip(shard.minibatches, found, strict=True)}
                squares = parts[0][1]
                assert squares is not None
                outcome = outcome_of([losses[m] for m in range(BATCH // size)], squares)
                outcomes.append((outcome.loss, outcome.grad_norm))
            weights = [{name: tensor.read().tobytes() for name, tensor in engine.model_tensors().items()} for engine in engines]
            assert all(each == weights[0] for each in weights)
            state = [runtime.stats()["peak_bytes_by_class"]["ram"].get("optimizer", 0) for runtime in runtimes]
            return Result(outcomes, weights[0], [sum(each.sent_bytes.values()) for each in comms], state, [engine.order for engine in engines])
        finally:
            for runtime in runtimes:
                runtime.close()
