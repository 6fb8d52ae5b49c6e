// Attention over pairs of bf16 tiles on tensor cores: FlashAttention-2 (Dao 2023), forward algorithm 1, backward algorithm 2, heads of 64 or 128.
//
// What a kernel computes, and its arguments, are those of attention.cu. A block of four warps has ROWS rows (queries, or in flash_dkv keys), 16 a
// warp, in registers, and walks over the other side COLUMNS at a time in shared memory. Products are mma.m16n8k16: a lane has of a 16 x 8 result
// the numbers (lane / 4 [+ 8], 2 (lane % 4) [+ 1]), and what it has of two results side by side is what it gives as the left factor of the next
// product (PTX ISA, "Matrix fragments for mma.m16n8k16"). A right factor is read from rows that hold its columns, so what is multiplied from both
// sides lies in shared memory twice, once transposed. Rows are padded by 8 elements, which keeps lanes in different banks. Weights and slopes are
// rounded to bf16 before they are multiplied; sums are float.

#include "common.cuh"
#include "pair.cuh"

#define ROWS 64
#define COLUMNS 64
#define PAD 8
#ifndef EMULATED
#define UNROLLED _Pragma("unroll")  // what is indexed lies in registers
#endif
#define LANE (threadIdx.x & 31)
#define WARP (threadIdx.x >> 5)

typedef unsigned short u16;

