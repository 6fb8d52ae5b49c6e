"""Random programs over tiles, for memories that hold a part of them."""

from __future__ import annotations

import random

import numpy as np

from scheduler import Runtime
from tiles import TileTensor
from tiles.ops.elementwise import add, copy, scale
from tiles.ops.matmul import matmul

SIZE, TILE = 192, 64
NBYTES = 4 * TILE * TILE
"""Of a tile."""


def program(runtime: Runtime, seed: int, num_actions: int = 40) -> np.ndarray:
    """Sums, products, copies and scalings of matrices of 3 x 3 tiles, chosen by chance; some are read and written by the program in between."""
    chance, rng = random.Random(seed), np.random.default_rng(seed)
    with runtime:
        tensors = []
        for _ in range(6):
            tensor = TileTensor(runtime, (SIZE, SIZE), (TILE, TILE), np.float32)
            tensor.write(rng.standard_normal((SIZE, SIZE)).astype(np.float32))
            tensors.append(tensor)
        for _ in range(num_actions):
            at, (a, b) = chance.randrange(6), chance.sample(range(6), 2)
            action = chance.randrange(5)
            if action == 0:
                tensors[at] = add(tensors[a], tensors[b])
            elif action == 1:
                tensors[at] = copy(tensors[a])
            elif action == 2:
                tensors[at] = scale(tensors[a], 0.5)
            elif action == 3:
                tensors[at] = scale(matmul(tensors[a], tensors[b]), 1 / SIZE)
            else:
                tensors[at].write(np.clip(tensors[at].read(), -2, 2))
        return np.stack([np.clip(tensor.read(), -1e3, 1e3) for tensor in tensors])
