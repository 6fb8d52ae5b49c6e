"""A training's nodes as one engine: formed from the workers of a cluster, called once per step, watched, and formed anew when they change.

What fails on a node is told apart. A worker that is gone, hangs or is cut off ends this team: `NodesChanged`, and the run goes on from its last
checkpoint with a new one. What a node found wrong (data, memory, NaN) would be wrong again: it is raised as it is. When the scheduler is gone there
is nobody to form a team: `ClusterError`.
"""

from __future__ import annotations

import shlex
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, Final, NoReturn

from nntask.checkpoints import step_directories
from nntask.data import Batch, Dataset
from nntask.errors import ClusterError, NntaskError, UsageError
from nntask.sharding import Share, most_nodes, shares
from nntask.sizes import parse_size
from nntask.trainer.base import Base
from nntask.trainer.engine import NodesChanged, Outcome
from nntask.trainer.prepare import Prepared
from nntask.trainer.recorded import outcome_of
from nntask.trainer.rules import local_nodes
from nntask.trainer.settings import ClusterSettings

from .cluster import Connection, Machine
from .cluster_tensors import Mirror
from .exchange import PeerLost
from .node import Node, Order, Part

LEAST_SILENCE: Final = 30.0
"""Seconds without the end of a step after which nodes count as hung, at least; see `Team.patience`."""

MEDIANS: Final = 10
"""As many times as a step usually takes may pass before nodes count as hung."""

FIRST_STEP_SECONDS: Final = 300.0
"""How long the first step may take, which compiles kernels; also one call that writes or reads a tensor."""

OPEN_SECONDS: Final = 1800.0
"""How long nodes may take to make data and model ready, which may mean to tokenise a corpus."""

MOST_RIDDLES: Final = 3
"""How often in a row a team may end although all of its workers answer."""

LOOK_SECONDS: Final = 1.0
"""How often the scheduler is asked who is there, while the client waits."""


