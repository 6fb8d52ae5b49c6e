"""Actors on the workers of a cluster, called together and watched.

What fails on a node is told apart. A worker that is gone, hangs or is cut off ends this team: `NodesChanged`, and the run goes on from its last
checkpoint with a new one. What a node found wrong (data, memory, NaN) would be wrong again: it is raised as it is. When the scheduler is gone there
is nobody to form a team: `ClusterError`.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from time import monotonic
from typing import Any, Final, NoReturn

from nntask.errors import NntaskError
from nntask.trainer.engine import NodesChanged

from .cluster import Connection, Machine
from .node import Node
from .peers import PeerLost

LEAST_SILENCE: Final = 30.0
"""Seconds without the end of a step after which nodes count as hung, at least; see `Team.patience`."""

MEDIANS: Final = 10
"""As many times as a step usually takes may pass before nodes count as hung."""

FIRST_STEP_SECONDS: Final = 300.0
"""How long the first step may take, which compiles kernels; also one call that writes or reads a tensor."""

OPEN_SECONDS: Final = 1800.0
"""How long nodes may take to make data and model ready, which may mean to tokenise a corpus; also to write the text that a run ends with."""

LOOK_SECONDS: Final = 1.0
"""How often the scheduler is asked who is there, while the client waits."""


class Team:
    """Actors on workers, by rank.

    Args:
        connection: to the cluster.
        machines: workers, in order of ranks.
        durations: of the latest steps of this training, by this team and earlier ones.

    Attributes:
        unanswering: workers whose silence has ended this team.
        is_riddle: whether it ended although every worker answers.
    """

    def __init__(self, connection: Connection, machines: Sequence[Machine], durations: deque[float]) -> None:
        self.connection, self.machines = connection, machines
        self.job = uuid.uuid4().hex
        self.unanswering: list[str] = []
        self.is_riddle = False
        self._durations = durations
        self._futures: list[Any] = []
        self.actors: list[Any] = []

    def form(self) -> None:
        """Make the actors.

        Raises:
            NodesChanged, NntaskError, ClusterError: see `gather`.
        """
        for rank, machine in enumerate(self.machines):
            self._futures.append(
                self.connection.client.submit(
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
        except RuntimeError as error:  # Dask knows that the worker is gone; another one may answer at its address by now
            self._fail(ConnectionError(str(error)))

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
        ping, suspects = monotonic() + LEAST_SILENCE / 2, set[str]()
        for future in futures:
            while True:
                try:
                    results.append(future.result(timeout=LOOK_SECONDS))
                    break
                except TimeoutError as error:
                    if future.done():  # else it is ours
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
        """What one node found wrong is told at once: the others may wait for what it will never send."""
        for future in futures:
            if future.done():
                try:
                    future.result(timeout=LOOK_SECONDS)
                except Exception as error:
                    self._fail(error)

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
        if self.actors:  # a new worker may be there at the address of one that is gone, without its actor
            states = [future.status for future in self._futures]
            gone += [each.address for each, state in zip(self.machines, states, strict=True) if state not in ("finished", "pending")]
        if gone:
            raise NodesChanged(f"lost {words_for(sorted(set(gone)))}")

    def _ping(self, suspects: set[str]) -> set[str]:
        """Ask all workers, whose event loops answer whatever their nodes are doing; those that are silent, if they were not so before.

        Raises:
            NodesChanged: some were silent the last time, too: they hang, however long what they do may take.
        """
        silent = set(self.connection.silent([machine.address for machine in self.machines]))
        if silent & suspects:
            self.unanswering = sorted(silent & suspects)
            raise NodesChanged(f"{words_for(self.unanswering)} did not answer for {LEAST_SILENCE:.0f} s")
        return silent

    def _fail(self, error: Exception) -> NoReturn:
        """Tell apart what an error of a node means."""
        if isinstance(error, NntaskError):
            raise error
        there = self.connection.workers()
        gone = [machine.address for machine in self.machines if machine.address not in there]
        silent = self.connection.silent([machine.address for machine in self.machines if machine.address not in gone])
        if gone or silent:
            self.unanswering = silent
            raise NodesChanged(f"lost {words_for([*gone, *silent])}") from error
        if isinstance(error, PeerLost | OSError):
            self.is_riddle = True
            raise NodesChanged(f"the connections between nodes broke ({error})") from error
        raise error

    def _fail_hung(self, patience: float) -> NoReturn:
        """Nodes have been silent for too long."""
        self._look()
        silent = self.connection.silent([machine.address for machine in self.machines])
        self.unanswering, self.is_riddle = silent, not silent
        who = f"{words_for(silent)} did not answer" if silent else "no node answered, though their workers do,"
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


def words_for(addresses: Sequence[str]) -> str:
    """Workers in a sentence."""
    return f"worker{'s' if len(addresses) > 1 else ''} {', '.join(addresses)}"
