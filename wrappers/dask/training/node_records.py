"""Step records of each node of a cluster, as `nntask report` reads them: RUN/nodes/<rank>/metrics.jsonl, machine.json and plan.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nntask.engine import Outcome
from nntask.optim import DataShard
from nntask.telemetry import Journal, Meter
from nntask.training import METRICS, NODES, write_machine, write_plan

from .node import NodeOutcome


class NodeRecords:
    """The files of a team's nodes, created at the end of the first step.

    Args:
        run: the run directory.
        first: number of steps done already; lines of later steps, of a team that was lost, are dropped.
        all_shards: shard of each node.
        tokens: number of tokens of a minibatch.
        answers: each node's answer to `open`.
        machines: contents of each node's machine.json.
    """

    def __init__(
        self,
        run: Path,
        first: int,
        all_shards: Sequence[DataShard],
        tokens: int,
        answers: Sequence[Mapping[str, Any]],
        machines: Sequence[Mapping[str, Any]],
    ) -> None:
        self._run, self._first, self._shards, self._tokens, self._machines = run, first, all_shards, tokens, machines
        self._plans = [each["planned"] for each in answers]
        self._meters = [Meter(self._counters(rank, each["stats"])) for rank, each in enumerate(answers)]
        self._journals: list[Journal] = []

    def add(self, step: int, lr: float, outcome: Outcome, outcomes: Sequence[NodeOutcome], seconds: float) -> None:
        """Write the lines of a finished step.

        Raises:
            StorageError: the disk is full or failed.
        """
        if not self._journals:
            self._open()
        for rank, (journal, result) in enumerate(zip(self._journals, outcomes, strict=True)):
            shard = self._shards[rank]
            tokens = len(shard.minibatches) * self._tokens
            line = {
                "step": step,
                "loss": result.loss,
                "lr": lr,
                "grad_norm": outcome.grad_norm,
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
            }
            journal.add_line({**line, **self._meters[rank].lap(self._counters(rank, result.stats), seconds)})

    def close(self) -> None:
        """Close the files.

        Raises:
            StorageError: the disk is full or failed.
        """
        journals, self._journals = self._journals, []
        for journal in journals:
            journal.close()

    def _open(self) -> None:
        folders = [self._run / NODES / str(rank) for rank in range(len(self._machines))]
        for folder, machine, planned in zip(folders, self._machines, self._plans, strict=True):
            write_machine(folder, machine)
            write_plan(folder, planned)
        for gone in set((self._run / NODES).iterdir()) - set(folders):
            Journal(gone / METRICS, self._first, run=self._run).close()
        self._journals = [Journal(folder / METRICS, self._first, run=self._run) for folder in folders]

    def _counters(self, rank: int, stats: Mapping[str, Any]) -> dict[str, Any]:
        """Return a node's counters, with its traffic to peers among its links."""
        sent = {f"{rank}=>{peer}": nbytes for peer, nbytes in sorted(stats["sent_bytes"].items())}
        links = {f"{rank}=>{peer}": 0 for peer in self._shards[rank].peers}
        return {**stats, "moved_bytes": {**links, **stats["moved_bytes"], **sent}}
