"""How time grows: with workers, with sequences in a batch, and with the length of a sequence; GPT-2 small's shape, fewer layers.

    python benchmarks/growth.py                   # five rounds, writes benchmarks/results/growth.json
    python benchmarks/growth.py --rounds 1 --output=

Every figure is seconds of a training step (fp32, AdamW, dropout 0, tiles from the table), each measured in a process of its own that runs a warm-up
step and then at least two more, for three seconds; the median counts. The vocabulary shrinks with the number of layers, so that the head keeps its
share of the arithmetic. Batches of more than 4 sequences go in minibatches of 4.

- Workers: the step of 4 sequences with all cores and with one. Bar: at least 1.85 x with two cores.
- Batch: 1, 2, 4, 8 and 16 sequences. Time linear in the batch means seconds = a + b x sequences; the figure is the largest relative distance from
  the least-squares line through the medians. Bar: 5 %.
- Length: 256 to 4096 tokens, always 4096 tokens a step. The figure is seconds per model flop (6N + 12 L d n per token, attention counted whole) of
  the longest beside the shortest. Bar: not above 1.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from time import perf_counter
from typing import Any, Final

import common
import numpy as np

LENGTH: Final = 1024
BATCHES: Final = (1, 2, 4, 8, 16)
LENGTHS: Final = (256, 1024, 4096)
MINIBATCH: Final = 4
TOKENS: Final = 4096
LEAST_STEPS: Final = 2
LEAST_SECONDS: Final = 3.0


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step and its model flops, in this process."""
    from nntask import PRESETS, GPT2Config
    from nntask.config import ModelSettings, ResourceSettings, TilingSettings, TrainSettings, resolve
    from nntask.data import Batch
    from nntask.engine import RecordedEngine, runtime_for

    batch, length = options.batch, options.length
    small = PRESETS["gpt2"]
    shape = {"n_layer": options.layers, "n_positions": length, "vocab_size": small.vocab_size * options.layers // small.n_layer}
    if options.tiny:
        shape |= {"n_embd": 32, "n_head": 2, "vocab_size": 128}
    config: GPT2Config = replace(small, **shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    asked = TrainSettings(
        model=ModelSettings(model="gpt2"),
        tiling=TilingSettings(batch=batch, minibatch=min(batch, max(1, MINIBATCH * options.most // length))),
        resources=ResourceSettings(ncpu=options.workers),
    )
    run = resolve(asked, config)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (batch, length + 1)).astype(np.int32)
    data = Batch.causal(ids[:, :-1], ids[:, 1:])
    with runtime_for(run) as runtime:
        engine = RecordedEngine(run, runtime)
        engine.start(1, 1e-4, data).result()
        seconds: list[float] = []
        while len(seconds) < LEAST_STEPS or sum(seconds) < LEAST_SECONDS:
            begin = perf_counter()
            engine.start(2 + len(seconds), 1e-4, data).result()
            seconds.append(perf_counter() - begin)
    return {"seconds": statistics.median(seconds), "flops": common.model_flops(config, length) * batch}


def comparisons(found: dict[str, common.Measurement], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The three claims."""
    seconds = {name: each["seconds"] for name, each in found.items()}
    cores = options.workers
    several = f"batch_{max(n for n in options.batches if n <= MINIBATCH)}"
    speed, alone = 1 / seconds[several], 1 / seconds["one_worker"]
    workers = common.compare(f"a step's speed on {cores} workers", "steps/s", speed, "one worker", alone, better="more", bar=bar_of(cores))
    slope, start = np.polyfit(options.batches, [seconds[f"batch_{n}"] for n in options.batches], 1)
    off = {n: abs(seconds[f"batch_{n}"] / (start + slope * n) - 1) for n in options.batches}
    worst = max(off, key=lambda n: off[n])
    batch = common.compare(
        f"a step of {worst} sequences, furthest from linear among {options.batches[0]} to {options.batches[-1]}",
        "s",
        seconds[f"batch_{worst}"],
        f"{start:.3g} + {slope:.3g} x sequences",
        float(start + slope * worst),
        better="equal",
        bar="ratio in 0.95..1.05",
    )
    rates = {n: found[f"length_{n}"]["seconds"] / found[f"length_{n}"]["flops"] * 1e12 for n in options.lengths}
    shortest, longest = options.lengths[0], options.lengths[-1]
    length = common.compare(
        f"seconds per 10^12 model flops, sequences of {longest} tokens",
        "s",
        rates[longest],
        f"sequences of {shortest}",
        rates[shortest],
        better="less",
        bar="ratio <= 1.0",
    )
    return [workers, batch, length]


def bar_of(workers: int) -> str:
    """The promise is about two workers."""
    return "ratio >= 1.85" if workers == 2 else ""


def main() -> None:
    parser = common.parser(__doc__, "growth")
    parser.add_argument("--rounds", type=int, default=5, help="times each side runs")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model")
    parser.add_argument("--workers", type=int, default=common.usable_cores(), help="workers of all sides but one")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="sequences of a step, rising")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens of a sequence, rising")
    parser.add_argument("--most", type=int, default=LENGTH, help="tokens of a sequence while batches and workers are compared")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of a step while lengths are compared")
    parser.add_argument("--tiny", action="store_true", help="a toy model, to try the script itself")
    parser.add_argument("--batch", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.batch:
        common.report(measure(options))
        return

    def side(name: str, batch: int, length: int, workers: int) -> common.Side:
        again = [f"--batch={batch}", f"--length={length}", f"--workers={workers}", f"--layers={options.layers}", f"--most={options.most}"]
        return common.Side(name, common.this_script(__file__, *again, *["--tiny"] * options.tiny), common.one_thread_blas())

    sides = [side(f"batch_{n}", n, options.most, options.workers) for n in options.batches]
    sides.append(side("one_worker", max(n for n in options.batches if n <= MINIBATCH), options.most, 1))
    sides += [side(f"length_{n}", max(options.tokens // n, 1), n, options.workers) for n in options.lengths]
    machine, rounds, middle = common.measured(sides, options.rounds)
    names = ("rounds", "layers", "workers", "batches", "lengths", "most", "tokens")
    common.finish(
        options.output,
        machine,
        ("nntask", "numpy"),
        {name: getattr(options, name) for name in names},
        comparisons(middle, options),
        keep=not options.tiny,
        medians=middle,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
