// Attention over pairs of query and key tiles: online softmax forward (Dao 2023, algorithm 1), recomputation backward (algorithm 2).
//
// q, o (b, tq, h D), k, v (b, tk, g D), g divides h; peak, total, lse, delta (b, h, tq). A block has QUERIES queries and KEYS keys at a time, in
// shared memory, as floats. Masked blocks are not computed. Dropout acts on normalised weights, by the element's index in (B, H, T, T).

#include "common.cuh"
#include "pair.cuh"

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
        top[t] = first || start + t >= at.tq ? -INFINITE : peak[statistics + t];
        sum[t] = first || start + t >= at.tq ? 0.0f : total[statistics + t];
    }
    for (int from = 0; from < at.tk; from += KEYS) {
        if (at.causal && at.k_start + from > at.q_start + start + QUERIES - 1) break;
        load(k, K, from, KEYS, at.tk, g, at.groups, D);
        load(v, V, from, KEYS, at.tk, g, at.groups, D);
        __syncthreads();
        for (int n = t; n < QUERIES * KEYS; n += blockDim.x) {
            int i = n / KEYS, j = n % KEYS;
            S[n] = sees(at, start + i, from + j) ? at.scale * dot(Q + i * D, K + j * D, D) : -INFINITE;
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

// delta = row sums of do * o per head  // (b, h, t); one thread a number
KERNEL attention_delta(const T *o, const T *grad, float *delta, int length, int heads, int size, long long count) {
    EACH(n, count) {
        long long i = n % length, h = n / length % heads, b = n / length / heads, at = ((b * length + i) * heads + h) * size;
        float sum = 0.0f;
        for (int d = 0; d < size; d++) sum += widen(o[at + d]) * widen(grad[at + d]);
        delta[n] = sum;
    }
}
EXPORT(attention_delta)

// Weights P and gradients dS of scores of a block of queries and keys, both (QUERIES, KEYS); P leaves dropped weights at 0 if `thin`.
__device__ inline void weigh(
    const float *Q, const float *K, const float *V, const float *dO, float *P, float *dS, const T *stored, const float *lse, const float *delta,
    const u64 *keys, u64 key, Pair at, int b, int h, int start, int from) {
    int D = at.head_size;
    for (int n = threadIdx.x; n < QUERIES * KEYS; n += blockDim.x) {
        int i = n / KEYS, j = n % KEYS;
        float weight = 0.0f, slope = 0.0f, factor = 1.0f;
        if (sees(at, start + i, from + j)) {
            long long row = ((long long)b * at.heads + h) * at.tq + start + i;
            weight = stored ? widen(stored[row * at.tk + from + j]) : expf(at.scale * dot(Q + i * D, K + j * D, D) - lse[row]);
            if (keys) factor = survival(at, key, b, h, start + i, from + j);
            slope = at.scale * weight * (dot(dO + i * D, V + j * D, D) * factor - delta[row]);
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
        if (at.causal && at.k_start + from > at.q_start + start + QUERIES - 1) break;
        load(k + of_keys, K, from, KEYS, at.tk, g, at.groups, D);
        load(v + of_keys, V, from, KEYS, at.tk, g, at.groups, D);
        __syncthreads();
        weigh(Q, K, V, dO, P, dS, stored, lse, delta, keys, key, at, b, h, start, from);
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
            if (at.causal && at.k_start + from > at.q_start + start + QUERIES - 1) continue;
            load(q + of_queries, Q, start, QUERIES, at.tq, h, at.heads, D);
            load(grad + of_queries, dO, start, QUERIES, at.tq, h, at.heads, D);
            __syncthreads();
            weigh(Q, K, V, dO, P, dS, stored, lse, delta, keys, key, at, b, h, start, from);
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
        s[n] = narrow<T>(sees(at, i, j) ? at.scale * sum : -INFINITE);
    }
}
EXPORT(attention_scores)

// s becomes the weights exp(s - lse)
KERNEL attention_weights(T *s, const float *lse, int width, long long count) {
    EACH(i, count) s[i] = narrow<T>(expf(widen(s[i]) - lse[i / width]));
}
EXPORT(attention_weights)

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

// Grid: (new tokens, h, b): one tile of the cache added to the running attention of a token, which sees positions up to its own.
KERNEL cached_attention(
    const T *q, const T *keys, const T *values, const int *positions, T *o, float *peak, float *total, float scale, int start, int length, int size,
    int heads, int groups, int first, int last) {
    SHARED(float, buffer);
    int w = blockIdx.x, num_new = gridDim.x, h = blockIdx.y, b = blockIdx.z, g = h / (heads / groups), t = threadIdx.x;
    float *Q = buffer + blockDim.x, *S = Q + size;
    long long row = (long long)b * num_new + w, statistics = ((long long)b * heads + h) * num_new + w;
    int seen = positions[row] - start + 1 < length ? positions[row] - start + 1 : length;
    float before = first ? -INFINITE : peak[statistics], top = before, sum = 0.0f;
    q += (row * heads + h) * size;
    o += (row * heads + h) * size;
    keys += ((long long)b * length * groups + g) * size;
    values += ((long long)b * length * groups + g) * size;
    for (int d = t; d < size; d += blockDim.x) Q[d] = widen(q[d]);
    __syncthreads();
    for (int j = t; j < seen; j += blockDim.x) {
        float score = 0.0f;
        for (int d = 0; d < size; d++) score += Q[d] * widen(keys[(long long)j * groups * size + d]);
        S[j] = scale * score;
        top = larger(top, S[j]);
    }
    top = block_max(top, buffer);
    for (int j = t; j < seen; j += blockDim.x) {
        S[j] = expf(S[j] - top);
        sum += S[j];
    }
    sum = block_sum(sum, buffer);
    float shrink = before != -INFINITE ? expf(before - top) : 0.0f, all = (first ? 0.0f : total[statistics] * shrink) + sum;
    for (int d = t; d < size; d += blockDim.x) {
        float out = first ? 0.0f : widen(o[d]) * shrink;
        for (int j = 0; j < seen; j++) out += S[j] * widen(values[(long long)j * groups * size + d]);
        o[d] = narrow<T>(last ? out / all : out);
    }
    __syncthreads();
    if (t == 0) {
        peak[statistics] = top;
        total[statistics] = all;
    }
}
EXPORT(cached_attention)
