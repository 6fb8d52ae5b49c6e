// Table lookup, the loss of a linear head, tokens of sequences, random numbers.

#include "common.cuh"
#include "columns.cuh"

// x[n] = table[tokens[n] - v_start] where this tile has the row; the first tile zeroes the rest
template <int N>
__device__ inline void embedding_of(const int *tokens, const T *table, T *x, int v_start, int num_rows, int width, int accumulate, long long count) {
    EACH_PIECE(i, N, count) {
        int j = column_of<N>(i, width), row = tokens[N == 1 ? i / width : (long long)((u32)(i / N) / (u32)(width / N))] - v_start;
        if (row >= 0 && row < num_rows)
            store<N>(x + i, load<N>(table + (long long)row * width + j));
        else if (!accumulate)
            for (int e = 0; e < N; e++) x[i + e] = narrow<T>(0.0f);
    }
}

KERNEL embedding(const int *tokens, const T *table, T *x, int v_start, int num_rows, int width, int accumulate, long long count) {
    if (width % WIDE == 0 && are_aligned(table, x))
        embedding_of<WIDE>(tokens, table, x, v_start, num_rows, width, accumulate, count);
    else
        embedding_of<1>(tokens, table, x, v_start, num_rows, width, accumulate, count);
}
EXPORT(embedding)

// Number of tokens that a thread compares at a time
#define TOKENS 16

// Bits of the tokens [begin, begin + TOKENS) that are `token`; four at a time where they lie within the array, which begins at a multiple of 16 bytes
__device__ inline u32 occurrences(const int *tokens, int token, int begin, int num_tokens, bool is_wide) {
    u32 bits = 0;
    if (is_wide && begin + TOKENS <= num_tokens) {
        UNROLLED
        for (int e = 0; e < TOKENS; e += 4) {
            Numbers<int, 4> four = load<4>(tokens + begin + e);
            UNROLLED
            for (int i = 0; i < 4; i++) bits |= (u32)(four.x[i] == token) << (e + i);
        }
    } else
        for (int e = 0; e < TOKENS && begin + e < num_tokens; e++) bits |= (u32)(tokens[begin + e] == token) << e;
    return bits;
}

// target[j] += dy[place][j] over `count` places, in order
template <int N> __device__ inline void add_rows_at(const int *places, int count, const T *dy, float *target, int width) {
    for (int j = threadIdx.x * N; j < width; j += blockDim.x * N) {
        Numbers<float, N> sum = load<N>(target + j);
        for (int m = 0; m < count; m++) {
            Numbers<T, N> row = load<N>(dy + (long long)places[m] * width + j);
            UNROLLED
            for (int e = 0; e < N; e++) sum.x[e] += widen(row.x[e]);
        }
        store<N>(target + j, sum);
    }
}

// dtable[tokens[n]] += dy[n] in the order of n. Grid: one block a token; the block of a token's first occurrence adds all of them, so nothing is added
// at once. A piece of tokens is searched by all threads; most have none of the row, and end there. A thread's tokens are neighbours, so the places of
// all threads one after another are in order.
//
// Ladder (H200, 16,384 random tokens of 50,257, in us, with a fill of 36): a token of each thread at a time 548
KERNEL embedding_backward(const int *tokens, const T *dy, float *dtable, int v_start, int num_rows, int width, int num_tokens) {
    SHARED(int, counts);
    int *totals = counts + blockDim.x, *places = totals + 32;
    int t = threadIdx.x, first = blockIdx.x, token = tokens[first], row = token - v_start;
    if (row < 0 || row >= num_rows) return;
    float *target = dtable + (long long)row * width;
    bool is_wide = are_aligned(tokens), has_wide_rows = width % 4 == 0 && are_aligned(dy, dtable);
    for (int begin = t * TOKENS;; begin += blockDim.x * TOKENS) {
        u32 bits = 0;
        for (int is_here = 0; !is_here; begin += is_here ? 0 : blockDim.x * TOKENS) {
            int num_before = min(TOKENS, first - begin);
            if (begin - t * TOKENS >= num_tokens) return;
            bits = occurrences(tokens, token, begin, num_tokens, is_wide);
            if (__syncthreads_or(num_before > 0 && (bits & ((1u << num_before) - 1)))) return;
            is_here = __syncthreads_or(bits);
        }
        int own = 0, place = 0, count = 0;
        for (int e = 0; e < TOKENS; e++) own += bits >> e & 1;
        counts[t] = own;
        __syncthreads();
        for (int m = t / 32 * 32; m < t; m++) place += counts[m];
        if (t % 32 == 31) totals[t / 32] = place + own;
        __syncthreads();
        for (int warp = 0; warp < (int)blockDim.x / 32; warp++) {
            place += warp < t / 32 ? totals[warp] : 0;
            count += totals[warp];
        }
        for (int e = 0; e < TOKENS; e++)
            if (bits >> e & 1) places[place++] = begin + e;
        __syncthreads();
        if (has_wide_rows)
            add_rows_at<4>(places, count, dy, target, width);
        else
            add_rows_at<1>(places, count, dy, target, width);
        __syncthreads();
    }
}
EXPORT(embedding_backward)

