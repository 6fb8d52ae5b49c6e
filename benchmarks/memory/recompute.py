"""What is kept, moved and made again: planned seconds of a step under `--recompute` auto, none and block, in virtual time.

    python benchmarks/memory/recompute.py                   # three models, three links, three budgets; an hour
    python benchmarks/memory/recompute.py --suite xl        # GPT-2 XL on one device of 20, 10, 6 and 4 GiB
    python benchmarks/memory/recompute.py --suite bound     # the same beside the linear-programming bound (nntask bench bound); six minutes

Each writes benchmarks/results/recompute_SUITE.json. Budgets are shares of what the step needs at once where nothing moves, devices together. A plan
is a process of its own (``nntask plan --json``); what it forecasts and then simulates is this program alone, on no hardware.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
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
NOTES: Final = (
    "A bound holds for the orders that planners know, and for machines that execute tasks in these. It hides every copy behind tasks, lets any "
    "fraction of a tile stay, and has what is made again cost the seconds of its own tasks alone, whatever they read.",
)
"""What the suite bound says of its figures."""
GPT_50B: Final = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048, "n_embd": 8192, "n_layer": 62, "n_head": 64}
MODELS: Final[dict[str, tuple[int, tuple[str, ...], dict[str, Any] | None]]] = {
    "GPT-2 medium": (1, ("--model=gpt2-medium", "--batch=32", "--minibatch=8"), None),
    "LLaMA 3B at 4,096": (1, ("--model=llama-3b", "--seq-len=4096", "--batch=8", "--minibatch=2"), None),
    "50B GPT": (8, ("--batch=64", "--minibatch=8"), GPT_50B),
}
"""Devices, flags, and the config where there is no preset."""


def plan(flags: list[str], *command: str) -> dict[str, Any]:
    """The figures of a plan, or of another command."""
    argv = [sys.executable, "-m", "nntask", *(command or ("plan",)), "--json", *flags]
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
        found = plan([*XL_FLAGS, f"--device={size}GiB@150TF"], "bench", "bound")
        cases[f"{size} GiB"] = found
        what, ours, least = f"GPT-2 XL, one device of {size} GiB", found["seconds_per_step"], found["bound_seconds"]
        rows.append(common.compare(what, "s a step", ours, "lower bound", least, better="less"))
        print(rows[-1], file=sys.stderr, flush=True)
    return {"notes": NOTES, "comparisons": rows, "cases": cases}


def models(args: argparse.Namespace) -> dict[str, Any]:
    """Other models and links."""
    rows: list[dict[str, Any]] = []
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            count, flags, config = MODELS[model]
            base = [*flags, "--dtype=bf16", "--ram=8TiB"]
            if config is not None:
                file = Path(folder) / f"{count}.json"
                file.write_text(json.dumps(config))
                base.append(f"--config-path={file}")
            needed = plan([*base, f"--devices={count}x4TiB@150TF", "--recompute=none"])["submission_needed_bytes"]
            for link, share in itertools.product(args.links, SHARES):
                device = f"--devices={count}x{needed // share // count}B@150TF"
                found = {mode: plan([*base, f"--link={link}", device, f"--recompute={mode}"]) for mode in MODES}
                seconds = {mode: each["seconds_per_step"] for mode, each in found.items()}
                name = f"{model}, {link}, 1/{share} of needed"
                cases[name] = {mode: kept(each) for mode, each in found.items()}
                other = min(MODES[1:], key=lambda mode: seconds[mode])
                rows.append(common.compare(name, "s a step", seconds["auto"], other, seconds[other], better="less", bar="ratio <= 1.01"))
                print(rows[-1], file=sys.stderr, flush=True)
    return {"comparisons": rows, "cases": cases}


def main() -> None:
    """Run a suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("xl", "bound", "models"), default="models")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--links", nargs="+", default=[*LINKS])
    parser.add_argument("--output", default=None, help="name of the result; empty writes nothing")
    args = parser.parse_args()
    found = {"xl": xl, "bound": bound, "models": models}[args.suite](args)
    name = f"recompute_{args.suite}" if args.output is None else args.output
    common.finish(name, {"machine": common.machine(), "versions": common.versions("numpy", "scipy"), "settings": {"rounds": 1}, **found})


if __name__ == "__main__":
    main()
