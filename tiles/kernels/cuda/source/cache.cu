// Attention of new tokens over a cache of keys and values, tile by tile of it.
//
// q, o (b, w, h D), keys, values (b, t, g D) with the positions start to start + t, g divides h; positions (b, w) of the new tokens; peak, total
// (b, h, w), running maxima and sums.

#include "common.cuh"
#include "runs.cuh"

// keys[b, positions[b, i] - start] = k[b, i], values likewise, where that lies in the tile  // k, v (b, w, width), keys, values (b, t, width)
KERNEL append_to_cache(const T *k, const T *v, const int *positions, T *keys, T *values, int start, int num_new, int length, int width, long long count) {
    EACH(n, count) {
        long long row = n / width, b = row / num_new;
        int at = positions[row] - start;
        if (at >= 0 && at < length) {
            long long place = (b * length + at) * width + n % width;
            keys[place] = k[n];
            values[place] = v[n];
        }
    }
}
EXPORT(append_to_cache)

// Grid: (new tokens, h, b): one tile of the cache added to the running attention of a token, which sees positions up to its own,
// the last `window` of them if that is not 0. `table` (buckets, heads): a number for each distance, or null. `cap`: of the scores, or 0.
KERNEL cached_attention(
    const T *q, const T *keys, const T *values, const int *positions, T *o, float *peak, float *total, float scale, int start, int length, int size,
    int heads, int groups, int first, int last, const T *table, Runs runs, int window, float cap) {
    SHARED(float, buffer);
    int w = blockIdx.x, num_new = gridDim.x, h = blockIdx.y, b = blockIdx.z, g = h / (heads / groups), t = threadIdx.x;
    float *Q = buffer + blockDim.x, *S = Q + size;
    long long row = (long long)b * num_new + w, statistics = ((long long)b * heads + h) * num_new + w;
    int seen = positions[row] - start + 1 < length ? positions[row] - start + 1 : length;
    int unseen = window && positions[row] - window + 1 - start > 0 ? positions[row] - window + 1 - start : 0;
    float before = first ? (window ? -1e30f : -INFINITE) : peak[statistics], top = before, sum = 0.0f;
    q += (row * heads + h) * size;
    o += (row * heads + h) * size;
    keys += ((long long)b * length * groups + g) * size;
    values += ((long long)b * length * groups + g) * size;
    for (int d = t; d < size; d += blockDim.x) Q[d] = widen(q[d]);
    __syncthreads();
    for (int j = unseen + t; j < seen; j += blockDim.x) {
        float score = 0.0f;
        for (int d = 0; d < size; d++) score += Q[d] * widen(keys[(long long)j * groups * size + d]);
        S[j] = cap != 0.0f ? cap * tanhf(scale * score / cap) : scale * score;
        if (table) S[j] += widen(table[bucket_of(runs, start + j - positions[row]) * heads + h]);
        top = larger(top, S[j]);
    }
    top = block_max(top, buffer);
    for (int j = unseen + t; j < seen; j += blockDim.x) {
        S[j] = expf(S[j] - top);
        sum += S[j];
    }
    sum = block_sum(sum, buffer);
    float shrink = before != -INFINITE ? expf(before - top) : 0.0f, all = (first ? 0.0f : total[statistics] * shrink) + sum;
    for (int d = t; d < size; d += blockDim.x) {
        float out = first ? 0.0f : widen(o[d]) * shrink;
        for (int j = unseen; j < seen; j++) out += S[j] * widen(values[(long long)j * groups * size + d]);
        o[d] = narrow<T>(last ? out / all : out);
    }
    __syncthreads();
    if (t == 0) {
        peak[statistics] = top;
        total[statistics] = all;
    }
}
EXPORT(cached_attention)