// logits (R, stride) of which (R, N) are logits: a bias (N,) is added, if there is one, and then they become cap tanh(logits / cap), if the cap is not 0
KERNEL shape_logits(float *logits, const T *bias, float cap, int width, int stride, long long count) {
    EACH(i, count) {
        int column = (int)(i % stride);
        if (column >= width) continue;
        float z = logits[i] + (bias ? widen(bias[column]) : 0.0f);
        logits[i] = cap > 0.0f ? cap * tanhf(z / cap) : z;
    }
}
EXPORT(shape_logits)

// Logits (R, N), of columns [v_start, v_start + N) of the vocabulary, in rows of `stride`, a multiple of 8: each row's running maximum and sum of
// exponentials, the target's logit. A thread reads N logits at a time, and each logit once: its sum follows its maximum.
template <int N> __device__ inline void add_to_statistics(const float *row, int width, float &top, float &sum) {
    for (int j = threadIdx.x * N; j < width; j += blockDim.x * N) {
        Numbers<float, N> z = load<N>(row + j);
        if (j + N > width)
            for (int e = 0; e < N; e++) z.x[e] = j + e < width ? z.x[e] : -INFINITE;
        float before = top;
        UNROLLED
        for (int e = 0; e < N; e++) top = larger(z.x[e], top);
        sum = before != -INFINITE ? sum * expf(before - top) : 0.0f;
        UNROLLED
        for (int e = 0; e < N; e++) sum += expf(z.x[e] - top);
    }
}

// The statistics of this block's row
__device__ inline void add_row(
    const float *row, bool is_wide, const int *targets, float *peak, float *total, float *picked, int v_start, int width, int first, float *buffer) {
    float before = first ? -INFINITE : peak[blockIdx.x], own = -INFINITE, sum = 0.0f;
    if (is_wide)
        add_to_statistics<8>(row, width, own, sum);
    else
        add_to_statistics<1>(row, width, own, sum);
    float top = larger(block_max(own, buffer), before);
    sum = block_sum(own != -INFINITE ? sum * expf(own - top) : 0.0f, buffer);  // of -inf alone, `sum` is NaN
    if (threadIdx.x == 0) {
        int column = targets[blockIdx.x] - v_start;
        float chosen = first ? 0.0f : picked[blockIdx.x];
        total[blockIdx.x] = (before != -INFINITE ? total[blockIdx.x] * expf(before - top) : 0.0f) + sum;
        peak[blockIdx.x] = top;
        picked[blockIdx.x] = column >= 0 && column < width ? row[column] : chosen;
    }
}

KERNEL add_logits(const float *logits, const int *targets, float *peak, float *total, float *picked, int v_start, int width, int stride, int first) {
    SHARED(float, buffer);
    add_row(logits + (long long)blockIdx.x * stride, are_aligned(logits), targets, peak, total, picked, v_start, width, first, buffer);
}
EXPORT(add_logits)

