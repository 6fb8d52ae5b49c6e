"""Training on a Dask cluster of worker processes on loopback: the bits of one machine, checkpoints that go anywhere, kills, and mistakes."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import dask
import numpy as np
import psutil
import pytest
from distributed import Client, Future, LocalCluster, rpc
from support.commands import ROOT, numbers, same_state, start, wait_for_line, wait_for_step
from support.dask_command import CONFIG, TRAIN, read
from support.deadline import DEADLINE
from support.fake_nccl import FakeNccl, FakeNetwork

from nntask.config.cluster import ClusterSpec, cluster_of
from nntask.config.resolution import resolve
from nntask.config.settings import ClusterSettings, ResourceSettings, TrainSettings
from nntask.data import Batch, open_dataset
from nntask.engine.interface import NodesChanged
from nntask.errors import ClusterError, DataError, UsageError
from nntask.hardware import gpus
from nntask.hardware.gpus import CudaCards
from nntask.planning import capture
from nntask.training.continuation import _besides
from scheduler.drivers.cuda_cupy import GpuFacts
from scheduler.drivers.nccl import CupyNccl
from wrappers.cli import main
from wrappers.cli.options.sources import request
from wrappers.dask.dashboard.plugin import install
from wrappers.dask.training import cluster as cluster_module
from wrappers.dask.training import cluster_engine as cluster_nodes
from wrappers.dask.training import exchange
from wrappers.dask.training import node as node_module
from wrappers.dask.training import team as cluster_team
from wrappers.dask.training.cluster import Connection, local_cluster
from wrappers.dask.training.cluster_engine import DaskCluster, check_cards
from wrappers.dask.training.failures import blamed
from wrappers.dask.training.team import Team
from wrappers.report.records import read_run

QUIET = {"distributed.worker.profile.enabled": False, "distributed.admin.tick.interval": "500ms"}
"""As `local_cluster` has it: workers that wait take no time of the processor."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Three workers, each a process."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        with dask.config.set(QUIET), LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0", silence_logs=50) as found:
            yield found
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


@pytest.fixture
def here(folder: Path, text: Path) -> Path:
    """A directory with a small config and some text."""
    (folder / "small.json").write_text(json.dumps({"model_type": "gpt2", **CONFIG}))
    return folder


def test_nodes_give_the_bits_of_one_machine_and_checkpoints_go_anywhere(here: Path, cluster: LocalCluster, capsys: Any) -> None:
    """A run without Dask, one on 3 nodes, and one that goes from 3 nodes to none to 2: equal numbers, equal files."""
    on = f"--dask={cluster.scheduler_address}"
    assert main([*TRAIN, "--steps=6", "--run-dir=alone", "--eval-every=3"]) == 0
    alone = capsys.readouterr().out
    assert main([*TRAIN, "--steps=6", "--run-dir=three", "--eval-every=3", on]) == 0
    three = capsys.readouterr().out
    assert [line for line in alone.splitlines() if "validation loss" in line] == [line for line in three.splitlines() if "validation loss" in line]
    assert main([*TRAIN, "--steps=2", "--run-dir=moving", on, "--nodes=3"]) == 0
    assert main(["train", "--resume=moving", "--steps=4"]) == 0
    assert main(["train", "--resume=moving", "--steps=6", on, "--nodes=2"]) == 0
    assert numbers(here / "alone") == numbers(here / "three") == numbers(here / "moving")
    for other in ("three", "moving"):
        assert same_state(here / "alone/checkpoints/step-000006", here / other / "checkpoints/step-000006")
    summary = json.loads((here / "three/summary.json").read_text())
    assert summary["workers"] == ["0/cpu:0", "1/cpu:0", "2/cpu:0"]
    assert summary["moved_bytes"]["0=>1"] > 0


def _hold_step(rank: int, number: int) -> None:
    """Let the message of a step reach a node after that of the next one. Runs on a worker."""
    step = node_module.TrainingNode.step
    arrived = asyncio.Event()

    async def held(self: node_module.TrainingNode, asked: int, lr: float, begin: Any) -> Any:
        if self.rank == rank and asked == number:
            await arrived.wait()
        if self.rank == rank and asked == number + 1:
            arrived.set()
        return await step(self, asked, lr, begin)

    held.before = step  # type: ignore[attr-defined]
    node_module.TrainingNode.step = held  # type: ignore[method-assign]


