"""Which nodes look ahead, and when: where something has changed."""

from __future__ import annotations

from collections.abc import Iterable

from .dispatch import Dispatch
from .events import Action, CopyFinished, Event, StepStarted, TaskFinished
from .memory.prefetch import Lookahead
from .memory.replicas import Replicas
from .records import RAM, NodeId


class Lookaheads:
    """The lookahead of every node that has one, and when each looks.

    Args:
        enabled: whether anything is moved ahead at all.

    Attributes:
        by_node: each of them.
        partition_nodes: where the partitions of a step run, if it has as many: equal devices, and nothing runs elsewhere.
    """

    def __init__(self, dispatch: Dispatch, replicas: Replicas, *, enabled: bool) -> None:
        self.partition_nodes: tuple[NodeId, ...] = ()
        self._dispatch = dispatch
        self._replicas = replicas
        self._enabled = enabled
        self.by_node: dict[NodeId, Lookahead] = {}

    def choose_nodes(self) -> None:
        """Decide which nodes look ahead, after a worker has joined, or data in a file has come: then even the last tier has something to fetch."""
        replicas, joined = self._replicas, [worker for worker in self._dispatch.joined if not worker.aside]
        nodes_of_tasks = sorted({each.node for each in joined})
        kinds = {each.kind for each in joined}
        is_parted = self._dispatch.policy.keeps_partitions and len(nodes_of_tasks) > 1 and RAM not in nodes_of_tasks and len(kinds) == 1
        self.partition_nodes = tuple(nodes_of_tasks) if is_parted else ()
        if self._enabled and replicas.has_several:
            looking = [node for node in nodes_of_tasks if node != replicas.last or replicas.num_files]
            looking = looking if is_parted or len(nodes_of_tasks) == 1 else []
            self.by_node = {node: Lookahead(replicas, node, is_only=len(nodes_of_tasks) == 1) for node in looking}

    def run(self, event: Event, actions: list[Action]) -> None:
        """Let the node where something changed look ahead: all nodes when a step starts, the only one if memory was short or data is unread."""
        nodes: Iterable[NodeId] = ()
        if len(self.by_node) == 1:
            replicas = self._replicas
            is_short = replicas.num_evictions or replicas.wanted or any(replicas.copies.num_writing)
            nodes = self.by_node if is_short or replicas.foresight.replays[0].returns else ()
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
        """No replay is in flight: nothing is kept of the last one."""
        for each in self.by_node.values():
            each.rest()
