"""What is kept, moved and made again: planned seconds of a step under `--recompute` auto, none and block, in virtual time.

    python benchmarks/memory/recompute.py --jobs 2          # three models, three links, three budgets; an hour and a half of two cores
    python benchmarks/memory/recompute.py --suite xl        # GPT-2 XL on one device of 20, 10, 6 and 4 GiB
    python benchmarks/memory/recompute.py --suite bound     # the same beside the linear-programming bound (benchmarks/bounds/bound.py); six minutes
    python benchmarks/memory/recompute.py --suite runs      # GPT-2 small, trained: RAM with a disk, and simulated devices; a quarter of an hour

Each writes benchmarks/results/recompute_SUITE.json. Budgets are shares of what the step needs at once where nothing moves, devices together. A plan
is a process of its own (``nntask plan --json``); what it forecasts and then simulates is this program alone, on no hardware, so its figures are the
same however many plans are made side by side. Simulated devices of the last suite compute on this machine's cores, behind links of a given rate.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common

MODES: Final = ("auto", "none", "block")
SHARES: Final = (2, 4, 8)
LINKS: Final = ("12GB/s", "25GB/s", "55GB/s")
XL: Final = {20: 3.0, 10: 3.2, 6: 3.3, 4: 3.6}
"""Gibibytes of the device, and the bar in seconds a step."""
XL_FLAGS: Final = ("--model=gpt2-xl", "--dtype=bf16", "--batch=32", "--minibatch=8", "--ram=200GiB", "--link=25GB/s")
GAIN: Final = 0.9
"""Of the seconds of the better of both ways that are set by hand, the share that a chosen one was to take in half of the cases."""
GPT_50B: Final = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048, "n_embd": 8192, "n_layer": 62, "n_head": 64}
MODELS: Final[dict[str, tuple[int, tuple[str, ...], dict[str, Any] | None]]] = {
    "GPT-2 medium": (1, ("--model=gpt2-medium", "--batch=32", "--minibatch=8"), None),
    "LLaMA 3B at 4,096": (1, ("--model=llama-3b", "--seq-len=4096", "--batch=8", "--minibatch=2"), None),
    "50B GPT": (8, ("--batch=64", "--minibatch=8"), GPT_50B),
}
"""Devices, flags, and the config where there is no preset."""

RUN_FLAGS: Final = (
    *("--model=gpt2", "--batch=4", "--minibatch=1", "--seq-len=512", "--steps=5"),
    *("--sample-tokens=0", "--save-every=0", "--grad-clip=1"),
)
RUN_NEEDS: Final = 2_302_459_904
"""Bytes of such a step where nothing moves."""
RUNS: Final = {
    "RAM at 1/4, and a disk": [f"--ram={RUN_NEEDS // 4}", "--disk={disk}"],
    "RAM at 1/8, and a disk": [f"--ram={RUN_NEEDS // 8}", "--disk={disk}"],
    "two simulated devices of 1/8 each, links of 1 GB/s": ["--sim-gpu=2@1GB/s", "--ncpu=0", f"--gpu-memory={RUN_NEEDS // 8}"],
}


def plan(flags: list[str], *command: str) -> dict[str, Any]:
    """The figures of a plan, or of another script."""
    argv = [sys.executable, *(command or ("-m", "nntask", "plan")), "--json", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=common.ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with code {done.returncode}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def kept(figures: dict[str, Any]) -> dict[str, Any]:
    """What a result file keeps of a plan."""
    names = ("seconds_per_step", "order", "recompute", "tasks_per_step", "moved_bytes_per_step", "needed_bytes", "values")
    return {name: figures[name] for name in names}


def xl(args: argparse.Namespace) -> dict[str, Any]:
    """GPT-2 XL on one device that has less and less."""
    rows, cases = [], {}
    roomy = plan([*XL_FLAGS, "--devices=1x60GiB@150TF"])
    for size, bar in XL.items():
        found = plan([*XL_FLAGS, f"--devices=1x{size}GiB@150TF"])
        cases[f"{size} GiB"] = kept(found)
        what, unlimited = f"GPT-2 XL, one device of {size} GiB", roomy["seconds_per_step"]
        rows.append(common.compare(what, "s a step", found["seconds_per_step"], "everything fits", unlimited, better="less", bar=f"ours <= {bar}"))
        print(rows[-1], file=sys.stderr, flush=True)
    return {"comparisons": rows, "cases": {**cases, "60 GiB": kept(roomy)}}


def bound(args: argparse.Namespace) -> dict[str, Any]:
    """GPT-2 XL on one device that has less and less, beside the least of the bounds of all known orders."""
    rows, cases = [], {}
    for size in XL:
        found = plan([*XL_FLAGS, f"--device={size}GiB@150TF"], "benchmarks/bounds/bound.py")
        cases[f"{size} GiB"] = found
        what, ours, least = f"GPT-2 XL, one device of {size} GiB", found["seconds_per_step"], found["bound_seconds"]
        rows.append(common.compare(what, "s a step", ours, "lower bound", least, better="less"))
        print(rows[-1], file=sys.stderr, flush=True)
    return {"comparisons": rows, "cases": cases}


def models(args: argparse.Namespace) -> dict[str, Any]:
    """Other models and links."""
    rows: list[dict[str, Any]] = []
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for model in args.models:
            count, given, config = MODELS[model]
            base = [*given, "--dtype=bf16", "--ram=8TiB"]
            if config is not None:
                file = Path(folder) / f"{count}.json"
                file.write_text(json.dumps(config))
                base.append(f"--config-path={file}")
            roomy = plan([*base, f"--devices={count}x4TiB@150TF", "--recompute=none"])
            needed, fits = roomy["submission_needed_bytes"], roomy["seconds_per_step"]
            flags_of = {
                (link, share, mode): [*base, f"--link={link}", f"--devices={count}x{needed // share // count}B@150TF", f"--recompute={mode}"]
                for link, share, mode in itertools.product(args.links, SHARES, MODES)
            }
            plans = {case: pool.submit(plan, flags) for case, flags in flags_of.items()}
            for link, share in itertools.product(args.links, SHARES):
                found = {mode: plans[link, share, mode].result() for mode in MODES}
                seconds = {mode: each["seconds_per_step"] for mode, each in found.items()}
                name = f"{model}, {link}, 1/{share} of needed"
                cases[name] = {mode: kept(each) for mode, each in found.items()}
                other = min(MODES[1:], key=lambda mode: seconds[mode])
                rows.append(common.compare(name, "s a step", seconds["auto"], other, seconds[other], better="less", bar="ratio <= 1.01"))
                cases[name]["everything fits"] = fits
                print(rows[-1], f"everything fits: {fits:.3f}", file=sys.stderr, flush=True)
    return {"notes": [_gains(rows, cases)], "comparisons": rows, "cases": cases}


def _gains(rows: Sequence[dict[str, Any]], cases: dict[str, Any]) -> str:
    """In how many cases the choice gains a tenth, and in how many it could."""
    gains = sum(row["ours"] <= GAIN * row["theirs"] for row in rows)
    could = sum(cases[row["what"]]["everything fits"] <= GAIN * row["theirs"] for row in rows)
    return (
        f"The goal, {GAIN:g} times the seconds of the better of both in half of the cases, is met in {gains} of {len(rows)}; "
        f"devices where everything fits reach it in {could}."
    )


def train(flags: Sequence[str], run_dir: Path) -> dict[str, Any]:
    """Median seconds of the steps of a run but the first two, its losses, bytes over links a step, and what was expected of a step."""
    argv = [sys.executable, "-m", "nntask", "train", *flags, f"--run-dir={run_dir}"]
    environment = {**os.environ, **common.one_thread_blas()}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=common.ROOT, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with code {done.returncode}\n{done.stderr}")
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    planned = json.loads((run_dir / "plan.json").read_text())
    seconds = sorted(step["seconds"] for step in steps[2:])
    return {
        "seconds": seconds[len(seconds) // 2],
        "losses": [step["loss"] for step in steps],
        "moved_bytes_per_step": sum(sum(step["moved_bytes"].values()) for step in steps[2:]) / len(steps[2:]),
        "expected_seconds": planned["judged_seconds"] or planned["forecast_seconds"].get(planned["order"]),
        "order": planned["order"],
        "recompute": planned["recompute"],
    }


def runs(args: argparse.Namespace) -> dict[str, Any]:
    """GPT-2 small, trained: each way in turn, once more than the rounds that count, because kernels are measured in the first."""
    rows, cases = [], {}
    for name, flags in RUNS.items():
        rounds: list[dict[str, Any]] = []
        for number in range(args.rounds + 1):
            found = {}
            for mode in MODES:
                with tempfile.TemporaryDirectory() as folder:
                    given = [flag.format(disk=folder) for flag in flags]
                    found[mode] = train([*RUN_FLAGS, *given, f"--recompute={mode}"], Path(folder) / "run")
                print(name, mode, found[mode], file=sys.stderr, flush=True)
            if any(each["losses"] != found["none"]["losses"] for each in found.values()):
                raise SystemExit(f"losses differ: {found}")
            rounds += [found] if number else []
        seconds = {mode: statistics.median(each[mode]["seconds"] for each in rounds) for mode in MODES}
        expected = statistics.median(each["auto"]["expected_seconds"] for each in rounds)
        other = min(MODES[1:], key=lambda mode: seconds[mode])
        what = f"GPT-2 small, {name}"
        rows.append(common.compare(what, "s a step", seconds["auto"], other, seconds[other], better="less", bar="ratio <= 1.0"))
        rows.append(common.compare(f"{what}, expected", "s a step", expected, "measured", seconds["auto"], better="less", bar="ratio in 0.85..1.15"))
        cases[name] = rounds
    return {"comparisons": rows, "cases": cases}


def main() -> None:
    """Run a suite."""
    parser = common.parser(__doc__, None)
    parser.add_argument("--suite", choices=("xl", "bound", "models", "runs"), default="models")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--links", nargs="+", default=[*LINKS])
    parser.add_argument("--jobs", type=int, default=1, help="plans of the suite models that are made side by side")
    parser.add_argument("--rounds", type=int, default=1, help="of runs")
    args = parser.parse_args()
    found = {"xl": xl, "bound": bound, "models": models, "runs": runs}[args.suite](args)
    name = f"recompute_{args.suite}" if args.output is None else args.output
    common.finish(name, common.machine(), ("numpy", "scipy"), {"rounds": args.rounds}, **found)


if __name__ == "__main__":
    main()
