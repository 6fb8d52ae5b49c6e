"""Updates of weights: by the device or by CPU workers, and with moments in fp32 or in 8 bits.

    python benchmarks/memory/update.py                  # GPT-2 XL on one device of 4 GiB, three links; a quarter of an hour
    python benchmarks/memory/update.py --suite runs     # GPT-2 small on two simulated devices with slow links; minutes
    python benchmarks/memory/update.py --suite bytes    # planned bytes of GPT-2 medium with both kinds of moments; minutes
    python benchmarks/memory/update.py --suite losses   # 200 steps of two models with both kinds of moments; an hour

Each writes benchmarks/results/update_SUITE.json. Plans are virtual time (``nntask plan --json``), on no hardware. Simulated devices of the second
suite compute on this machine's cores, which the CPU workers share: its seconds say what traffic costs there, and its losses that they are the same.
A quarter of the memory, in the third, is a quarter of what the step needs with moments in fp32: the same bytes for both, above a disk.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
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
MOMENTS: Final = {"8 bits": "--optimizer=adamw8bit", "fp32": "--optimizer=adamw"}
QUARTERS: Final = {
    "1 x 1,024 tokens": ("--batch=1",),
    "4 x 1,024 tokens, one at a time": ("--batch=4", "--minibatch=1"),
}
"""What a step of GPT-2 medium trains on -> flags."""
LOSS_STEPS: Final = 200
SEEDS: Final = range(4)
"""Seeds of weights and batches. With one, losses of the larger model differ by up to 2 % either way: runs diverge after any rounding."""
LAST: Final = 10
"""Number of steps at the end whose mean loss is compared."""
TEN_MILLION: Final = {"model_type": "gpt2", "vocab_size": 2048, "n_positions": 128, "n_embd": 256, "n_layer": 12, "n_head": 4} | dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)
"""Config of a GPT-2 with 10 million weights."""


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


def fewest_bytes(flags: list[str]) -> float:
    """Bytes that a planned step moves in the order, with or without recomputation, that moves fewest: the fastest depends on this machine's load."""
    return float(min(min(plan([*flags, f"--recompute={mode}"])["forecast_bytes"].values()) for mode in ("none", "block")))


def bytes_of_fastest(flags: list[str]) -> float:
    """Bytes that a step of the chosen plan moves: the fastest with the kernels and the disk of this machine."""
    chosen = plan(flags)
    return float(chosen["forecast_bytes"][chosen["order"]])


def quarters(args: argparse.Namespace) -> dict[str, Any]:
    """GPT-2 medium in a quarter of the memory that a step with moments in fp32 needs, above a disk, in virtual time."""
    rows, cases = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for what, flags in QUARTERS.items():
            shared = ["--model=gpt2-medium", *flags]
            needed = {name: plan([*shared, flag])["needed_bytes"] for name, flag in MOMENTS.items()}
            budget = [f"--ram={needed['fp32'] // 4}B", f"--disk={folder}"]
            by_moments = {name: fewest_bytes([*shared, flag, *budget]) for name, flag in {**MOMENTS, "none": "--optimizer=sgd"}.items()}
            fastest = {name: bytes_of_fastest([*shared, flag, *budget]) for name, flag in MOMENTS.items()}
            cases[what] = {"needed_bytes": needed, "forecast_bytes": by_moments, "forecast_bytes_of_fastest": fastest}
            label = f"GPT-2 medium, {what}, moments in 8 bits"
            rows.append(common.compare(label, "bytes a step", by_moments["8 bits"], "fp32", by_moments["fp32"], better="less", bar="ratio <= 0.5"))
            label = f"GPT-2 medium, {what}, no moments (SGD)"
            rows.append(common.compare(label, "bytes a step", by_moments["none"], "fp32", by_moments["fp32"], better="less"))
            label = f"GPT-2 medium, {what}, moments in 8 bits, the plan that `nntask train` takes"
            rows.append(common.compare(label, "bytes a step", fastest["8 bits"], "fp32", fastest["fp32"], better="less", bar="ratio <= 0.5"))
            print(*rows[-3:], file=sys.stderr, flush=True)
    return {"comparisons": rows, "cases": cases}


def compare_losses(model: str, by_moments: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Mean losses of the last steps, of all seeds together and of each: kind of moments -> seed -> losses of all steps."""
    label = f"{model}, mean loss of steps {LOSS_STEPS - LAST + 1} to {LOSS_STEPS}, moments in 8 bits"
    means = {name: {seed: fmean(values[-LAST:]) for seed, values in by_seed.items()} for name, by_seed in by_moments.items()}
    ours, theirs = (means[name] for name in MOMENTS)
    rows = [common.compare(label, "nats", fmean(ours.values()), "fp32", fmean(theirs.values()), better="equal", bar="ratio in 0.99..1.01")]
    rows += [common.compare(f"{label}, {seed}", "nats", ours[seed], "fp32", theirs[seed], better="equal") for seed in ours]
    print(*rows, file=sys.stderr, flush=True)
    return rows


def losses(args: argparse.Namespace) -> dict[str, Any]:
    """`tiny` with its own batch, and a GPT-2 of 10 million weights with 256 tokens a step, from several seeds."""
    rows, cases = [], {}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(TEN_MILLION))
        models = {"GPT-2 of 10 million weights": [f"--config-path={config}", "--batch=4", "--seq-len=64"], "tiny": ["--model=tiny"]}
        for model, flags in models.items():
            shared = [*flags, f"--steps={LOSS_STEPS}", "--sample-tokens=0", "--save-every=0"]
            by_moments: dict[str, dict[str, list[float]]] = {name: {} for name in MOMENTS}
            for seed in SEEDS:
                for name, flag in MOMENTS.items():
                    run = train([*shared, flag, f"--seed={seed}"], Path(folder) / f"{model} {name} {seed}")
                    by_moments[name][f"seed {seed}"] = run["losses"]
            cases[model] = by_moments
            rows += compare_losses(model, by_moments)
    return {"comparisons": rows, "cases": cases}


SUITES: Final = {"xl": xl, "runs": runs, "bytes": quarters, "losses": losses}


def main() -> None:
    """Run a suite."""
    parser = common.parser(__doc__, None)
    parser.add_argument("--suite", choices=tuple(SUITES), default="xl")
    parser.add_argument("--links", nargs="+", default=[*LINKS])
    parser.add_argument("--ram-rates", nargs="+", default=[*RAM_RATES])
    args = parser.parse_args()
    found = SUITES[args.suite](args)
    name = f"update_{args.suite}" if args.output is None else args.output
    common.finish(name, common.machine(), ("numpy",), {"rounds": 1}, **found)


if __name__ == "__main__":
    main()
