"""Who updates the weights: planned seconds of GPT-2 XL with updates on the device and by CPU workers, and measured ones of GPT-2 small.

    python benchmarks/memory/update.py                  # GPT-2 XL on one device of 4 GiB, three links; a quarter of an hour
    python benchmarks/memory/update.py --suite runs     # GPT-2 small on two simulated devices with slow links; minutes

Each writes benchmarks/results/update_SUITE.json. Plans are virtual time (``nntask plan --json``), on no hardware. Simulated devices of the second
suite compute on this machine's cores, which the CPU workers share: its seconds say what traffic costs there, and its losses that they are the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from recompute import LINKS, plan, train

RAM_RATES: Final = ("100GB/s",)
"""What CPU workers read and write of RAM, all together: about half of what a server socket with eight channels has."""
XL_FLAGS: Final = ("--model=gpt2-xl", "--dtype=bf16", "--batch=32", "--minibatch=8", "--ram=200GiB", "--devices=1x4GiB@150TF")
KEPT: Final = ("seconds_per_step", "order", "recompute", "update_on", "seconds_by_update", "moved_bytes_per_step")
RUN_FLAGS: Final = (
    *("--model=gpt2", "--batch=2", "--minibatch=1", "--seq-len=128", "--sim-gpu=2", "--gpu-memory=300MB"),
    *("--sample-tokens=0", "--save-every=0", "--grad-clip=1"),
)
STEPS: Final = 5
SLOW: Final = ("0.25GB/s", "1GB/s")
"""Rates of simulated links."""


def xl(args: argparse.Namespace) -> dict[str, Any]:
    """GPT-2 XL in virtual time."""
    rows, cases = [], {}
    for link in args.links:
        flags = [*XL_FLAGS, f"--link={link}"]
        device = plan([*flags, "--update-on=device"])
        cases[f"{link}, device"] = {name: device[name] for name in KEPT}
        for rate in args.ram_rates:
            auto = plan([*flags, "--update-on=auto", f"--ram-rate={rate}"])
            cpu = auto if auto["update_on"] == "cpu" else plan([*flags, "--update-on=cpu", f"--ram-rate={rate}"])
            cases |= {f"{link}, RAM {rate}, {mode}": {name: each[name] for name in KEPT} for mode, each in (("cpu", cpu), ("auto", auto))}
            what, seconds = f"GPT-2 XL, link {link}, RAM {rate}", (device["seconds_per_step"], cpu["seconds_per_step"])
            rows.append(common.compare(f"{what}, updates by CPU", "s a step", seconds[1], "device", seconds[0], better="less", bar="ratio <= 1.0"))
            rows.append(
                common.compare(f"{what}, auto", "s a step", auto["seconds_per_step"], "the better", min(seconds), better="less", bar="ratio <= 1.03")
            )
            for row in rows[-2:]:
                print(row, file=sys.stderr, flush=True)
    return {"comparisons": rows, "cases": cases}


def runs(args: argparse.Namespace) -> dict[str, Any]:
    """GPT-2 small on simulated devices."""
    rows, cases = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for rate in SLOW:
            found = {}
            for mode in ("device", "cpu"):
                workers = ["--ncpu=0"] if mode == "device" else ["--ncpu=2"]
                flags = [*RUN_FLAGS, f"--steps={STEPS}", f"--update-on={mode}", f"--sim-gpu=2@{rate}", *workers]
                found[mode] = train(flags, Path(folder) / f"{mode}-{rate.replace('/', '-')}")
                cases[f"{rate}, {mode}"] = found[mode]
            if found["cpu"]["losses"] != found["device"]["losses"]:
                raise SystemExit(f"losses differ: {found}")
            what = f"GPT-2 small, two simulated devices of 300 MB, links of {rate}, updates by CPU"
            rows.append(
                common.compare(what, "s a step", found["cpu"]["seconds"], "device", found["device"]["seconds"], better="less", bar="ratio <= 1.0")
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return {"comparisons": rows, "cases": cases}


def main() -> None:
    """Run a suite."""
    parser = common.parser(__doc__, None)
    parser.add_argument("--suite", choices=("xl", "runs"), default="xl")
    parser.add_argument("--links", nargs="+", default=[*LINKS])
    parser.add_argument("--ram-rates", nargs="+", default=[*RAM_RATES])
    args = parser.parse_args()
    found = {"xl": xl, "runs": runs}[args.suite](args)
    name = f"update_{args.suite}" if args.output is None else args.output
    common.finish(name, common.machine(), ("numpy",), {"rounds": 1}, **found)


if __name__ == "__main__":
    main()
