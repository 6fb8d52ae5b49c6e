"""Kernels of a GPT-2 training step beside torch's operations and plain NumPy, on one thread, at the tile shapes of the committed table.

    python benchmarks/kernels.py               # five rounds, writes benchmarks/results/kernels.json
    python benchmarks/kernels.py --tiny        # small tiles, one round, written nowhere
    python benchmarks/kernels.py --only gelu   # the cases whose names begin so, written nowhere

All sides run in one process and take turns; each works through sets of arrays that together exceed the caches, and so does the copy that
memory-bound kernels are compared with. A figure is the median over rounds of the median call of a round. torch has one thread and an allocator that
keeps freed buffers (glibc's mallopt), so that no page of its fresh outputs is taken anew: its best case, not its default. Ours and torch's
outputs are compared before anything is timed.

Bars: at least torch's speed; memory-bound kernels at least 0.8 of the bandwidth of the copy. `kernel_case` defines the bytes that must move.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final

import common
import numpy as np

COLD_BYTES: Final = 96 << 20
MOST_SETS: Final = 16
SECONDS: Final = 0.03
"""Of one side in one round, about; at least one call."""
TOLERANCE: Final = 2e-3
"""Of the largest value of an output: fp32 sums over thousands of terms in different orders."""
_MALLOPT: Final = {"mmap_max": (-4, 0), "trim_threshold": (-1, 2**31 - 1)}


def keep_buffers() -> bool:
    """Let the C library keep what is freed; False where it is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(mallopt(*option) for option in _MALLOPT.values())


def agree(case: Any, arrays: dict[str, Any]) -> None:
    """Run ours and torch's from the same contents and compare the outputs.

    Raises:
        SystemExit: they differ.
    """
    import torch

    before = {name: value.copy() for name, value in arrays.items() if isinstance(value, np.ndarray)}
    case.ours(arrays)
    found = {name: arrays[name].astype(np.float64) for name in case.checked}
    for name, value in before.items():
        arrays[name][...] = value
    if "lse" in before:
        case.ours(arrays)  # what the backward pass of the peer reads
        for name in case.checked:
            arrays[name][...] = before[name]
    for name in ("o", "lse"):
        if name in arrays:
            arrays[f"{name}_t"] = torch.from_numpy(arrays[name])
    case.torch(arrays)
    for name in case.checked:
        theirs = arrays[f"{name}_t"].detach().to(torch.float64).numpy().reshape(found[name].shape)
        away, size = float(np.abs(found[name] - theirs).max()), float(np.abs(theirs).max())
        if not away <= TOLERANCE * size:
            raise SystemExit(f"{case.name}: {name} differs from torch's by {away:.3g}, its largest value is {size:.3g}")


