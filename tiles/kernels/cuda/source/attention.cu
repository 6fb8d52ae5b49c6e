// Attention over pairs of query and key tiles: online softmax forward (Dao 2023, algorithm 1), recomputation backward (algorithm 2).
//
// q, o (b, tq, h D), k, v (b, tk, g D), g divides h; peak, total, lse, delta (b, h, tq). A block has QUERIES queries and KEYS keys at a time, in
// shared memory, as floats. Masked blocks are not computed. Dropout acts on normalised weights, by the element's index in (B, H, T, S).

#include "common.cuh"
#include "pair.cuh"
#include "runs.cuh"

#define QUERIES 32
#define KEYS 32

// Rows [first, first + count) of one head of a (t, heads D) tile, zeros behind its end
__device__ inline void load(const T *x, float *buffer, int first, int count, int extent, int head, int heads, int size) {
    for (int n = threadIdx.x; n < count * size; n += blockDim.x) {
        int i = n / size, d = n % size;
        buffer[n] = first + i < extent ? widen(x[((long long)(first + i) * heads + head) * size + d]) : 0.0f;
    }
}

__device__ inline float dot(const float *a, const float *b, int size) {
    float sum = 0.0f;
    for (int d = 0; d < size; d++) sum += a[d] * b[d];
    return sum;
}

// Grid: (blocks of queries, h, b)
KERNEL attention(const T *q, const T *k, const T *v, T *o, float *peak, float *total, float *lse, const u64 *keys, Pair at, int first, int last) {
    SHARED(float, buffer);
    int D = at.head_size, start = blockIdx.x * QUERIES, h = blockIdx.y, b = blockIdx.z, g = h / (at.heads / at.groups), t = threadIdx.x;
    float *Q = buffer, *K = Q + QUERIES * D, *V = K + KEYS * D, *O = V + KEYS * D, *S = O + QUERIES * D;  // S (QUERIES, KEYS)
    float *top = S + QUERIES * KEYS, *sum = top + QUERIES, *shrink = sum + QUERIES;
    long long statistics = ((long long)b * at.heads + h) * at.tq + start;
    q += (long long)b * at.tq * at.heads * D;
    o += (long long)b * at.tq * at.heads * D;
    k += (long long)b * at.tk * at.groups * D;
    v += (long long)b * at.tk * at.groups * D;
    u64 key = keys ? mixed(keys[0], keys[1], (u64)at.stream) : 0;
    load(q, Q, start, QUERIES, at.tq, h, at.heads, D);
    if (first)
        for (int n = t; n < QUERIES * D; n += blockDim.x) O[n] = 0.0f;
    else
        load(o, O, start, QUERIES, at.tq, h, at.heads, D);
    if (t < QUERIES) {
        top[t] = first || start + t >= at.tq ? (at.may_blind ? FLOOR : -INFINITE) : peak[statistics + t];
        sum[t] = first || start + t >= at.tq ? 0.0f : total[statistics + t];
    }
    for (int from = 0; from < at.tk; from += KEYS) {
        if (is_later(at, start, QUERIES, from)) break;
        if (is_behind(at, start, from, KEYS)) continue;
        load(k, K, from, KEYS, at.tk, g, at.groups, D);
        load(v, V, from, KEYS, at.tk, g, at.groups, D);
        __syncthreads();
        for (int n = t; n < QUERIES * KEYS; n += blockDim.x) {
            int i = n / KEYS, j = n % KEYS;
            S[n] = sees(at, b, start + i, from + j) ? scored(at, h, start + i, from + j, dot(Q + i * D, K + j * D, D)) : -INFINITE;
        }
        __syncthreads();
        if (t < QUERIES) {
            float *row = S + t * KEYS, most = top[t], found = 0.0f;
            for (int j = 0; j < KEYS; j++) most = larger(row[j], most);
            shrink[t] = top[t] != -INFINITE ? expf(top[t] - most) : 0.0f;
            for (int j = 0; j < KEYS; j++) {
                row[j] = row[j] != -INFINITE ? expf(row[j] - most) : 0.0f;
                found += row[j];
                if (keys) row[j] *= survival(at, key, b, h, start + t, from + j);
            }
            sum[t] = sum[t] * shrink[t] + found;
            top[t] = most;
        }
        __syncthreads();
        for (int n = t; n < QUERIES * D; n += blockDim.x) {
            int i = n / D, d = n % D;
            float add = 0.0f;
            for (int j = 0; j < KEYS; j++) add += S[i * KEYS + j] * V[j * D + d];
            O[n] = O[n] * shrink[i] + add;
        }
        __syncthreads();
    }
    __syncthreads();
    if (last && at.may_blind && t < QUERIES && sum[t] == 0.0f) sum[t] = 1.0f;
    __syncthreads();
    for (int n = t; n < QUERIES * D; n += blockDim.x) {
        int i = n / D, d = n % D;
        if (start + i < at.tq) o[((long long)(start + i) * at.heads + h) * D + d] = narrow<T>(last ? O[n] / sum[i] : O[n]);
    }
    if (t < QUERIES && start + t < at.tq) {
        peak[statistics + t] = top[t];
        total[statistics + t] = sum[t];
        if (last) lse[statistics + t] = top[t] + logf(sum[t]);
    }
}
EXPORT(attention)