// N numbers of a thread at a time: a piece of the row is read by all threads before they write over its beginning
template <int N>
__device__ inline void logits_to_gradients(float *row, float lse, int target, int is_ignored, float scale, float cap, int width) {
    T *out = (T *)row;
    for (int start = 0; start < width; start += blockDim.x * N) {
        int j = start + threadIdx.x * N;
        Numbers<T, N> p;
        if (j < width) {
            Numbers<float, N> z = load<N>(row + j);
            UNROLLED
            for (int e = 0; e < N; e++) {
                float slope = is_ignored ? 0.0f : scale * (expf(z.x[e] - lse) - (j + e == target ? 1.0f : 0.0f));
                p.x[e] = narrow<T>(cap > 0.0f ? slope * (1.0f - z.x[e] / cap * (z.x[e] / cap)) : slope);
            }
        }
        __syncthreads();
        if (j < width) store<N>(out + j, p);
    }
}

// p = scale factor (exp(logits - lse) - 1 at the target), 0 for ignored tokens, in place: rows of `width` elements T at the beginning of rows of `stride`
// floats. The rest of a row is left undefined.
// Of logits cap tanh(z / cap), the gradients by z: times 1 - tanh^2.
KERNEL logit_gradients(
    float *logits, const int *targets, const float *lse, const float *factor, int v_start, int width, int stride, float scale, float cap) {
    float *row = logits + (long long)blockIdx.x * stride;
    int target = targets[blockIdx.x];
    if (factor) scale *= factor[0];
    if (are_aligned(logits))
        logits_to_gradients<8>(row, lse[blockIdx.x], target - v_start, target < 0, scale, cap, width);
    else
        logits_to_gradients<1>(row, lse[blockIdx.x], target - v_start, target < 0, scale, cap, width);
}
EXPORT(logit_gradients)

// `add_logits` of all columns, lse = peak + log total, and `logit_gradients`. A block has a row; a multiprocessor has few of them, so that a row is
// still in the cache when it is read again.
KERNEL logits_and_gradients(
    float *logits, const int *targets, float *peak, float *total, float *picked, float *lse, const float *factor, int v_start, int width, int stride,
    int first, float scale, float cap) {
    SHARED(float, buffer);
    float *row = logits + (long long)blockIdx.x * stride;
    bool is_wide = are_aligned(logits);
    int target = targets[blockIdx.x];
    add_row(row, is_wide, targets, peak, total, picked, v_start, width, first, buffer);
    if (threadIdx.x == 0) buffer[0] = lse[blockIdx.x] = peak[blockIdx.x] + logf(total[blockIdx.x]);
    __syncthreads();
    if (factor) scale *= factor[0];
    if (is_wide)
        logits_to_gradients<8>(row, buffer[0], target - v_start, target < 0, scale, cap, width);
    else
        logits_to_gradients<1>(row, buffer[0], target - v_start, target < 0, scale, cap, width);
}
EXPORT(logits_and_gradients)

// total (+)= sums of the columns of p (R, N), whose rows begin `stride` elements apart; partial (pieces, N). Grid: (groups of 32 columns, pieces)
KERNEL gradient_columns(const T *p, float *partial, float *total, u32 *arrivals, int num_rows, int width, int stride, int accumulate) {
    SHARED(float, buffer);
    int column = blockIdx.x * 32 + threadIdx.x % 32, end = first_of_piece(num_rows, blockIdx.y + 1, gridDim.y);
    float sum = 0.0f;
    if (column < width)
        for (int r = first_of_piece(num_rows, blockIdx.y, gridDim.y) + threadIdx.x / 32; r < end; r += LANES)
            sum += widen(p[(long long)r * stride + column]);
    add_piece<1>(&sum, partial, total, column, width, accumulate, arrivals, buffer);
}
EXPORT(gradient_columns)