def _hold_nothing() -> None:
    """Undo `_hold_step`. Runs on a worker."""
    node_module.TrainingNode.step = node_module.TrainingNode.step.before  # type: ignore[attr-defined, method-assign]


def test_a_message_that_is_overtaken_changes_no_bit(here: Path, cluster: LocalCluster, capsys: Any) -> None:
    """Step 4 reaches the first node after step 5: computed in that order, the validation after step 6 had a loss of 5.5194 instead of 5.5187."""
    assert main([*TRAIN, "--steps=6", "--run-dir=alone", "--eval-every=3"]) == 0
    with Client(cluster.scheduler_address) as client:
        client.run(_hold_step, 0, 4)
        try:
            assert main([*TRAIN, "--steps=6", "--run-dir=three", "--eval-every=3", f"--dask={cluster.scheduler_address}"]) == 0
        finally:
            client.run(_hold_nothing)
    assert numbers(here / "alone") == numbers(here / "three")
    assert same_state(here / "alone/checkpoints/step-000006", here / "three/checkpoints/step-000006")


def test_a_killed_worker_costs_steps_and_a_late_one_joins(here: Path) -> None:
    """kill -9 in the middle: one line says what happened, and the run goes on by itself from its last checkpoint. A worker that comes late is taken
    in at a later one. The numbers are those of an undisturbed run."""
    lines, victim = [], ""
    terms = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}
    with dask.config.set(QUIET), LocalCluster(**terms) as cluster, Client(cluster) as client:
        address = cluster.scheduler_address
        process = start(*TRAIN, "--steps=100000", "--save-every=20", "--run-dir=run", f"--dask={address}", "--transport=dask@10GB")
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 30/") and not victim:
                victim = next(text for text in lines if text.startswith("node 1: ")).split()[2]
                os.kill(client.run(os.getpid, workers=[victim])[victim], signal.SIGKILL)
            elif line.startswith("step 45/"):
                cluster.scale(3)
            elif " joined; going on after step " in line:
                break
        for line in process.stdout:
            if line.startswith("step "):
                process.send_signal(signal.SIGTERM)
                break
        said, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143, errors
    assert f"; continue with: nntask train --resume run --dask {address} --transport dask@10GB\n" in said
    assert [line for line in lines if "lost" in line] == [f"lost worker {victim}; going on after step 20\n"]
    found = numbers(here / "run")
    assert main([*TRAIN, f"--steps={len(found)}", "--run-dir=alone"]) == 0
    assert found == numbers(here / "alone")
    (last,) = (here / "alone/checkpoints").iterdir()
    assert same_state(here / "run/checkpoints" / last.name, last)


def test_how_to_continue_names_the_transport() -> None:
    """A resumed run asks anew on which machines it is."""
    cluster = ClusterSettings(dask="tcp://a:1", nodes=2, transport="nccl", link_bandwidth="1GB")
    settings = TrainSettings(cluster=cluster, resources=ResourceSettings(disk="a tier"))
    assert _besides(settings) == " --dask tcp://a:1 --nodes 2 --transport nccl@1GB --disk 'a tier'"
    assert _besides(TrainSettings()) == ""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_group_saves(here: Path, number: signal.Signals) -> None:
    """A terminal's Ctrl-C and `kill -- -GROUP` reach the local workers as well, who leave them to the client: the step ends and is saved, and the run
    says how to continue on a cluster."""
    process = start(*TRAIN, "--steps=100000", "--save-every=50", "--run-dir=run", "--dask=local:2", start_new_session=True)
    wait_for_step(process, 4)
    os.killpg(process.pid, number)
    said, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + number, errors
    assert errors == ""
    assert "lost worker" not in said
    assert re.search(r"interrupted after step \d+; continue with: nntask train --resume run --dask local:2", said)


