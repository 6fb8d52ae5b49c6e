// A pair of tiles of attention, as `reference/attention.Pair` and the extents of the tiles; what both kinds of kernels ask of it.

#pragma once

struct Pair {
    int head_size, causal, q_start, k_start, b_start, h_start, num_heads, length, stream;
    u32 threshold;
    float scale, p;
    int tq, tk, heads, groups;  // of the tiles
};

// Factor of a weight: 0 or 1 / (1 - p)
__device__ inline float survival(Pair at, u64 key, int b, int h, int i, int j) {
    u64 row = ((u64)(at.b_start + b) * at.num_heads + at.h_start + h) * at.length + at.q_start + i;
    return random_bits(key, row * at.length + at.k_start + j) >= at.threshold ? 1.0f / (1.0f - at.p) : 0.0f;
}

// Whether key j of the tile counts for query i
__device__ inline int sees(Pair at, int i, int j) { return j < at.tk && i < at.tq && (!at.causal || at.k_start + j <= at.q_start + i); }