class Team:
    """Actors on workers, by rank.

    Args:
        connection: to the cluster.
        machines: workers, in order of ranks.

    Attributes:
        unanswering: workers whose silence has ended this team.
        is_riddle: whether it ended although every worker answers.
    """

    def __init__(self, connection: Connection, machines: Sequence[Machine]) -> None:
        self.connection, self.machines = connection, machines
        self.job = uuid.uuid4().hex
        self.unanswering: list[str] = []
        self.is_riddle = False
        self._durations: deque[float] = deque(maxlen=64)
        self._futures: list[Any] = []
        self.actors: list[Any] = []
        for rank, machine in enumerate(machines):
            self._futures.append(
                connection.client.submit(
                    Node,
                    self.job,
                    rank,
                    actor=True,
                    workers=[machine.address],
                    allow_other_workers=False,
                    pure=False,
                    key=f"nntask-{self.job[:12]}-{rank}",
                )
            )
        self.actors = self.gather(self._futures, OPEN_SECONDS)

    def call(self, method: str, *args: Any, patience: float = FIRST_STEP_SECONDS) -> list[Any]:
        """Call every node and wait for all answers."""
        return self.gather(self.begin(method, *args), patience)

    def begin(self, method: str, *args: Any) -> list[Any]:
        """Call every node."""
        return [self.ask(rank, method, *args) for rank in range(len(self.actors))]

    def ask(self, rank: int, method: str, *args: Any) -> Any:
        """Call one node; the result is for `gather`."""
        try:
            with self.connection.client.as_current():
                return getattr(self.actors[rank], method)(*args)
        except RuntimeError as error:  # Dask knows that the worker is gone
            self._fail(error)

    def gather(self, futures: Sequence[Any], patience: float) -> list[Any]:
        """The results of calls under way.

        Args:
            patience: seconds until nodes count as hung.

        Raises:
            NodesChanged: a node is gone, hangs, or has lost its peers.
            NntaskError: what a node found wrong.
            ClusterError: the scheduler is gone.
        """
        results = []
        deadline, look = monotonic() + patience, monotonic() + LOOK_SECONDS
        for future in futures:
            while True:
                try:
                    results.append(future.result(timeout=LOOK_SECONDS))
                    break
                except TimeoutError as error:
                    if future.done() is True and not _is_pending(future):
                        self._fail(error)
                except Exception as error:
                    self._fail(error)
                if monotonic() > look:
                    self._look()
                    look = monotonic() + LOOK_SECONDS
                if monotonic() > deadline:
                    self._fail_hung(patience)
        return results

    def note_step(self, seconds: float) -> None:
        """A step took so long."""
        self._durations.append(seconds)

    @property
    def patience(self) -> float:
        """Seconds without the end of a step after which nodes count as hung."""
        return max(LEAST_SILENCE, MEDIANS * median(self._durations)) if self._durations else FIRST_STEP_SECONDS

    def _look(self) -> None:
        """Ask the scheduler whether all are there."""
        there = self.connection.workers()
        gone = [machine.address for machine in self.machines if machine.address not in there]
        if gone:
            raise NodesChanged(f"lost {_workers(gone)}")

    def _fail(self, error: Exception) -> NoReturn:
        """Tell apart what an error of a node means."""
        if isinstance(error, NntaskError):
            raise error
        there = self.connection.workers()
        gone = [machine.address for machine in self.machines if machine.address not in there]
        silent = self.connection.silent([machine.address for machine in self.machines if machine.address not in gone])
        if gone or silent:
            self.unanswering = silent
            raise NodesChanged(f"lost {_workers([*gone, *silent])}") from error
        if isinstance(error, PeerLost | OSError):
            self.is_riddle = True
            raise NodesChanged(f"the connections between nodes broke ({error})") from error
        if "busy with another training" in str(error):
            raise ClusterError(f"{error}; wait for it, or name fewer workers with --nodes") from error
        raise error

    def _fail_hung(self, patience: float) -> NoReturn:
        """Nodes have been silent for too long."""
        self._look()
        silent = self.connection.silent([machine.address for machine in self.machines])
        self.unanswering, self.is_riddle = silent, not silent
        who = f"{_workers(silent)} did not answer" if silent else "no node answered, though their workers do,"
        raise NodesChanged(f"{who} for {patience:.0f} s")

    def close(self) -> None:
        """Let the workers go; those that do not answer lose their actor when they come back."""
        closing = []
        for rank in range(len(self.actors)):
            with suppress(Exception):  # it is gone
                closing.append(self.ask(rank, "close"))
        deadline = monotonic() + 10
        for future in closing:
            with suppress(Exception):
                future.result(timeout=max(deadline - monotonic(), 0.1))
        for future in self._futures:
            with suppress(Exception):
                future.release()
        self.actors, self._futures = [], []


def _is_pending(future: Any) -> bool:
    return getattr(future, "status", "") == "pending"


def _workers(addresses: Sequence[str]) -> str:
    return f"worker{'s' if len(addresses) > 1 else ''} {', '.join(addresses)}"


