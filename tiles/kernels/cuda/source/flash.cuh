// Attention over pairs of bf16 tiles on tensor cores: FlashAttention-2 (Dao 2023), forward algorithm 1, backward algorithm 2, heads of 64 or 128.
//
// What a kernel computes, and its arguments, are those of attention.cu. A block of four warps has BLOCK rows (queries, or in flash_dkv keys), 16 M a
// warp, and walks over the other side STAGE rows at a time: while one stage is multiplied, the next one is copied to shared memory. Rows are padded
// by 8 elements, so that 8 of them lie in different banks.
//
// Scores stay products q k^T until their exponential, in powers of two, takes the scale. Each option (mask, cap, bias, dropout) is a pass over a warp's
// scores that is skipped if it has nothing to do; `flash.cu` has kernels without most of them. Weights and slopes are rounded to bf16 before
// they are multiplied; sums are float.
//
// Ladder (H200, 8 sequences of 1,024 tokens, 12 heads of 64, causal, forward and backward in ms):
//   options tested for each score, right factors transposed by stores of 2 bytes   0.853   1.918
//   options compiled or skipped by warp, ldmatrix, one stage copied ahead          0.178   0.268

#pragma once

#define WARPS 4
#define PAD 8

// Start to copy rows [first, first + COUNT) of one head of a (t, heads D) tile, zeros behind its end
template <int D, int COUNT> __device__ inline void fetch(const bf16 *x, u16 *buffer, int first, int extent, int head, int heads) {
    const int PER_PASS = WARPS * 32 / (D / 8);
    int i = threadIdx.x / (D / 8), d = threadIdx.x % (D / 8) * 8;
    const bf16 *source = x + ((long long)(first + i) * heads + head) * D + d;
    UNROLLED
    for (int pass = 0; pass < COUNT / PER_PASS; pass++)
        copy16(buffer + (i + pass * PER_PASS) * (D + PAD) + d, source + (long long)(pass * PER_PASS) * heads * D, first + i + pass * PER_PASS < extent);
}

template <int M, int N> __device__ inline void clear(float (*c)[N][4]) {
    UNROLLED
    for (int m = 0; m < M; m++)
        UNROLLED
        for (int n = 0; n < N; n++)
            UNROLLED
            for (int e = 0; e < 4; e++) c[m][n][e] = 0.0f;
}