// loss = scale factor * sum of (lse - picked) over tokens that count, in double: one block, thread t takes tokens t, t + blockDim.x, ...
KERNEL head_finish(
    const int *targets, const float *peak, const float *total, const float *picked, const float *factor, float *lse, double *loss, double scale,
    int num_tokens) {
    SHARED(double, sums);
    double sum = 0.0;
    for (int n = threadIdx.x; n < num_tokens; n += blockDim.x) {
        lse[n] = peak[n] + logf(total[n]);
        if (targets[n] >= 0) sum += (double)lse[n] - (double)picked[n];
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) loss[0] = (factor ? scale * (double)factor[0] : scale) * sums[0];
}
EXPORT(head_finish)

// The first token of each sequence  // (b, length, width) -> (b, 1, width)
KERNEL first_token(const T *x, T *y, int length, int width, long long count) {
    EACH(i, count) y[i] = x[i / width * length * width + i % width];
}
EXPORT(first_token)

KERNEL first_token_backward(const T *dy, T *dx, int length, int width, long long count) {
    EACH(i, count) dx[i] = i / width % length == 0 ? dy[i / width / length * width + i % width] : narrow<T>(0.0f);
}
EXPORT(first_token_backward)

// total (+)= sum over tokens, in order; y = total * shrink, if there is a y  // (b, length, width) -> (b, width)
KERNEL mean_tokens(const T *x, float *total, T *y, int length, int width, int first, float shrink, long long count) {
    EACH(i, count) {
        const T *column = x + i / width * length * width + i % width;
        float sum = first ? 0.0f : total[i];
        for (int t = 0; t < length; t++) sum += widen(column[(long long)t * width]);
        total[i] = sum;
        if (y) y[i] = narrow<T>(sum * shrink);
    }
}
EXPORT(mean_tokens)

KERNEL mean_tokens_backward(const T *dy, T *dx, int length, int width, float shrink, long long count) {
    EACH(i, count) dx[i] = narrow<T>(shrink * widen(dy[i / width / length * width + i % width]));
}
EXPORT(mean_tokens_backward)

// (b, length, width) -> (b, width, length): a block turns 32 tokens by 32 features in shared memory, so that both sides are read and written in rows.
// Grid: b times pieces of tokens, pieces of features.
KERNEL swap_tokens(const T *x, T *y, int length, int width) {
    SHARED(T, square);
    int pieces = (length + 31) / 32, column = threadIdx.x % 32;
    int t = blockIdx.x % pieces * 32, c = blockIdx.y * 32;
    long long start = (long long)(blockIdx.x / pieces) * length * width;
    for (int r = threadIdx.x / 32; r < 32; r += blockDim.x / 32)
        if (t + r < length && c + column < width) square[r * 33 + column] = x[start + (long long)(t + r) * width + c + column];
    __syncthreads();
    for (int r = threadIdx.x / 32; r < 32; r += blockDim.x / 32)
        if (c + r < width && t + column < length) y[start + (long long)(c + r) * length + t + column] = square[column * 33 + r];
}
EXPORT(swap_tokens)

// Global row-major index of element i of a tile: up to 4 axes, given as products and origins; axis 0 varies slowest
struct Place {
    int extents[4], origin[4];
    long long strides[4];
};

// I: a type that holds the number of elements; divisions of 32 bits are five times as fast as those of 64
template <class I> __device__ inline u64 index_of(const Place &place, I i) {
    u64 index = 0;
    UNROLLED
    for (int axis = 3; axis > 0; axis--) {
        I before = i / (I)place.extents[axis];
        index += (u64)(place.origin[axis] + (long long)(i - before * (I)place.extents[axis])) * (u64)place.strides[axis];
        i = before;
    }
    return index + (u64)(place.origin[0] + (long long)i) * (u64)place.strides[0];
}

// x / (1 - p) where a number survives, else 0; N neighbours have indices of one distance, from `index` on
template <int N>
__device__ inline Numbers<T, N> dropped(Numbers<T, N> numbers, u64 key, u64 index, float p, u32 threshold, const Place &place) {
    UNROLLED
    for (int e = 0; e < N; e++)
        numbers.x[e] = narrow<T>(random_bits(key, index + e * place.strides[3]) >= threshold ? quotient(widen(numbers.x[e]), 1.0f - p) : 0.0f);
    return numbers;
}

