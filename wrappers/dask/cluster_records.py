"""What each node of a cluster has done, step by step, where `nntask report` looks for it: RUN/nodes/<rank>/metrics.jsonl and machine.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nntask.sharding import Share
from nntask.trainer.engine import Outcome
from nntask.trainer.metrics import Journal, Meter
from nntask.trainer.outputs import METRICS, NODES, write_machine

from .node import Part


class NodeRecords:
    """The files of a team's nodes. Nothing is written before the first step is over.

    Args:
        run: the run directory.
        first: steps done already; what the files hold of later ones, by a team that was lost, is dropped.
        all_shares: what each node does.
        tokens: of a minibatch.
        told: what each node said of itself when it opened.
        machines: the content of their machine.json.
    """

    def __init__(
        self,
        run: Path,
        first: int,
        all_shares: Sequence[Share],
        tokens: int,
        told: Sequence[Mapping[str, Any]],
        machines: Sequence[Mapping[str, Any]],
    ) -> None:
        self._run, self._first, self._shares, self._tokens, self._machines = run, first, all_shares, tokens, machines
        self._meters = [Meter(self._counters(rank, each["stats"])) for rank, each in enumerate(told)]
        self._journals: list[Journal] = []

    def add(self, step: int, lr: float, outcome: Outcome, parts: Sequence[Part], seconds: float) -> None:
        """A step is over.

        Raises:
            StorageError: the disk is full or failed.
        """
        if not self._journals:
            self._open()
        for rank, (journal, part) in enumerate(zip(self._journals, parts, strict=True)):
            share = self._shares[rank]
            tokens = len(share.minibatches) * self._tokens
            line = {
                "step": step,
                "loss": part.loss,
                "lr": lr,
                "grad_norm": outcome.grad_norm,
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
            }
            journal.add_line({**line, **self._meters[rank].lap(self._counters(rank, part.stats), seconds)})

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
        for folder, machine in zip(folders, self._machines, strict=True):
            write_machine(folder, machine)
        for gone in set((self._run / NODES).iterdir()) - set(folders):
            Journal(gone / METRICS, self._first, run=self._run).close()
        self._journals = [Journal(folder / METRICS, self._first, run=self._run) for folder in folders]

    def _counters(self, rank: int, stats: Mapping[str, Any]) -> dict[str, Any]:
        """A node's counters, with what it has sent among its links."""
        sent = {f"{rank}=>{peer}": nbytes for peer, nbytes in sorted(stats["sent_bytes"].items())}
        links = {f"{rank}=>{peer}": 0 for peer in self._shares[rank].peers}
        return {**stats, "moved_bytes": {**links, **stats["moved_bytes"], **sent}}
