"""Host time of a task on the CUDA path, and the kernels and driver calls of a step, beside a GPU that computes nothing in no time (`HollowGpu`).

    python benchmarks/gpu/host.py                       # GPT-2 small and XL; writes benchmarks/results/gpu_host.json
    python benchmarks/gpu/host.py --models gpt2 --output=
    python benchmarks/gpu/host.py --models gpt2 --profile    # where the time goes, by function

A step is that of `nntask train`: bf16, 16 sequences of 1,024 tokens in one minibatch, coarse tiles, AdamW with clipping, recorded once and replayed
with two in flight. Everything is in memory. Microseconds are those of the processor, in all threads of the process, from one replay to the next,
over the tasks of a step: so other programs beside it count little. That is the scheduler, the data handed to kernels, arguments, events; not the
calls of the driver themselves, which are counted. Beside it the same with every task by itself. Bars: at most 8 us a task, and half of the 1,628
kernels that a step of GPT-2 small once started.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

GIB: Final = 1 << 30
MODELS: Final = ("gpt2", "gpt2-xl")
MEMORY: Final = 74 * GIB
"""Bytes for tiles on an H100: XL's step needs 58.5 GiB."""
DISK: Final = 1 << 42
"""The last tier, which holds nothing: no bytes are behind it."""
BATCH: Final = 16
SINGLE: Final = "single tasks"
BEFORE: Final = 1628
"""Kernels of a step of GPT-2 small before tiles started together."""
WARM: Final = 6
"""Replays until addresses, graphs and caches are as they stay."""


def measure(size: str, steps: int, *, graphs: bool, profile: bool, in_turn: bool = False) -> dict[str, Any]:
    """Figures of a model's recorded step.

    Args:
        in_turn: whether a step begins when the one before is over: then counts do not depend on who is faster, the program or the worker.
    """
    from nntask import GPT2, PRESETS, AdamW, ModelTiling
    from scheduler import Runtime
    from tiles.kernels import BF16, HollowGpu

    config = replace(PRESETS[size], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    gpu = HollowGpu(2 * MEMORY)
    profiles = _profile_threads() if profile else []
    with (
        tempfile.TemporaryDirectory() as folder,
        Runtime(0, gpus=[gpu], gpu_memory=MEMORY, ram=2 * GIB, disk=(folder, DISK), graphs=graphs) as runtime,
    ):
        model = GPT2(config, ModelTiling().resolve(config, BATCH, config.n_positions), runtime, seed=1, dtype=BF16)
        optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, max_norm=1.0)
        tokens, targets = model.input_tensors(BATCH)
        model.train()
        with runtime.record() as step:
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
        data = np.zeros((BATCH, config.n_positions), np.int32)
        tickets: deque[Any] = deque(maxlen=2)

        def replay(number: int) -> None:
            tokens.write(data)
            targets.write(data)
            optimizer.prepare(number + 1)
            tickets.append(step.replay())
            if number:
                tickets[0].read(loss.data)
            if in_turn:
                runtime.wait()

        found = _timed(runtime, gpu, replay, step.num_tasks, steps)
    for each in profiles:
        pstats.Stats(each, stream=sys.stderr).sort_stats("tottime").print_stats(40)
    return found


def _timed(runtime: Any, gpu: Any, replay: Callable[[int], None], num_tasks: int, steps: int) -> dict[str, Any]:
    """Replay the step and return the figures of the replays after the first `WARM`."""
    wall, processor = [], []
    for number in range(WARM + steps):
        if number == WARM:
            runtime.wait()
            calls, kernels, started = Counter(gpu.calls), Counter(gpu.kernels), runtime.stats()["tasks"]
        now = perf_counter(), process_time()
        replay(number)
        if number >= WARM:
            wall.append(perf_counter() - now[0])
            processor.append(process_time() - now[1])
    runtime.wait()
    for counts in (gpu.kernels - kernels, gpu.calls - calls):
        print(json.dumps({name: count / steps for name, count in counts.most_common()}), file=sys.stderr)
    return {
        "tasks": num_tasks,
        "started_tasks": (runtime.stats()["tasks"] - started) / steps,
        "us_per_task": statistics.median(processor) / num_tasks * 1e6,
        "wall_us_per_task": statistics.median(wall) / num_tasks * 1e6,
        "kernels": (gpu.kernels.total() - kernels.total()) / steps,
        "driver_calls": (gpu.calls.total() - calls.total()) / steps,
    }


def _profile_threads() -> list[cProfile.Profile]:
    """Profile the calling thread, and each that is started from now on; the list grows with them."""
    profiles = [cProfile.Profile()]

    def begin(*_: object) -> None:
        own = cProfile.Profile()
        profiles.append(own)
        own.enable()

    threading.setprofile(begin)
    profiles[0].enable()
    return profiles


def comparisons(size: str, fused: dict[str, float], single: dict[str, float]) -> list[dict[str, Any]]:
    """Rows of a table: a step with its tasks fused beside the same with every task by itself."""
    rows = []
    for key, what, unit in (
        ("us_per_task", "host time a task", "us"),
        ("kernels", "kernels a step", "kernels"),
        ("driver_calls", "calls of the driver a step", "calls"),
    ):
        bar = "ours <= 8" if unit == "us" else f"ours <= {BEFORE // 2}" if key == "kernels" and size == "gpt2" else ""
        rows.append(common.compare(f"{size}, {what}", unit, fused[key], SINGLE, single[key], better="less", bar=bar))
    return rows


def main() -> None:
    parser = common.parser(__doc__, "gpu_host")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--steps", type=int, default=20, help="replays that count")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each model")
    parser.add_argument("--no-graphs", action="store_true", help="single tasks")
    parser.add_argument("--profile", action="store_true", help="print the functions that take longest")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side or options.profile:
        for size in [options.side] if options.side else options.models:
            common.report(measure(size, options.steps, graphs=not options.no_graphs, profile=options.profile))
        return
    sides = [
        common.Side(name, common.this_script(__file__, f"--side={size}", f"--steps={options.steps}", *flags), common.one_thread_blas())
        for size in options.models
        for name, flags in ((size, ()), (f"{size} {SINGLE}", ("--no-graphs",)))
    ]
    machine, rounds, middle = common.measured(sides, options.rounds)
    common.finish(
        options.output,
        machine,
        ("nntask", "numpy"),
        {"steps": options.steps, "rounds": options.rounds},
        [row for size in options.models for row in comparisons(size, middle[size], middle[f"{size} {SINGLE}"])],
        medians=middle,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