template <int N, class I>
__device__ inline void dropout_of(const T *x, u64 key, T *y, float p, u32 threshold, const Place &place, long long count) {
    EACH_PIECE(i, N, count) store<N>(y + i, dropped<N>(load<N>(x + i), key, index_of<I>(place, (I)i), p, threshold, place));
}

KERNEL dropout(const T *x, const u64 *key, T *y, float p, u32 threshold, int stream, Place place, long long count) {
    u64 own = mixed(key[0], key[1], (u64)stream);
    if (place.extents[3] % WIDE == 0 && are_aligned(x, y) && count >> 32 == 0)
        dropout_of<WIDE, u32>(x, own, y, p, threshold, place, count);
    else
        dropout_of<1, long long>(x, own, y, p, threshold, place, count);
}
EXPORT(dropout)

// y as by `dropout`, and the sums of its columns in the order of `column_sums`
template <int N, class I>
__device__ inline void dropout_sums_of(
    const T *x, u64 key, T *y, float *partial, float *total, u32 *arrivals, float p, u32 threshold, const Place &place, int num_rows, int width,
    int accumulate, float *buffer) {
    int column = (blockIdx.x * 32 + threadIdx.x % 32) * N, end = first_of_piece(num_rows, blockIdx.y + 1, gridDim.y);
    float sums[N] = {};
    if (column < width)
        for (int r = first_of_piece(num_rows, blockIdx.y, gridDim.y) + threadIdx.x / 32; r < end; r += LANES) {
            long long at = (long long)r * width + column;
            Numbers<T, N> numbers = dropped<N>(load<N>(x + at), key, index_of<I>(place, (I)at), p, threshold, place);
            UNROLLED
            for (int e = 0; e < N; e++) sums[e] += widen(numbers.x[e]);
            store<N>(y + at, numbers);
        }
    add_piece<N>(sums, partial, total, column, width, accumulate, arrivals, buffer);
}

// Grid: (groups of columns, pieces of rows). y may be x.
KERNEL dropout_sums(
    const T *x, const u64 *key, T *y, float *partial, float *total, u32 *arrivals, float p, u32 threshold, int stream, Place place, int num_rows,
    int width, int accumulate, int is_wide) {
    SHARED(float, buffer);
    u64 own = mixed(key[0], key[1], (u64)stream);
    if (is_wide && (long long)num_rows * width >> 32 == 0)
        dropout_sums_of<4, u32>(x, own, y, partial, total, arrivals, p, threshold, place, num_rows, width, accumulate, buffer);
    else if (is_wide)
        dropout_sums_of<4, long long>(x, own, y, partial, total, arrivals, p, threshold, place, num_rows, width, accumulate, buffer);
    else
        dropout_sums_of<1, long long>(x, own, y, partial, total, arrivals, p, threshold, place, num_rows, width, accumulate, buffer);
}
EXPORT(dropout_sums)

// U[0, 1) in steps of 2^-24, which fp32 holds exactly
KERNEL keyed_uniform(const u64 *key, T *out, long long stream, long long count) {
    u64 own = mixed(key[0], key[1], (u64)stream);
    EACH(i, count) out[i] = narrow<T>((float)(random_bits(own, (u64)i) >> 8) / 16777216.0f);
}
EXPORT(keyed_uniform)

__device__ inline double uniform(u64 key, u64 index) { return (random_bits(key, index) + 0.5) / 4294967296.0; }

// N(0, std^2) by Box and Muller (1958)
KERNEL random_normal(T *out, double std, u64 radius_key, u64 angle_key, Place place, long long count) {
    EACH(i, count) {
        u64 index = index_of<long long>(place, i);
        out[i] = narrow<T>((float)(std * sqrt(-2.0 * log(uniform(radius_key, index))) * cos(6.283185307179586 * uniform(angle_key, index))));
    }
}
EXPORT(random_normal)

KERNEL random_uniform(T *out, double low, double high, u64 key, Place place, long long count) {
    EACH(i, count) out[i] = narrow<T>((float)(low + (high - low) * uniform(key, index_of<long long>(place, i))));
}
EXPORT(random_uniform)
