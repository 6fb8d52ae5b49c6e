"""What tracing costs: steps of the model `tiny` on all workers with the trace on and off in turn, in one process.

    python benchmarks/trace_cost.py               # 40 pairs, writes benchmarks/results/trace_cost.json
    python benchmarks/trace_cost.py --pairs 5 --output=

Bar: the median traced step takes at most 1.01 x the median plain one.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

import common
import numpy as np

from nntask import GPT2, PRESETS, AdamW, default_tiling
from scheduler import Runtime, Trace

BATCH, LENGTH = 8, 256


def measure(pairs: int, workers: int) -> tuple[list[float], list[float]]:
    """Seconds of the plain and of the traced steps."""
    config = PRESETS["tiny"]
    trace = Trace(active=False)
    plain: list[float] = []
    traced: list[float] = []
    with Runtime(cpu_workers=workers, trace=trace) as runtime:
        model = GPT2(config, default_tiling(config, BATCH, LENGTH), runtime)
        optimizer = AdamW(model.parameters(), lr=1e-4)
        tokens, targets = model.input_tensors(BATCH, LENGTH)
        with runtime.record() as step:
            model(tokens, targets).backward()
            optimizer.step()
        ids = np.random.default_rng(0).integers(0, config.vocab_size, (BATCH, LENGTH + 1))
        tokens.write(ids[:, :-1])
        targets.write(ids[:, 1:])
        for number in range(2 * pairs + 2):
            optimizer.prepare(number + 1)
            trace.active = number % 2 == 1
            begin = perf_counter()
            step.replay().wait()
            if number > 1:
                (traced if trace.active else plain).append(perf_counter() - begin)
    return plain, traced


def main() -> None:
    parser = common.parser(__doc__, "trace_cost")
    parser.add_argument("--pairs", type=int, default=40, help="plain and traced steps each")
    parser.add_argument("--workers", type=int, default=common.usable_cores(), help="CPU workers")
    options = parser.parse_args()
    machine = common.machine()
    plain, traced = measure(options.pairs, options.workers)
    row = common.compare(
        "a traced step of tiny", "ms", 1e3 * median(traced), "the same, not traced", 1e3 * median(plain), better="less", bar="ratio <= 1.01"
    )
    common.finish(
        options.output,
        machine,
        ("nntask", "numpy"),
        {"model": "tiny", "batch": BATCH, "length": LENGTH, "rounds": options.pairs, "workers": options.workers},
        [row],
    )


if __name__ == "__main__":
    main()
