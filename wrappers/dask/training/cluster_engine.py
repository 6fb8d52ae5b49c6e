"""The nodes of a training as one engine: formed from the workers of a cluster, called once per step, watched, and formed again after a change.

After a change of the workers, `open` is called again, for the workers that are present then and the run as of its last checkpoint.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, Final

from nntask import ClusterError, DoesNotFit, NntaskError, UsageError
from nntask.checkpoints import step_directories
from nntask.config import ClusterSpec, RunConfig, check_shared
from nntask.data import Batch, Dataset
from nntask.engine import ModelShapes, NodesChanged, Outcome, outcome_of
from nntask.optim import DataShard, buckets_of, data_shards, most_nodes

from ..dashboard.plugin import install
from .cluster import ClusterWorker, Connection
from .failures import NodeFailed, blamed, blaming
from .node import NodeOutcome, Order
from .node_records import NodeRecords
from .peers import PeerLost
from .remote_tensors import Mirror
from .team import FIRST_STEP_SECONDS, OPEN_SECONDS, Team, words_for

MOST_UNEXPLAINED: Final = 3
"""Most times in a row, without a new checkpoint, that a team may end although all of its workers answer."""


class ClusterEngine:
    """A team as the training loop's engine (`nntask.engine.interface`).

    Args:
        team: the team, connected and open.
        shapes: tensors of the model and the optimizer, without data.
        all_shards: shard of each node.
        answers: each node's answer to `open`.
        machines: contents of each node's machine.json.
        records: step records of the nodes.

    Attributes:
        gpus: empty, since nodes use GPUs of their own machines.
    """

    def __init__(
        self,
        team: Team,
        shapes: ModelShapes,
        all_shards: Sequence[DataShard],
        answers: Sequence[Mapping[str, Any]],
        machines: Sequence[Mapping[str, Any]],
        records: NodeRecords,
    ) -> None:
        self.team, self._shards, self.records = team, all_shards, records
        self.gpus: Sequence[Any] = ()
        self.num_tasks = sum(each["num_tasks"] for each in answers)
        self.num_trained = int(answers[0]["num_trained"])
        self._peak_flops = float(sum(machine["peak_flops"] for machine in machines))
        self._stats: list[Mapping[str, Any]] = [each["stats"] for each in answers]
        self.mirror = Mirror(team, shapes)
        self._last_end = 0.0

    def start(self, step: int, lr: float, batch: Batch) -> _Pending:
        """Begin optimizer step `step` on all nodes."""
        return _Pending(self, step, lr, self.team.begin("step", step, lr, batch.begin))

    def finish(self, step: int, lr: float, begun: float, outcomes: Sequence[NodeOutcome]) -> Outcome:
        """Combine the nodes' outcomes of a step."""
        now = monotonic()
        seconds = now - max(begun, self._last_end)
        if self._last_end:
            self.team.note_step(now - self._last_end)
        self._last_end = now
        self._stats = [result.stats for result in outcomes]
        losses = [0.0] * self._shards[0].num_minibatches
        for shard, result in zip(self._shards, outcomes, strict=True):
            for number, loss in zip(shard.minibatches, result.losses, strict=True):
                losses[number] = loss
        squares = outcomes[0].squares
        assert squares is not None  # the first node always has it
        outcome = outcome_of(losses, squares)
        self.records.add(step, lr, outcome, outcomes, seconds)
        return outcome

    def evaluate(self, batch: Batch) -> float:
        """Return the sum of the token losses of a batch, computed by the first node."""
        self._last_end = 0.0
        (loss,) = self.team.gather([self.team.ask(0, "evaluate", dict(batch.arrays))], max(self.team.patience, FIRST_STEP_SECONDS))
        return float(loss)

    def model_tensors(self) -> Mapping[str, Any]:
        """Return the trained parameters, by name."""
        self._last_end = 0.0
        return self.mirror.model

    def optimizer_tensors(self) -> Mapping[str, Any]:
        """Return the state of the optimizer, by name."""
        return self.mirror.optimizer

    def peak_flops(self) -> float:
        """Return the flop/s of matrix products on all nodes together, as measured by each."""
        return self._peak_flops

    def reset_optimizer(self) -> None:
        """Reset the optimizer's state; the weights stay."""
        self.mirror.flush()
        self.team.call("reset_optimizer")

    def sample(self, dataset: Dataset, length: int, stopped: Callable[[], bool]) -> str:
        """Return the text at the end of a run, from the first node."""
        (text,) = self.team.gather([self.team.ask(0, "sample")], OPEN_SECONDS)
        return str(text)

    def stats(self, *, forget_recent_peak: bool = False) -> dict[str, Any]:
        """Return counters of all nodes after their last step; names of memories, links and workers begin with the node's rank."""
        tables = (
            "moved_bytes",
            "resident_bytes",
            "peak_bytes",
            "peak_bytes_by_class",
            "recent_peak_bytes",
            "budget_bytes",
            "busy_seconds",
            "worker_stall_seconds",
        )
        merged: dict[str, Any] = {name: {} for name in tables}
        for rank, stats in enumerate(self._stats):
            for name in tables:
                merged[name].update({f"{rank}/{key}": value for key, value in stats[name].items()})
            merged["moved_bytes"].update({f"{rank}=>{peer}": nbytes for peer, nbytes in sorted(stats["sent_bytes"].items())})
        for name in (
            "tasks",
            "evictions",
            "hits",
            "misses",
            "stall_seconds",
            "recomputed_tasks",
            "recompute_seconds",
            "skipped_tasks",
            "num_messages",
        ):
            merged[name] = sum(stats[name] for stats in self._stats)
        return {**merged, "policy": self._stats[0]["policy"], "seconds": self._stats[0]["seconds"]}

    def check_stop(self) -> None:
        """Do nothing: each node raises its own stop."""

    def wait(self) -> None:
        """Wait until all tiles written to the nodes have arrived."""
        self.mirror.flush()


