// Launches over several tiles, of which tables are among the arguments (`kernels/cuda/many.py`).
//
// Tile n has the blocks from begins[n] to begins[n + 1] of a grid. It has as many as in a launch of its own, and each block the same numbers, so sums
// have the same order.

#pragma once

#define MOST_TILES 64

#define TILE_OF_BLOCK(tile, given)                                                      \
    int tile = 0;                                                                       \
    while (tile + 1 < given.num_tiles && given.begins[tile + 1] <= (int)blockIdx.x) tile++

// Index of this thread among those of its tile, and how many these are
#define NUMBER_OF_THREAD(given, tile) ((long long)(blockIdx.x - given.begins[tile]) * blockDim.x + threadIdx.x)
#define NUM_THREADS(given, tile) ((long long)(given.begins[tile + 1] - given.begins[tile]) * blockDim.x)