// c (16 M x 8 N) = a b^T, a this warp's 16 M of the block's rows of D, b 8 N rows of D
template <int D, int M, int N> __device__ inline void times_rows(float (*c)[N][4], const u16 *a, const u16 *b) {
    a += (WARP * 16 * M + (LANE & 15)) * (D + PAD) + (LANE >> 4) * 8;
    b += ((LANE & 7) + (LANE >> 4) * 8) * (D + PAD) + (LANE >> 3 & 1) * 8;
    clear<M, N>(c);
    UNROLLED
    for (int k = 0; k < D / 16; k++) {
        u32 left[M][4], right[4];
        UNROLLED
        for (int m = 0; m < M; m++) load4(left[m], a + m * 16 * (D + PAD) + k * 16);
        UNROLLED
        for (int n = 0; n < N; n += 2) {
            load4(right, b + n * 8 * (D + PAD) + k * 16);
            UNROLLED
            for (int m = 0; m < M; m++) {
                mma(c[m][n], left[m], right[0], right[1]);
                mma(c[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// c (16 M x D) += p (16 M x 8 N) b, b 8 N rows of D; p as a result of `times_rows`
template <int D, int M, int N> __device__ inline void add_product(float (*c)[D / 8][4], const float (*p)[N][4], const u16 *b) {
    b += (LANE & 15) * (D + PAD) + (LANE >> 4) * 8;
    UNROLLED
    for (int k = 0; k < N; k += 2) {
        u32 left[M][4], right[4];
        UNROLLED
        for (int m = 0; m < M; m++)
            UNROLLED
            for (int part = 0; part < 4; part++) left[m][part] = pack(p[m][k + part / 2][part % 2 * 2], p[m][k + part / 2][part % 2 * 2 + 1]);
        UNROLLED
        for (int n = 0; n < D / 8; n += 2) {
            load4_transposed(right, b + k * 8 * (D + PAD) + n * 8);
            UNROLLED
            for (int m = 0; m < M; m++) {
                mma(c[m][n], left[m], right[0], right[1]);
                mma(c[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// the numbers of a packed pair
__device__ inline float first_of(u32 two) { return __uint_as_float(two << 16); }

__device__ inline float second_of(u32 two) { return __uint_as_float(two & 0xffff0000u); }

// x [+]= factor c, rows from `start` of a (t, heads D) tile; `factors` has one of each row
template <int D, int M>
__device__ inline void store_result(bf16 *x, const float (*c)[D / 8][4], const float (*factors)[2], int start, int extent, int head, int heads, int fresh) {
    UNROLLED
    for (int m = 0; m < M; m++)
        UNROLLED
        for (int half = 0; half < 2; half++) {
            int i = start + (WARP * M + m) * 16 + LANE / 4 + half * 8;
            if (i >= extent) continue;
            bf16 *row = x + ((long long)i * heads + head) * D + LANE % 4 * 2;
            UNROLLED
            for (int n = 0; n < D / 8; n++) {
                u32 *two = (u32 *)(row + n * 8), old = fresh ? 0 : *two;
                *two = pack(first_of(old) + factors[m][half] * c[m][n][2 * half], second_of(old) + factors[m][half] * c[m][n][2 * half + 1]);
            }
        }
}

// A loop over this warp's scores c[m][n][e]: own row `i` of the block's side, row `j` of the other side
#define EACH_SCORE(m, n, e)         \
    UNROLLED                        \
    for (int m = 0; m < M; m++)     \
        UNROLLED                    \
        for (int n = 0; n < N; n++) \
            UNROLLED                \
            for (int e = 0; e < 4; e++)
#define OWN(m, e) (own + m * 16 + e / 2 * 8)
#define OTHER(n, e) (other + n * 8 + e % 2)

// No weight where a query does not see a key; `own` and `other` are the first rows of this lane, and keys are its own if `turned`
template <int M, int N> __device__ inline void mask(float (*s)[N][4], Pair at, int b, int own, int other, int turned) {
    UNROLLED
    for (int m = 0; m < M; m++)
        UNROLLED
        for (int half = 0; half < 2; half++) {
            int row = OWN(m, 2 * half), low, high;
            if (turned)
                range_of_queries(at, row, low, high);
            else
                range_of_keys(at, row, low, high);
            UNROLLED
            for (int n = 0; n < N; n++)
                UNROLLED
                for (int e = 0; e < 2; e++)
                    if (OTHER(n, e) < low || OTHER(n, e) >= high) s[m][n][2 * half + e] = -INFINITE;
        }
    if (at.of_queries)
        EACH_SCORE(m, n, e) {
            int i = turned ? OTHER(n, e) : OWN(m, e), j = turned ? OWN(m, e) : OTHER(n, e);
            if (i < at.tq && j < at.tk && !same_document(at, b, i, j)) s[m][n][e] = -INFINITE;
        }
}

// Products become cap / scale tanh(scale product / cap), and what is in `slopes`, if not null, is multiplied by the slope; then comes the bias
template <int M, int N>
__device__ inline void shape(float (*s)[N][4], float (*slopes)[N][4], Pair at, int h, int own, int other, int turned) {
    if (at.cap != 0.0f)
        EACH_SCORE(m, n, e) {
            float t = tanhf(at.scale * s[m][n][e] / at.cap);
            s[m][n][e] = at.cap * t / at.scale;
            if (slopes) slopes[m][n][e] *= 1.0f - t * t;
        }
    if (at.bias)
        EACH_SCORE(m, n, e) {
            int i = turned ? OTHER(n, e) : OWN(m, e), j = turned ? OWN(m, e) : OTHER(n, e);
            if (i < at.tq && j < at.tk) s[m][n][e] += at.bias[(long long)h * (at.tq + at.tk - 1) + j - i + at.tq - 1] / at.scale;
        }
}

template <int M, int N> __device__ inline void drop(float (*p)[N][4], Pair at, u64 key, int b, int h, int own, int other, int turned) {
    EACH_SCORE(m, n, e) p[m][n][e] *= survival(at, key, b, h, turned ? OTHER(n, e) : OWN(m, e), turned ? OWN(m, e) : OTHER(n, e));
}

// Grid: (blocks of queries, h, b); those with the most keys start first
template <int D>
__device__ inline void forward(
    u16 *buffer, const bf16 *q, const bf16 *k, const bf16 *v, bf16 *o, float *peak, float *total, float *lse, const u64 *keys, Pair at, int first, int last) {
    const int M = 2, STAGE = 4096 / D, BLOCK = WARPS * M * 16, N = STAGE / 8, TILE = STAGE * (D + PAD);
    int start = (gridDim.x - 1 - blockIdx.x) * BLOCK, h = blockIdx.y, b = blockIdx.z, g = h / (at.heads / at.groups);
    int own = start + WARP * 16 * M + LANE / 4;
    u16 *Q = buffer, *stages = Q + BLOCK * (D + PAD);
    float *statistics[2] = {peak + ((long long)b * at.heads + h) * at.tq, total + ((long long)b * at.heads + h) * at.tq};
    float unit = at.scale * PER_2, O[M][D / 8][4], S[M][N][4], top[M][2], sum[M][2], factors[M][2];
    u64 key = keys ? mixed(keys[0], keys[1], (u64)at.stream) : 0;
    q += (long long)b * at.tq * at.heads * D;
    o += (long long)b * at.tq * at.heads * D;
    k += (long long)b * at.tk * at.groups * D;
    v += (long long)b * at.tk * at.groups * D;
    int from = first_key(at, start) / STAGE * STAGE, end = end_of_keys(at, start + BLOCK);
    fetch<D, BLOCK>(q, Q, start, at.tq, h, at.heads);
    fetch<D, STAGE>(k, stages, from, at.tk, g, at.groups);
    fetch<D, STAGE>(v, stages + TILE, from, at.tk, g, at.groups);
    clear<M, D / 8>(O);
    UNROLLED
    for (int m = 0; m < M; m++)
        UNROLLED
        for (int half = 0; half < 2; half++) {
            int i = own + m * 16 + half * 8, none = first || i >= at.tq;
            top[m][half] = none ? (at.may_blind ? FLOOR * PER_2 : -INFINITE) : statistics[0][i] * PER_2;
            sum[m][half] = none || LANE % 4 ? 0.0f : statistics[1][i];
            if (none) continue;
            const bf16 *row = o + ((long long)i * at.heads + h) * D + LANE % 4 * 2;
            UNROLLED
            for (int n = 0; n < D / 8; n++) {
                u32 two = *(const u32 *)(row + n * 8);
                O[m][n][2 * half] = first_of(two);
                O[m][n][2 * half + 1] = second_of(two);
            }
        }
    for (int turn = 0; from < end; from += STAGE, turn ^= 1) {
        const u16 *K = stages + turn * 2 * TILE, *V = K + TILE;
        u16 *next = stages + (turn ^ 1) * 2 * TILE;
        await_copies();
        __syncthreads();  // this stage has arrived, and all threads have read the other one
        if (from + STAGE < end) {
            fetch<D, STAGE>(k, next, from + STAGE, at.tk, g, at.groups);
            fetch<D, STAGE>(v, next + TILE, from + STAGE, at.tk, g, at.groups);
        }
        int other = from + LANE % 4 * 2, mine = own - LANE / 4;
        if (sees_none(at, mine, 16 * M, from, STAGE)) continue;
        times_rows<D, M, N>(S, Q, K);
        shape<M, N>(S, (float(*)[N][4])0, at, h, own, other, 0);
        if (!sees_all(at, mine, 16 * M, from, STAGE)) mask<M, N>(S, at, b, own, other, 0);
        UNROLLED
        for (int m = 0; m < M; m++)
            UNROLLED
            for (int half = 0; half < 2; half++) {
                float most = -INFINITE, base, shrink;
                UNROLLED
                for (int n = 0; n < N; n++) most = fmaxf(most, fmaxf(S[m][n][2 * half], S[m][n][2 * half + 1]));
                most = fmaxf(quad_max(most) * unit, top[m][half]);
                base = most != -INFINITE ? most : 0.0f;  // of a row without keys so far, whose weights are 0
                shrink = power_of_2(top[m][half] - base);
                top[m][half] = most;
                sum[m][half] *= shrink;
                UNROLLED
                for (int n = 0; n < N; n++)
                    UNROLLED
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        S[m][n][e] = power_of_2(S[m][n][e] * unit - base);
                        sum[m][half] += S[m][n][e];
                    }
                UNROLLED
                for (int n = 0; n < D / 8; n++)
                    UNROLLED
                    for (int e = 2 * half; e < 2 * half + 2; e++) O[m][n][e] *= shrink;
            }
        if (keys) drop<M, N>(S, at, key, b, h, own, other, 0);
        add_product<D, M, N>(O, S, V);
    }
    await_copies();
    UNROLLED
    for (int m = 0; m < M; m++)
        UNROLLED
        for (int half = 0; half < 2; half++) {
            int i = own + m * 16 + half * 8;
            float whole = quad_sum(sum[m][half]);
            if (last && at.may_blind && whole == 0.0f) whole = 1.0f;
            factors[m][half] = last ? quotient(1.0f, whole) : 1.0f;
            if (LANE % 4 || i >= at.tq) continue;
            statistics[0][i] = top[m][half] * PER_E;
            statistics[1][i] = whole;
            if (last) lse[((long long)b * at.heads + h) * at.tq + i] = (top[m][half] + log_to_2(whole)) * PER_E;
        }
    store_result<D, M>(o, O, factors, start, at.tq, h, at.heads, 1);
}

// delta = row sums of grad * o of one head, of BLOCK queries from `start` on, as by `attention_delta`: 8 lanes a row
template <int D, int BLOCK>
__device__ inline void write_delta(const bf16 *o, const bf16 *grad, float *delta, int start, int extent, int head, int heads) {
    NOT_UNROLLED
    for (int first = 0; first < BLOCK; first += WARPS * 4) {
        int i = start + first + threadIdx.x / 8, at = (min(i, extent - 1) * heads + head) * D + threadIdx.x % 8 * 8;
        float sum = 0.0f;
        UNROLLED
        for (int d = 0; d < D; d += 64) {
            Numbers<bf16, 8> x = load<8>(o + at + d), slope = load<8>(grad + at + d);
            UNROLLED
            for (int e = 0; e < 8; e++) sum += widen(x.x[e]) * widen(slope.x[e]);
        }
        for (int mask = 1; mask < 8; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        if (i < extent && threadIdx.x % 8 == 0) delta[i] = sum;
    }
    __syncthreads();  // all threads read what others have written
}

// Grid: (blocks of queries, h, b): dq of each query, over the keys in order. If there is an o, delta is computed from it first.
template <int D>
__device__ inline void backward_q(
    u16 *buffer, const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *grad, const float *lse, const bf16 *o, float *delta, bf16 *dq, const u64 *keys,
    Pair at, int first) {
    const int M = 128 / D, STAGE = 4096 / D, BLOCK = WARPS * M * 16, N = 4, TILE = STAGE * (D + PAD);
    int start = (gridDim.x - 1 - blockIdx.x) * BLOCK, h = blockIdx.y, b = blockIdx.z, g = h / (at.heads / at.groups);
    int own = start + WARP * 16 * M + LANE / 4;
    u16 *Q = buffer, *G = Q + BLOCK * (D + PAD), *stages = G + BLOCK * (D + PAD);
    long long of_queries = (long long)b * at.tq * at.heads * D, of_keys = (long long)b * at.tk * at.groups * D;
    u64 key = keys ? mixed(keys[0], keys[1], (u64)at.stream) : 0;
    float unit = at.scale * PER_2, sum[M][D / 8][4], S[M][N][4], P[M][N][4], level[M][2], shift[M][2], factors[M][2];
    int from = first_key(at, start) / STAGE * STAGE, end = end_of_keys(at, start + BLOCK);
    fetch<D, BLOCK>(q + of_queries, Q, start, at.tq, h, at.heads);
    fetch<D, BLOCK>(grad + of_queries, G, start, at.tq, h, at.heads);
    fetch<D, STAGE>(k + of_keys, stages, from, at.tk, g, at.groups);
    fetch<D, STAGE>(v + of_keys, stages + TILE, from, at.tk, g, at.groups);
    if (o) write_delta<D, BLOCK>(o + of_queries, grad + of_queries, delta + ((long long)b * at.heads + h) * at.tq, start, at.tq, h, at.heads);
    clear<M, D / 8>(sum);
    UNROLLED
    for (int m = 0; m < M; m++)
        UNROLLED
        for (int half = 0; half < 2; half++) {
            int i = own + m * 16 + half * 8;
            long long row = ((long long)b * at.heads + h) * at.tq + i;
            level[m][half] = i < at.tq ? lse[row] * PER_2 : 0.0f;
            shift[m][half] = i < at.tq ? delta[row] : 0.0f;
            factors[m][half] = at.scale;
        }
    for (int turn = 0; from < end; from += STAGE, turn ^= 1) {
        const u16 *K = stages + turn * 2 * TILE, *V = K + TILE;
        u16 *next = stages + (turn ^ 1) * 2 * TILE;
        await_copies();
        __syncthreads();
        if (from + STAGE < end) {
            fetch<D, STAGE>(k + of_keys, next, from + STAGE, at.tk, g, at.groups);
            fetch<D, STAGE>(v + of_keys, next + TILE, from + STAGE, at.tk, g, at.groups);
        }
        NOT_UNROLLED
        for (int part = 0; part < STAGE; part += 8 * N, K += 8 * N * (D + PAD), V += 8 * N * (D + PAD)) {
            int other = from + part + LANE % 4 * 2, mine = own - LANE / 4;
            if (sees_none(at, mine, 16 * M, from + part, 8 * N)) continue;
            times_rows<D, M, N>(S, Q, K);
            times_rows<D, M, N>(P, G, V);
            if (keys) drop<M, N>(P, at, key, b, h, own, other, 0);
            EACH_SCORE(m, n, e) P[m][n][e] -= shift[m][e / 2];
            shape<M, N>(S, P, at, h, own, other, 0);
            if (!sees_all(at, mine, 16 * M, from + part, 8 * N)) mask<M, N>(S, at, b, own, other, 0);
            EACH_SCORE(m, n, e) S[m][n][e] = power_of_2(S[m][n][e] * unit - level[m][e / 2]) * P[m][n][e];
            add_product<D, M, N>(sum, S, K);
        }
    }
    await_copies();
    store_result<D, M>(dq + of_queries, sum, factors, start, at.tq, h, at.heads, first);
}

// Grid: (blocks of keys, g, b): dk and dv of each key, over the heads of queries that share it and their queries in order
template <int D>
__device__ inline void backward_kv(
    u16 *buffer, const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *grad, const float *lse, const float *delta, bf16 *dk, bf16 *dv, const u64 *keys,
    Pair at, int first) {
    const int M = 128 / D, STAGE = 4096 / D, BLOCK = WARPS * M * 16, N = 4, TILE = STAGE * (D + PAD);
    int from = blockIdx.x * BLOCK, g = blockIdx.y, b = blockIdx.z, share = at.heads / at.groups, own = from + WARP * 16 * M + LANE / 4;
    u16 *K = buffer, *V = K + BLOCK * (D + PAD), *stages = V + BLOCK * (D + PAD);
    float *levels = (float *)(stages + 4 * TILE);
    long long of_queries = (long long)b * at.tq * at.heads * D, of_keys = (long long)b * at.tk * at.groups * D;
    u64 key = keys ? mixed(keys[0], keys[1], (u64)at.stream) : 0;
    float unit = at.scale * PER_2, sumk[M][D / 8][4], sumv[M][D / 8][4], S[M][N][4], P[M][N][4], factors[M][2];
    int begin = first_query(at, from) / STAGE * STAGE, per_head = (end_of_queries(at, from + BLOCK) - begin + STAGE - 1) / STAGE;
    int num_stages = per_head > 0 ? share * per_head : 0;
    auto fetch_stage = [&](int number) {
        int h = g * share + number / per_head, start = begin + number % per_head * STAGE, i = start + threadIdx.x;
        u16 *stage = stages + number % 2 * 2 * TILE;
        fetch<D, STAGE>(q + of_queries, stage, start, at.tq, h, at.heads);
        fetch<D, STAGE>(grad + of_queries, stage + TILE, start, at.tq, h, at.heads);
        if (threadIdx.x >= STAGE) return;
        long long row = ((long long)b * at.heads + h) * at.tq + i;
        float *level = levels + number % 2 * 2 * STAGE + threadIdx.x;
        copy4(level, lse + row, i < at.tq);
        copy4(level + STAGE, delta + row, i < at.tq);
    };
    fetch<D, BLOCK>(k + of_keys, K, from, at.tk, g, at.groups);
    fetch<D, BLOCK>(v + of_keys, V, from, at.tk, g, at.groups);
    if (num_stages) fetch_stage(0);
    clear<M, D / 8>(sumk);
    clear<M, D / 8>(sumv);
    for (int number = 0; number < num_stages; number++) {
        int h = g * share + number / per_head, start = begin + number % per_head * STAGE;
        const u16 *Q = stages + number % 2 * 2 * TILE, *G = Q + TILE;
        const float *level = levels + number % 2 * 2 * STAGE + LANE % 4 * 2, *shift = level + STAGE;
        await_copies();
        __syncthreads();
        if (number + 1 < num_stages) fetch_stage(number + 1);
        NOT_UNROLLED
        for (int part = 0; part < STAGE; part += 8 * N, Q += 8 * N * (D + PAD), G += 8 * N * (D + PAD), level += 8 * N, shift += 8 * N) {
            int other = start + part + LANE % 4 * 2, mine = own - LANE / 4;
            if (sees_none(at, start + part, 8 * N, mine, 16 * M)) continue;
            times_rows<D, M, N>(S, K, Q);
            times_rows<D, M, N>(P, V, G);
            if (keys) drop<M, N>(P, at, key, b, h, own, other, 1);
            EACH_SCORE(m, n, e) P[m][n][e] -= shift[n * 8 + e % 2];
            shape<M, N>(S, P, at, h, own, other, 1);
            if (!sees_all(at, start + part, 8 * N, mine, 16 * M)) mask<M, N>(S, at, b, own, other, 1);
            EACH_SCORE(m, n, e) {
                S[m][n][e] = power_of_2(S[m][n][e] * unit - level[n * 8 + e % 2] * PER_2);
                P[m][n][e] *= S[m][n][e];
            }
            add_product<D, M, N>(sumk, P, Q);
            if (keys) drop<M, N>(S, at, key, b, h, own, other, 1);
            add_product<D, M, N>(sumv, S, G);
        }
    }
    await_copies();
    UNROLLED
    for (int m = 0; m < M; m++) factors[m][0] = factors[m][1] = at.scale;
    store_result<D, M>(dk + of_keys, sumk, factors, from, at.tk, g, at.groups, first);
    UNROLLED
    for (int m = 0; m < M; m++) factors[m][0] = factors[m][1] = 1.0f;
    store_result<D, M>(dv + of_keys, sumv, factors, from, at.tk, g, at.groups, first);
}

// A pair without options but dropout; the compiler then drops their passes
__device__ inline Pair plain(Pair at) {
    at.window = 0;
    at.cap = 0.0f;
    at.of_queries = at.of_keys = 0;
    at.bias = 0;
    return at;
}

// The last two: blocks of the forward kernel and of flash_dq that a multiprocessor holds, as far as registers suffice without spilling
#define FLASH(NAME, D, OPTIONS, DROPOUT, RESIDENT, RESIDENT_DQ)                                                                                      \
    KERNEL __launch_bounds__(WARPS * 32, RESIDENT)                                                                                                   \
        flash_##NAME(const bf16 *q, const bf16 *k, const bf16 *v, bf16 *o, float *peak, float *total, float *lse, const u64 *keys, Pair at,          \
                     int first, int last) {                                                                                                          \
        SHARED(u16, buffer);                                                                                                                         \
        forward<D>(buffer, q, k, v, o, peak, total, lse, DROPOUT ? keys : 0, OPTIONS ? at : plain(at), first, last);                                 \
    }                                                                                                                                                \
    EXPORT(flash_##NAME)                                                                                                                             \
    KERNEL __launch_bounds__(WARPS * 32, RESIDENT_DQ)                                                                                                \
        flash_dq_##NAME(const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *grad, const float *lse, const bf16 *o, float *delta, bf16 *dq,      \
                        const u64 *keys, Pair at, int first) {                                                                                       \
        SHARED(u16, buffer);                                                                                                                         \
        backward_q<D>(buffer, q, k, v, grad, lse, o, delta, dq, DROPOUT ? keys : 0, OPTIONS ? at : plain(at), first);                                \
    }                                                                                                                                                \
    EXPORT(flash_dq_##NAME)                                                                                                                          \
    KERNEL __launch_bounds__(WARPS * 32, 2)                                                                                                          \
        flash_dkv_##NAME(const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *grad, const float *lse, const float *delta, bf16 *dk,              \
                         bf16 *dv, const u64 *keys, Pair at, int first) {                                                                            \
        SHARED(u16, buffer);                                                                                                                         \
        backward_kv<D>(buffer, q, k, v, grad, lse, delta, dk, dv, DROPOUT ? keys : 0, OPTIONS ? at : plain(at), first);                              \
    }                                                                                                                                                \
    EXPORT(flash_dkv_##NAME)
