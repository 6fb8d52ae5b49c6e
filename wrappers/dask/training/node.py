"""The actor of one node of a training: on a Dask worker, with a runtime, the model, and a shard of the optimizer's state.

The client creates one `TrainingNode` per worker, lets each listen, connects them, lets each open its shard, and calls `step` once per step; that is a
coroutine on the worker's event loop, so that two steps can be under way; long work runs on the node's own threads. When the client or the
scheduler ends, Dask drops the actor, which closes its connections and threads and frees its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, wraps
from time import perf_counter
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from nntask import ClusterError, DataError
from nntask.hardware import give_back_freed, reuse_freed_memory

from .failures import blaming, forget_frames, portable

if TYPE_CHECKING:
    from nntask.config import RunConfig
    from nntask.data import Cursor
    from nntask.optim import DataShard
    from scheduler import Runtime

    from .nccl import NcclTransport

LATE_SECONDS: Final = 300
"""Time limit of a step for the message of the step before it; seconds."""

T = TypeVar("T")
P = ParamSpec("P")
_JOBS: Final[dict[str, str]] = {}
"""The training that each worker of this process belongs to: address of the worker -> job."""


def is_claimed(worker: str) -> bool:
    """Return whether the worker at an address in this process belongs to a training."""
    return worker in _JOBS


@dataclass(frozen=True, slots=True)
class Order:
    """The instructions with which a node opens.

    Attributes:
        run: settings of the run. Its machine describes the client; only an explicit --ram in it applies to the node.
        shard: share of each step that the node computes.
        fingerprint: fingerprint of the client's data, which the node's data must match.
        on_host: number of nodes of this training on the node's machine, this one included.
        largest: bytes of the largest bucket that is exchanged.
        board: name of the run on the cluster's dashboard; "" for none.
    """

    run: RunConfig
    shard: DataShard
    fingerprint: str
    on_host: int
    largest: int
    board: str = ""


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """A node's results of a step.

    Attributes:
        losses: loss of each minibatch of the shard, as a part of the step's mean.
        loss: mean loss of the shard per token.
        squares: sum of squares of the gradient; None if the node does not have it.
        stats: counters of the node so far.
    """

    losses: list[float]
    loss: float
    squares: float | None
    stats: dict[str, Any]


class Turns:
    """Numbered calls that proceed one after the other, on one event loop.

    Dask sends each call of an actor over any free connection, so the call for one step may arrive before that for the step ahead of it. Computed in
    the order of arrival, a node would then sum its share of one step with those of another step of its peers.

    Args:
        last: number of the last call before the first one.
    """

    def __init__(self, last: int) -> None:
        self._last = last
        self._waiting: dict[int, asyncio.Event] = {}

    async def wait(self, number: int) -> None:
        """Return once all calls with smaller numbers have proceeded; the next call proceeds when this one awaits something else."""
        if number > self._last + 1:
            await self._waiting.setdefault(number, asyncio.Event()).wait()
        self._last = number
        following = self._waiting.pop(number + 1, None)
        if following is not None:
            following.set()


def _runs_on(threads: str) -> Callable[[Callable[Concatenate[TrainingNode, P], T]], Callable[Concatenate[TrainingNode, P], Awaitable[T]]]:
    """Make a method a coroutine that runs on the node's own threads of this name; errors are raised without references to objects of the worker."""

    def decorated(method: Callable[Concatenate[TrainingNode, P], T]) -> Callable[Concatenate[TrainingNode, P], Awaitable[T]]:
        @wraps(method)
        async def called(node: TrainingNode, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return await asyncio.get_running_loop().run_in_executor(getattr(node, threads), partial(method, node, *args, **kwargs))
            except Exception as error:
                forget_frames(error)
                raise blaming(portable(node.explained(error)), node.worker_name) from None

        return called

    return decorated


class TrainingNode:
    """The actor of a node.

    Args:
        job: identifier of the training.
        rank: rank of the node.

    Raises:
        ClusterError: the worker belongs to another training.
    """

    def __init__(self, job: str, rank: int) -> None:
        from distributed import get_worker

        self._closed = True  # until a resource exists that must be closed
        self.job, self.rank = job, rank
        self._worker = get_worker()
        self.worker_name = str(self._worker.address)
        if _JOBS.setdefault(self.worker_name, job) != job:
            busy = f"worker {self.worker_name} is busy with another training; wait for it, or name fewer workers with --nodes"
            raise blaming(ClusterError(busy), self.worker_name)
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        reuse_freed_memory()
        self._starts = ThreadPoolExecutor(1, "nntask steps")  # one thread, so that steps start in order
        self._results = ThreadPoolExecutor(1, "nntask results")  # one thread, so that the end of a step is noted before that of the next one
        self._comms: Any = None
        self._nccl: NcclTransport | None = None
        self._runtime: Runtime | None = None
        self._engine: Any = None
        self._closed = False
        self._last_end = 0.0
        self._turns: Turns | None = None
        self._was_read = False  # whether a checkpoint was read since the last step

    @_runs_on("_starts")
    def listen(self, run: RunConfig, num_nodes: int) -> tuple[str, str, float]:
        """Examine the devices of this node, and begin to listen for peers.

        Returns:
            The address; the identifier of NCCL's GPU on its machine, "" without NCCL; and the time limit of `connect` in seconds.
        """
        from nntask.config import request_of
        from nntask.hardware import requested_devices

        from .exchange import PeerComms
        from .nccl import open_nccl_transport

        cluster = run.cluster
        assert cluster is not None  # this node belongs to a cluster
        self._devices = requested_devices(request_of(run.settings.resources), run.model.dtype, checks=False)
        if cluster.transport == "nccl":
            self._nccl = open_nccl_transport(self._devices.gpus, self.worker_name, self.rank, num_nodes)
        scheme, _, place = self.worker_name.partition("://")
        host = place.rpartition(":")[0] if scheme != "inproc" else "127.0.0.1"
        scheme = scheme if scheme != "inproc" else "tcp"
        security = self._worker.security
        self._comms = PeerComms(
            self.job,
            self.rank,
            listen_on=f"{scheme}://{host}:0",
            connect_args=security.get_connection_args("worker"),
            listen_args=security.get_listen_args("worker"),
            bandwidth=cluster.link_rate,
            transport=self._nccl,
        )
        return self._comms.listen(), "" if self._nccl is None else self._nccl.card, self._comms.connect_seconds

    @_runs_on("_starts")
    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to the peers; before `open`, because some nodes take minutes longer to open, and budgets depend on the memory that NCCL takes."""
        self._comms.begin_to_connect(addresses)
        self._comms.wait_connected()

    @_runs_on("_starts")
    def open(self, order: Order) -> dict[str, Any]:
        """Prepare runtime, model and data; return the node's number of tasks and of trained weights, its plan.json and its counters."""
        from nntask.data import BatchStream, open_dataset
        from nntask.engine import RecordedEngine, runtime_for
        from nntask.hardware import this_machine
        from nntask.planning import order_figures
        from nntask.training import model_to_start_from

        from .node_memory import machine_of_node, planned_share
        from .peers import window_for

        run, shard = order.run, order.shard
        self._order = order
        dataset = open_dataset(run.data)
        if dataset.fingerprint != order.fingerprint:
            raise DataError(
                f"worker {self.worker_name} has other data at {dataset.train.name} than the client",
                "copy the same files to every worker, or use a shared directory",
            )
        window = self._comms.window = window_for(order.largest)
        passing = 2 * (shard.num_nodes - 1) * (window + order.largest)  # buckets on their way to this node, and copies of those that it sends
        machine = machine_of_node(self._worker, self._devices, run, self._nccl, on_host=order.on_host, passing_nbytes=passing)
        run = self._run_config = run.on(machine)
        self._dataset, minibatch = dataset, run.step.minibatch
        self._stream = BatchStream(
            dataset.examples(run.model.seed),
            run.step.batch,
            seed=run.model.seed,
            select=dataset.select_sequences,
            rows=[m * minibatch + row for m in shard.minibatches for row in range(minibatch)],
        )
        self._turns = Turns(run.start.step)
        transport = self._comms if shard.num_nodes > 1 else None
        planned = planned_share(run, shard, transport, self.worker_name)  # before memory is taken
        runtime = self._runtime = runtime_for(run)
        start = model_to_start_from(run, runtime)
        engine = self._engine = RecordedEngine(run, runtime, start, shard=shard, transport=transport, planned=planned)
        runtime.wait()
        give_back_freed()  # memory that reading weights and planning the step have used
        return {
            "num_tasks": engine.num_tasks,
            "num_trained": engine.num_trained,
            "planned": order_figures(engine.order, run, this_machine(run.machine)),
            "stats": self._stats(),
        }

    @_runs_on("_starts")
    def describe(self) -> dict[str, Any]:
        """Return the contents of this node's machine.json. The client calls all nodes at once, since nodes of one machine share what they measure."""
        from nntask.training import machine_of

        return {**machine_of(self._stats(), self._engine.peak_flops(), self._engine.num_tasks), "address": self.worker_name}

    async def step(self, number: int, lr: float, begin: Cursor) -> NodeOutcome:
        """Compute this node's shard of step `number` (from 1), whose batch begins at `begin` in the data; at most two steps are in flight."""
        begun = perf_counter()
        assert self._turns is not None  # open() comes first
        try:
            await asyncio.wait_for(self._turns.wait(number), LATE_SECONDS)
        except TimeoutError:
            late = f"worker {self.worker_name} was asked for step {number}, and not for the step before it within {LATE_SECONDS} s; resume the run"
            raise blaming(ClusterError(late), self.worker_name) from None
        return await self._finish(await self._start(number, lr, begin), number, begun)

    @_runs_on("_starts")
    def _start(self, number: int, lr: float, begin: Cursor) -> Any:
        if self._was_read:
            self._was_read = False
            give_back_freed()
        self._stream.cursor = begin
        return self._engine.start(number, lr, self._stream.next())

    @_runs_on("_results")
    def _finish(self, flight: Any, number: int, begun: float) -> NodeOutcome:
        losses, squares = flight.shard_outcome()
        shard, stats, now = self._order.shard, self._stats(), perf_counter()
        loss = sum(losses) * shard.num_minibatches / len(losses)  # each loss is its part of the step's mean
        seconds, self._last_end = now - max(begun, self._last_end), now
        if self._order.board:
            self._publish(number, loss, len(losses) * self._run_config.step.minibatch * self._stream.length / seconds, stats)
        return NodeOutcome(losses, loss, squares, stats)

    def _publish(self, number: int, loss: float, tokens_per_second: float, stats: Mapping[str, Any]) -> None:
        """Report the step to the dashboard without waiting; failures are ignored."""
        from ..dashboard.plugin import publish

        figures = {
            "loss": loss,
            "tokens_per_second": tokens_per_second,
            "resident_bytes": stats["resident_bytes"],
            "budget_bytes": stats["budget_bytes"],
        }
        with contextlib.suppress(Exception):
            publish(self._worker, {"job": self._order.board, "node": str(self.rank), "step": number, **figures})

    def _stats(self) -> dict[str, Any]:
        assert self._runtime is not None  # open() comes first
        found = self._runtime.stats(forget_recent_peak=True)
        found["sent_bytes"] = dict(self._comms.sent_bytes)
        found["num_messages"] = self._comms.num_messages
        return found

    @_runs_on("_starts")
    def evaluate(self, arrays: Mapping[str, npt.NDArray[Any]]) -> float:
        """Return the sum of the losses of a batch with these arrays, without changing anything."""
        from nntask.data import Batch

        return float(self._engine.evaluate(Batch(arrays)))

    @_runs_on("_results")
    def read(self, table: str, name: str, numbers: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of tiles of a tensor of the model or the optimizer.

        Args:
            table: "model" or "optimizer".
            name: name of the tensor.
            numbers: numbers of the tiles.
        """
        self._was_read = True
        tensor = self._table(table)[name]
        arrays = []
        for number in numbers:
            with tensor.runtime.acquire(tensor.handles[number], "R") as view:
                arrays.append(view.reshape(-1).view(np.uint8).copy())
        return arrays

    @_runs_on("_starts")
    def write(self, table: str, name: str, tiles: Mapping[int, npt.NDArray[np.uint8]]) -> None:
        """Overwrite tiles of a tensor of the model or the optimizer."""
        tensor = self._table(table)[name]
        for number, packed in tiles.items():
            with tensor.runtime.acquire(tensor.handles[number], "W") as view:
                view.reshape(-1).view(np.uint8)[:] = packed

    def _table(self, table: str) -> Mapping[str, Any]:
        return self._engine.model_tensors() if table == "model" else self._engine.optimizer_tensors()  # type: ignore[no-any-return]

    @_runs_on("_starts")
    def reset_optimizer(self) -> None:
        """Reset the optimizer's state; the weights stay."""
        self._engine.optimizer.reset()

    @_runs_on("_starts")
    def sample(self) -> str:
        """Return the text at the end of the training."""
        from nntask.inference import sample_text

        assert self._runtime is not None  # open() comes first
        return sample_text(self._run_config, self._engine.model, self._runtime, self._dataset.tokenizer, self._stream.length, lambda: self._closed)

    async def ping(self) -> int:
        """Return the rank. The worker's event loop answers even while the node computes."""
        return self.rank

    async def close(self) -> None:
        """End connections and threads, and free memory. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._comms is not None:
            self._comms.close()
        if self._runtime is not None:
            with contextlib.suppress(Exception):  # the runtime may be broken
                self._runtime.close()
        self._engine = self._runtime = None
        give_back_freed()
        self._starts.shutdown(wait=False, cancel_futures=True)
        self._results.shutdown(wait=False, cancel_futures=True)
        if _JOBS.get(self.worker_name) == self.job:
            del _JOBS[self.worker_name]

    def __del__(self) -> None:
        if sys.is_finalizing():  # no new thread would start, and the process ends anyway
            return
        if not self._closed:  # Dask has dropped the actor of a lost client; closing must not block the worker's event loop
            with contextlib.suppress(Exception):
                threading.Thread(target=self._close, name="nntask end", daemon=True).start()

    def explained(self, error: Exception) -> Exception:
        """Return the error for the user that explains a failure of the runtime."""
        from nntask.hardware import FAILURES, as_user_error

        if self._runtime is None or not isinstance(error, FAILURES):
            return error
        lower = "" if self._run_config.start.is_continued else None  # a checkpoint has its tiling
        return as_user_error(error, self._runtime, self._run_config.machine, "the last checkpoint is safe", lower=lower)
