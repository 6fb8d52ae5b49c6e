"""How small a tile may be: replayed fp32 matrix products of 256 x 256 x 256 and 128 x 128 x 128 beside one large product per core.

    python benchmarks/small_tiles.py              # five rounds, writes benchmarks/results/small_tiles.json
    python benchmarks/small_tiles.py --output=    # written nowhere

Each round is a process. In it square matrices are multiplied in turn: of 2048 x 2048 by one call of the BLAS per core, all cores at once, each on
matrices of its own, which gives the rate of a core; then of 1024 x 1024, which stay in the last cache, as a recorded step of tile products
(`tiles.ops.matmul`) on one worker per core, replayed so often that the operations are as many. The figure is floating-point operations per second of
all cores together, each the median of the repetitions. Bars: 0.9 of the large product for tiles of 256, 0.75 for tiles of 128.
"""

from __future__ import annotations

import argparse
import statistics
import threading
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Any, Final

import common
import numpy as np

LARGE: Final = 2048
EXTENT: Final = 1024
BARS: Final = {256: "ratio >= 0.9", 128: "ratio >= 0.75"}


def replays(extent: int, tile: int, number: int, workers: int, stack: ExitStack) -> Callable[[], None]:
    """A recorded product of two square matrices in square tiles, on a runtime that `stack` closes; each call replays it so often, and waits."""
    from scheduler import Runtime
    from tiles import TileTensor
    from tiles.ops import matmul

    runtime = stack.enter_context(Runtime(cpu_workers=workers))
    rng = np.random.default_rng(0)
    shape, cut = (extent, extent), (tile, tile)
    a, b, c = (TileTensor(runtime, shape, cut, np.float32, kind="persistent", name=name) for name in "abc")
    for tensor in (a, b):
        tensor.write(rng.standard_normal(shape, np.float32))
    with runtime.record() as step:
        matmul.matmul(a, b, out=c)
    step.replay().wait()
    if not np.allclose(c.read()[:8], a.read()[:8] @ b.read(), rtol=1e-3, atol=1e-3):
        raise SystemExit(f"the product in tiles of {tile} is wrong")

    def run() -> None:
        for _ in range(number):
            ticket = step.replay()
        ticket.wait()

    return run


def large_products(extent: int, threads: int) -> Callable[[], None]:
    """One product per thread, all at once."""
    from tiles.kernels import gemm

    rng = np.random.default_rng(0)
    operands = [tuple(rng.standard_normal((extent, extent), np.float32) for _ in range(3)) for _ in range(threads)]

    def run() -> None:
        running = [threading.Thread(target=gemm, args=each) for each in operands]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    return run


def measure(large: int, extent: int, tiles: list[int], repetitions: int, workers: int) -> dict[str, float]:
    """Flop/s of the large products and of each size of tile, on all workers together."""
    number = max(1, workers * (large // extent) ** 3)
    with ExitStack() as stack:
        sides = {"large": (2.0 * large**3 * workers, large_products(large, workers))}
        sides |= {f"tiles_{tile}": (2.0 * extent**3 * number, replays(extent, tile, number, workers, stack)) for tile in tiles}
        for _, run in sides.values():
            run()
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repetitions):
            for name, (work, run) in sides.items():
                begin = perf_counter()
                run()
                rates[name].append(work / (perf_counter() - begin))
    return {name: statistics.median(found) for name, found in rates.items()}


def comparisons(found: common.Measurement, tiles: list[int]) -> list[dict[str, Any]]:
    """Each size of tile beside the large product."""
    large = found["large"] / 1e9
    return [
        common.compare(
            f"replayed GEMM tasks of {tile} x {tile} x {tile}",
            "GF/s",
            found[f"tiles_{tile}"] / 1e9,
            "one large GEMM per core",
            large,
            better="more",
            bar=BARS.get(tile, ""),
        )
        for tile in tiles
    ]


def main() -> None:
    parser = common.parser(__doc__, "small_tiles")
    parser.add_argument("--rounds", type=int, default=5, help="processes")
    parser.add_argument("--repetitions", type=int, default=15, help="products of each kind in a process")
    parser.add_argument("--large", type=int, default=LARGE, help="rows and columns of the matrices that one call multiplies")
    parser.add_argument("--extent", type=int, default=EXTENT, help="rows and columns of the matrices in tiles")
    parser.add_argument("--tiles", type=int, nargs="+", default=list(BARS), help="rows and columns of a tile")
    parser.add_argument("--workers", type=int, default=common.usable_cores(), help="workers, and threads of the large products")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        common.report(measure(options.large, options.extent, options.tiles, options.repetitions, options.workers))
        return
    again = [f"--{name}={getattr(options, name)}" for name in ("large", "extent", "repetitions", "workers")] + ["--tiles", *map(str, options.tiles)]
    machine = common.machine()
    side = common.Side("tiles", common.this_script(__file__, "--side", *again), common.one_thread_blas())
    rounds = common.alternate([side], options.rounds)
    middle = common.medians(rounds["tiles"])
    common.finish(
        options.output,
        machine,
        ("nntask", "numpy"),
        {name: getattr(options, name) for name in ("rounds", "repetitions", "large", "extent", "tiles", "workers")},
        comparisons(middle, options.tiles),
        medians=middle,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
