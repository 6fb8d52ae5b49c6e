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
    chosen = {name: what for name, what in variants(first["needed_bytes"]).items() if name in ("unlimited", *args.only) or not args.only}
    rounds: dict[str, list[Result]] = {name: [] for name in chosen}
    rounds["unlimited"].append(first)
    for number in range(args.rounds):
        for name, (flags, below) in chosen.items():
            if number == 0 and name == "unlimited":
                continue
            result = job([steps, *flags], disk if below else None)
            rounds[name].append(result)
            print(
                f"round {number + 1}  {name}: {result['tokens_per_second']:.1f} tokens/s, {moved(result) / 1e9:.2f} GB", file=sys.stderr, flush=True
            )
    speed = {name: statistics.median(one["tokens_per_second"] for one in found) for name, found in rounds.items()}
    gigabytes = {name: statistics.median(moved(one) for one in found) / 1e9 for name, found in rounds.items()}
    rows = []
    for part, bar in (("half", ""), ("quarter", "ratio >= 0.9"), ("eighth", "ratio >= 0.85")):
        if part in speed:
            rows.append(
                common.compare(f"RAM at a {part} of needed + disk", "tokens/s", speed[part], "unlimited", speed["unlimited"], better="more", bar=bar)
            )
    if "eighth, blocking" in speed:
        rows.append(
            common.compare(
                "RAM at an eighth + disk",
                "tokens/s",
                speed["eighth"],
                "blocking copies, no prefetch",
                speed["eighth, blocking"],
                better="more",
                bar="ratio >= 1.15",
            )
        )
    for name, bar in (("quarter, eager + lru", ""), ("quarter, eager + lru, submission order", "ratio <= 0.6")):
        if name in gigabytes and "quarter" in gigabytes:
            rows.append(
                common.compare(
                    "bytes a step, RAM at a quarter", "GB", gigabytes["quarter"], name.partition(", ")[2], gigabytes[name], better="less", bar=bar
                )
            )
    equal = {tuple(one["losses"]) for found in rounds.values() for one in found}
    budget = {
        name: {
            "resident_above_start": max(one["resident_above_start"] for one in found),
            "allowed": round(1.05 * found[0]["budget_bytes"]["ram"]) + SLACK,
            "ledger_peak": max(one["peak_bytes"]["ram"] for one in found),
            "budget": found[0]["budget_bytes"]["ram"],
        }
        for name, found in rounds.items()
    }
    print(f"losses of all runs equal, bit for bit: {len(equal) == 1}")
    for name, found in budget.items():
        verdict = "within" if found["resident_above_start"] <= found["allowed"] and found["ledger_peak"] <= found["budget"] else "NOT WITHIN"
        print(f"{name}: resident {found['resident_above_start'] / 1e6:,.0f} MB above start, allowed {found['allowed'] / 1e6:,.0f} MB: {verdict}")
    return {
        "needed_bytes": first["needed_bytes"],
        "orders": {name: found[0]["order"] for name, found in rounds.items()},
        "losses_equal": len(equal) == 1,
        "gigabytes_per_step": gigabytes,
        "resident": budget,
        "comparisons": rows,
        "rounds": rounds,
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
