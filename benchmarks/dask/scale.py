"""Virtual time for `cluster.py --suite scale`: what a message, a call and a task cost here, and a step of n nodes on the node that sends most.

Virtual time gives every node's computation and every link a resource of its own. Nodes of one machine share its cores: a step takes at least all that
computing, messages and calls need of them. On machines of their own a step takes at least the client's calls to all nodes.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[2]))


class Link:
    """A node's link in virtual time: messages follow one another, each way for itself.

    Args:
        seconds: that a message costs besides its bytes.
        bandwidth: bytes per second.
    """

    def __init__(self, seconds: float, bandwidth: float) -> None:
        self.seconds, self.bandwidth = seconds, bandwidth
        self.free = {"send": 0.0, "receive": 0.0}
        self.num_messages = self.nbytes = 0

    def end(self, task: Any, now: float) -> float:
        """When a message that begins now is over; what peers send is there when it is asked for, since they do the same at the same time."""
        count = task.spec.constants.get("count", len(task.accesses))
        nbytes = sum(handle.spec.nbytes for handle, _ in task.accesses[:count])
        self.num_messages, self.nbytes = self.num_messages + 1, self.nbytes + nbytes
        end = self.free[task.spec.name] = max(now, self.free[task.spec.name]) + self.seconds + nbytes / self.bandwidth
        return end


def measured_link() -> Link:
    """What a message costs here: two ends in one process over loopback, small ones and large ones."""
    import numpy as np

    from wrappers.dask import PeerComms

    ends = [PeerComms("link", rank, listen_on="tcp://127.0.0.1:0") for rank in range(2)]
    addresses = [end.listen() for end in ends]
    for end in ends:
        end.begin_to_connect(addresses)
    for end in ends:
        end.wait_connected()

    def seconds(nbytes: int, count: int) -> float:
        source, target, over = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8), threading.Semaphore(0)
        begin = perf_counter()
        for number in range(count):
            ends[0].send.host(lambda error: None, source, peer=1, key=str(number))  # type: ignore[misc]
            ends[1].receive.host(lambda error: over.release(), target, peer=0, key=str(number), count=1)  # type: ignore[misc]
            over.acquire(timeout=60)
        return (perf_counter() - begin) / count

    seconds(1 << 20, 20)
    small, large = median(seconds(4096, 50) for _ in range(5)), median(seconds(4 << 20, 10) for _ in range(5))
    for end in ends:
        end.close()
    return Link(small, (4 << 20) / max(large - small, 1e-9))


def measured_task(rows: Sequence[Mapping[str, Any]], run: Path) -> float:
    """Seconds that a worker needs for a task besides its kernel, from the steps of a run on one worker."""
    num_tasks = json.loads((run / "machine.json").read_text())["tasks_per_step"]
    return median(row["seconds"] - sum(row["busy_seconds"].values()) for row in rows) / float(num_tasks)


class Costs(NamedTuple):
    """What was measured.

    Args:
        link: of a node.
        call: seconds to call a node.
        task: seconds of a task besides its kernel.
    """

    link: Link
    call: float
    task: float


class Echo:
    """An actor that answers."""

    async def step(self, number: int) -> list[float]:
        """What a node's `step` returns is as small."""
        return [float(number)]


def measured_call(workers: int = 2, count: int = 200) -> float:
    """Seconds of processors that it takes to call one node and get its answer, two calls under way: of the client, the scheduler and the worker."""
    import psutil
    from distributed import Client

    from wrappers.dask import local_cluster

    with local_cluster(workers) as cluster, Client(cluster) as client:
        actors = [client.submit(Echo, actor=True, workers=[address], pure=False).result() for address in client.scheduler_info()["workers"]]
        flying = [actor.step(0) for actor in actors]
        me = psutil.Process()
        everybody = [me, *me.children(recursive=True)]

        def busy() -> float:
            return float(sum(times.user + times.system for times in (each.cpu_times() for each in everybody)))

        begin = busy()
        for number in range(count):
            following = [actor.step(number) for actor in actors]
            for future in flying:
                future.result(timeout=60)
            flying = following
        seconds = (busy() - begin) / count
        for future in flying:
            future.result(timeout=60)
    return seconds / workers


def captured_step(rank: int, nodes: int, run: Any) -> tuple[Any, Any]:
    """The plan of a step of tiny on one of several nodes, and the buckets that they exchange."""
    from nntask.engine import build_model, build_optimizer, emit_training_step
    from nntask.optim import Exchange, data_shards
    from scheduler import CapturingRuntime, Codelet

    class Nowhere:
        send = Codelet("send", host=lambda *_, **__: None)
        receive = Codelet("receive", host=lambda *_, **__: None)

    runtime = CapturingRuntime(run.step.lanes)
    model = build_model(run.model, runtime)
    shard = data_shards(run.step.num_minibatches, run.step.lanes, nodes)[rank]
    exchange = Exchange([p for p in model.parameters() if p.trainable], shard, Nowhere()) if nodes > 1 else None
    optimizer = build_optimizer(model, run.optimizer, None if exchange is None else exchange.tiles_of)
    inputs = [model.inputs(run.step.minibatch, run.model.seq_len) for _ in shard.minibatches]
    with runtime.record():
        kept = emit_training_step(model, optimizer, inputs, exchange)
    del kept
    return runtime.plan, [] if exchange is None else exchange.buckets


def predict(flags: Sequence[str], nodes: int, costs: Costs, *, cores: int | None) -> dict[str, float]:
    """A step of `nodes` nodes in virtual time, on the node that sends most.

    Args:
        flags: of the training, for one node and for those that share a machine.
        cores: of the machine that all of them share; None for machines of their own.
    """
    from nntask.config import resolve
    from nntask.hardware import durations, this_machine
    from scheduler.simulation import simulate
    from wrappers.cli.options import request

    own = list(flags)
    if cores is None:  # a minibatch for each node, however many there are
        size = int(own[own.index("--minibatch") + 1])
        own += ["--batch", str(size * nodes), "--lanes", str(nodes)]
    asked = request(own, {})
    run = resolve(asked.settings, asked.config)
    target = this_machine(run.machine)
    _, buckets = captured_step(0, nodes, run)
    loads = [sum(bucket.nbytes for bucket in buckets if bucket.owner == rank) for rank in range(nodes)]
    plan, _ = captured_step(max(range(nodes), key=lambda rank: loads[rank]), nodes, run)
    link = Link(costs.link.seconds, costs.link.bandwidth)  # which counts from zero
    kernels = durations(plan, target)
    found = simulate(
        plan,
        workers=[("cpu", 0, 1)],
        nodes=[("ram", 1 << 50)],
        policy="prio",
        duration=lambda task, kind: kernels.of(task, kind) + costs.task,
        host=link.end,
    )
    messages, nbytes = link.num_messages / 2, link.nbytes / 2  # of two replays
    of_a_node = {
        "compute_seconds": found.busy_seconds[0],
        "message_seconds": messages * link.seconds / 2,  # each is one node's to send and another's to receive
        "byte_seconds": nbytes / link.bandwidth / 2,
    }
    calls = costs.call * nodes
    at_least = calls if cores is None else (nodes * sum(of_a_node.values()) + calls) / cores
    return {"seconds": max(found.seconds, at_least), **of_a_node, "call_seconds": calls}
