// A pair of tiles of attention, as `reference/attention.Pair` and the extents of the tiles; what both kinds of kernels ask of it.

#pragma once

#define FLOOR -1e30f  // where running maxima begin when a row may see no key at all

struct Pair {
    int head_size, causal, q_start, k_start, b_start, h_start, num_heads, length, stream;
    u32 threshold;
    float scale, p;
    int tq, tk, heads, groups;  // of the tiles
    int row, window, may_blind;
    float cap;
    const int *of_queries, *of_keys;  // documents (b, tq), (b, tk), or null
    const float *bias;                // (heads, tq + tk - 1), first that of the last query and the first key, or null
};

// Factor of a weight: 0 or 1 / (1 - p)
__device__ inline float survival(Pair at, u64 key, int b, int h, int i, int j) {
    u64 row = ((u64)(at.b_start + b) * at.num_heads + at.h_start + h) * at.length + at.q_start + i;
    return random_bits(key, row * at.row + at.k_start + j) >= at.threshold ? 1.0f / (1.0f - at.p) : 0.0f;
}

__device__ inline int same_document(Pair at, int b, int i, int j) {
    return at.of_queries[(long long)b * at.tq + i] == at.of_keys[(long long)b * at.tk + j];
}

// Whether key j of the tile counts for query i of sequence b
__device__ inline int sees(Pair at, int b, int i, int j) {
    if (j >= at.tk || i >= at.tq) return 0;
    int distance = at.k_start + j - (at.q_start + i);
    if ((at.causal && distance > 0) || (at.window && distance <= -at.window)) return 0;
    return !at.of_queries || same_document(at, b, i, j);
}

// The first key that a query sees, and one past the last key that it sees, without regard to documents; and the same of keys and the queries that see them
__device__ inline int first_key(Pair at, int i) { return at.window ? max(0, at.q_start + i - at.window + 1 - at.k_start) : 0; }

__device__ inline int end_of_keys(Pair at, int end) { return at.causal ? min(at.tk, at.q_start + end - at.k_start) : at.tk; }

__device__ inline int first_query(Pair at, int j) { return at.causal ? max(0, at.k_start + j - at.q_start) : 0; }

__device__ inline int end_of_queries(Pair at, int end) { return at.window ? min(at.tq, at.k_start + end - 1 + at.window - at.q_start) : at.tq; }

__device__ inline void range_of_keys(Pair at, int i, int &low, int &high) {
    low = first_key(at, i);
    high = i < at.tq ? end_of_keys(at, i + 1) : 0;
}

__device__ inline void range_of_queries(Pair at, int j, int &low, int &high) {
    low = first_query(at, j);
    high = j < at.tk ? end_of_queries(at, j + 1) : 0;
}

// Whether none of the queries [start, start + num_queries) sees any of the keys [from, from + num_keys), but for documents
__device__ inline int sees_none(Pair at, int start, int num_queries, int from, int num_keys) {
    return start >= at.tq || from >= end_of_keys(at, start + num_queries) || from + num_keys <= first_key(at, start);
}

// Whether each of the queries [start, start + num_queries) sees all keys [from, from + num_keys)
__device__ inline int sees_all(Pair at, int start, int num_queries, int from, int num_keys) {
    return start + num_queries <= at.tq && from + num_keys <= end_of_keys(at, start + 1) && from >= first_key(at, start + num_queries - 1) &&
           !at.of_queries;
}

// Whether all keys [from, from + num_keys) are later than all queries [start, start + num_queries), or in front of their windows
__device__ inline int is_later(Pair at, int start, int num_queries, int from) { return at.causal && at.k_start + from > at.q_start + start + num_queries - 1; }

__device__ inline int is_behind(Pair at, int start, int from, int num_keys) {
    return at.window && at.k_start + from + num_keys - 1 <= at.q_start + start - at.window;
}

// The score of key j for query i, from their product
__device__ inline float scored(Pair at, int h, int i, int j, float product) {
    float s = at.scale * product;
    if (at.cap != 0.0f) s = at.cap * tanhf(s / at.cap);
    return at.bias ? s + at.bias[(long long)h * (at.tq + at.tk - 1) + j - i + at.tq - 1] : s;
}

// Slope of the score by the product
__device__ inline float slope_of_score(Pair at, float product) {
    if (at.cap == 0.0f) return at.scale;
    float t = tanhf(at.scale * product / at.cap);
    return at.scale * (1.0f - t * t);
}
