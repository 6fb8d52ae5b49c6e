"""Training beyond memory: speed kept, bytes moved, the budget kept and the same losses, on GPT-2 small.

    python benchmarks/memory/claims.py                      # the standard job, writes benchmarks/results/memory.json
    python benchmarks/memory/claims.py --rounds 1 --steps 1 --only quarter --output=

The standard job is ``--model gpt2 --batch 8 --minibatch 1 --minibatch-tile 1 --vocab-tile 6283``, 1,024 tokens a sequence, no clipping, dropout as
the preset has it. *Needed* is what one worker needs in submission order. Every variant runs in a process of its own (`job`), all once per round in
turn. Two steps are in flight, as in training; a variant's figure is its best step between the first and the last, and the median of these over the
rounds is compared with the unlimited run's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

JOB: Final = Path(__file__).resolve().parent / "job.py"
SLACK: Final = 250 << 20

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
    steps = f"--steps={args.steps + 2}"
    first = job([steps], None)
    rounds = _rounds(args, disk, steps, first)
    gigabytes = {name: statistics.median(moved(one) for one in found) / 1e9 for name, found in rounds.items()}
    resident = {name: _resident(found) for name, found in rounds.items()}
    is_equal = len({tuple(one["losses"]) for found in rounds.values() for one in found}) == 1
    print(f"losses of all runs equal, bit for bit: {is_equal}")
    for name, found in resident.items():
        is_within = found["resident_above_start"] <= found["allowed"] and found["ledger_peak"] <= found["budget"]
        megabytes = f"{found['resident_above_start'] / 1e6:,.0f} MB above start, allowed {found['allowed'] / 1e6:,.0f} MB"
        print(f"{name}: resident {megabytes}: {'within' if is_within else 'NOT WITHIN'}")
    return {
        "needed_bytes": first["needed_bytes"],
        "orders": {name: found[0]["order"] for name, found in rounds.items()},
        "losses_equal": is_equal,
        "gigabytes_per_step": gigabytes,
        "resident": resident,
        "comparisons": [*_speeds(rounds), *_traffic(gigabytes)],
        "rounds": rounds,
    }


def _rounds(args: argparse.Namespace, disk: str, steps: str, first: Result) -> dict[str, list[Result]]:
    """Every chosen variant once per round; `first` counts as the first unlimited run."""
    chosen = {name: what for name, what in variants(first["needed_bytes"]).items() if name in ("unlimited", *args.only) or not args.only}
    rounds: dict[str, list[Result]] = {name: [] for name in chosen}
    rounds["unlimited"].append(first)
    for number in range(args.rounds):
        for name, (flags, below) in chosen.items():
            if number == 0 and name == "unlimited":
                continue
            result = job([steps, *flags], disk if below else None)
            rounds[name].append(result)
            speed = f"{result['tokens_per_second']:.1f} tokens/s, {moved(result) / 1e9:.2f} GB"
            print(f"round {number + 1}  {name}: {speed}", file=sys.stderr, flush=True)
    return rounds


def _speeds(rounds: dict[str, list[Result]]) -> list[dict[str, Any]]:
    """Tokens per second of the variants beside those they must not fall behind."""
    speed = {name: statistics.median(one["tokens_per_second"] for one in found) for name, found in rounds.items()}
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


def _resident(found: list[Result]) -> dict[str, int]:
    """Resident memory and ledger of a variant beside its budget, bytes; the worst of its runs."""
    budget = found[0]["budget_bytes"]["ram"]
    return {
        "resident_above_start": max(one["resident_above_start"] for one in found),
        "allowed": round(1.05 * budget) + SLACK,
        "ledger_peak": max(one["peak_bytes"]["ram"] for one in found),
        "budget": budget,
    }


def main() -> None:
    """Run a suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="variants besides unlimited")
    parser.add_argument("--disk", default="", help="directory of the disk tier (default: a temporary one)")
    parser.add_argument("--output", default="memory", help="name of the result; empty writes nothing")
    args = parser.parse_args()
    header = {"machine": common.machine(), "versions": common.versions("numpy")}
    with tempfile.TemporaryDirectory(dir=args.disk or None) as disk:
        found = standard(args, disk)
    common.finish(args.output, {**header, "settings": {"rounds": args.rounds, "steps": args.steps}, **found})


if __name__ == "__main__":
    main()