class ClusterEngine:
    """What the training loop sees of a team; see `nntask.trainer.engine`.

    Args:
        team: connected and open.
        prepared: the run.
        base: the frozen weights of a run with adapters.
        all_shares: what each node does.
        told: what each node said of itself when it opened.

    Attributes:
        gpus: of this machine: nodes use their own.
    """

    def __init__(self, team: Team, prepared: Prepared, base: Base | None, all_shares: Sequence[Share], told: Sequence[Mapping[str, Any]]) -> None:
        self.team, self._shares = team, all_shares
        self.gpus: Sequence[Any] = ()
        self.num_tasks = sum(each["num_tasks"] for each in told)
        self.num_trained = int(told[0]["num_trained"])
        self._stats: list[Mapping[str, Any]] = [each["stats"] for each in told]
        self.mirror = Mirror(team, prepared, base)
        self._last_end = 0.0

    def start(self, step: int, lr: float, batch: Batch) -> _Pending:
        """Begin optimizer step `step` on all nodes."""
        return _Pending(self, self.team.begin("step", step, lr, batch.begin))

    def finish(self, parts: Sequence[Part]) -> Outcome:
        """Put the nodes' parts of a step together."""
        now = monotonic()
        if self._last_end:
            self.team.note_step(now - self._last_end)
        self._last_end = now
        self._stats = [part.stats for part in parts]
        losses = [0.0] * self._shares[0].num_minibatches
        for share, part in zip(self._shares, parts, strict=True):
            for number, loss in zip(share.minibatches, part.losses, strict=True):
                losses[number] = loss
        squares = parts[0].squares
        assert squares is not None  # the first node is always told
        return outcome_of(losses, squares)

    def evaluate(self, batch: Batch) -> float:
        """Sum of the token losses of a batch, by the first node."""
        self._last_end = 0.0
        (loss,) = self.team.gather([self.team.ask(0, "evaluate", batch.tokens, batch.targets)], max(self.team.patience, FIRST_STEP_SECONDS))
        return float(loss)

    def model_tensors(self) -> Mapping[str, Any]:
        """Parameters that are learnt, by name."""
        self._last_end = 0.0
        return self.mirror.model

    def optimizer_tensors(self) -> Mapping[str, Any]:
        """State of the optimizer by name."""
        return self.mirror.optimizer

    def reset_optimizer(self) -> None:
        """Begin anew with the weights as they are now."""
        self.mirror.flush()
        self.team.call("reset_optimizer")

    def sample(self, dataset: Dataset, length: int, stopped: Callable[[], bool]) -> str:
        """The text that a run ends with, by the first node."""
        (text,) = self.team.gather([self.team.ask(0, "sample")], FIRST_STEP_SECONDS)
        return str(text)

    def stats(self, *, forget_recent_peak: bool = False) -> dict[str, Any]:
        """Counters of all nodes as of their last step; names of memories, links and workers begin with the node's rank."""
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
        for name in ("tasks", "evictions", "hits", "misses", "stall_seconds", "num_messages"):
            merged[name] = sum(stats[name] for stats in self._stats)
        return {**merged, "policy": self._stats[0]["policy"], "seconds": self._stats[0]["seconds"]}

    def check_stop(self) -> None:
        """Nodes raise what stops them themselves."""

    def wait(self) -> None:
        """Wait until everything written to the nodes is there."""
        self.mirror.flush()


class _Pending:
    """A step under way on all nodes."""

    def __init__(self, engine: ClusterEngine, futures: Sequence[Any]) -> None:
        self._engine, self._futures = engine, futures

    def result(self) -> Outcome:
        """Wait until the step is over on every node."""
        team = self._engine.team
        return self._engine.finish(team.gather(self._futures, team.patience))


def _with_whole_paths(prepared: Prepared) -> Prepared:
    """The run with absolute names of what nodes read and write, since workers have working directories of their own."""
    data, files, resources = prepared.data, prepared.settings.checkpoints, prepared.settings.resources
    data = replace(data, path=_whole(data.path), val_path=_whole(data.val_path), tokenizer_path=_whole(data.tokenizer_path))
    files = replace(files, init_from=_whole(files.init_from), load_checkpoint=_whole(files.load_checkpoint))
    resources = replace(resources, disk=_whole(resources.disk))
    return replace(prepared, data=data, settings=replace(prepared.settings, checkpoints=files, resources=resources))


def _whole(path: str) -> str:
    return str(Path(path).absolute()) if path else path


