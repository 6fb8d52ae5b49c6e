"""Rules of --dask: the forms of a cluster's address, and the flags that belong to one machine."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ..errors import Setting, UsageError
from ..io.units import parse_size
from ..optim.sharded import most_nodes
from .machine import sharing_of
from .settings import ClusterSettings, TrainSettings

_LOCAL: Final = re.compile(r"local:(\d{1,6})", re.ASCII)
_ADDRESS: Final = re.compile(r"((tcp|tls|wss?|ucx)://)?(?P<host>\[[^]\s]+\]|[^][\s/:]+):(?P<port>[0-9]{1,5})|inproc://\S+")
MOST_PORT: Final = 65535
MOST_LOCAL: Final = 256
"""Largest number of workers of a cluster on one machine; each is a process."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The Dask cluster that a run trains on.

    Args:
        address: address of the scheduler, or local:N.
        num_local: number of workers to start on this machine; None if the scheduler exists already.
        num_nodes: number of nodes to wait for; None for the workers that have joined.
        link_rate: largest number of bytes per second that a node sends to others; None for the speed of the network.
        transport: connections that carry tensors between nodes.
    """

    address: str
    num_local: int | None
    num_nodes: int | None
    link_rate: float | None
    transport: Literal["dask", "nccl"]

    @property
    def is_local(self) -> bool:
        """Whether all nodes are processes on this machine."""
        return self.num_local is not None


def cluster_of(asked: ClusterSettings) -> ClusterSpec | None:
    """Return the cluster that flags ask for; None for this machine alone.

    Raises:
        UsageError: --dask is not an address, or RATE in --transport is not one.
    """
    if not asked.dask:
        return None
    local = local_nodes(asked.dask)
    return ClusterSpec(
        address=asked.dask,
        num_local=local,
        num_nodes=local if asked.nodes is None else asked.nodes,
        link_rate=float(parse_size(asked.link_bandwidth.removesuffix("/s"), "RATE in --transport")) if asked.link_bandwidth else None,
        transport=asked.transport,
    )


def check_cluster(settings: TrainSettings) -> None:
    """Check --dask against flags that belong to one machine.

    Raises:
        UsageError: a rule is broken.
    """
    cluster = settings.cluster
    if not cluster.dask:
        for flag, value, is_set in (
            ("--transport", cluster.transport, cluster.transport != "dask"),
            ("--transport", f"dask@{cluster.link_bandwidth}", bool(cluster.link_bandwidth)),
            ("--nodes", cluster.nodes, cluster.nodes is not None),
        ):
            if is_set:
                raise UsageError(
                    "is about a Dask cluster", f"add --dask ADDRESS or --dask local:{cluster.nodes or 2}, or drop it", flag=flag, value=value
                )
        return
    local = local_nodes(cluster.dask)
    if local is not None and cluster.nodes is not None and cluster.nodes > local:
        raise UsageError(
            f"must be at most the {local} workers of --dask {cluster.dask}, got {cluster.nodes}",
            f"the nearest legal value is {local}",
            flag="--nodes",
        )
    cluster_of(cluster)  # checks RATE in --transport
    if sharing_of(settings.resources):
        value, others = f"{settings.resources.sched}@{settings.resources.assignment}", (Setting("--dask", cluster.dask),)
        raise UsageError("is for one machine", "drop it or {0}", others=others, flag="--sched", value=value)
    if settings.resources.update_on != "device":
        raise UsageError(
            "is for one machine, and the nodes of --dask share updates by ZeRO-1",
            "drop one of them",
            flag="--update-on",
            value=settings.resources.update_on,
        )
    if cluster.transport == "nccl":
        _check_nccl(settings)
    _check_observers(settings)


def _check_observers(settings: TrainSettings) -> None:
    """Check that nothing which looks at one machine is asked for on a cluster."""
    cluster, observe = settings.cluster, settings.observe
    alone: Sequence[tuple[str, str | None, object]] = (
        ("--trace-steps", None, observe.trace_steps or observe.trace),
        ("--explain", None, observe.explain),
        ("--auto-tile", "measured", settings.tiling.auto_tile == "measured"),
    )
    for flag, value, asked in alone:
        if asked:
            others = (Setting("--dask", cluster.dask),)
            raise UsageError("looks at one machine and {0} trains on several", "drop one of them", flag=flag, value=value, others=others)


def check_shared(num_minibatches: int, lanes: int, cluster: ClusterSpec) -> None:
    """Check that every step has work for more than one node, if more are asked for.

    Raises:
        UsageError: a step has work for one node only.
    """
    asked = 1 if cluster.num_nodes is None else cluster.num_nodes
    if most_nodes(num_minibatches, lanes) < min(asked, 2):
        raise UsageError(
            f"shares the minibatches of a step by lanes, and a step of {num_minibatches} minibatch{'es' if num_minibatches > 1 else ''} in "
            f"{lanes} lane{'s' if lanes > 1 else ''} is for one node",
            f"use --lanes {asked} or more, and a --minibatch that divides --batch into {asked} or more",
            flag="--dask",
        )


def _check_nccl(settings: TrainSettings) -> None:
    """Check --transport nccl, as far as that is possible before there are nodes."""
    cluster, resources = settings.cluster, settings.resources
    check_plain(cluster.dask)
    if local_nodes(cluster.dask) is not None:
        raise UsageError(
            f"takes a GPU for each node, and the workers of --dask {cluster.dask} share those of this machine",
            "start each worker with its own (CUDA_VISIBLE_DEVICES=0 dask worker ADDRESS), or use --transport dask",
            flag="--transport",
            value="nccl",
        )
    if cluster.link_bandwidth:
        raise UsageError(f"nccl@{cluster.link_bandwidth} has a rate, which is only for dask", "use --transport nccl", flag="--transport")
    for setting, asked in ((Setting("--ngpu", 0), resources.ngpu == 0), (Setting("--sim-gpu", resources.sim_gpu), resources.sim_gpu)):
        if asked:
            raise UsageError("sends from GPUs and {0} leaves them out", "drop one of them", flag="--transport", value="nccl", others=(setting,))


def check_plain(address: str) -> None:
    """Check that a cluster does not encrypt; for --transport nccl.

    Args:
        address: address of a scheduler or a worker.

    Raises:
        UsageError: the cluster encrypts.
    """
    if address.startswith(("tls://", "wss://")):
        raise UsageError(
            f"does not encrypt, and {address} belongs to a cluster that does (TLS)", "use --transport dask", flag="--transport", value="nccl"
        )


def local_nodes(address: str) -> int | None:
    """Return N of --dask local:N; None for the address of a cluster.

    Raises:
        UsageError: the value is neither.
    """
    local = _LOCAL.fullmatch(address)
    if local is not None and 1 <= int(local[1]) <= MOST_LOCAL:
        return int(local[1])
    if address.startswith("local:"):
        raise UsageError(f"local:N takes 1 to {MOST_LOCAL} workers on this machine, got {address!r}", "for example --dask local:2", flag="--dask")
    match = _ADDRESS.fullmatch(address)
    host, port = (match["host"] or "", int(match["port"] or 1)) if match else ("", 0)
    if host and 1 <= port <= MOST_LOCAL and difflib.get_close_matches(host.lower(), ["local"], 1, 0.8):  # no scheduler uses such a port
        raise UsageError(f"must be the address of a Dask scheduler or local:N, got {address!r}", f"did you mean local:{port}?", flag="--dask")
    if not 1 <= port <= MOST_PORT:
        raise UsageError(f"must be the address of a Dask scheduler, such as tcp://HOST:8786, or local:N, got {address!r}", flag="--dask")
    return None
