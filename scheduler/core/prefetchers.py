"""The lookaheads of the memory nodes, and the choice of the nodes that look ahead after an event."""

from __future__ import annotations

from collections.abc import Iterable

from .dispatch import Dispatch
from .events import Action, CopyFinished, Event, StepStarted, TaskFinished
from .memory.prefetch import Lookahead
from .memory.replicas import Replicas
from .records import RAM, NodeId


class Lookaheads:
    """The lookaheads of all nodes that have one.

    Args:
        enabled: whether any data is moved ahead.

    Attributes:
        by_node: lookahead of each node that has one.
        partition_nodes: nodes that run the partitions of a step, one each, if the devices are equal and nothing runs elsewhere; else empty.
    """

    def __init__(self, dispatch: Dispatch, replicas: Replicas, *, enabled: bool) -> None:
        self.partition_nodes: tuple[NodeId, ...] = ()
        self._dispatch = dispatch
        self._replicas = replicas
        self._enabled = enabled
        self.by_node: dict[NodeId, Lookahead] = {}

    def choose_nodes(self) -> None:
        """Choose the nodes that look ahead, after a worker has joined or data in a file was attached (which even the last tier can fetch ahead)."""
        replicas, joined = self._replicas, [worker for worker in self._dispatch.joined if not worker.aside]
        nodes_of_tasks = sorted({worker.node for worker in joined})
        kinds = {worker.kind for worker in joined}
        is_parted = self._dispatch.policy.keeps_partitions and len(nodes_of_tasks) > 1 and RAM not in nodes_of_tasks and len(kinds) == 1
        self.partition_nodes = tuple(nodes_of_tasks) if is_parted else ()
        if self._enabled and replicas.has_several:
            looking = [node for node in nodes_of_tasks if node != replicas.last or replicas.num_files]
            looking = looking if is_parted or len(nodes_of_tasks) == 1 else []
            self.by_node = {node: Lookahead(replicas, node, is_only=len(nodes_of_tasks) == 1) for node in looking}

    def run(self, event: Event, actions: list[Action]) -> None:
        """Look ahead on the nodes where `event` changed something; at the start of a step, on all of them.

        If there is a single node, it looks ahead at every event once data was evicted, or while data of the step has to be read or written.
        """
        nodes: Iterable[NodeId] = ()
        if len(self.by_node) == 1:
            replicas = self._replicas
            is_short = replicas.num_evictions or replicas.wanted or any(replicas.copies.num_writing)
            nodes = self.by_node if is_short or replicas.foresight.replays[0].plan.returns else ()
        elif isinstance(event, StepStarted):
            nodes = self.by_node
        elif isinstance(event, TaskFinished):
            nodes = (event.task.node,)
        elif isinstance(event, CopyFinished):
            nodes = (event.target.node if event.target.node in self.by_node else event.source.node,)
        ended = event.task if isinstance(event, TaskFinished) else None
        for node in nodes:
            lookahead = self.by_node.get(node)
            if lookahead is not None:
                lookahead.run(ended, actions, blocked=bool(self._dispatch.blocked[node]))

    def rest(self) -> None:
        """Drop the state of the last replay; to be called when no replay is in progress."""
        for lookahead in self.by_node.values():
            lookahead.rest()