def _suspects(team: Team, error: Exception, newcomers: Sequence[str]) -> list[str]:
    """Return the newcomers that may be the reason why a team failed to form.

    These are the one that reports an error, both ends of a broken connection, or all of them.
    """
    worker, cause = blamed(error), error.__cause__
    if isinstance(error, NodesChanged):
        if not team.is_unexplained:  # the reason is a worker that is gone or silent
            return []
        ends = {blamed(cause), team.workers[cause.rank].address} if isinstance(cause, PeerLost) else set()
        return [address for address in newcomers if address in ends] or list(newcomers)
    if worker in newcomers:
        return [worker]
    more_may_cost = bool(worker) and isinstance(error, DoesNotFit | ClusterError)  # each additional peer costs memory of the node or of its GPU
    return list(newcomers) if more_may_cost else []


def check_cards(machines: Sequence[ClusterWorker], cards: Sequence[str]) -> None:
    """Check that no two nodes use NCCL on the same GPU.

    Args:
        machines: workers of the nodes.
        cards: identifier of each node's GPU on its machine; "" without NCCL.

    Raises:
        UsageError: two nodes do; the error blames the later one.
    """
    seen: dict[tuple[str, str], str] = {}
    for machine, card in zip(machines, cards, strict=True):
        other = seen.setdefault((machine.host, card), machine.address)
        if card and other != machine.address:
            shared = (
                f"--transport nccl takes a GPU for each node, and workers {other} and {machine.address} both use {card} of {machine.host}; start "
                "each with its own (CUDA_VISIBLE_DEVICES=0 dask worker ADDRESS), or use --transport dask"
            )
            raise blaming(UsageError(shared), machine.address)


class _Pending:
    """A step under way on all nodes."""

    def __init__(self, engine: ClusterEngine, step: int, lr: float, futures: Sequence[Any]) -> None:
        self._engine, self._step, self._lr, self._futures = engine, step, lr, futures
        self._begun = monotonic()

    def result(self) -> Outcome:
        """Wait until the step has ended on every node."""
        team = self._engine.team
        return self._engine.finish(self._step, self._lr, self._begun, team.gather(self._futures, team.patience))


