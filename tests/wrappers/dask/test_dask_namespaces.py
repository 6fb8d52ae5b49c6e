"""Nodes in network namespaces of their own, with addresses, a bridge between them, and a cable to pull."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from support.commands import ROOT, numbers, start, wait_for_line, wait_for_step
from support.dask_command import CONFIG, TRAIN
from support.deadline import DEADLINE

from wrappers.cli import main

pytestmark = pytest.mark.long

NODES = 2


@dataclass
class Network:
    """A scheduler on this machine and workers elsewhere.

    Attributes:
        scheduler: its address.
        workers: addresses, without ports.
        cables: the ends on this side.
    """

    scheduler: str
    workers: list[str]
    cables: list[str]


def ip(*words: str) -> None:
    """Change the network."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def here(folder: Path, text: Path) -> Path:
    """A directory with a small config and some text."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **CONFIG}))
    return folder


@pytest.fixture
def network(here: Path) -> Iterator[Network]:
    """Two workers behind a bridge; only root can make namespaces."""
    number = os.getpid() % 200
    name, subnet = f"nntask{number}", f"10.213.{number}"
    with ExitStack() as at_the_end:
        try:
            ip("link", "add", name, "type", "bridge")
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("bridges and network namespaces cannot be made here; root can, with the ip command")
        at_the_end.callback(ip, "link", "del", name)
        ip("addr", "add", f"{subnet}.1/24", "dev", name)
        ip("link", "set", name, "up")
        cables = [_lay_cable(at_the_end, name, subnet, which) for which in range(NODES)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}

        def run(*argv: str) -> None:
            process = subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
            at_the_end.callback(process.wait)
            at_the_end.callback(os.killpg, process.pid, signal.SIGKILL)

        scheduler = f"tcp://{subnet}.1:8786"
        run(sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", f"{subnet}.1", "--port", "8786", "--no-dashboard")
        workers = [f"{subnet}.{2 + which}" for which in range(NODES)]
        for which, address in enumerate(workers):
            worker = [sys.executable, "-m", "distributed.cli.dask_worker", scheduler, "--host", address, "--no-dashboard", "--nthreads", "1"]
            run("ip", "netns", "exec", f"{name}-{which}", *worker)
        with Client(scheduler, timeout=DEADLINE) as client:
            client.wait_for_workers(NODES, timeout=DEADLINE)
        yield Network(scheduler, workers, cables)


def _lay_cable(at_the_end: ExitStack, bridge: str, subnet: str, which: int) -> str:
    """A namespace whose only way out ends at the bridge; returns the name of that end."""
    space, near, far = f"{bridge}-{which}", f"{bridge}n{which}", f"{bridge}f{which}"
    ip("netns", "add", space)
    at_the_end.callback(ip, "netns", "del", space)
    ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", space)
    at_the_end.callback(ip, "link", "del", near)  # with its other end, however long a process keeps the namespace
    ip("link", "set", near, "master", bridge, "up")
    ip("-n", space, "addr", "add", f"{subnet}.{2 + which}/24", "dev", far)
    for device in (far, "lo"):
        ip("-n", space, "link", "set", device, "up")
    return near


def test_losses_are_those_of_one_machine(here: Path, network: Network, capsys: Any) -> None:
    """Between addresses that are not loopback."""
    assert main([*TRAIN, "--steps=6", "--run-dir=alone"]) == 0
    capsys.readouterr()
    assert main([*TRAIN, "--steps=6", "--run-dir=apart", f"--dask={network.scheduler}", f"--nodes={NODES}"]) == 0
    shown = capsys.readouterr().out
    assert all(f"tcp://{address}:" in shown for address in network.workers)
    assert numbers(here / "alone") == numbers(here / "apart")


def test_a_node_whose_cable_is_pulled_is_given_up(here: Path, network: Network) -> None:
    """No connection breaks and nobody says goodbye: its silence is noticed, and the other one goes on from the last checkpoint."""
    process = start(*TRAIN, "--steps=100000", "--save-every=10", "--run-dir=cut", f"--dask={network.scheduler}", f"--nodes={NODES}")
    wait_for_step(process, 20)
    ip("link", "set", network.cables[1], "down")
    assert process.stdout is not None
    change = next(line for line in process.stdout if "going on after step" in line)
    assert f"worker tcp://{network.workers[1]}:" in change
    wait_for_line(process, "step ")
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, errors
    assert "saved cut/checkpoints/" in out