// delta = row sums of do * o per head  // (b, h, t); 8 lanes a row, rows in the order of o
template <int N> __device__ inline float part_of_delta(const T *o, const T *grad, int size) {
    float sum = 0.0f;
    for (int d = threadIdx.x % 8 * N; d < size; d += 8 * N) {
        Numbers<T, N> x = load<N>(o + d), g = load<N>(grad + d);
        UNROLLED
        for (int e = 0; e < N; e++) sum += widen(x.x[e]) * widen(g.x[e]);
    }
    return sum;
}

KERNEL attention_delta(const T *o, const T *grad, float *delta, int length, int heads, int size, long long num_rows) {
    long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 8;
    float sum = 0.0f;
    if (row < num_rows) {
        bool is_wide = size % WIDE == 0 && are_aligned(o, grad);
        sum = is_wide ? part_of_delta<WIDE>(o + row * size, grad + row * size, size) : part_of_delta<1>(o + row * size, grad + row * size, size);
    }
    for (int mask = 1; mask < 8; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    if (row < num_rows && threadIdx.x % 8 == 0) delta[(row / heads / length * heads + row % heads) * length + row / heads % length] = sum;
}
EXPORT(attention_delta)

// Weights P, without those that dropout drops, and gradients dS of a block of queries and keys, both (QUERIES, KEYS): of the products q k^T, or of
// the scores if `outer`.
__device__ inline void weigh(
    const float *Q, const float *K, const float *V, const float *dO, float *P, float *dS, const T *stored, const float *lse, const float *delta,
    const u64 *keys, u64 key, Pair at, int b, int h, int start, int from, int outer) {
    int D = at.head_size;
    for (int n = threadIdx.x; n < QUERIES * KEYS; n += blockDim.x) {
        int i = n / KEYS, j = n % KEYS;
        float weight = 0.0f, slope = 0.0f, factor = 1.0f;
        if (sees(at, b, start + i, from + j)) {
            long long row = ((long long)b * at.heads + h) * at.tq + start + i;
            float product = stored && at.cap == 0.0f ? 0.0f : dot(Q + i * D, K + j * D, D);
            weight = stored ? widen(stored[row * at.tk + from + j]) : expf(scored(at, h, start + i, from + j, product) - lse[row]);
            if (keys) factor = survival(at, key, b, h, start + i, from + j);
            slope = (outer ? 1.0f : slope_of_score(at, product)) * weight * (dot(dO + i * D, V + j * D, D) * factor - delta[row]);
        }
        P[n] = weight * factor;
        dS[n] = slope;
    }
}

// Grid: (blocks of queries, h, b): dq of each query, over the keys in order
KERNEL attention_dq(
    const T *q, const T *k, const T *v, const T *grad, const T *stored, const float *lse, const float *delta, T *dq, const u64 *keys, Pair at,
    int first) {
    SHARED(float, buffer);
    int D = at.head_size, start = blockIdx.x * QUERIES, h = blockIdx.y, b = blockIdx.z, g = h / (at.heads / at.groups), t = threadIdx.x;
    float *Q = buffer, *dO = Q + QUERIES * D, *sum = dO + QUERIES * D, *K = sum + QUERIES * D, *V = K + KEYS * D;
    float *P = V + KEYS * D, *dS = P + QUERIES * KEYS;
    long long of_queries = (long long)b * at.tq * at.heads * D, of_keys = (long long)b * at.tk * at.groups * D;
    u64 key = keys ? mixed(keys[0], keys[1], (u64)at.stream) : 0;
    load(q + of_queries, Q, start, QUERIES, at.tq, h, at.heads, D);
    load(grad + of_queries, dO, start, QUERIES, at.tq, h, at.heads, D);
    if (first)
        for (int n = t; n < QUERIES * D; n += blockDim.x) sum[n] = 0.0f;
    else
        load(dq + of_queries, sum, start, QUERIES, at.tq, h, at.heads, D);
    for (int from = 0; from < at.tk; from += KEYS) {
        if (is_later(at, start, QUERIES, from)) break;
        if (is_behind(at, start, from, KEYS)) continue;
        load(k + of_keys, K, from, KEYS, at.tk, g, at.groups, D);
        load(v + of_keys, V, from, KEYS, at.tk, g, at.groups, D);
        __syncthreads();
        weigh(Q, K, V, dO, P, dS, stored, lse, delta, keys, key, at, b, h, start, from, 0);
        __syncthreads();
        for (int n = t; n < QUERIES * D; n += blockDim.x) {
            int i = n / D, d = n % D;
            for (int j = 0; j < KEYS; j++) sum[n] += dS[i * KEYS + j] * K[j * D + d];
        }
        __syncthreads();
    }
    __syncthreads();
    for (int n = t; n < QUERIES * D; n += blockDim.x) {
        int i = n / D, d = n % D;
        if (start + i < at.tq) dq[of_queries + ((long long)(start + i) * at.heads + h) * D + d] = narrow<T>(sum[n]);
    }
}
EXPORT(attention_dq)

// Grid: (blocks of keys, g, b): dk and dv of each key, over the heads of queries that share it and their queries in order
KERNEL attention_dkv(
    const T *q, const T *k, const T *v, const T *grad, const T *stored, const float *lse, const float *delta, T *dk, T *dv, const u64 *keys, Pair at,
    int first) {
    SHARED(float, buffer);
    int D = at.head_size, from = blockIdx.x * KEYS, g = blockIdx.y, b = blockIdx.z, t = threadIdx.x, share = at.heads / at.groups;
    float *K = buffer, *V = K + KEYS * D, *sumk = V + KEYS * D, *sumv = sumk + KEYS * D, *Q = sumv + KEYS * D, *dO = Q + QUERIES * D;
    float *P = dO + QUERIES * D, *dS = P + QUERIES * KEYS;
    long long of_queries = (long long)b * at.tq * at.heads * D, of_keys = (long long)b * at.tk * at.groups * D;
    u64 key = keys ? mixed(keys[0], keys[1], (u64)at.stream) : 0;
    load(k + of_keys, K, from, KEYS, at.tk, g, at.groups, D);
    load(v + of_keys, V, from, KEYS, at.tk, g, at.groups, D);
    if (first)
        for (int n = t; n < KEYS * D; n += blockDim.x) sumk[n] = sumv[n] = 0.0f;
    else {
        load(dk + of_keys, sumk, from, KEYS, at.tk, g, at.groups, D);
        load(dv + of_keys, sumv, from, KEYS, at.tk, g, at.groups, D);
    }
    for (int h = g * share; h < (g + 1) * share; h++)
        for (int start = 0; start < at.tq; start += QUERIES) {
            if (is_later(at, start, QUERIES, from) || is_behind(at, start, from, KEYS)) continue;
            load(q + of_queries, Q, start, QUERIES, at.tq, h, at.heads, D);
            load(grad + of_queries, dO, start, QUERIES, at.tq, h, at.heads, D);
            __syncthreads();
            weigh(Q, K, V, dO, P, dS, stored, lse, delta, keys, key, at, b, h, start, from, 0);
            __syncthreads();
            for (int n = t; n < KEYS * D; n += blockDim.x) {
                int j = n / D, d = n % D;
                for (int i = 0; i < QUERIES; i++) {
                    sumk[n] += dS[i * KEYS + j] * Q[i * D + d];
                    sumv[n] += P[i * KEYS + j] * dO[i * D + d];
                }
            }
            __syncthreads();
        }
    __syncthreads();
    for (int n = t; n < KEYS * D; n += blockDim.x) {
        int j = n / D, d = n % D;
        if (from + j < at.tk) {
            long long place = of_keys + ((long long)(from + j) * at.groups + g) * D + d;
            dk[place] = narrow<T>(sumk[n]);
            dv[place] = narrow<T>(sumv[n]);
        }
    }
}
EXPORT(attention_dkv)

// s = masked scores, to be kept  // (b, h, tq, tk)
KERNEL attention_scores(const T *q, const T *k, T *s, Pair at, long long count) {
    int D = at.head_size;
    EACH(n, count) {
        int j = (int)(n % at.tk), i = (int)(n / at.tk % at.tq), h = (int)(n / at.tk / at.tq % at.heads), g = h / (at.heads / at.groups);
        long long b = n / at.tk / at.tq / at.heads;
        const T *one = q + ((b * at.tq + i) * at.heads + h) * D, *other = k + ((b * at.tk + j) * at.groups + g) * D;
        float sum = 0.0f;
        for (int d = 0; d < D; d++) sum += widen(one[d]) * widen(other[d]);
        s[n] = narrow<T>(sees(at, (int)b, i, j) ? scored(at, h, i, j, sum) : -INFINITE);
    }
}
EXPORT(attention_scores)

// s becomes the weights exp(s - lse)
KERNEL attention_weights(T *s, const float *lse, int width, long long count) {
    EACH(i, count) s[i] = narrow<T>(expf(widen(s[i]) - lse[i / width]));
}
EXPORT(attention_weights)

// What running maxima and sums are before any key where rows may see none
KERNEL attention_begin(float *peak, float *total, long long count) {
    EACH(i, count) {
        peak[i] = FLOOR;
        total[i] = 0.0f;
    }
}
EXPORT(attention_begin)

// lse = peak + log(total); a row that saw no key has a sum of 1 from now on
KERNEL attention_end(const float *peak, float *total, float *lse, long long count) {
    EACH(i, count) {
        if (total[i] == 0.0f) total[i] = 1.0f;
        lse[i] = peak[i] + logf(total[i]);
    }
}
EXPORT(attention_end)

// o (+)= dropout(weights) @ v  // (b, h, tq, tk) by (b, tk, g D) -> (b, tq, h D); one thread a number
KERNEL attention_apply(const T *s, const T *v, T *o, const u64 *keys, Pair at, int accumulate, long long count) {
    int D = at.head_size;
    u64 key = keys ? mixed(keys[0], keys[1], (u64)at.stream) : 0;
    EACH(n, count) {
        int d = (int)(n % D), h = (int)(n / D % at.heads), i = (int)(n / D / at.heads % at.tq), b = (int)(n / D / at.heads / at.tq);
        int g = h / (at.heads / at.groups);
        float sum = accumulate ? widen(o[n]) : 0.0f;
        for (int j = 0; j < at.tk; j++) {  // a masked weight is 0
            float weight = widen(s[(((long long)b * at.heads + h) * at.tq + i) * at.tk + j]);
            if (keys) weight *= survival(at, key, b, h, i, j);
            sum += weight * widen(v[(((long long)b * at.tk + j) * at.groups + g) * D + d]);
        }
        o[n] = narrow<T>(sum);
    }
}
EXPORT(attention_apply)

// bias (heads, tq + tk - 1) of a pair of tiles from its table (buckets, heads)
KERNEL attention_bias(const T *table, float *bias, Pair at, Runs runs, long long count) {
    int width = at.tq + at.tk - 1;
    EACH(n, count) {
        int h = (int)(n / width), distance = at.k_start - (at.q_start + at.tq - 1) + (int)(n % width);
        bias[n] = widen(table[bucket_of(runs, distance) * at.heads + h]);
    }
}
EXPORT(attention_bias)

// Grid: (blocks of queries, h, b): sums of the gradients of the scores of a block by buckets  // partial (b, blocks, h, buckets)
KERNEL attention_dtable(
    const T *q, const T *k, const T *v, const T *grad, const T *stored, const float *lse, const float *delta, const u64 *keys, float *partial, Pair at,
    Runs runs, int buckets) {
    SHARED(float, buffer);
    int D = at.head_size, start = blockIdx.x * QUERIES, h = blockIdx.y, b = blockIdx.z, g = h / (at.heads / at.groups), t = threadIdx.x;
    float *Q = buffer, *dO = Q + QUERIES * D, *K = dO + QUERIES * D, *V = K + KEYS * D, *P = V + KEYS * D, *dS = P + QUERIES * KEYS;
    float *sums = dS + QUERIES * KEYS, *found = sums + QUERIES + KEYS;
    int *which = (int *)(found + buckets);
    long long of_queries = (long long)b * at.tq * at.heads * D, of_keys = (long long)b * at.tk * at.groups * D;
    u64 key = keys ? mixed(keys[0], keys[1], (u64)at.stream) : 0;
    load(q + of_queries, Q, start, QUERIES, at.tq, h, at.heads, D);
    load(grad + of_queries, dO, start, QUERIES, at.tq, h, at.heads, D);
    for (int n = t; n < buckets; n += blockDim.x) found[n] = 0.0f;
    for (int from = 0; from < at.tk; from += KEYS) {
        if (is_later(at, start, QUERIES, from)) break;
        if (is_behind(at, start, from, KEYS)) continue;
        load(k + of_keys, K, from, KEYS, at.tk, g, at.groups, D);
        load(v + of_keys, V, from, KEYS, at.tk, g, at.groups, D);
        __syncthreads();
        weigh(Q, K, V, dO, P, dS, stored, lse, delta, keys, key, at, b, h, start, from, 1);
        __syncthreads();
        for (int n = t; n < QUERIES + KEYS - 1; n += blockDim.x) {  // a diagonal
            float sum = 0.0f;
            for (int i = 0; i < QUERIES; i++) {
                int j = n - (QUERIES - 1) + i;
                if (j >= 0 && j < KEYS) sum += dS[i * KEYS + j];
            }
            sums[n] = sum;
            which[n] = bucket_of(runs, at.k_start + from + n - (QUERIES - 1) - (at.q_start + start));
        }
        __syncthreads();
        for (int bucket = t; bucket < buckets; bucket += blockDim.x)
            for (int n = 0; n < QUERIES + KEYS - 1; n++)
                if (which[n] == bucket) found[bucket] += sums[n];
        __syncthreads();
    }
    __syncthreads();
    for (int n = t; n < buckets; n += blockDim.x) partial[(((long long)b * gridDim.x + blockIdx.x) * at.heads + h) * buckets + n] = found[n];
}
EXPORT(attention_dtable)

// dtable (buckets, heads) (+)= partial sums (blocks, heads, buckets), in order
KERNEL attention_table_sums(const float *partial, float *dtable, int blocks, int heads, int buckets, int accumulate, long long count) {
    EACH(n, count) {
        int bucket = (int)(n / heads), h = (int)(n % heads);
        float sum = accumulate ? dtable[n] : 0.0f;
        for (int block = 0; block < blocks; block++) sum += partial[((long long)block * heads + h) * buckets + bucket];
        dtable[n] = sum;
    }
}
EXPORT(attention_table_sums)