def measure(case: Any, rounds: int) -> dict[str, list[float]]:
    """Seconds of a call of each side in each round, and of a copy as large as the case's largest array."""
    generator = np.random.default_rng(0)
    sets = [case.make(generator)]
    agree(case, sets[0])
    size = sum(array.nbytes for array in sets[0].values() if isinstance(array, np.ndarray))
    sets += [case.make(generator) for _ in range(min(MOST_SETS, -(-COLD_BYTES // size)) - 1)]
    largest = max((array for array in sets[0].values() if isinstance(array, np.ndarray)), key=lambda array: array.nbytes)
    copies = [np.ones((2, largest.nbytes // 4), np.float32) for _ in range(max(2, min(MOST_SETS, -(-COLD_BYTES // (2 * largest.nbytes)))))]
    sides: dict[str, tuple[Callable[[Any], object], Sequence[Any]]] = {
        "ours": (case.ours, sets),
        "torch": (case.torch, sets),
        "numpy": (case.numpy, sets),
        "copy": (lambda pair: np.copyto(pair[1], pair[0]), copies),
    }
    calls = {name: _calls(*side) for name, side in sides.items()}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (action, arrays) in sides.items():
            found[name].append(_median(action, arrays, calls[name]))
    found["copy_bytes"] = [2.0 * largest.nbytes]
    return found


def _calls(action: Callable[[Any], object], arrays: Sequence[Any]) -> int:
    """How many calls fill a turn; runs every set once, which is the warm-up."""
    begin = perf_counter()
    for each in arrays:
        action(each)
    return int(min(4 * len(arrays), max(1, SECONDS * len(arrays) / (perf_counter() - begin))))


def _median(action: Callable[[Any], object], arrays: Sequence[Any], calls: int) -> float:
    seconds = []
    for number in range(calls):
        each = arrays[number % len(arrays)]
        begin = perf_counter()
        action(each)
        seconds.append(perf_counter() - begin)
    return statistics.median(seconds)


def rates(case: Any, found: dict[str, list[float]]) -> common.Measurement:
    """GB/s of what must move, or GF/s, of each side; and the copy's GB/s."""
    work = case.nbytes or case.flops
    middle = {side: work / statistics.median(found[side]) / 1e9 for side in ("ours", "torch", "numpy")}
    return middle | {"copy": found["copy_bytes"][0] / statistics.median(found["copy"]) / 1e9}


def comparisons(case: Any, rate: common.Measurement) -> list[dict[str, Any]]:
    """Rows of one case: beside torch, and beside the copy where memory binds."""
    unit = "GB/s" if case.nbytes else "GF/s"
    rows = [common.compare(case.name, unit, rate["ours"], "torch, one thread", rate["torch"], better="more", bar="ratio >= 1.0")]
    if case.nbytes:
        rows.append(common.compare(case.name, unit, rate["ours"], "copy", rate["copy"], better="more", bar="ratio >= 0.8"))
    return rows


def tiles(tiny: bool) -> Any:
    """Shapes of the tiles of GPT-2 small at 4 x 1024 tokens, or small ones."""
    from kernel_case import Shape

    if tiny:
        return Shape(tokens=64, width=32, inner=128, num_heads=2, vocab=96)
    from nntask import PRESETS, default_tiling

    config = PRESETS["gpt2"]
    tiling = default_tiling(config, 4, 1024)
    return Shape(tiling.seq_tile * tiling.minibatch_tile, tiling.embd_tile, tiling.inner_tile, tiling.head_tile, tiling.vocab_tile)


def main() -> None:
    parser = common.parser(__doc__, "kernels")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--only", default="", help="cases whose names begin so; written nowhere")
    parser.add_argument("--tiny", action="store_true", help="small tiles, to try the script; written nowhere")
    options = parser.parse_args()
    kept = keep_buffers()
    import torch
    from kernel_cases import cases

    torch.set_num_threads(1)
    machine, shape = common.machine(), tiles(options.tiny)
    rows, middle, rounds = [], {}, {}
    print(f"{'':50} {'nntask':>8} {'torch':>8} {'numpy':>8} {'copy':>8}")
    for case in cases(shape):
        if not case.name.startswith(options.only):
            continue
        rounds[case.name] = measure(case, options.rounds)
        middle[case.name] = rate = rates(case, rounds[case.name])
        rows += comparisons(case, rate)
        unit = "GB/s" if case.nbytes else "GF/s"
        print(f"{case.name:50} {rate['ours']:8.2f} {rate['torch']:8.2f} {rate['numpy']:8.2f} {rate['copy']:8.2f} {unit} (copy GB/s)", flush=True)
    if not rows:
        parser.error(f"--only {options.only}: no case begins so")
    common.finish(
        options.output,
        machine,
        ("nntask", "numpy", "numba", "torch"),
        {"rounds": options.rounds, "threads": 1, "torch_keeps_buffers": kept, **{name: getattr(shape, name) for name in shape.__slots__}},
        rows,
        keep=not (options.tiny or options.only),
        medians=middle,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