def test_other_users_cannot_enter_a_local_cluster() -> None:
    """Its processes listen on loopback alone, speak TLS with certificates of their own, and their HTTP servers answer nothing."""
    before = listening_addresses()  # clusters of other tests may be open
    with local_cluster(1) as cluster, Client(cluster) as client:
        assert client.submit(os.getpid).result() != os.getpid()
        listening = listening_addresses() - before
        assert {address.ip for address in listening} == {"127.0.0.1"}
        for address in listening:
            answer = asked_in_plain_text(address.port)
            assert answer.startswith(b"HTTP/1.1 404") or not answer, (address, answer)
        for scheme in ("tcp", "tls"):
            with pytest.raises((OSError, TypeError)):
                client.sync(identity_of, f"{scheme}://{cluster.scheduler_address.partition('://')[2]}")


def listening_addresses() -> set[Any]:
    """Addresses at which this process and its children listen."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {each.laddr for process in processes for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def asked_in_plain_text(port: int) -> bytes:
    """What a port of this machine answers to an HTTP request, as far as one line."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as connection:
        try:
            connection.sendall(b"GET /json/identity.json HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            return connection.recv(100)
        except ConnectionError:
            return b""


async def identity_of(address: str) -> Any:
    """What a scheduler says of itself to a peer without certificates."""
    async with rpc(address) as scheduler:
        return await asyncio.wait_for(scheduler.identity(), DEADLINE)


def test_a_signal_while_local_workers_start(here: Path) -> None:
    """One sentence, the signal's exit code, and no process is left: the output, which all of them share, has an end."""
    process = start(*TRAIN, "--steps=2", "--run-dir=run", "--dask=local:2", script=_UNBUFFERED, start_new_session=True)
    wait_for_line(process, "dask: starting 2 workers")
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, errors) == (130, "")
    assert said.startswith("interrupted before the cluster was ready; training has not begun")
    assert not (here / "run").exists()


_UNBUFFERED = """
import sys
sys.stdout.reconfigure(line_buffering=True)
"""


def test_a_second_signal_leaves_nothing(here: Path) -> None:
    """It ends the client at once; workers follow by themselves, and Python's tracker does not complain of what they have left."""
    process = start(*TRAIN, "--steps=100000", "--run-dir=run", "--dask=local:2", start_new_session=True)
    wait_for_step(process, 2)
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode in (130, 143)
    assert errors == "nntask: stopped at once; nothing was saved, so there is nothing to continue\n"


@pytest.mark.long
def test_a_hung_worker_is_given_up(here: Path, cluster: LocalCluster) -> None:
    """SIGSTOP: after 30 silent seconds the run goes on without it, and takes it back when it answers again."""
    process = start(*TRAIN, "--steps=100000", "--save-every=20", "--run-dir=run", f"--dask={cluster.scheduler_address}")
    assert process.stdout is not None
    lines: list[str] = []
    with Client(cluster.scheduler_address) as client:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 30/") and len([each for each in lines if each.startswith("node ")]) == 3:
                victim = next(text for text in lines if text.startswith("node 1: ")).split()[2]
                pid = client.run(os.getpid, workers=[victim])[victim]
                os.kill(pid, signal.SIGSTOP)
            if line.startswith("step 21/") and any("did not answer for" in each for each in lines):
                os.kill(pid, signal.SIGCONT)  # not before: a worker that answers while the others gather would be one of them
            if " joined; going on after step " in line:
                process.send_signal(signal.SIGTERM)
                break
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 143, errors
    assert [line for line in lines if "did not answer" in line] == [f"worker {victim} did not answer for 30 s; going on after step 20\n"]


def test_a_scheduler_that_is_lost_leaves_the_checkpoint(here: Path) -> None:
    """Exit code 6, one sentence with what to do, and a run that continues without the cluster."""
    process = start(*TRAIN, "--steps=100000", "--save-every=2", "--run-dir=run", "--dask=local:2", script=_NAME_SCHEDULER)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 6/"):
            os.kill(int((here / "scheduler.pid").read_text()), signal.SIGKILL)
            break
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 6
    assert errors.startswith("nntask: the Dask scheduler at ")
    assert "--resume run" in errors
    assert main(["train", "--resume=run", "--steps=100000", "--dry-run"]) == 0


