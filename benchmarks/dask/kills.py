"""Workers of a cluster killed while it trains, for `cluster.py --suite faults`.

A run on three workers is killed at steps drawn over its whole length. A kill falls into a run that trains: the kill before it is over, which takes a
step line behind the line about the loss, and one more step line has come since. From that line on the killer waits for a random part of a step and
kills a random worker among those that train. What counts is the time from the kill to the first step line behind the line that names the killed
worker as lost; step lines that were printed before the loss was noticed do not. A worker that dies while the run takes in another one is not named:
such a kill is told, and another one takes its place.
"""

from __future__ import annotations

import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

MARK: Final = "CLUSTER_BENCHMARK"
"""Environment variable by which the processes of a suite are known."""

WORKERS: Final = 3

SILENCE: Final = 300.0
"""Seconds without a line after which the run counts as stuck."""

_ADDRESS: Final = re.compile(r"\w+://[\w.\[\]:]+:\d+")


@dataclass
class Kill:
    """A worker that was killed.

    Attributes:
        at: when.
        step: last one that was printed before.
        address: of the worker.
        change: what the run said of it: the line that names the worker as lost, else another line with which it went on.
        noticed: whether the worker was named.
        safe: whether the run went on from the last checkpoint that it had saved.
        seconds: from the kill to the first step behind that line; None while there is none.
    """

    at: float
    step: int
    address: str
    change: str = ""
    noticed: bool = False
    safe: bool = False
    seconds: float | None = None

    @property
    def survived(self) -> bool:
        """Whether the run noticed it, lost no checkpoint by it and went on."""
        return self.noticed and self.safe and self.seconds is not None

    def told(self) -> dict[str, Any]:
        """For the result."""
        return {"step": self.step, "seconds": self.seconds, "noticed": self.noticed, "from_last_checkpoint": self.safe, "line": self.change}


@dataclass
class Run:
    """What a run's lines have shown so far.

    Attributes:
        members: addresses of the workers that train.
        step: the last one.
        saved: step of the last checkpoint.
        laps: seconds between step lines of one team.
        kills: see `Kill`.
        changes: every line with which it went on.
        may_be_killed: whether it trains, and the kills so far are over.
    """

    members: list[str] = field(default_factory=list)
    step: int = 0
    saved: int = 0
    laps: list[float] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    may_be_killed: bool = False
    _last: float | None = None

    def note(self, at: float, line: str) -> None:
        """A line has come."""
        if match := re.match(r"step (\d+)/", line):
            self._note_step(at, int(match[1]))
        elif match := re.match(r"saved .*step-(\d+)", line):
            self.saved, self._last = int(match[1]), None
        elif match := re.match(r"node \d+: (\S+) on ", line):
            self.members.append(match[1])
        elif "; going on " in line:
            self._note_change(line)

    def _note_step(self, at: float, step: int) -> None:
        open_kill = next((kill for kill in self.kills if kill.seconds is None), None)
        if open_kill is None:
            self.may_be_killed = True
        elif open_kill.change:
            open_kill.seconds = at - open_kill.at
        if self._last is not None:
            self.laps.append(at - self._last)
        self.step, self._last = step, at

    def _note_change(self, line: str) -> None:
        self.changes.append(line.strip())
        self.members, self._last, self.may_be_killed = [], None, False
        for kill in self.kills:
            if kill.seconds is None and not kill.noticed:
                kill.noticed = line.startswith("lost ") and kill.address in _ADDRESS.findall(line)
                kill.change, kill.safe = line.strip(), int((re.findall(r"after step (\d+)", line) or [0])[-1]) >= self.saved

    def killed(self, at: float, address: str) -> None:
        """A worker was killed."""
        self.kills.append(Kill(at, self.step, address))
        self.may_be_killed = False

    @property
    def num_noticed(self) -> int:
        """Kills that the run has noticed."""
        return sum(kill.noticed for kill in self.kills)


