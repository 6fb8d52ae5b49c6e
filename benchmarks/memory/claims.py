"""Training beyond memory: speed kept, bytes moved, the budget kept and the same losses, on GPT-2 small.

    python benchmarks/memory/claims.py                      # the standard job, writes benchmarks/results/memory.json
    python benchmarks/memory/claims.py --rounds 2 --only quarter --output=

The standard job is ``--model gpt2 --batch 8 --minibatch 1 --minibatch-tile 1 --vocab-tile 6283``, 1,024 tokens a sequence, no clipping, dropout as
the preset has it. *Needed* is what one worker needs in submission order. Every variant is a process of its own (`job`), with two steps in flight as
in training, and they take turns step by step: all but one are stopped, by a signal, in the middle of whatever they do. So each step is measured
beside the others' steps of the same minutes, and the machine's own ups and downs, which last longer, fall on all. What is under way when a job is
stopped looks long to its performance models, which leave out spikes. A variant's figure is the median of its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from select import select
from time import perf_counter
from typing import Any, Final, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
from job import TOLD

JOB: Final = Path(__file__).resolve().parent / "job.py"
SLACK: Final = 250 << 20

KEPT: Final = ("losses", "order", "needed_bytes", "peak_bytes", "budget_bytes", "resident_above_start")
KEPT_OF_LAPS: Final = ("moved_bytes", "evictions", "hit_rate", "resident_peak_bytes")
"""What a job says that has nothing to do with when it was stopped."""

TOKENS: Final = 8 * 1024
"""Of a step."""

Result = dict[str, Any]


def job(flags: list[str], disk: str | None) -> Result:
    """Run one job and return what it measured.

    Raises:
        SystemExit: it failed; its output has been printed.
    """
    argv = [sys.executable, str(JOB), *flags, *([f"--disk={disk}"] if disk else [])]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=common.ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(flags)} ended with code {done.returncode}\n{done.stdout}{done.stderr}")
    found: Result = json.loads(done.stdout[done.stdout.index("{") :])
    return found


class Job:
    """One job that has done its first step, and is stopped unless it has its turn; a context manager.

    Args:
        flags: of `job`.

    Attributes:
        seconds: of each step that it has done in a turn, while it was not stopped.

    Raises:
        SystemExit: it has failed; its output has been printed. Methods, too.
    """

    def __init__(self, flags: list[str]) -> None:
        self.flags = flags
        self.seconds: list[float] = []
        argv = [sys.executable, str(JOB), *flags, "--tell"]
        # in a session of its own: where a shell that has started all this ends, the system wakes whoever is stopped in its group
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, bufsize=0, cwd=common.ROOT, start_new_session=True)

    def __enter__(self) -> Self:
        try:
            self._step()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *args: object) -> None:
        self._process.kill()
        self._process.wait()

    def turn(self) -> None:
        """Let it end a step."""
        begin = perf_counter()
        self._process.send_signal(signal.SIGCONT)
        self._step()
        self.seconds.append(perf_counter() - begin)

    def end(self) -> Result:
        """Let it do the rest, and return what it measured; of laps only what has nothing to do with when it was stopped."""
        self._process.send_signal(signal.SIGCONT)
        output = self._process.communicate()[0].decode()
        if self._process.returncode:
            raise SystemExit(f"{' '.join(self.flags)} ended with code {self._process.returncode}\n{output}")
        found: Result = json.loads(output[output.index("{") :])
        laps = [{name: lap[name] for name in KEPT_OF_LAPS} for lap in found["steady"]]
        return {**{name: found[name] for name in KEPT}, "steady": laps, "seconds": self.seconds}

    def _step(self) -> None:
        """Wait until it has ended a step, and stop it; nothing may have come before or come until it stands still."""
        output = self._process.stdout
        assert output is not None
        line = output.readline().decode().strip()
        self._process.send_signal(signal.SIGSTOP)
        if line != TOLD:
            raise SystemExit(f"{' '.join(self.flags)} has failed: it said {line!r} where {TOLD!r} was expected")
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if select([output], [], [], 0)[0]:
            raise SystemExit(f"{' '.join(self.flags)} has computed while it was not its turn")


def variants(needed: int) -> dict[str, tuple[list[str], bool]]:
    """Name -> flags, and whether a disk tier lies below."""
    ram = {part: f"--ram={needed // part}B" for part in (2, 4, 8)}
    return {
        "unlimited": ([], False),
        "half": ([ram[2]], True),
        "quarter": ([ram[4]], True),
        "eighth": ([ram[8]], True),
        "eighth, blocking": ([ram[8], "--no-prefetch"], True),
        "quarter, submission order": ([ram[4], "--order=submission"], True),
        "quarter, eager + lru": ([ram[4], "--sched=eager", "--evict=lru"], True),
        "quarter, eager + lru, submission order": ([ram[4], "--sched=eager", "--evict=lru", "--order=submission"], True),
    }


def moved(result: Result) -> int:
    """Bytes moved in a step, over all links."""
    return round(statistics.median(sum(lap["moved_bytes"].values()) for lap in result["steady"]))


def standard(args: argparse.Namespace, disk: str) -> dict[str, Any]:
    """The standard job within a half, a quarter and an eighth of what it needs."""
    runs = _chosen(args, disk)
    gigabytes = {name: moved(found) / 1e9 for name, found in runs.items()}
    resident = {name: _resident(found) for name, found in runs.items()}
    is_equal = len({tuple(found["losses"]) for found in runs.values()}) == 1
    print(f"losses of all runs equal, bit for bit: {is_equal}")
    for name, found in resident.items():
        is_within = found["resident_above_start"] <= found["allowed"] and found["ledger_peak"] <= found["budget"]
        megabytes = f"{found['resident_above_start'] / 1e6:,.0f} MB above start, allowed {found['allowed'] / 1e6:,.0f} MB"
        print(f"{name}: resident {megabytes}: {'within' if is_within else 'NOT WITHIN'}")
    return {
        "needed_bytes": runs["unlimited"]["needed_bytes"],
        "orders": {name: found["order"] for name, found in runs.items()},
        "losses_equal": is_equal,
        "gigabytes_per_step": gigabytes,
        "resident": resident,
        "comparisons": [*_speeds(runs), *_traffic(gigabytes)],
        "runs": runs,
    }


def _chosen(args: argparse.Namespace, disk: str) -> dict[str, Result]:
    """Run the chosen variants in turns."""
    needed = job(["--steps=1"], None)["needed_bytes"]
    sides = {
        name: [*flags, *([f"--disk={disk}"] if below else [])]
        for name, (flags, below) in variants(needed).items()
        if name == "unlimited" or name in args.only or not args.only
    }
    return in_turns(sides, args.rounds)


def in_turns(sides: Mapping[str, list[str]], rounds: int) -> dict[str, Result]:
    """Jobs by the flags of each, a step of each per round; the order of each other round is the opposite one."""
    steps = f"--steps={rounds + 2}"  # the first fills memory, and beside the last no other begins
    with ExitStack() as stack:
        jobs = {name: stack.enter_context(Job([*flags, steps])) for name, flags in sides.items()}
        for number in range(rounds):
            names = [*jobs] if number % 2 else [*jobs][::-1]
            for name in names:
                jobs[name].turn()
            seconds = ", ".join(f"{name} {found.seconds[-1]:.2f} s" for name, found in jobs.items())
            print(f"round {number + 1}/{rounds}  {seconds}", file=sys.stderr, flush=True)
        return {name: found.end() for name, found in jobs.items()}


def _speeds(runs: dict[str, Result]) -> list[dict[str, Any]]:
    """Tokens per second of the variants beside those they must not fall behind."""
    speed = {name: TOKENS / statistics.median(found["seconds"]) for name, found in runs.items()}
    rows = []
    for name, what, peer, bar in (
        ("half", "RAM at a half of needed + disk", "unlimited", ""),
        ("quarter", "RAM at a quarter of needed + disk", "unlimited", "ratio >= 0.9"),
        ("eighth", "RAM at an eighth of needed + disk", "unlimited", "ratio >= 0.85"),
        ("eighth", "RAM at an eighth + disk", "eighth, blocking", "ratio >= 1.15"),
    ):
        if name in speed and peer in speed:
            label = "blocking copies, no prefetch" if peer == "eighth, blocking" else peer
            rows.append(common.compare(what, "tokens/s", speed[name], label, speed[peer], better="more", bar=bar))
    return rows


def _traffic(gigabytes: dict[str, float]) -> list[dict[str, Any]]:
    """Gigabytes a step of the planned order with next-use eviction, beside eager and LRU."""
    rows = []
    for name, bar in (("quarter, eager + lru", ""), ("quarter, eager + lru, submission order", "ratio <= 0.6")):
        if name in gigabytes and "quarter" in gigabytes:
            peer = name.partition(", ")[2]
            rows.append(common.compare("bytes a step, RAM at a quarter", "GB", gigabytes["quarter"], peer, gigabytes[name], better="less", bar=bar))
    return rows


def _resident(found: Result) -> dict[str, int]:
    """Resident memory and ledger of a variant beside its budget, bytes."""
    budget = found["budget_bytes"]["ram"]
    return {
        "resident_above_start": found["resident_above_start"],
        "allowed": round(1.05 * budget) + SLACK,
        "ledger_peak": found["peak_bytes"]["ram"],
        "budget": budget,
    }


def main() -> None:
    """Run a suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=[], help="variants besides unlimited")
    parser.add_argument("--disk", default="", help="directory of the disk tier (default: a temporary one)")
    parser.add_argument("--output", default="memory", help="name of the result; empty writes nothing")
    args = parser.parse_args()
    header = {"machine": common.machine(), "versions": common.versions("numpy")}
    with tempfile.TemporaryDirectory(dir=args.disk or None) as disk:
        found = standard(args, disk)
    common.finish(args.output, {**header, "settings": {"rounds": args.rounds}, **found})


if __name__ == "__main__":
    main()