_NAME_SCHEDULER = """
import os, subprocess, sys
from wrappers.dask.training import cluster
def by_hand(number):
    host = "127.0.0.1"
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", host, "--port", "0", "--no-dashboard", "--scheduler-file", "where"]
    scheduler = subprocess.Popen(dask, stderr=subprocess.DEVNULL)
    open("scheduler.pid", "w").write(str(scheduler.pid))
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", "where", "--no-dashboard", "--nthreads", "1"]
    for _ in range(number):
        subprocess.Popen([*worker, "--death-timeout", "20"], stderr=subprocess.DEVNULL)
    import json, pathlib
    while not pathlib.Path("where").exists() or not open("where").read().strip().endswith("}"):
        if scheduler.poll() is not None: raise SystemExit("no scheduler")
    class Here:
        scheduler_address = json.load(open("where"))["address"]
        def close(self, timeout): pass
    return Here.scheduler_address
cluster.local_cluster = by_hand
"""


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ("--dask=tcp://127.0.0.1:9", 6, "no Dask scheduler answers at tcp://127.0.0.1:9 within 5 s"),
        ("--dask=nowhere", 2, "--dask must be the address of a Dask scheduler"),
        ("--dask=http://127.0.0.1:8787", 2, "--dask must be the address of a Dask scheduler, such as tcp://HOST:8786"),
        ("--dask=tcp://127.0.0.1:99999", 2, "--dask must be the address of a Dask scheduler, such as tcp://HOST:8786"),
        ("--dask=locall:2", 2, "got 'locall:2'; did you mean local:2?"),
        ("--dask=lcoal:2", 2, "got 'lcoal:2'; did you mean local:2?"),
        pytest.param("--dask=localhost:9", 6, "no Dask scheduler answers at localhost:9 within 5 s", marks=pytest.mark.long),
        ("--dask=tls://127.0.0.1:9", 6, "set distributed.comm.tls.ca-file, distributed.comm.tls.client.cert"),
        ("--dask=local:0", 2, "--dask local:N takes 1 to 256 workers"),
        ("--dask=local:two", 2, "--dask local:N takes 1 to 256 workers"),
        ("--dask=local:2 --nodes=3", 2, "--nodes must be at most the 2 workers"),
        ("--dask=local:2 --lanes=1", 2, "use --lanes 2 or more"),
        ("--dask=local:2 --minibatch=8", 2, "a step of 1 minibatch in 4 lanes is for one node"),
        ("--dask=local:2 --init-from=none.safetensors", 4, "none"),
        ("--nodes=2", 2, "add --dask ADDRESS or --dask local:2"),
        ("--dask=local:2 --trace-steps=all@t.json", 2, "--trace-steps looks at one machine"),
        ("--dask=local:2 --trace-steps=1:2", 2, "--trace-steps looks at one machine"),
    ],
)
def test_mistakes_are_one_sentence(here: Path, capsys: Any, flags: str, code: int, said: str) -> None:
    """Before anything is computed: the rule, the value, the exit code."""
    assert main([*TRAIN, "--steps=2", "--run-dir=run", *flags.split()]) == code
    out, errors = capsys.readouterr()
    assert said in errors
    assert errors.count("\n") == 1
    assert "dask: starting" not in out