#ifndef EMULATED
// c (16 x 8) += a (16 x 16) b (16 x 8)
__device__ inline void mma(float *c, const u32 *a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// two numbers of a fragment, the first in the low half
__device__ inline u32 pack(float low, float high) { return (u32)narrow<bf16>(low).bits | (u32)narrow<bf16>(high).bits << 16; }

// over the four lanes that share a row
__device__ inline float quad_max(float x) {
    x = larger(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return larger(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Rows [first, first + 64) of one head of a (t, heads D) tile, zeros behind its end, to rows of D + PAD; `turned` takes them transposed, rows of 64 + PAD
template <int D> __device__ inline void fetch(const bf16 *x, u16 *buffer, u16 *turned, int first, int extent, int head, int heads) {
    for (int n = threadIdx.x; n < 64 * (D / 4); n += blockDim.x) {
        int i = n / (D / 4), d = n % (D / 4) * 4;
        u64 four = first + i < extent ? *(const u64 *)(x + ((long long)(first + i) * heads + head) * D + d) : 0ull;
        if (buffer) *(u64 *)(buffer + i * (D + PAD) + d) = four;
        if (turned)
            UNROLLED
            for (int e = 0; e < 4; e++) turned[(d + e) * (64 + PAD) + i] = (u16)(four >> 16 * e);
    }
}

// this warp's 16 rows of a left factor, D wide
template <int D> __device__ inline void left_factor(const u16 *buffer, u32 (*a)[4]) {
    const u16 *row = buffer + (WARP * 16 + LANE / 4) * (D + PAD) + LANE % 4 * 2;
    UNROLLED
    for (int k = 0; k < D / 16; k++)
        UNROLLED
        for (int part = 0; part < 4; part++) a[k][part] = *(const u32 *)(row + part % 2 * 8 * (D + PAD) + k * 16 + part / 2 * 8);
}

// c (16 x 64) = a (16 x D) b^T, b 64 rows of D
template <int D> __device__ inline void times_rows(float (*c)[4], const u32 (*a)[4], const u16 *b) {
    UNROLLED
    for (int n = 0; n < COLUMNS / 8; n++) {
        const u16 *row = b + (n * 8 + LANE / 4) * (D + PAD) + LANE % 4 * 2;
        UNROLLED
        for (int e = 0; e < 4; e++) c[n][e] = 0.0f;
        UNROLLED
        for (int k = 0; k < D / 16; k++) mma(c[n], a[k], *(const u32 *)(row + k * 16), *(const u32 *)(row + k * 16 + 8));
    }
}

// c (16 x D) += p (16 x 64) b, b given transposed as D rows of 64; p as results of `times_rows`
template <int D> __device__ inline void add_product(float (*c)[4], const float (*p)[4], const u16 *b) {
    UNROLLED
    for (int k = 0; k < COLUMNS / 16; k++) {
        u32 a[4] = {pack(p[2 * k][0], p[2 * k][1]), pack(p[2 * k][2], p[2 * k][3]), pack(p[2 * k + 1][0], p[2 * k + 1][1]),
                    pack(p[2 * k + 1][2], p[2 * k + 1][3])};
        UNROLLED
        for (int n = 0; n < D / 8; n++) {
            const u16 *row = b + (n * 8 + LANE / 4) * (COLUMNS + PAD) + k * 16 + LANE % 4 * 2;
            mma(c[n], a, *(const u32 *)row, *(const u32 *)(row + 8));
        }
    }
}

// Numbers of this lane of a (t, heads D) tile, rows from `start`, as floats; zeros where there is nothing to add to
template <int D> __device__ inline void load_result(const bf16 *x, float (*c)[4], int start, int extent, int head, int heads, int fresh) {
    UNROLLED
    for (int n = 0; n < D / 8; n++)
        UNROLLED
        for (int e = 0; e < 4; e++) {
            int i = start + WARP * 16 + LANE / 4 + e / 2 * 8;
            c[n][e] = fresh || i >= extent ? 0.0f : widen(x[((long long)i * heads + head) * D + n * 8 + LANE % 4 * 2 + e % 2]);
        }
}

template <int D> __device__ inline void store_result(bf16 *x, const float (*c)[4], const float *divisor, int start, int extent, int head, int heads) {
    UNROLLED
    for (int n = 0; n < D / 8; n++)
        UNROLLED
        for (int half = 0; half < 2; half++) {
            int i = start + WARP * 16 + LANE / 4 + half * 8;
            float d = divisor ? divisor[half] : 1.0f;
            if (i < extent) *(u32 *)(x + ((long long)i * heads + head) * D + n * 8 + LANE % 4 * 2) = pack(c[n][2 * half] / d, c[n][2 * half + 1] / d);
        }
}

// Grid: (blocks of queries, h, b)
template <int D>
__device__ inline void forward(
    u16 *buffer, const bf16 *q, const bf16 *k, const bf16 *v, bf16 *o, float *peak, float *total, float *lse, const u64 *keys, Pair at, int first, int last) {
    int start = blockIdx.x * ROWS, h = blockIdx.y, b = blockIdx.z, g = h / (at.heads / at.groups), mine = start + WARP * 16 + LANE / 4;
    u16 *K = buffer, *V = K + COLUMNS * (D + PAD);
    long long statistics = ((long long)b * at.heads + h) * at.tq;
    u64 key = keys ? mixed(keys[0], keys[1], (u64)at.stream) : 0;
    q += (long long)b * at.tq * at.heads * D;
    o += (long long)b * at.tq * at.heads * D;
    k += (long long)b * at.tk * at.groups * D;
    v += (long long)b * at.tk * at.groups * D;
    u32 Q[D / 16][4];
    float O[D / 8][4], S[COLUMNS / 8][4], top[2], sum[2];
    fetch<D>(q, K, (u16 *)0, start, at.tq, h, at.heads);
    __syncthreads();
    left_factor<D>(K, Q);
    load_result<D>(o, O, start, at.tq, h, at.heads, first);
    UNROLLED
    for (int half = 0; half < 2; half++) {
        int i = mine + half * 8, none = first || i >= at.tq;
        top[half] = none ? (at.may_blind ? FLOOR : -INFINITE) : peak[statistics + i];
        sum[half] = none ? 0.0f : total[statistics + i];
    }
    for (int from = 0; from < at.tk; from += COLUMNS) {
        if (is_later(at, start, ROWS, from)) break;
        if (is_behind(at, start, from, COLUMNS)) continue;
        __syncthreads();
        fetch<D>(k, K, (u16 *)0, from, at.tk, g, at.groups);
        fetch<D>(v, (u16 *)0, V, from, at.tk, g, at.groups);
        __syncthreads();
        times_rows<D>(S, Q, K);
        UNROLLED
        for (int half = 0; half < 2; half++) {
            int i = mine + half * 8;
            float most = -INFINITE, found = 0.0f;
            UNROLLED
            for (int n = 0; n < COLUMNS / 8; n++)
                UNROLLED
                for (int e = 0; e < 2; e++) {
                    float *s = &S[n][2 * half + e];
                    int j = from + n * 8 + LANE % 4 * 2 + e;
                    *s = sees(at, b, i, j) ? scored(at, h, i, j, *s) : -INFINITE;
                    most = larger(*s, most);
                }
            most = larger(quad_max(most), top[half]);
            UNROLLED
            for (int n = 0; n < COLUMNS / 8; n++)
                UNROLLED
                for (int e = 0; e < 2; e++) {
                    float *s = &S[n][2 * half + e];
                    *s = *s != -INFINITE ? expf(*s - most) : 0.0f;
                    found += *s;
                    if (keys) *s *= survival(at, key, b, h, i, from + n * 8 + LANE % 4 * 2 + e);
                }
            float shrink = top[half] != -INFINITE ? expf(top[half] - most) : 0.0f;
            sum[half] = sum[half] * shrink + quad_sum(found);
            top[half] = most;
            UNROLLED
            for (int n = 0; n < D / 8; n++)
                UNROLLED
                for (int e = 0; e < 2; e++) O[n][2 * half + e] *= shrink;
        }
        add_product<D>(O, S, V);
    }
    UNROLLED
    for (int half = 0; half < 2; half++)
        if (last && at.may_blind && sum[half] == 0.0f) sum[half] = 1.0f;
    store_result<D>(o, O, last ? sum : (float *)0, start, at.tq, h, at.heads);
    if (LANE % 4 == 0)
        UNROLLED
        for (int half = 0; half < 2; half++) {
            int i = mine + half * 8;
            if (i >= at.tq) continue;
            peak[statistics + i] = top[half];
            total[statistics + i] = sum[half];
            if (last) lse[statistics + i] = top[half] + logf(sum[half]);
        }
}

// Grid: (blocks of queries, h, b): dq of each query, over the keys in order
template <int D>
__device__ inline void backward_q(
    u16 *buffer, const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *grad, const float *lse, const float *delta, bf16 *dq, const u64 *keys, Pair at,
    int first) {
    int start = blockIdx.x * ROWS, h = blockIdx.y, b = blockIdx.z, g = h / (at.heads / at.groups), mine = start + WARP * 16 + LANE / 4;
    u16 *K = buffer, *V = K + COLUMNS * (D + PAD), *turned = V + COLUMNS * (D + PAD);
    long long of_queries = (long long)b * at.tq * at.heads * D, of_keys = (long long)b * at.tk * at.groups * D;
    u64 key = keys ? mixed(keys[0], keys[1], (u64)at.stream) : 0;
    u32 Q[D / 16][4], G[D / 16][4];
    float sum[D / 8][4], S[COLUMNS / 8][4], P[COLUMNS / 8][4], level[2], shift[2];
    fetch<D>(q + of_queries, K, (u16 *)0, start, at.tq, h, at.heads);
    fetch<D>(grad + of_queries, V, (u16 *)0, start, at.tq, h, at.heads);
    __syncthreads();
    left_factor<D>(K, Q);
    left_factor<D>(V, G);
    load_result<D>(dq + of_queries, sum, start, at.tq, h, at.heads, first);
    UNROLLED
    for (int half = 0; half < 2; half++) {
        long long row = ((long long)b * at.heads + h) * at.tq + mine + half * 8;
        level[half] = mine + half * 8 < at.tq ? lse[row] : 0.0f;
        shift[half] = mine + half * 8 < at.tq ? delta[row] : 0.0f;
    }
    for (int from = 0; from < at.tk; from += COLUMNS) {
        if (is_later(at, start, ROWS, from)) break;
        if (is_behind(at, start, from, COLUMNS)) continue;
        __syncthreads();
        fetch<D>(k + of_keys, K, turned, from, at.tk, g, at.groups);
        fetch<D>(v + of_keys, V, (u16 *)0, from, at.tk, g, at.groups);
        __syncthreads();
        times_rows<D>(S, Q, K);
        times_rows<D>(P, G, V);
        UNROLLED
        for (int n = 0; n < COLUMNS / 8; n++)
            UNROLLED
            for (int e = 0; e < 4; e++) {
                int i = mine + e / 2 * 8, j = from + n * 8 + LANE % 4 * 2 + e % 2;
                float weight = sees(at, b, i, j) ? expf(scored(at, h, i, j, S[n][e]) - level[e / 2]) : 0.0f;
                float factor = keys ? survival(at, key, b, h, i, j) : 1.0f;
                S[n][e] = slope_of_score(at, S[n][e]) * weight * (P[n][e] * factor - shift[e / 2]);
            }
        add_product<D>(sum, S, turned);
    }
    store_result<D>(dq + of_queries, sum, (float *)0, start, at.tq, h, at.heads);
}

// Grid: (blocks of keys, g, b): dk and dv of each key, over the heads of queries that share it and their queries in order
template <int D>
__device__ inline void backward_kv(
    u16 *buffer, const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *grad, const float *lse, const float *delta, bf16 *dk, bf16 *dv, const u64 *keys,
    Pair at, int first) {
    int from = blockIdx.x * ROWS, g = blockIdx.y, b = blockIdx.z, share = at.heads / at.groups, mine = from + WARP * 16 + LANE / 4;
    u16 *Q = buffer, *G = Q + COLUMNS * (D + PAD), *Qt = G + COLUMNS * (D + PAD), *Gt = Qt + D * (COLUMNS + PAD);
    float *level = (float *)(Gt + D * (COLUMNS + PAD)), *shift = level + COLUMNS;
    long long of_queries = (long long)b * at.tq * at.heads * D, of_keys = (long long)b * at.tk * at.groups * D;
    u64 key = keys ? mixed(keys[0], keys[1], (u64)at.stream) : 0;
    u32 K[D / 16][4], V[D / 16][4];
    float sumk[D / 8][4], sumv[D / 8][4], S[COLUMNS / 8][4], P[COLUMNS / 8][4];
    fetch<D>(k + of_keys, Q, (u16 *)0, from, at.tk, g, at.groups);
    fetch<D>(v + of_keys, G, (u16 *)0, from, at.tk, g, at.groups);
    __syncthreads();
    left_factor<D>(Q, K);
    left_factor<D>(G, V);
    load_result<D>(dk + of_keys, sumk, from, at.tk, g, at.groups, first);
    load_result<D>(dv + of_keys, sumv, from, at.tk, g, at.groups, first);
    for (int h = g * share; h < (g + 1) * share; h++)
        for (int start = 0; start < at.tq; start += COLUMNS) {
            if (is_later(at, start, COLUMNS, from) || is_behind(at, start, from, ROWS)) continue;
            long long row = ((long long)b * at.heads + h) * at.tq + start;
            __syncthreads();
            fetch<D>(q + of_queries, Q, Qt, start, at.tq, h, at.heads);
            fetch<D>(grad + of_queries, G, Gt, start, at.tq, h, at.heads);
            for (int i = threadIdx.x; i < COLUMNS; i += blockDim.x) {
                level[i] = start + i < at.tq ? lse[row + i] : 0.0f;
                shift[i] = start + i < at.tq ? delta[row + i] : 0.0f;
            }
            __syncthreads();
            times_rows<D>(S, K, Q);
            times_rows<D>(P, V, G);
            UNROLLED
            for (int n = 0; n < COLUMNS / 8; n++)
                UNROLLED
                for (int e = 0; e < 4; e++) {
                    int i = n * 8 + LANE % 4 * 2 + e % 2, j = mine + e / 2 * 8;
                    float weight = sees(at, b, start + i, j) ? expf(scored(at, h, start + i, j, S[n][e]) - level[i]) : 0.0f;
                    float factor = keys ? survival(at, key, b, h, start + i, j) : 1.0f;
                    S[n][e] = slope_of_score(at, S[n][e]) * weight * (P[n][e] * factor - shift[i]);
                    P[n][e] = weight * factor;
                }
            add_product<D>(sumk, S, Qt);
            add_product<D>(sumv, P, Gt);
        }
    store_result<D>(dk + of_keys, sumk, (float *)0, from, at.tk, g, at.groups);
    store_result<D>(dv + of_keys, sumv, (float *)0, from, at.tk, g, at.groups);
}

#define FLASH(D)                                                                                                                                    \
    KERNEL flash_##D(const bf16 *q, const bf16 *k, const bf16 *v, bf16 *o, float *peak, float *total, float *lse, const u64 *keys, Pair at,          \
                     int first, int last) {                                                                                                         \
        SHARED(u16, buffer);                                                                                                                          \
        forward<D>(buffer, q, k, v, o, peak, total, lse, keys, at, first, last);                                                                      \
    }                                                                                                                                               \
    EXPORT(flash_##D)                                                                                                                               \
    KERNEL flash_dq_##D(const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *grad, const float *lse, const float *delta, bf16 *dq,               \
                        const u64 *keys, Pair at, int first) {                                                                                      \
        SHARED(u16, buffer);                                                                                                                          \
        backward_q<D>(buffer, q, k, v, grad, lse, delta, dq, keys, at, first);                                                                        \
    }                                                                                                                                               \
    EXPORT(flash_dq_##D)                                                                                                                            \
    KERNEL flash_dkv_##D(const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *grad, const float *lse, const float *delta, bf16 *dk, bf16 *dv,    \
                         const u64 *keys, Pair at, int first) {                                                                                     \
        SHARED(u16, buffer);                                                                                                                          \
        backward_kv<D>(buffer, q, k, v, grad, lse, delta, dk, dv, keys, at, first);                                                                   \
    }                                                                                                                                               \
    EXPORT(flash_dkv_##D)

FLASH(64)
FLASH(128)