class Killer:
    """Decides when to kill.

    Args:
        steps: of the run.
        kills: that it is to notice.
    """

    def __init__(self, steps: int, kills: int) -> None:
        self._chance = random.Random(0)
        self.planned = sorted(self._chance.sample(range(1, steps - 2), kills))  # two steps may be under way: a kill behind them hits no training
        self.due: float | None = None

    def look(self, run: Run, now: float) -> None:
        """Decide after a line."""
        if not run.may_be_killed or run.num_noticed == len(self.planned):
            self.due = None
        elif self.due is None and run.step >= self.planned[run.num_noticed]:
            self.due = now + self._chance.uniform(0.0, median(run.laps) if run.laps else 0.1)

    def strike(self, run: Run, pids: dict[str, int]) -> None:
        """Kill a worker that trains.

        Args:
            pids: of the cluster's workers, by address.
        """
        address = self._chance.choice(sorted(run.members))
        os.kill(pids[address], signal.SIGKILL)
        run.killed(monotonic(), address)
        self.due = None


def kill_at_random(flags: Sequence[str], steps: int, kills: int, mark: str) -> Run:
    """Train with `flags` on a cluster of this machine and kill workers, until the run ends or has noticed so many kills.

    Args:
        mark: by which `left_over` knows what was started.

    Raises:
        SystemExit: the run failed, or was silent for too long.
    """
    from distributed import LocalCluster

    os.environ[MARK] = mark  # what is started from here on inherits it
    run, killer, printed = Run(), Killer(steps, kills), list[str]()
    lines: queue.Queue[tuple[float, str] | None] = queue.Queue()
    environment = {**os.environ, **common.one_thread_blas(), "PYTHONUNBUFFERED": "1"}
    with LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=":0", silence_logs=50, env=common.one_thread_blas()) as cluster:
        argv = [sys.executable, "-m", "nntask", "train", "--dask", cluster.scheduler_address, *flags]
        process = subprocess.Popen(argv, cwd=common.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        try:
            while (event := _next(lines, killer.due)) is not None:
                if event == ():
                    killer.strike(run, {worker.worker_address: worker.pid for worker in cluster.workers.values()})
                    continue
                at, line = event
                printed.append(line)
                run.note(at, line)
                killer.look(run, at)
                if "going on" in line:
                    print(f"kill {len(run.kills)}, step {run.step}: {line}", end="", file=sys.stderr, flush=True)
            code = process.wait(timeout=SILENCE)
        except queue.Empty:
            raise SystemExit(f"the run has printed nothing for {SILENCE:g} s\n{''.join(printed[-40:])}") from None
        finally:
            process.kill()
    if code:
        raise SystemExit(f"the run ended with code {code}\n{''.join(printed[-40:])}")
    return run


def _read(stream: Any, lines: queue.Queue[tuple[float, str] | None]) -> None:
    """Put each line with when it came, and None at the end."""
    for line in stream:
        lines.put((monotonic(), line))
    lines.put(None)


def _next(lines: queue.Queue[tuple[float, str] | None], due: float | None) -> tuple[float, str] | tuple[()] | None:
    """The next line, or () when it is time to kill.

    Raises:
        queue.Empty: neither for too long.
    """
    try:
        return lines.get(timeout=SILENCE if due is None else max(due - monotonic(), 0.0))
    except queue.Empty:
        if due is None:
            raise
        return ()


def left_over(mark: str) -> list[Any]:
    """Processes that a suite has started and that do not end."""
    import psutil

    _, alive = psutil.wait_procs([each for each in psutil.process_iter() if _is_of(each, mark)], timeout=20)
    return alive


def _is_of(process: Any, mark: str) -> bool:
    """Whether the suite has started a process; it is not this one, nor what Python keeps beside it."""
    try:
        helps = any("resource_tracker" in word for word in process.cmdline())
        return process.pid != os.getpid() and process.environ().get(MARK) == mark and not helps
    except Exception:  # it has ended meanwhile, or is somebody else's
        return False