def test_too_few_workers_other_data_other_versions(here: Path, cluster: LocalCluster, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only the cluster can tell: 6 for workers that are missing or other, 4 for data they do not have, 2 for a step that cannot be shared."""
    on = f"--dask={cluster.scheduler_address}"
    with monkeypatch.context() as patch:
        patch.setattr(cluster_module, "WAIT_SECONDS", 1.0)
        assert main([*TRAIN, "--steps=2", "--run-dir=run", on, "--nodes=4"]) == 6
        assert "--nodes 4 asks for 4 workers of" in capsys.readouterr().err
    own = "/proc/self/cwd/text"  # names the client's directory here and another one there
    assert main([*TRAIN, "--steps=2", "--run-dir=run", on, f"--dataset-path={own}"]) == 4
    assert own in capsys.readouterr().err
    assert main([*TRAIN, "--steps=2", "--run-dir=run", on, "--nodes=2", "--lanes=1"]) == 2
    assert "--lanes 2 or more" in capsys.readouterr().err
    versions = cluster_module.versions()
    monkeypatch.setattr(cluster_module, "versions", lambda: {**versions, "distributed": "1.0"})
    assert main([*TRAIN, "--steps=2", "--run-dir=run", on]) == 6
    assert "and this client 1.0; install the same versions" in capsys.readouterr().err


def test_nodes_leave_files_for_the_report_and_figures_on_the_dashboard(here: Path, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, machine and plan of each node, which a later part of the run continues; gauges; and no harm where there is no dashboard."""
    on = f"--dask={cluster.scheduler_address}"
    assert main([*TRAIN, "--steps=4", "--run-dir=run", on, "--nodes=2"]) == 0
    run = read_run(here / "run")
    assert [(node.name, [line["step"] for line in node.lines]) for node in run.nodes] == [("0", [1, 2, 3, 4]), ("1", [1, 2, 3, 4])]
    for whole, *parts in zip(run.lines, *(node.lines for node in run.nodes), strict=True):
        assert sum(part["tokens"] for part in parts) == whole["tokens"]
        assert sum(part["loss"] * part["tokens"] for part in parts) / whole["tokens"] == pytest.approx(whole["loss"])
        assert [part["moved_bytes"][link] > 0 for part, link in zip(parts, ("0=>1", "1=>0"), strict=True)] == [True, True]
        assert all(node.planned["recompute"] == "none" for node in run.nodes)  # everything fits
        assert all(0 < part["resident_peak_bytes"]["ram"] <= node.machine["budget_bytes"]["ram"] for part, node in zip(parts, run.nodes, strict=True))
    with Client(cluster.scheduler_address) as client:
        limit = monotonic() + DEADLINE  # messages of workers go out in batches
        wanted = {f'nntask_step{{job="run",node="{rank}"}} 4.0' for rank in range(2)}
        while not wanted <= set(read(install(client).metrics).splitlines()) and monotonic() < limit:
            client.run_on_scheduler(lambda: None)
        assert wanted <= set(read(install(client).metrics).splitlines())

    def refuse(client: Client) -> None:
        raise ImportError("no nntask on the scheduler")

    monkeypatch.setattr(cluster_nodes, "install", refuse)
    assert main(["train", "--resume=run", "--steps=5", on, "--nodes=1"]) == 0
    assert [len(node.lines) for node in read_run(here / "run").nodes] == [5, 4]


def test_nodes_with_little_memory(here: Path, cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """At exactly the memory that each node says it needs, in a planned order, losses are those of one machine; a page less is refused."""
    (here / "deep.json").write_text(json.dumps({"model_type": "gpt2", **CONFIG, "n_embd": 64, "n_head": 4, "n_layer": 4}))
    text = ("--dataset=text", "--dataset-path=text", "--tokenizer=bytes", "--sample-tokens=0", "--ncpu=1")
    deep = ["train", "--config-path=deep.json", *text, "--batch=8", "--minibatch=1", "--lanes=2", "--steps=2"]
    assert main([*deep, "--run-dir=one"]) == 0
    nodes = [*deep, f"--dask={cluster.scheduler_address}", "--nodes=2", "--disk=tier", "--order=layers"]
    ram, num_refused = 500 << 10, 0
    while main([*nodes, f"--ram={ram}", "--run-dir=two"]) == 3:  # each node says what it needs
        shown = capsys.readouterr().err
        found = re.search(r"needs ([\d,]+) B at once .*more than the ([\d,]+) B of the largest memory", shown)
        assert found is not None, shown
        least, had = (int(number.replace(",", "")) for number in found.groups())
        ram, num_refused = ram + least - had, num_refused + 1
    assert num_refused > 0
    assert main([*nodes, f"--ram={ram - 4096}", "--run-dir=none"]) == 3
    one, two = read_run(here / "one"), read_run(here / "two")
    assert [line["loss"] for line in two.lines] == [line["loss"] for line in one.lines]
    assert [node.planned["order"] for node in two.nodes] == ["layers"] * 2
    capsys.readouterr()
    assert main([*nodes, f"--ram={ram}", "--run-dir=none", "--minibatch=4", "--order=forward"]) == 2
    assert re.search(r"on worker tcp.* this step has no order 'forward'; it has", capsys.readouterr().err)


def fail() -> None:
    """A mistake that a node finds."""
    raise DataError("worker holds other data")


def cluster_spec(address: str, nodes: int | None = None) -> ClusterSpec:
    """What --dask and --nodes ask for."""
    found = cluster_of(ClusterSettings(dask=address, nodes=nodes))
    assert found is not None
    return found


@pytest.fixture
def connection(cluster: LocalCluster) -> Iterator[Connection]:
    """To the cluster."""
    found = Connection(cluster_spec(cluster.scheduler_address), print)
    yield found
    found.close()


@pytest.fixture
def team(connection: Connection) -> Iterator[Team]:
    """Two nodes."""
    found = Team(connection, connection.usable_workers(2, {})[:2], deque())
    found.form()
    yield found
    found.close()


def endless(client: Client) -> Future:
    """A call that never ends, because no worker has what it asks for."""
    return client.submit(int, resources={"what no worker has": 1}, pure=False)


def test_what_one_node_finds_wrong_is_told_while_others_wait_for_it(team: Team) -> None:
    """The first node's step would never end: the second one's error ends the team at once, not as a hang."""
    client = team.connection.client
    waits = endless(client)
    with pytest.raises(DataError, match="other data"):
        team.gather([waits, client.submit(fail, pure=False)], 100)
    waits.cancel()


def test_an_actor_that_is_gone_is_missed_though_its_worker_answers(team: Team) -> None:
    """As after a worker has died and another one was started at its address."""
    client = team.connection.client
    waits = endless(client)
    client.cancel(team._futures[1], force=True)
    with pytest.raises(NodesChanged, match=f"lost worker {team.workers[1].address}"):
        team.gather([waits], 100)
    waits.cancel()
    team.actors = team.actors[:1]


@pytest.mark.long
def test_a_worker_that_hangs_in_a_long_call_is_found(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening, connecting and checkpoints may take minutes; a worker that hangs meanwhile is given up as in a step."""
    monkeypatch.setattr(cluster_team, "LEAST_SILENCE", 1.0)
    address = team.workers[1].address
    pid = team.connection.client.run(os.getpid, workers=[address])[address]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(NodesChanged, match=f"worker {address} did not answer for 1 s"):
            team.gather([team.ask(1, "ping")], 100)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert team.unanswering == [address]


def test_workers_that_hang_or_run_other_software_do_not_stop_a_run(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped worker is left out instead of waited for; one with other versions is refused to a run that has begun."""
    pids = connection.client.run(os.getpid)
    stopped, *others = sorted(pids)
    os.kill(pids[stopped], signal.SIGSTOP)
    try:
        assert [machine.address for machine in connection.ask(sorted(pids))] == others
    finally:
        os.kill(pids[stopped], signal.SIGCONT)
    versions, refused = cluster_module.versions(), dict[str, str]()
    monkeypatch.setattr(cluster_module, "versions", lambda: {**versions, "numpy": "1.0"})
    assert connection.ask(others, refused) == []
    assert sorted(refused) == others


def waste(dask_worker: Any) -> int:
    """Free 400 MB of a worker in small pieces below one in use; the MB that it has."""
    held = [bytearray(100_000) for _ in range(4000)]
    dask_worker.pieces = [*getattr(dask_worker, "pieces", ()), bytearray(100_000)]
    del held
    return used(dask_worker)


def used(dask_worker: Any) -> int:
    """MB that a worker has of the machine's memory."""
    return psutil.Process().memory_info().rss // 1_000_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's allocator")
def test_nodes_give_back_what_opening_and_checkpoints_have_freed(late: Late, connection: Connection) -> None:
    """When they have opened, with the first step after tensors were read, and when they close."""
    _, open_nodes, (worker,) = late(1, "--ngpu=0")

    def run(function: Callable[..., int]) -> int:
        found: int = connection.client.run(function, workers=[worker])[worker]
        return found

    before = run(waste)
    with open_nodes() as (engine, _):
        assert run(used) < before - 200  # what a node needs itself is less than the rest
        tokens = np.zeros((8, 16), np.int32)  # nodes read their own
        engine.start(1, 1e-3, Batch.causal(tokens, tokens)).result()
        next(iter(engine.model_tensors().values())).read()
        before = run(waste)
        engine.start(2, 1e-3, Batch.causal(tokens, tokens)).result()
        assert run(used) < before - 200
        before = run(waste)
    assert run(used) < before - 200


class _Cards:
    """A card on every worker, whose NCCL fails, or waits for others for ever."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    def choose(self, count: int | None) -> list[GpuFacts]:
        return [GpuFacts(0, "Fake", 90, 8 << 30, 6 << 30)]

    def open(self, facts: Sequence[object], *, tf32: bool, dtype: str) -> list[Any]:
        return []

    def nccl(self, facts: GpuFacts) -> CupyNccl:
        if self.fails:
            raise RuntimeError("planted: CUDA failed")
        found = FakeNccl(FakeNetwork(), str(os.getpid()))
        found.joins = False
        return found


def prepare_worker(folder: str, cards: CudaCards, connect_seconds: float) -> None:
    """What a test has a worker's process be."""
    os.chdir(folder)
    gpus.cards = cards
    exchange.CONNECT_SECONDS = connect_seconds  # type: ignore[misc]


Late = Callable[..., tuple[DaskCluster, Callable[[], Any], list[str]]]


@pytest.fixture
def late(here: Path, connection: Connection) -> Iterator[Late]:
    """Makes a cluster of workers that all but the first have come late to a run; what forms its next team, and their addresses."""
    addresses = sorted(connection.workers())

    def make(number: int, *flags: str) -> tuple[DaskCluster, Callable[[], Any], list[str]]:
        connection.client.run(prepare_worker, str(here), _Cards(fails=False), 1.0)
        found = DaskCluster(connection, cluster_spec(connection.address, number))
        found._has_begun, found._members = True, frozenset(addresses[:1])
        own = "--dataset-path=/proc/self/cwd/text"  # names another folder in each process
        asked = request([*TRAIN[1:], own, "--steps=2", "--run-dir=run", f"--dask={connection.address}", *flags], os.environ)
        run = resolve(asked.settings, asked.config)
        dataset = open_dataset(run.data)
        return found, lambda: found.open(run, capture(run, 1), dataset, print), addresses[:number]

    yield make
    connection.client.run(prepare_worker, str(ROOT), gpus.cards, exchange.CONNECT_SECONDS)


def test_a_late_worker_that_cannot_take_part_is_left_out(late: Late, tmp_path: Path, connection: Connection) -> None:
    """One without the data: the run goes on with the others, one that has come with it among them, and the one is not asked again."""
    found, open_nodes, (old, bad, good) = late(3, "--ngpu=0")
    connection.client.run(os.chdir, str(tmp_path.parent), workers=[bad])
    with pytest.raises(NodesChanged, match=rf"worker {bad} cannot take part \(") as change, open_nodes():
        pass
    assert isinstance(change.value.__cause__, DataError)
    assert list(found._refused) == [bad]
    with open_nodes() as (engine, _):
        assert [machine.address for machine in engine.team.workers] == [old, good]
    assert found._members == {old, good}


def test_an_error_of_an_old_node_is_not_blamed_on_late_ones(late: Late, tmp_path: Path, connection: Connection) -> None:
    """Its data is gone, which would be so without them: it is raised, and nobody is refused."""
    found, open_nodes, (old, *_) = late(3, "--ngpu=0")
    connection.client.run(os.chdir, str(tmp_path.parent), workers=[old])
    with pytest.raises(DataError), open_nodes():
        pass
    assert not found._refused


def test_a_late_worker_whose_gpu_fails_does_not_end_the_run(late: Late, connection: Connection) -> None:
    """What CUDA or NCCL say there."""
    found, open_nodes, (_, new) = late(2, "--transport=nccl")
    connection.client.run(prepare_worker, ".", _Cards(fails=True), 1.0, workers=[new])
    with pytest.raises(NodesChanged, match=f"worker {new} cannot take part .*planted: CUDA failed") as change, open_nodes():
        pass
    assert isinstance(change.value.__cause__, ClusterError)
    assert list(found._refused) == [new]


@pytest.mark.long
def test_a_late_worker_that_peers_cannot_reach_is_tried_once(late: Late, connection: Connection) -> None:
    """All workers answer their client, and connections between nodes do not come about: a riddle among old nodes, with a newcomer the answer."""
    found, open_nodes, (_, new) = late(2, "--transport=nccl")
    with pytest.raises(NodesChanged, match=f"worker {new} cannot take part .*no data could be sent to or received from"), open_nodes():
        pass
    assert list(found._refused) == [new]
    assert found._num_unexplained == 0


def test_a_late_worker_on_the_gpu_of_an_old_one() -> None:
    """The newcomer is blamed, wherever it stands among the ranks."""
    machines = [cluster_module.ClusterWorker(address, "here", False) for address in ("old", "new")]
    with pytest.raises(UsageError) as error:
        check_cards(machines, ["7", "7"])
    assert blamed(error.value) == "new"


def test_plain_text_to_a_cluster_that_speaks_tls(here: Path, capsys: Any) -> None:
    """The address is right and the protocol is not: says so, instead of a time-out."""
    key = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=here"]
    if subprocess.run(["which", "openssl"], capture_output=True).returncode:
        pytest.skip("needs openssl to make a certificate")
    subprocess.run(key, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("cert.pem", "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    plain, _ = server.accept()
                except OSError:
                    return
                try:
                    context.wrap_socket(plain, server_side=True).close()
                except OSError:
                    plain.close()

        threading.Thread(target=answer, daemon=True).start()
        port = server.getsockname()[1]
        assert main([*TRAIN, "--steps=2", "--run-dir=run", f"--dask=tcp://127.0.0.1:{port}"]) == 6
        server.shutdown(socket.SHUT_RDWR)
    assert f"requires TLS and --dask is in plain text; use --dask tls://127.0.0.1:{port}" in capsys.readouterr().err


def test_somebody_who_is_silent_is_no_scheduler(here: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An HTTP server, such as a scheduler's own dashboard, takes connections and waits for more: one sentence when the time is over."""
    monkeypatch.setattr(cluster_module, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert main([*TRAIN, "--steps=2", "--run-dir=run", f"--dask={address}"]) == 6
    errors = capsys.readouterr().err
    assert f"no Dask scheduler answers at {address} within 0.3 s" in errors
    assert "not its dashboard's (8787)" in errors
    assert errors.count("\n") == 1


def test_a_worker_is_no_scheduler(here: Path, cluster: LocalCluster, capsys: Any) -> None:
    """It speaks Dask's protocol and says who it is: the address of its scheduler is in the sentence."""
    worker = next(iter(cluster.workers.values())).worker_address
    assert main([*TRAIN, "--steps=2", "--run-dir=run", f"--dask={worker}"]) == 6
    assert f"--dask {worker} is a Dask worker; give the address of its scheduler, --dask {cluster.scheduler_address}" in capsys.readouterr().err


def test_nothing_is_left_when_the_client_dies(here: Path, cluster: LocalCluster) -> None:
    """kill -9 of the client: its actors go, their memory and their claims with them, and another training can use the workers at once."""
    process = start(*TRAIN, "--steps=100000", "--run-dir=first", f"--dask={cluster.scheduler_address}", "--nodes=3")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    busy = subprocess.run(
        [sys.executable, "-c", _BUSY.format(flags=[*TRAIN, "--steps=1", "--run-dir=second", f"--dask={cluster.scheduler_address}"])],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert busy.returncode == 6
    assert "3 belong to another training" in busy.stderr
    process.kill()
    process.communicate()
    assert main([*TRAIN, "--steps=1", "--run-dir=third", f"--dask={cluster.scheduler_address}", "--nodes=3"]) == 0


_BUSY = """
import sys
from wrappers.cli import main
from wrappers.dask.training import cluster
cluster.WAIT_SECONDS = 1.0
sys.exit(main({flags!r}))
"""
