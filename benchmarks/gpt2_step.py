"""GPT-2 small, fp32, 4 x 1024 tokens a step, AdamW: our recorded step beside eager PyTorch.

    python benchmarks/gpt2_step.py                                     # three rounds, writes benchmarks/results/gpt2_step.json
    python benchmarks/gpt2_step.py --rounds 1 --steps 1 --output=      # a quick look, written nowhere
    python benchmarks/gpt2_step.py --peers transformers torch torch-malloc torch-compile

A measurement is: build, warm-up steps, then `--steps` timed steps of random tokens; tokens per second over the timed ones and the process's peak
resident memory over everything. Bars, against `transformers` and `torch`: at least 1.0 x the tokens per second, at most 0.7 x the peak memory.

Peers: `transformers` is the library's GPT2LMHeadModel with sdpa attention, `torch` the hand-written model of `torch_gpt2`, which is quicker and
smaller. `torch-malloc` is `torch` with glibc told to keep freed buffers (faster, larger), `torch-compile` is `torch` behind torch.compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common

BATCH: Final = 4
LENGTH: Final = 1024
SMALL: Final = {"vocab": 50257, "positions": 1024, "width": 768, "num_layers": 12, "num_heads": 12}
TINY: Final = {"vocab": 512, "positions": 1024, "width": 64, "num_layers": 2, "num_heads": 4}
LEARNING_RATE: Final = 3e-4
KEEP: Final = str(1 << 40)
ENVIRONMENT: Final = {
    "ours": common.one_thread_blas(),
    "torch-malloc": {"MALLOC_MMAP_THRESHOLD_": KEEP, "MALLOC_TRIM_THRESHOLD_": KEEP, "MALLOC_TOP_PAD_": str(64 << 20)},
}
PEERS: Final = {
    "transformers": "torch eager, transformers model",
    "torch": "torch eager, hand-written model",
    "torch-malloc": "the same, malloc keeping freed buffers",
    "torch-compile": "torch.compile, hand-written model",
}
JUDGED: Final = ("transformers", "torch")
FIGURES: Final = (
    ("GPT-2 small step, fp32, 4 x 1024 tokens", "tokens/s", "tokens_per_second", "more", "ratio >= 1.0"),
    ("the same, peak resident memory", "bytes", "peak_rss_bytes", "less", "ratio <= 0.7"),
)

Step = Callable[[Any, Any], Any]


def batches(vocab: int, number: int) -> list[tuple[Any, Any]]:
    """`number` pairs of (B, T) token ids and targets, the same for every side."""
    generator = np.random.default_rng(0)
    streams = generator.integers(0, vocab, (number, BATCH, LENGTH + 1), dtype=np.int64)
    return [(stream[:, :-1].copy(), stream[:, 1:].copy()) for stream in streams]


def measure(side: str, sizes: dict[str, int], warmup: int, steps: int, workers: int) -> dict[str, float]:
    """Run one side in this process."""
    data = batches(sizes["vocab"], warmup + steps)
    run = run_ours if side == "ours" else run_torch
    times, loss = run(side, sizes, data, warmup, workers)
    seconds = times[-1] - times[0]
    return {
        "tokens_per_second": steps * BATCH * LENGTH / seconds,
        "seconds_per_step": seconds / steps,
        "peak_rss_bytes": common.peak_rss(),
        "loss_last": loss,
    }


def run_ours(side: str, sizes: dict[str, int], data: list[tuple[Any, Any]], warmup: int, workers: int) -> tuple[list[float], float]:
    """Clock readings at the end of warm-up and at the very end, and the last loss; steps overlap in between, as they do in training."""
    from nntask import GPT2, AdamW, GPT2Config, default_tiling
    from scheduler import Runtime

    config = GPT2Config(
        vocab_size=sizes["vocab"],
        n_positions=sizes["positions"],
        n_embd=sizes["width"],
        n_layer=sizes["num_layers"],
        n_head=sizes["num_heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    with Runtime(cpu_workers=workers) as runtime:
        model = GPT2(config, default_tiling(config, BATCH, LENGTH), runtime)
        optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
        tokens, targets = model.input_tensors(batch=BATCH, seq_len=LENGTH)
        with runtime.record() as step:
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
        begin = perf_counter()
        for number, (ids, following) in enumerate(data):
            if number == warmup:
                runtime.wait()
                begin = perf_counter()
            tokens.write(ids)
            targets.write(following)
            optimizer.prepare(number + 1)
            ticket = step.replay()
        value = ticket.read(loss)
        runtime.wait()
        return [begin, perf_counter()], float(value.reshape(()))


def run_torch(side: str, sizes: dict[str, int], data: list[tuple[Any, Any]], warmup: int, workers: int) -> tuple[list[float], float]:
    """Clock readings from the end of warm-up on, one per step, and the last loss."""
    import torch

    torch.set_num_threads(workers)
    torch.manual_seed(0)
    model: Any
    if side == "transformers":
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=sizes["vocab"],
            n_positions=sizes["positions"],
            n_embd=sizes["width"],
            n_layer=sizes["num_layers"],
            n_head=sizes["num_heads"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            attn_implementation="sdpa",
        )
        library = GPT2LMHeadModel(config).train()

        def model(tokens: Any, targets: Any) -> Any:
            logits = library(tokens).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

        parameters = library.parameters()
    else:
        from torch_gpt2 import GPT2

        model = GPT2(**sizes).train()
        parameters = model.parameters()
        if side == "torch-compile":
            model = torch.compile(model)
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    times, loss = [], torch.tensor(0.0)
    for number, (tokens, targets) in enumerate(data):
        if number == warmup:
            times.append(perf_counter())
        optimizer.zero_grad(set_to_none=True)
        loss = model(torch.from_numpy(tokens), torch.from_numpy(targets))
        loss.backward()
        optimizer.step()
        value = loss.item()
        if number >= warmup:
            times.append(perf_counter())
    return times, value


def comparisons(found: dict[str, common.Measurement]) -> list[dict[str, Any]]:
    """Ours beside every peer: speed and memory."""
    ours, rows = found["ours"], []
    for peer in (name for name in found if name != "ours"):
        for what, unit, key, better, bar in FIGURES:
            promise = bar if peer in JUDGED else ""
            rows.append(common.compare(what, unit, ours[key], PEERS[peer], found[peer][key], better=better, bar=promise))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs")
    parser.add_argument("--warmup", type=int, default=1, help="untimed steps of a run")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a run")
    parser.add_argument("--workers", type=int, default=common.usable_cores(), help="threads of each side")
    parser.add_argument("--peers", nargs="*", default=["transformers", "torch"], choices=list(PEERS))
    parser.add_argument("--tiny", action="store_true", help="a toy model, to try the script itself")
    parser.add_argument("--output", default="gpt2_step", help="name of the result; empty: print it only")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = TINY if options.tiny else SMALL
    if options.side:
        common.report(measure(options.side, sizes, options.warmup, options.steps, options.workers))
        return
    again = [f"--{name}={getattr(options, name)}" for name in ("warmup", "steps", "workers")] + ["--tiny"] * options.tiny
    sides = [common.Side(n, common.this_script(__file__, f"--side={n}", *again), ENVIRONMENT.get(n, {})) for n in ("ours", *options.peers)]
    machine = common.machine()
    rounds = common.alternate(sides, options.rounds)
    middle = {name: common.medians(measured) for name, measured in rounds.items()}
    result = {
        "machine": machine,
        "versions": common.versions("nntask", "numpy", "torch", "transformers"),
        "settings": {"model": sizes, "batch": BATCH, "length": LENGTH} | {n: getattr(options, n) for n in ("rounds", "warmup", "steps", "workers")},
        "comparisons": comparisons(middle),
        "medians": middle,
        "rounds": rounds,
    }
    common.finish(options.output, result, measured=not options.tiny)


if __name__ == "__main__":
    main()