def _with_whole_paths(run: RunConfig) -> RunConfig:
    """Return the run with absolute paths of the files that nodes read and write, since workers have working directories of their own."""
    data, start, settings = run.data, run.start, run.settings
    objective = replace(data.objective, template=_whole(data.objective.template))
    data = replace(data, path=_whole(data.path), val_path=_whole(data.val_path), tokenizer_path=_whole(data.tokenizer_path), objective=objective)
    start = replace(start, directory=None if start.directory is None else start.directory.absolute())
    resources = replace(settings.resources, disk=_whole(settings.resources.disk))
    return replace(run, data=data, start=start, settings=replace(settings, resources=resources))


def _whole(path: str) -> str:
    return str(Path(path).absolute()) if path else path


class DaskCluster:
    """The `nntask.engine.interface.Cluster` of a training on Dask.

    Args:
        connection: an open connection.
        asked: the requested cluster, including the number of nodes.
    """

    def __init__(self, connection: Connection, asked: ClusterSpec) -> None:
        self._connection, self._asked = connection, asked
        self._unusable: dict[str, str] = {}
        self._refused: dict[str, str] = {}  # permanently excluded, because of other software or a missing resource
        self._members = frozenset[str]()  # addresses of the last team that trained
        self._team: Team | None = None
        self._most = 1
        self._has_begun = False
        self._num_unexplained = self._last_saved = 0
        self._durations: deque[float] = deque(maxlen=64)
        self._run: Path | None = None
        self._board: bool | None = None  # unknown until first use

    @contextmanager
    def open(
        self, run: RunConfig, shapes: ModelShapes, dataset: Dataset, say: Callable[[str], None]
    ) -> Iterator[tuple[ClusterEngine, ClusterEngine]]:
        """Make the nodes ready for a run."""
        self._run = run.directory
        num_minibatches, lanes = run.step.num_minibatches, run.step.lanes
        check_shared(num_minibatches, lanes, self._asked)
        wanted = self._wanted(num_minibatches, lanes, say)
        saved = run.start.step
        if saved != self._last_saved:  # the run has advanced since then
            self._num_unexplained, self._last_saved = 0, saved
        if self._num_unexplained == MOST_UNEXPLAINED:
            raise ClusterError(
                f"training stopped {MOST_UNEXPLAINED} times in a row although all workers answer",
                "look at the network between them and at their logs, and if memory is short raise --ram",
            )
        self._check_silent()
        if self._has_begun:
            machines = self._connection.usable_workers(None, self._unusable, self._refused)[: self._most]
        else:
            machines = self._connection.usable_workers(wanted, self._unusable)[: self._most]
        team = self._team = Team(self._connection, machines, self._durations)
        try:
            try:
                team.form()
                engine = self._open(team, run, shapes, dataset, data_shards(num_minibatches, lanes, len(machines)))
            except (NntaskError, NodeFailed, NodesChanged) as error:
                self._refuse_newcomers(team, error)
                raise
            self._members = frozenset(machine.address for machine in machines)
            for rank, machine in enumerate(machines):
                say(f"node {rank}: {machine.address} on {machine.host}")
            self._has_begun = True
            with closing(engine.records):
                yield engine, engine
        finally:
            self._num_unexplained = self._num_unexplained + 1 if team.is_unexplained else 0
            self._unusable.update(dict.fromkeys(team.unanswering, "does not answer"))
            team.close()
            self._team = None

    def _refuse_newcomers(self, team: Team, error: Exception) -> None:
        """Exclude new workers whose team failed to form, so that they do not end a run that has begun.

        Raises:
            NodesChanged: new workers may be the reason; they are not used again.
        """
        newcomers = [machine.address for machine in team.workers if machine.address not in self._members]
        suspects = _suspects(team, error, newcomers) if self._has_begun else []
        if suspects and len(suspects) < len(team.workers):
            team.is_unexplained = False  # the suspects explain it
            self._refused.update(dict.fromkeys(suspects, f"cannot take part ({error})"))
            raise NodesChanged(f"{words_for(suspects)} cannot take part ({error})") from error

    def _wanted(self, num_minibatches: int, lanes: int, say: Callable[[str], None]) -> int | None:
        """Return the number of nodes to wait for; None for the workers that are present."""
        asked = self._asked.num_nodes
        most = most_nodes(num_minibatches, lanes)
        self._most = most if asked is None else min(most, asked)
        if asked is not None and asked > most and not self._has_begun:
            how = f"a step of {num_minibatches} minibatches in {lanes} lanes"
            say(f"dask: {how} is shared by at most {most} nodes; {asked - most} of {asked} workers have nothing to do")
        return None if asked is None else self._most

    def _open(self, team: Team, run: RunConfig, shapes: ModelShapes, dataset: Dataset, all_shards: Sequence[DataShard]) -> ClusterEngine:
        run = _with_whole_paths(run)
        places = team.call("listen", run, len(team.workers))
        oldest = sorted(range(len(places)), key=lambda rank: team.workers[rank].address not in self._members)
        check_cards([team.workers[rank] for rank in oldest], [places[rank][1] for rank in oldest])
        patience = FIRST_STEP_SECONDS + max(seconds for *_, seconds in places)  # a node reports its own timeouts before this one
        team.call("connect", [address for address, *_ in places], patience=patience)
        trained = list(shapes.trained.values())
        widest = max(4 / tensor.dtype.itemsize for tensor in trained)  # gradients of 16-bit parameters are fp32
        largest = int(max(bucket.nbytes for bucket in buckets_of(trained, len(team.workers), shapes.whole)) * max(widest, 1))
        hosts = [machine.host for machine in team.workers]
        board = run.directory.name if self._has_board() else ""
        opening = [
            team.ask(shard.rank, "open", Order(run, shard, dataset.fingerprint, hosts.count(host), largest, board))
            for shard, host in zip(all_shards, hosts, strict=True)
        ]
        answers = team.gather(opening, OPEN_SECONDS)
        machines = team.call("describe")
        tokens = run.step.minibatch * run.model.seq_len
        return ClusterEngine(
            team, shapes, all_shards, answers, machines, NodeRecords(run.directory, run.start.step, all_shards, tokens, answers, machines)
        )

    def _has_board(self) -> bool:
        """Return whether the scheduler shows runs, tested once; a library missing there costs the page, not the training."""
        if self._board is None:
            try:
                found = install(self._connection.client)
                self._board = found.page is not None or found.metrics is not None
            except Exception:  # the scheduler may have no nntask
                self._board = False
        return self._board

    def what_is_safe(self) -> str:
        """Return a sentence with the run's last checkpoint and the command that continues it."""
        if self._run is None or not step_directories(self._run):
            return "nothing was saved yet"
        return f"the checkpoint {step_directories(self._run)[-1]} is safe; continue with: nntask train --resume {shlex.quote(str(self._run))}"

    def _check_silent(self) -> None:
        """Use workers again that were silent and answer now."""
        if self._unusable:
            silent = set(self._connection.silent(list(self._unusable)))
            self._unusable = {address: why for address, why in self._unusable.items() if address in silent}

    def check_members(self) -> None:
        """Raise if workers have joined that the run could use; see `nntask.engine.interface.Cluster`."""
        team = self._team
        if team is None or len(team.workers) >= self._most:
            return
        self._check_silent()
        here = {machine.address for machine in team.workers}
        others = [address for address in self._connection.workers() if address not in here | self._unusable.keys() | self._refused.keys()]
        free = [machine.address for machine in self._connection.ask(others, self._refused) if not machine.busy] if others else []
        if free:
            raise NodesChanged(f"{words_for(free[: self._most - len(here)])} joined")


def train_on(asked: ClusterSpec, train: Callable[[DaskCluster], int], say: Callable[[str], None]) -> int:
    """Call `train` with the cluster that is asked for, and leave the cluster afterwards.

    Raises:
        ClusterError: the cluster cannot be used; the last checkpoint of a run that has begun is safe.
    """
    connection = Connection(asked, say)
    cluster = DaskCluster(connection, asked)
    try:
        code = train(cluster)
    except ClusterError as error:
        raise ClusterError(str(error), cluster.what_is_safe()) from error
    finally:
        closing_code = connection.close()
    return code or closing_code
