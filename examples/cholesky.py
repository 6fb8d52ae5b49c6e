"""Tiled Cholesky factorisation with the task runtime alone: A = L L^T, lower triangle, in place.

    python examples/cholesky.py --size 2048 --tile 256 --workers 2

The loop is the sequential algorithm. The runtime derives the dependencies of tasks from the tiles that they read and write, so tasks of later columns
start while earlier ones still run. The result is compared with numpy.linalg.cholesky.
"""

import argparse
import itertools
import sys
import time

import numpy as np
from threadpoolctl import threadpool_limits

from scheduler import Codelet, Runtime


def potrf(a):
    """a <- L with L L^T = a, for one diagonal tile."""
    a[:] = np.linalg.cholesky(a)


def trsm(a, b):
    """b <- b a^-T, for a tile below the factorised diagonal tile."""
    b[:] = np.linalg.solve(a, b.T).T


def gemm(a, b, c):
    """c <- c - a b^T, the update of a tile to the right."""
    c -= a @ b.T


def syrk(a, c):
    """c <- c - a a^T, the update of a diagonal tile."""
    c -= a @ a.T


POTRF, TRSM, GEMM, SYRK = (Codelet(kernel.__name__, cpu=kernel) for kernel in (potrf, trsm, gemm, syrk))


def factorise(runtime, tiles):
    """Submit the factorisation of the symmetric matrix whose lower tiles are `tiles[i][j]`, i >= j."""
    for k in range(len(tiles)):
        runtime.submit(POTRF, [(tiles[k][k], "RW")], priority=2)
        for i in range(k + 1, len(tiles)):
            runtime.submit(TRSM, [(tiles[k][k], "R"), (tiles[i][k], "RW")], priority=1)
        for i in range(k + 1, len(tiles)):
            runtime.submit(SYRK, [(tiles[i][k], "R"), (tiles[i][i], "RW")])
            for j in range(k + 1, i):
                runtime.submit(GEMM, [(tiles[i][k], "R"), (tiles[j][k], "R"), (tiles[i][j], "RW")])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, help="rows of the matrix")
    parser.add_argument("--tile", type=int, default=256, help="rows of a tile; the last tile may be smaller")
    parser.add_argument("--workers", type=int, default=None, help="CPU workers (default: one per core)")
    parser.add_argument("--sim-gpus", type=int, default=0, help="simulated devices with their own memory")
    args = parser.parse_args(argv)
    if args.size < 1 or args.tile < 1:
        parser.error(f"--size and --tile must be positive, got {args.size} and {args.tile}")

    random = np.random.default_rng(0).standard_normal((args.size, args.size))
    matrix = random @ random.T + args.size * np.eye(args.size)
    edges = [*range(0, args.size, args.tile), args.size]
    rows = [slice(begin, end) for begin, end in itertools.pairwise(edges)]

    with threadpool_limits(1), Runtime(args.workers, sim_gpus=args.sim_gpus) as runtime:  # parallelism comes from the workers
        tiles = [[new_tile(runtime, matrix[i, j], f"A[{m}, {n}]") for n, j in enumerate(rows[: m + 1])] for m, i in enumerate(rows)]
        start = time.perf_counter()
        factorise(runtime, tiles)
        runtime.wait()
        seconds = time.perf_counter() - start
        factor = np.zeros_like(matrix)
        for m, i in enumerate(rows):
            for n, j in enumerate(rows[: m + 1]):
                with runtime.acquire(tiles[m][n], "R") as tile:
                    factor[i, j] = tile
        tasks = runtime.stats()["tasks"]
    error = np.abs(np.tril(factor) - np.linalg.cholesky(matrix)).max() / np.abs(factor).max()
    print(f"{args.size} x {args.size} in {len(rows)} x {len(rows)} tiles: {tasks} tasks, {seconds * 1e3:.0f} ms, error {error:.1e}")
    return error


def new_tile(runtime, values, name):
    """Return a new handle that holds a copy of `values`."""
    handle = runtime.handle(values.nbytes, lambda memory, offset: np.ndarray(values.shape, values.dtype, memory, offset), name=name)
    with runtime.acquire(handle, "W") as view:
        view[:] = values
    return handle


if __name__ == "__main__":
    sys.exit(1 if main() > 1e-12 else 0)
