"""Rules of --dask: what a cluster is, and which flags belong to one machine."""

from __future__ import annotations

import re
from typing import Final

from ..errors import UsageError
from ..sizes import parse_size
from .settings import TrainSettings

_LOCAL: Final = re.compile(r"local:(\d{1,6})")
MOST_LOCAL: Final = 256
"""Workers of a cluster on one machine; each is a process."""


def check_cluster(settings: TrainSettings) -> None:
    """Check --dask against flags that belong to one machine.

    Raises:
        UsageError: the first rule that is broken.
    """
    cluster, run, observe = settings.cluster, settings.run, settings.observe
    if not cluster.dask:
        for flag, value in (("--nodes", cluster.nodes), ("--link-bandwidth", cluster.link_bandwidth or None)):
            if value is not None:
                raise UsageError(f"{flag} {value} is about a Dask cluster; add --dask ADDRESS or --dask local:{cluster.nodes or 2}, or drop it")
        return
    local = local_nodes(cluster.dask)
    if local is not None and cluster.nodes is not None and cluster.nodes > local:
        raise UsageError(
            f"--nodes must be at most the {local} workers of --dask {cluster.dask}, got {cluster.nodes}; the nearest legal value is {local}"
        )
    if cluster.link_bandwidth:
        parse_size(cluster.link_bandwidth, "--link-bandwidth")
    alone: dict[str, object] = {
        "--trace": observe.trace,
        "--trace-steps": observe.trace_steps,
        "--explain": observe.explain,
        "--nforward": run.nforward or run.nforward_warmup,
        "--nbackward": run.nbackward or run.nbackward_warmup,
        "--auto-tile measured": settings.tiling.auto_tile == "measured",
    }
    for flag, asked in alone.items():
        if asked:
            raise UsageError(f"{flag} looks at one machine and --dask {cluster.dask} trains on several; drop one of them")


def local_nodes(address: str) -> int | None:
    """N of --dask local:N; None for the address of a cluster.

    Raises:
        UsageError: it is local without such a number.
    """
    if not address.startswith("local"):
        return None
    match = _LOCAL.fullmatch(address)
    if match is None or not 1 <= int(match[1]) <= MOST_LOCAL:
        raise UsageError(f"--dask local:N takes 1 to {MOST_LOCAL} workers on this machine, got {address!r}; for example --dask local:2")
    return int(match[1])
