"""Training beyond memory: speed kept, bytes moved, the budget kept and the same losses, on GPT-2 small.

    python benchmarks/memory/claims.py                      # the standard job, writes benchmarks/results/memory.json
    python benchmarks/memory/claims.py --rounds 2 --only quarter --output=

The standard job is ``--model gpt2 --batch 8 --minibatch 1 --minibatch-tile 1 --vocab-tile 6283``, 1,024 tokens a sequence, no clipping, dropout as
the preset has it. *Needed* is what one worker needs in submission order. Every variant is a process of its own (`job`), with two steps in flight as
in training. The two sides of a comparison of speed take turns step by step: the other one is stopped, by a signal, in the middle of whatever it does.
So each step is measured beside the other side's steps of the same minutes, and the machine's own ups and downs, which last longer, fall on both.
There are two sides at a time, no more: tier files of other jobs would share the host's cache of the disk with this one. What is under way when a
job is stopped looks long to its performance models, which leave out spikes. A side's figure is the median of its steps.
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
KEPT_OF_LAPS: Final = ("moved_bytes", "evictions", "hit_rate", "resident_peak_bytes", "processor_seconds")
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


def variants(needed: int, disk: str) -> dict[str, list[str]]:
    """Name -> flags."""
    below = f"--disk={disk}"
    half, quarter, eighth = ([f"--ram={needed // part}B", below] for part in (2, 4, 8))
    return {
        "unlimited": [],
        "half": half,
        "quarter": quarter,
        "eighth": eighth,
        "eighth, blocking": [*eighth, "--no-prefetch"],
        "quarter, submission order": [*quarter, "--order=submission"],
        "quarter, eager + lru": [*quarter, "--sched=eager", "--evict=lru"],
        "quarter, eager + lru, submission order": [*quarter, "--sched=eager", "--evict=lru", "--order=submission"],
    }


SPEEDS: Final = (
    ("half", "RAM at a half of needed + disk", "unlimited", "unlimited", ""),
    ("quarter", "RAM at a quarter of needed + disk", "unlimited", "unlimited", "ratio >= 0.9"),
    ("eighth", "RAM at an eighth of needed + disk", "unlimited", "unlimited", "ratio >= 0.85"),
    ("eighth", "RAM at an eighth + disk", "eighth, blocking", "blocking copies, no prefetch", "ratio >= 1.15"),
)
"""Comparisons of speed: variant, what it is, the variant beside it, what that is, and the bar."""


ALONE: Final = ("quarter, submission order", "quarter, eager + lru", "quarter, eager + lru, submission order")
"""Variants of which only bytes are compared, with those of the quarter."""

NAMES: Final = (*dict.fromkeys(speed[0] for speed in SPEEDS), *ALONE)
"""What `--only` may name: a side of a comparison comes with it."""


def moved(result: Result) -> int:
    """Bytes moved in a step, over all links."""
    return round(statistics.median(sum(lap["moved_bytes"].values()) for lap in result["steady"]))


def standard(args: argparse.Namespace, disk: str) -> dict[str, Any]:
    """The standard job within a half, a quarter and an eighth of what it needs."""
    needed = job(["--steps=1"], None)["needed_bytes"]
    flags = variants(needed, disk)
    chosen = args.only or NAMES
    rows, runs = [], {}
    for name, what, peer, label, bar in SPEEDS:
        if name in chosen:
            found = in_turns({side: flags[side] for side in (name, peer)}, args.rounds)
            ours, theirs = (TOKENS / statistics.median(found[side]["seconds"]) for side in (name, peer))
            rows.append(common.compare(what, "tokens/s", ours, label, theirs, better="more", bar=bar))
            print(rows[-1], file=sys.stderr, flush=True)
            runs |= {f"{side}, beside {other}": found[side] for side, other in ((name, peer), (peer, name))}
    runs |= {name: in_turns({name: flags[name]}, args.rounds)[name] for name in ALONE if name in chosen}
    gigabytes = {name: moved(found) / 1e9 for name, found in runs.items()}
    resident = {name: _resident(found) for name, found in runs.items()}
    is_equal = len({tuple(found["losses"]) for found in runs.values()}) == 1
    print(f"losses of all runs equal, bit for bit: {is_equal}")
    for name, found in resident.items():
        is_within = found["resident_above_start"] <= found["allowed"] and found["ledger_peak"] <= found["budget"]
        megabytes = f"{found['resident_above_start'] / 1e6:,.0f} MB above start, allowed {found['allowed'] / 1e6:,.0f} MB"
        print(f"{name}: resident {megabytes}: {'within' if is_within else 'NOT WITHIN'}")
    return {
        "needed_bytes": needed,
        "orders": {name: found["order"] for name, found in runs.items()},
        "losses_equal": is_equal,
        "gigabytes_per_step": gigabytes,
        "resident": resident,
        "comparisons": [*rows, *_traffic(gigabytes)],
        "runs": runs,
    }


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


def _traffic(gigabytes: dict[str, float]) -> list[dict[str, Any]]:
    """Gigabytes a step of the planned order with next-use eviction, beside eager and LRU."""
    ours = gigabytes.get("quarter, beside unlimited")
    rows = []
    for peer, bar in (("eager + lru", ""), ("eager + lru, submission order", "ratio <= 0.6")):
        theirs = gigabytes.get(f"quarter, {peer}")
        if ours is not None and theirs is not None:
            rows.append(common.compare("bytes a step, RAM at a quarter", "GB", ours, peer, theirs, better="less", bar=bar))
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
    parser = common.parser(__doc__, "memory")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=[], choices=NAMES, help="some variants, beside what they are compared with (default: all)")
    parser.add_argument("--disk", default="", help="directory of the disk tier (default: a temporary one)")
    args = parser.parse_args()
    machine = common.machine()
    with tempfile.TemporaryDirectory(dir=args.disk or None) as disk:
        found = standard(args, disk)
    common.finish(args.output, machine, ("numpy",), {"rounds": args.rounds}, **found)


if __name__ == "__main__":
    main()