class DaskCluster:
    """The `Cluster` of a training.

    Args:
        connection: open.
        settings: how many nodes.
    """

    def __init__(self, connection: Connection, settings: ClusterSettings) -> None:
        self._connection, self._settings = connection, settings
        self._unusable: dict[str, str] = {}
        self._team: Team | None = None
        self._most = 1
        self._has_begun = False
        self._num_riddles = 0
        self._run: Path | None = None

    @contextmanager
    def open(
        self, prepared: Prepared, base: Base | None, dataset: Dataset, say: Callable[[str], None]
    ) -> Iterator[tuple[ClusterEngine, ClusterEngine]]:
        """Make the nodes ready for a run."""
        tiling, self._run = prepared.settings.tiling, prepared.run
        num_minibatches, lanes = (tiling.batch or 1) // tiling.minibatch, tiling.lanes or 1
        wanted = self._wanted(num_minibatches, lanes, say)
        if self._num_riddles == MOST_RIDDLES:
            raise ClusterError(
                f"training stopped {MOST_RIDDLES} times in a row although all workers answer; look at the network between them and at their logs, "
                "and if memory is short raise --ram"
            )
        self._check_silent()
        machines = self._connection.machines(None if self._has_begun else wanted, self._unusable)[: self._most]
        team = self._team = Team(self._connection, machines)
        try:
            engine = self._open(team, prepared, base, dataset, shares(num_minibatches, lanes, len(machines)))
            for rank, machine in enumerate(machines):
                say(f"node {rank}: {machine.address} on {machine.host}")
            self._has_begun = True
            yield engine, engine
        finally:
            self._num_riddles = self._num_riddles + 1 if team.is_riddle else 0
            self._unusable.update(dict.fromkeys(team.unanswering, "does not answer"))
            team.close()
            self._team = None

    def _wanted(self, num_minibatches: int, lanes: int, say: Callable[[str], None]) -> int | None:
        """Nodes to wait for; None for those that there are.

        Raises:
            UsageError: a step of this kind cannot be shared.
        """
        asked = self._settings.nodes or local_nodes(self._settings.dask)
        most = most_nodes(num_minibatches, lanes)
        self._most = min(most, asked or most)
        if asked is not None and asked > most:
            how = f"a step of {num_minibatches} minibatch{'es' if num_minibatches > 1 else ''} in {lanes} lane{'s' if lanes > 1 else ''}"
            if most == 1:
                raise UsageError(
                    f"--dask shares the minibatches of a step by lanes, and {how} is for one node; use --lanes {asked} or more, and a --minibatch "
                    f"that divides --batch into {asked} or more"
                )
            if not self._has_begun:
                say(f"dask: {how} is shared by at most {most} nodes; {asked - most} of {asked} workers have nothing to do")
        return None if asked is None else self._most

    def _open(self, team: Team, prepared: Prepared, base: Base | None, dataset: Dataset, all_shares: Sequence[Share]) -> ClusterEngine:
        limit = self._settings.link_bandwidth
        prepared = _with_whole_paths(prepared)
        addresses = team.call("listen", float(parse_size(limit, "--link-bandwidth")) if limit else None)
        hosts = [machine.host for machine in team.machines]
        opening = [
            team.ask(share.rank, "open", Order(prepared, base, share, dataset.fingerprint, hosts.count(host)), addresses)
            for share, host in zip(all_shares, hosts, strict=True)
        ]
        return ClusterEngine(team, prepared, base, all_shares, team.gather(opening, OPEN_SECONDS))

    def what_is_safe(self) -> str:
        """What is left of the run, and how to continue it."""
        if self._run is None or not step_directories(self._run):
            return "nothing was saved yet"
        return f"the checkpoint {step_directories(self._run)[-1]} is safe; continue with: nntask train --resume {shlex.quote(str(self._run))}"

    def _check_silent(self) -> None:
        """Workers that did not answer may do so again."""
        if self._unusable:
            silent = set(self._connection.silent(list(self._unusable)))
            self._unusable = {address: why for address, why in self._unusable.items() if address in silent}

    def check_members(self) -> None:
        """See `nntask.trainer.engine.Cluster`."""
        team = self._team
        if team is None or len(team.machines) >= self._most:
            return
        self._check_silent()
        here = {machine.address for machine in team.machines}
        others = [address for address in self._connection.workers() if address not in here and address not in self._unusable]
        free = [machine.address for machine in self._connection.ask(others) if not machine.busy] if others else []
        if free:
            raise NodesChanged(f"{_workers(free[: self._most - len(here)])} joined")


def train_on(settings: ClusterSettings, train: Callable[[DaskCluster], int], say: Callable[[str], None]) -> int:
    """Call `train` with the cluster that settings name, and leave it afterwards.

    Raises:
        ClusterError: it cannot be used; of a run that has begun, the last checkpoint is safe.
    """
    connection = Connection(settings, say)
    cluster = DaskCluster(connection, settings)
    try:
        return train(cluster)
    except ClusterError as error:
        raise ClusterError(f"{error}; {cluster.what_is_safe()}") from error
    finally:
        connection.close()
