"""Actors on the workers of a cluster, called together and watched.

Failures on nodes are of three kinds. If a worker is gone, hangs or is cut off, this team ends with `NodesChanged`, and the run goes on from its last
checkpoint with a new team. An error that a node has found (in data, memory, NaN) would occur again: it is raised as it is. If the scheduler is gone
no team can be formed: `ClusterError`.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from time import monotonic
from typing import Any, Final, NoReturn

from nntask import NntaskError
from nntask.engine import NodesChanged

from .cluster import ClusterWorker, Connection
from .node import TrainingNode
from .peers import PeerLost

LEAST_SILENCE: Final = 30.0
"""Least time without the end of a step after which nodes count as hung; seconds. See `Team.patience`."""

MEDIANS: Final = 10
"""Nodes count as hung after this multiple of the median duration of a step."""

FIRST_STEP_SECONDS: Final = 300.0
"""Time limit of the first step, which compiles kernels; also of one call that writes or reads a tensor."""

OPEN_SECONDS: Final = 1800.0
"""Time limit for nodes to prepare data and model, which may include the tokenisation of a corpus; also for the text at the end of a run."""

LOOK_SECONDS: Final = 1.0
"""Period of the scheduler's queries for present workers, while the client waits."""


class Team:
    """Actors on workers, by rank.

    Args:
        connection: connection to the cluster.
        workers: the workers, in order of ranks.
        durations: seconds of the latest steps of this training, by this team and earlier ones.

    Attributes:
        unanswering: addresses of silent workers that ended this team.
        is_unexplained: whether the team ended although every worker answers.
    """

    def __init__(self, connection: Connection, workers: Sequence[ClusterWorker], durations: deque[float]) -> None:
        self.connection, self.workers = connection, workers
        self.job = uuid.uuid4().hex
        self.unanswering: list[str] = []
        self.is_unexplained = False
        self._durations = durations
        self._futures: list[Any] = []
        self.actors: list[Any] = []

    def form(self) -> None:
        """Create the actors.

        Raises:
            NodesChanged, NntaskError, ClusterError: as in `gather`.
        """
        for rank, machine in enumerate(self.workers):
            self._futures.append(
                self.connection.client.submit(
                    TrainingNode,
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
        """Call a method of every node and wait for all results."""
        return self.gather(self.begin(method, *args), patience)

    def begin(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every node; the results are for `gather`."""
        return [self.ask(rank, method, *args) for rank in range(len(self.actors))]

    def ask(self, rank: int, method: str, *args: Any) -> Any:
        """Call a method of one node; the result is for `gather`."""
        try:
            with self.connection.client.as_current():
                return getattr(self.actors[rank], method)(*args)
        except RuntimeError as error:  # Dask knows that the worker is gone; another one may answer at its address by now
            self._fail(ConnectionError(str(error)))

    def gather(self, futures: Sequence[Any], patience: float) -> list[Any]:
        """Return the results of calls under way.

        Args:
            futures: the calls.
            patience: seconds until nodes count as hung.

        Raises:
            NodesChanged: a node is gone, hangs, or has lost its peers.
            NntaskError: an error that a node has found.
            ClusterError: the scheduler is gone.
        """
        results = []
        deadline, look = monotonic() + patience, monotonic() + LOOK_SECONDS
        ping, suspects = monotonic() + LEAST_SILENCE / 2, set[str]()
        for future in futures:
            while True:
                try:
                    results.append(future.result(timeout=LOOK_SECONDS))
                    break
                except TimeoutError as error:
                    if future.done():  # else the timeout is the one above
                        self._fail(error)
                except Exception as error:
                    self._fail(error)
                if monotonic() > look:
                    self._raise_failed(futures)
                    self._look()
                    look = monotonic() + LOOK_SECONDS
                if monotonic() > ping:
                    suspects = self._ping(suspects)
                    ping = monotonic() + LEAST_SILENCE / 2
                if monotonic() > deadline:
                    self._fail_hung(patience)
        return results

    def _raise_failed(self, futures: Sequence[Any]) -> None:
        """Raise the error of any node at once: other nodes may wait for data that the failed node will never send."""
        for future in futures:
            if future.done():
                try:
                    future.result(timeout=LOOK_SECONDS)
                except Exception as error:
                    self._fail(error)

    def note_step(self, seconds: float) -> None:
        """Record the duration of a step."""
        self._durations.append(seconds)

    @property
    def patience(self) -> float:
        """Seconds without the end of a step after which nodes count as hung."""
        return max(LEAST_SILENCE, MEDIANS * median(self._durations)) if self._durations else FIRST_STEP_SECONDS

    def _gone(self) -> list[str]:
        there = self.connection.workers()
        return [machine.address for machine in self.workers if machine.address not in there]

    def _look(self) -> None:
        """Check that the scheduler still has all workers and actors."""
        gone = self._gone()
        if self.actors:  # a new worker may have the address of one that is gone, without its actor
            states = [future.status for future in self._futures]
            gone += [each.address for each, state in zip(self.workers, states, strict=True) if state not in ("finished", "pending")]
        if gone:
            raise NodesChanged(f"lost {words_for(sorted(set(gone)))}")

    def _ping(self, suspects: set[str]) -> set[str]:
        """Ping the event loops of all workers, which answer while their nodes compute; returns those that are silent now but were not before.

        Raises:
            NodesChanged: a worker was silent twice in a row, so it hangs.
        """
        silent = set(self.connection.silent([machine.address for machine in self.workers]))
        if silent & suspects:
            self.unanswering = sorted(silent & suspects)
            raise NodesChanged(f"{words_for(self.unanswering)} did not answer for {LEAST_SILENCE:.0f} s")
        return silent

    def _fail(self, error: Exception) -> NoReturn:
        """Raise the error of a node as the kind of failure that it is."""
        if isinstance(error, NntaskError):
            raise error
        gone = self._gone()
        silent = self.connection.silent([machine.address for machine in self.workers if machine.address not in gone])
        if gone or silent:
            self.unanswering = silent
            raise NodesChanged(f"lost {words_for([*gone, *silent])}") from error
        if isinstance(error, PeerLost | OSError):
            self.is_unexplained = True
            raise NodesChanged(f"the connections between nodes broke ({error})") from error
        raise error

    def _fail_hung(self, patience: float) -> NoReturn:
        """End the team after too long a silence."""
        self._look()
        silent = self.connection.silent([machine.address for machine in self.workers])
        self.unanswering, self.is_unexplained = silent, not silent
        who = f"{words_for(silent)} did not answer" if silent else "no node answered, though their workers do,"
        raise NodesChanged(f"{who} for {patience:.0f} s")

    def close(self) -> None:
        """Release the workers; a silent worker loses its actor when it answers again."""
        closing = []
        for rank in range(len(self.actors)):
            with suppress(Exception):  # the worker is gone
                closing.append(self.ask(rank, "close"))
        deadline = monotonic() + 10
        for future in closing:
            with suppress(Exception):
                future.result(timeout=max(deadline - monotonic(), 0.1))
        for future in self._futures:
            with suppress(Exception):
                future.release()
        self.actors, self._futures = [], []


def words_for(addresses: Sequence[str]) -> str:
    """Return the addresses of workers as a phrase."""
    return f"worker{'s' if len(addresses) > 1 else ''} {', '.join(addresses)}"
