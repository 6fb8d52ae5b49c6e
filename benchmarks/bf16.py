"""GPT-2 small in bf16, AdamW on fp32 masters: our recorded step beside PyTorch under bf16 autocast, ours in fp32, and ours in bf16 without oneDNN.

    python benchmarks/bf16.py                                               # five rounds of 4 x 1024, writes benchmarks/results/bf16.json
    python benchmarks/bf16.py --rounds 1 --steps 1 --batch 1 --output=      # a quick look, written nowhere
    python benchmarks/bf16.py --sides torch-bf16-malloc                     # against a chosen side

A measurement is: build, warm-up steps, then `--steps` timed steps of random tokens; tokens per second over the timed ones and the process's peak
resident memory over everything. Bar, against `torch-bf16`: at least 1.0 x the tokens per second. Both compute products in bf16 with sums in fp32;
PyTorch keeps weights and gradients in fp32 and rounds weights at every use, ours keep bf16 weights beside fp32 masters. Our fp32 sides depend on
which code OpenBLAS picks, and OPENBLAS_CORETYPE is therefore written down.
"""

from __future__ import annotations

import argparse
import os
from typing import Any, Final

import common
import numpy as np
import steps as steps_of

LENGTH: Final = 1024
SMALL: Final = {"vocab": 50257, "positions": 1024, "width": 768, "num_layers": 12, "num_heads": 12}
TINY: Final = {"vocab": 512, "positions": 1024, "width": 64, "num_layers": 2, "num_heads": 4}
KEEP: Final = str(1 << 40)
SIDES: Final = {
    "torch-bf16": "torch eager, bf16 autocast, hand-written model",
    "torch-bf16-malloc": "the same, malloc keeping freed buffers",
    "ours-fp32": "nntask in fp32",
    "ours-copies": "nntask in bf16 through fp32 copies (NNTASK_ONEDNN=off)",
}
ENVIRONMENT: Final = {
    "ours": common.one_thread_blas(),
    "ours-fp32": common.one_thread_blas(),
    "ours-copies": {**common.one_thread_blas(), "NNTASK_ONEDNN": "off"},
    "torch-bf16-malloc": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": KEEP},
}
FIGURES: Final = (
    ("GPT-2 small step, bf16", "tokens/s", "tokens_per_second", "more", "ratio >= 1.0"),
    ("the same, peak resident memory", "bytes", "peak_rss_bytes", "less", ""),
)


def measure(side: str, options: argparse.Namespace) -> dict[str, float]:
    """Run one side in this process."""
    sizes = TINY if options.tiny else SMALL
    data = steps_of.batches(sizes["vocab"], options.batch, LENGTH, options.warmup + options.steps)
    run = run_torch if side.startswith("torch") else run_ours
    return steps_of.figures(*run(side, sizes, data, options), options.steps, options.batch * LENGTH)


def run_ours(side: str, sizes: dict[str, int], data: steps_of.Batches, options: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds of the timed steps and the last loss."""
    import ml_dtypes

    from nntask import GPT2Config
    from tiles.kernels import bf16_products, has_bf16_products

    if side == "ours" and not has_bf16_products():
        raise SystemExit(f"this machine computes bf16 in fp32, so there is nothing to compare: {bf16_products()}")
    dtype = np.float32 if side == "ours-fp32" else ml_dtypes.bfloat16
    shape = {"n_embd": sizes["width"], "n_layer": sizes["num_layers"], "n_head": sizes["num_heads"]}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=sizes["vocab"], n_positions=sizes["positions"], **shape, **dropout)
    return steps_of.run_ours(config, data, options.warmup, options.workers, dtype)


def run_torch(side: str, sizes: dict[str, int], data: steps_of.Batches, options: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds of the timed steps and the last loss."""
    import torch
    from torch_gpt2 import GPT2

    torch.set_num_threads(options.workers)
    torch.manual_seed(0)
    model = GPT2(**sizes).train()
    return steps_of.run_torch(model, model.parameters(), data, options.warmup, lambda: torch.autocast("cpu", torch.bfloat16))


def comparisons(found: dict[str, common.Measurement]) -> list[dict[str, Any]]:
    """Ours beside every side: speed and memory."""
    ours, rows = found["ours"], []
    for side in (name for name in found if name != "ours"):
        for what, unit, key, better, bar in FIGURES:
            rows.append(common.compare(what, unit, ours[key], SIDES[side], found[side][key], better=better, bar=bar if side == "torch-bf16" else ""))
    return rows


def main() -> None:
    parser = common.parser(__doc__, "bf16")
    parser.add_argument("--rounds", type=int, default=5, help="times each side runs")
    parser.add_argument("--warmup", type=int, default=1, help="untimed steps of a run")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a run")
    parser.add_argument("--batch", type=int, default=4, help="sequences of 1024 tokens a step")
    parser.add_argument("--workers", type=int, default=common.usable_cores(), help="threads of each side")
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=list(SIDES), help="what to measure ours beside")
    parser.add_argument("--tiny", action="store_true", help="a toy model, to try the script itself")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        common.report(measure(options.side, options))
        return
    names = ("warmup", "steps", "batch", "workers")
    again = [f"--{name}={getattr(options, name)}" for name in names] + ["--tiny"] * options.tiny
    sides = [common.Side(n, common.this_script(__file__, f"--side={n}", *again), ENVIRONMENT.get(n, {})) for n in ("ours", *options.sides)]
    machine, rounds, middle = common.measured(sides, options.rounds)
    common.finish(
        options.output,
        machine,
        ("nntask", "numpy", "torch", "onednn-cpu-gomp"),
        {"model": TINY if options.tiny else SMALL, "length": LENGTH, "openblas_coretype": os.environ.get("OPENBLAS_CORETYPE", "")}
        | {n: getattr(options, n) for n in ("rounds", *names)},
        comparisons(middle),
        keep=not options.tiny,
        medians=middle,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
