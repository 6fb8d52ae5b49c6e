"""The connection to a Dask cluster: a client of its scheduler, its usable workers, and the reasons why it cannot be used.

User errors are reported in one sentence each: an address that does not answer or requires TLS, other versions on the workers, too few workers.
`cluster_engine` trains on the workers, and detects changes of the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

from nntask import ClusterError
from nntask.config import ClusterSpec
from nntask.training import Interrupts
from scheduler import usable_cores

from .local_workers import block_signals

ANSWER_SECONDS: Final = 5.0
"""Time limit of a scheduler's first answer."""

BUSY_SECONDS: Final = 30.0
"""Time limit of an answer of a scheduler with an open connection."""

PING_SECONDS: Final = 3.0
"""Time limit of an answer of a worker's event loop."""

WAIT_SECONDS: Final = 30.0
"""Time limit for requested workers to appear."""

_MUST_AGREE: Final = ("python", "nntask", "numpy", "dask", "distributed")
"""Software whose versions must be the same on the client and on every worker."""


@dataclass(frozen=True, slots=True)
class ClusterWorker:
    """A Dask worker.

    Attributes:
        address: address of the worker.
        host: name of the machine that it runs on.
        busy: whether it belongs to another training.
    """

    address: str
    host: str
    busy: bool


class Connection:
    """A client of a Dask cluster, and the cluster itself if it is local.

    Args:
        asked: requested address of a cluster, or number of local workers.
        say: function that prints a line.

    Raises:
        ClusterError: the cluster does not answer.
    """

    def __init__(self, asked: ClusterSpec, say: Callable[[str], None]) -> None:
        self.address = asked.address
        self._cluster: Any = None
        self.client: Any = None
        with Interrupts() as interrupts:  # Python's own handlers would raise in the middle of Dask's code
            try:
                self._open(asked.num_local, say)
            except ClusterError:
                if not interrupts.pending():
                    raise
            if interrupts.pending():
                self.close()
        if interrupts.pending():
            say("interrupted before the cluster was ready; training has not begun, so there is nothing to continue")
            raise SystemExit(interrupts.exit_code)

    def _open(self, number: int | None, say: Callable[[str], None]) -> None:
        _silence()
        if number is not None:
            say(f"dask: starting {number} worker{'s' if number > 1 else ''} on this machine")
            self._cluster = local_cluster(number)
        try:
            self.client = _connect(self._cluster or self.address)
        except BaseException:
            self._close_cluster()
            raise

    def close(self) -> int:
        """Leave the cluster, and shut it down if it is local. Return the exit code of a first signal, which does not interrupt this; 0 for none."""
        with Interrupts() as interrupts:
            interrupts.say_what_is_left = lambda: "the last checkpoint is complete"
            with contextlib.suppress(Exception):  # the client may be closed already
                self.client.close(timeout=2)
            self._close_cluster()
        return interrupts.exit_code

    def _close_cluster(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is None:
            return
        with contextlib.suppress(Exception):
            cluster.shutdown_on_close = False  # otherwise Dask tries once more while Python ends
            cluster.close(timeout=10)
            return
        for nanny in list(getattr(cluster, "workers", {}).values()):  # Python would wait for these processes, which block its SIGTERM
            with contextlib.suppress(Exception):
                os.kill(nanny.pid, signal.SIGKILL)

    def workers(self) -> dict[str, dict[str, Any]]:
        """Return the scheduler's information on each worker, by address.

        Raises:
            ClusterError: the scheduler is gone.
        """
        deadline = monotonic() + BUSY_SECONDS
        while True:
            try:
                identity = self.client.sync(self.client.scheduler.identity, n_workers=-1, callback_timeout=ANSWER_SECONDS)
            except Exception as error:
                if isinstance(error, TimeoutError) and self.client.status == "running" and monotonic() < deadline:
                    continue  # still connected: the scheduler is busy
                raise ClusterError(f"the Dask scheduler at {self.address} is gone ({type(error).__name__})") from error
            by_address: dict[str, dict[str, Any]] = identity["workers"]
            return by_address

    def usable_workers(self, wanted: int | None, unusable: Mapping[str, str], refused: dict[str, str] | None = None) -> list[ClusterWorker]:
        """Wait for enough workers that can train, and return them sorted by address.

        Args:
            wanted: number of workers to wait for; None for all present workers, at least one.
            unusable: address -> reason for each worker to leave out.
            refused: the argument of `ask`.

        Raises:
            ClusterError: there are fewer workers, or a worker runs other software and `refused` is None.
        """
        deadline, least = monotonic() + WAIT_SECONDS, 1 if wanted is None else wanted
        while True:
            addresses = [address for address in self.workers() if address not in unusable and address not in (refused or ())]
            answering = self.ask(addresses, refused) if addresses and (len(addresses) >= least or monotonic() > deadline) else []
            free = [machine for machine in answering if not machine.busy]
            if len(free) >= least:
                return free
            if monotonic() > deadline:
                raise self._too_few(wanted, len(free), len(answering) - len(free), {**unusable, **(refused or {})})
            with contextlib.suppress(Exception):  # asked again above
                self.client.wait_for_workers(max(len(addresses) + 1, least), timeout=1)

    def silent(self, addresses: Sequence[str]) -> list[str]:
        """Return the addresses of the workers that do not answer within `PING_SECONDS`."""
        client = self.client

        async def ask(address: str) -> None:
            await asyncio.wait_for(client.rpc(address).identity(), PING_SECONDS)

        async def ask_all() -> list[str]:
            answers = await asyncio.gather(*map(ask, addresses), return_exceptions=True)
            return [address for address, answer in zip(addresses, answers, strict=True) if isinstance(answer, BaseException)]

        unanswered: list[str] = client.sync(ask_all)
        return unanswered

    def _too_few(self, wanted: int | None, num_free: int, num_busy: int, unusable: Mapping[str, str]) -> ClusterError:
        others = [f"{num_busy} belong to another training"] if num_busy else []
        others += [f"{address} {why}" for address, why in unusable.items()]
        usable = f"{num_free} can be used after {WAIT_SECONDS:g} s" + (f" ({', '.join(others)})" if others else "")
        if wanted is None:
            return ClusterError(f"the cluster at {self.address} must have a worker, and {usable}", f"start one with: dask worker {self.address}")
        clause = f"asks for {wanted} workers of {self.address}, and {usable}; start more with dask worker, or lower --nodes"
        return ClusterError(clause, flag="--nodes", value=wanted)

    def ask(self, addresses: list[str], refused: dict[str, str] | None = None) -> list[ClusterWorker]:
        """Return the workers that answer, sorted by address.

        Args:
            addresses: addresses of the workers.
            refused: dictionary to which address -> reason is added for workers that run other software, so that a started run continues without them;
                None to raise instead.

        Raises:
            ClusterError: a worker runs other software than the client, and `refused` is None.
        """
        own, silent = versions(), set(self.silent(addresses))  # a hung worker would block the probe below
        addresses = [address for address in addresses if address not in silent]
        answering = []
        for address, said in self._probe(addresses).items():
            if isinstance(said, OSError):  # the worker is shutting down
                continue
            problem = _difference(said, own)
            if problem is None:
                answering.append(ClusterWorker(address, said["host"], said["busy"]))
            elif refused is None:
                raise ClusterError(f"worker {address} {problem}")
            else:
                refused[address] = problem
        return sorted(answering, key=lambda machine: machine.address)

    def _probe(self, addresses: list[str]) -> Mapping[str, Any]:
        if not addresses:  # Dask would run the probe on all workers
            return {}
        try:
            found: Mapping[str, Any] = self.client.run(_probe_function(), workers=addresses, on_error="return")
        except Exception as error:
            raise ClusterError(f"the workers of {self.address} cannot be queried: {type(error).__name__}: {error}", "see their logs") from error
        return found


def _difference(said: Any, own: Mapping[str, str]) -> str | None:
    """Return the reason why a worker cannot train with this client, from the worker's answer; None if it can."""
    if not isinstance(said, dict):
        return f"did not report its versions ({type(said).__name__}: {said}); install the same nntask on every machine"
    theirs = said["versions"]
    for name in _MUST_AGREE:
        if theirs.get(name) != own.get(name):
            return f"has {name} {theirs.get(name) or 'not installed'} and this client {own.get(name)}; install the same versions on every machine"
    return None


def _probe_function() -> Callable[..., dict[str, Any]]:
    """Return the function that is run on each worker. A nested function travels as code, so workers without nntask can run it, too."""

    def probe(dask_worker: Any) -> dict[str, Any]:
        import platform
        import socket
        from importlib import metadata

        by_package: dict[str, Any] = {"python": ".".join(platform.python_version_tuple()[:2])}
        for name in ("nntask", "numpy", "dask", "distributed"):
            try:
                by_package[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                by_package[name] = ""
        busy = False
        try:
            from .node import is_claimed

            by_package["nntask"] = by_package["nntask"] or "in the source tree"
            busy = is_claimed(dask_worker.address)
        except ImportError:
            by_package["nntask"] = ""
        return {"versions": by_package, "host": socket.gethostname(), "busy": busy}

    return probe


def versions() -> dict[str, str]:
    """Return the versions of this process, under the names of `_MUST_AGREE`."""
    from importlib import metadata

    by_package = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in _MUST_AGREE[1:]:
        try:
            by_package[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            by_package[name] = "in the source tree"
    return by_package


def _silence() -> None:
    """Silence Dask's loggers, because failures of a cluster are reported in one sentence instead."""
    import distributed  # noqa: F401 - sets the levels of its loggers

    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "distributed":
            logging.getLogger(name).setLevel(logging.CRITICAL)


def local_cluster(number: int) -> Any:
    """Start a cluster of processes on this machine, which end with this process and divide its cores among them.

    Any program that can connect to a Dask scheduler or worker can run code as its user, and other users of the machine reach its loopback
    addresses. So the processes authenticate each other by certificates made for this cluster, and their HTTP servers have no routes.

    Dask's memory monitor of workers is off, since budgets replace it, and so is its profiler: with it, idle workers take a fifth of the processor
    time.

    Raises:
        ClusterError: a worker does not start.
    """
    import dask
    from distributed import LocalCluster

    terms = {
        "distributed.worker.profile.enabled": False,
        "distributed.admin.tick.interval": "500ms",
        "distributed.scheduler.http.routes": [],
        "distributed.worker.http.routes": [],
    }
    try:
        with dask.config.set(terms), block_signals():
            return LocalCluster(
                n_workers=number,
                threads_per_worker=max(usable_cores() // number, 1),
                memory_limit=0,
                processes=True,
                host="127.0.0.1",
                security=True,
                dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"dashboard": False},
                silence_logs=logging.CRITICAL,
            )
    except Exception as error:
        raise ClusterError(f"could not start its workers: {type(error).__name__}: {error}", flag="--dask", value=f"local:{number}") from error


def _connect(cluster: Any) -> Any:
    """Return a client of a cluster, or of the scheduler at an address.

    Raises:
        ClusterError: no scheduler answers there.
    """
    from distributed import Client

    if isinstance(cluster, str):
        _check_scheduler(cluster)
    try:
        return Client(cluster, timeout=ANSWER_SECONDS, direct_to_workers=True, set_as_default=False)
    except Exception as error:
        where = f"Dask scheduler at {cluster}" if isinstance(cluster, str) else "local cluster"
        raise ClusterError(f"the {where} does not answer: {type(error).__name__}: {error}") from error


def _check_scheduler(address: str) -> None:
    """Check that a scheduler answers at an address, on a connection of its own.

    Dask's client waits without limit for a peer that accepts connections and then is silent, such as an HTTP server, and a half-made client keeps the
    process from ending.

    Raises:
        ClusterError: no scheduler answers there.
    """
    import dask
    from distributed import Security, rpc

    scheme, _, location = address.rpartition("://")
    if scheme == "inproc" or dask.config.get("distributed.client.security-loader"):  # only the client knows the loader's certificates
        return
    keys = "distributed.comm.tls.ca-file, distributed.comm.tls.client.cert and distributed.comm.tls.client.key in Dask's configuration"
    try:
        certificates = Security().get_connection_args("client")
    except Exception as error:
        raise ClusterError(f"cannot be reached with the configured certificates: {error}", f"see {keys}", flag="--dask", value=address) from error
    if scheme in ("tls", "wss") and certificates["ssl_context"] is None:
        raise ClusterError("requires TLS, and no certificates are configured", f"set {keys}", flag="--dask", value=address)

    async def ask() -> Any:
        peer = rpc(address, connection_args=certificates)
        try:
            return await asyncio.wait_for(peer.identity(), ANSWER_SECONDS)
        finally:
            await peer.close_rpc()

    try:
        identity = asyncio.run(ask())
    except Exception as error:
        raise _no_scheduler(address, scheme, location, error) from error
    if identity["type"] != "Scheduler":
        scheduler = identity.get("scheduler", "tcp://HOST:8786")
        raise ClusterError(
            f"is a Dask {identity['type'].lower()}", f"give the address of its scheduler, --dask {scheduler}", flag="--dask", value=address
        )


def _no_scheduler(address: str, scheme: str, location: str, error: Exception) -> ClusterError:
    """Return the error for a scheduler's address that does not answer."""
    host, _, port = location.rpartition(":")
    if scheme not in ("tls", "wss") and _speaks_tls(host, int(port)):
        return ClusterError(
            f"the Dask cluster at {address} requires TLS and --dask is in plain text",
            f"use --dask tls://{location}, with certificates in Dask's configuration (distributed.comm.tls)",
        )
    if isinstance(error, RuntimeError | TypeError | ImportError):
        return ClusterError(f"cannot be used: {error}", flag="--dask", value=address)
    return ClusterError(
        f"no Dask scheduler answers at {address} within {ANSWER_SECONDS:g} s",
        "check that it runs, that this machine reaches it, and that the port is the scheduler's (usually 8786), not its dashboard's (8787)",
    )


def _speaks_tls(host: str, port: int) -> bool:
    """Return whether a server at an address begins a TLS handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=2) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return "WRONG_VERSION" not in str(error) and "UNEXPECTED_EOF" not in str(error) and "RECORD_LAYER" not in str(error)
    except OSError:
        return False
