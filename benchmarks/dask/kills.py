"""Workers of a cluster killed at random moments while it trains, for `cluster.py --suite faults`."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

MARK: Final = "CLUSTER_BENCHMARK"
"""Environment variable by which the processes of a suite are known."""

WORKERS: Final = 3


@dataclass
class Told:
    """What a run under fire has shown.

    Attributes:
        kills: when a worker was killed.
        printed: lines of the run, each with when it came.
    """

    kills: list[float] = field(default_factory=list)
    printed: list[tuple[float, str]] = field(default_factory=list)

    @property
    def is_training(self) -> bool:
        """Whether the latest lines are steps: it is not just starting."""
        return any(re.match(r"step [1-9]", line) for _, line in self.printed[-3:])

    @property
    def lines(self) -> list[str]:
        """What it said about the changes of its nodes."""
        return [line for _, line in self.printed if "going on" in line]

    @property
    def recovery(self) -> list[float]:
        """Seconds from each kill that the run has noticed to the next step."""
        steps = [at for at, line in self.printed if line.startswith("step ")]
        noticed = [at for at, line in self.printed if "lost" in line]
        following = ((kill, min((at for at in steps if at > kill), default=kill)) for kill in self.kills if any(at > kill for at in noticed))
        return [step - kill for kill, step in following]


def kill_at_random(flags: Sequence[str], kills: int, mark: str) -> Told:
    """Train with `flags` on a cluster of this machine and kill workers, until the run ends or there were so many kills.

    Args:
        mark: by which `left_over` knows what was started.

    Raises:
        SystemExit: the run failed.
    """
    from distributed import Client, LocalCluster

    os.environ[MARK] = mark  # what is started from here on inherits it
    told, over, chance = Told(), threading.Event(), random.Random(0)
    with LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=":0", silence_logs=50) as cluster, Client(cluster) as client:

        def kill_some() -> None:
            while len(told.kills) < kills and not over.wait(chance.uniform(0.5, 4.0)):
                if told.is_training:
                    os.kill(chance.choice(list(client.run(os.getpid).values())), signal.SIGKILL)
                    told.kills.append(monotonic())

        argv = [sys.executable, "-m", "nntask", "train", "--dask", cluster.scheduler_address, *flags]
        environment = {**os.environ, **common.one_thread_blas(), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(argv, cwd=common.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        killer = threading.Thread(target=kill_some)
        killer.start()
        assert process.stdout is not None
        for line in process.stdout:
            told.printed.append((monotonic(), line))
            if "going on" in line:
                print(f"kill {len(told.kills)}: {line}", end="", file=sys.stderr)
        over.set()
        killer.join()
        code = process.wait()
    if code:
        raise SystemExit(f"the run ended with code {code}\n{''.join(line for _, line in told.printed[-40:])}")
    return told


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
