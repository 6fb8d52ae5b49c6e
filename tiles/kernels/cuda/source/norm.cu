// Layer norm, RMS norm and sums of exponentials. Kernels over rows have one block per row, of a power of two of threads from 32 on: the fewer threads,
// the fewer instructions, so tall arrays have a warp for each row. A block of norm_backward has one lane of a piece of the rows.
//
// Where the width is cut into tiles, sums are chained over them and the row is finished in a second pass.

#include "common.cuh"
#include "columns.cuh"

#define ROW(a) ((a) + (long long)blockIdx.x * width)
#define COLUMNS_OF_ROW(j) for (int j = threadIdx.x; j < width; j += blockDim.x)
#define PIECES_OF_ROW(j, N) for (int j = threadIdx.x * N; j < width; j += blockDim.x * N)

// N numbers at a time: what is read again is still in the cache
template <int N>
__device__ inline void normalise_row(
    const T *x, const T *r, const T *gamma, const T *beta, T *s, T *y, float *mean, float *rstd, float eps, float offset, int width,
    float *buffer) {
    const T *in = r ? s : x;
    float sum = 0.0f;
    PIECES_OF_ROW(j, N) {
        Numbers<T, N> a = load<N>(x + j);
        if (r) {
            a = sum_of<N>(a, load<N>(r + j));
            store<N>(s + j, a);
        }
        UNROLLED
        for (int e = 0; e < N; e++) sum += widen(a.x[e]);
    }
    float m = beta ? block_sum(sum, buffer) / width : 0.0f, squares = 0.0f;
    PIECES_OF_ROW(j, N) {
        Numbers<T, N> a = load<N>(in + j);
        UNROLLED
        for (int e = 0; e < N; e++) squares += (widen(a.x[e]) - m) * (widen(a.x[e]) - m);
    }
    float scale = 1.0f / sqrtf(block_sum(squares, buffer) / width + eps);
    if (threadIdx.x == 0) {
        if (beta) *mean = m;
        *rstd = scale;
    }
    PIECES_OF_ROW(j, N) {
        Numbers<T, N> a = load<N>(in + j), factor = load<N>(gamma + j), shift = beta ? load<N>(beta + j) : factor;
        UNROLLED
        for (int e = 0; e < N; e++)
            a.x[e] = narrow<T>((widen(a.x[e]) - m) * scale * (widen(factor.x[e]) + offset) + (beta ? widen(shift.x[e]) : 0.0f));
        store<N>(y + j, a);
    }
}

// [s = x + r;] y = (s - mean) rstd (gamma + offset) [+ beta]; r may be null, then s is x. Without beta: RMS norm, mean is not written.
KERNEL normalise(
    const T *x, const T *r, const T *gamma, const T *beta, T *s, T *y, float *mean, float *rstd, float eps, float offset, int width) {
    SHARED(float, buffer);
    const T *more = r ? ROW(r) : r;
    T *sum = s ? ROW(s) : s;
    mean += blockIdx.x;
    rstd += blockIdx.x;
    if (width % WIDE == 0 && are_aligned(x, r, gamma, beta, s, y))
        normalise_row<WIDE>(ROW(x), more, gamma, beta, sum, ROW(y), mean, rstd, eps, offset, width, buffer);
    else
        normalise_row<1>(ROW(x), more, gamma, beta, sum, ROW(y), mean, rstd, eps, offset, width, buffer);
}
EXPORT(normalise)

// Slopes by y: dy, or the sum of two or three arrays, rounded after each addition
template <int N> __device__ inline Numbers<T, N> slopes_of(const T *dy, const T *second, const T *third, long long at) {
    Numbers<T, N> d = load<N>(dy + at);
    if (second) d = sum_of<N>(d, load<N>(second + at));
    if (third) d = sum_of<N>(d, load<N>(third + at));
    return d;
}

// Rows first, first + LANES, ... before `end`; `sums` (2 or 3, width) are those of dy xhat, dy and, if `has_columns`, dx over these rows. The thread of
// a column adds them up.
template <int N>
__device__ inline void norm_backward_rows(
    const T *x, const T *gamma, const float *mean, const float *rstd, const T *dy, const T *second, const T *third, const T *extra, T *dx, float *sums,
    float offset, int first, int end, int width, int has_columns, float *buffer) {
    PIECES_OF_ROW(j, N) {
        UNROLLED
        for (int e = 0; e < N; e++) sums[j + e] = sums[width + j + e] = 0.0f;
        if (has_columns) store<N>(sums + 2 * width + j, load<N>(sums + j));
    }
    for (int r = first; r < end; r += LANES) {
        long long row = (long long)r * width;
        float m = mean ? mean[r] : 0.0f, s = rstd[r], plain = 0.0f, weighted = 0.0f;
        PIECES_OF_ROW(j, N) {
            Numbers<T, N> a = load<N>(x + row + j), factor = load<N>(gamma + j), d = slopes_of<N>(dy, second, third, row + j);
            Numbers<float, N> scaled = load<N>(sums + j), shifted = load<N>(sums + width + j);
            UNROLLED
            for (int e = 0; e < N; e++) {
                float slope = widen(d.x[e]), xhat = (widen(a.x[e]) - m) * s, g = slope * (widen(factor.x[e]) + offset);
                plain += g;
                weighted += g * xhat;
                scaled.x[e] += slope * xhat;
                shifted.x[e] += slope;
            }
            store<N>(sums + j, scaled);
            store<N>(sums + width + j, shifted);
        }
        plain = mean ? block_sum(plain, buffer) / width : 0.0f;
        weighted = block_sum(weighted, buffer) / width;
        PIECES_OF_ROW(j, N) {
            Numbers<T, N> a = load<N>(x + row + j), factor = load<N>(gamma + j), d = slopes_of<N>(dy, second, third, row + j);
            Numbers<T, N> more = extra ? load<N>(extra + row + j) : d;
            UNROLLED
            for (int e = 0; e < N; e++) {
                float xhat = (widen(a.x[e]) - m) * s;
                float slope = s * (widen(d.x[e]) * (widen(factor.x[e]) + offset) - plain - xhat * weighted);
                a.x[e] = narrow<T>(extra ? slope + widen(more.x[e]) : slope);
            }
            store<N>(dx + row + j, a);
            if (has_columns) {
                Numbers<float, N> columns = load<N>(sums + 2 * width + j);
                UNROLLED
                for (int e = 0; e < N; e++) columns.x[e] += widen(a.x[e]);
                store<N>(sums + 2 * width + j, columns);
            }
        }
    }
}

// dx = rstd (g - mean(g) - xhat mean(g xhat)) [+ extra], g = dy (gamma + offset); without mean: RMS norm. A block has one lane of a piece of the rows,
// and writes the sums of dy xhat, dy and, if there are three of them, dx over its rows to partial (pieces, LANES, num_sums, width). They are kept in
// shared memory until then, or in partial itself if `is_shared` is 0.
KERNEL norm_backward(
    const T *x, const T *gamma, const float *mean, const float *rstd, const T *dy, const T *second, const T *third, const T *extra, T *dx, float *partial,
    float offset, int num_rows, int width, int num_sums, int is_shared) {
    SHARED(float, buffer);
    float *own = partial + (long long)blockIdx.x * num_sums * width, *sums = is_shared ? buffer + 32 : own;
    int piece = blockIdx.x / LANES, num_pieces = gridDim.x / LANES;
    int first = first_of_piece(num_rows, piece, num_pieces) + blockIdx.x % LANES, end = first_of_piece(num_rows, piece + 1, num_pieces);
    if (width % WIDE == 0 && are_aligned(x, gamma, dy, second, third, extra, dx))
        norm_backward_rows<WIDE>(x, gamma, mean, rstd, dy, second, third, extra, dx, sums, offset, first, end, width, num_sums > 2, buffer);
    else
        norm_backward_rows<1>(x, gamma, mean, rstd, dy, second, third, extra, dx, sums, offset, first, end, width, num_sums > 2, buffer);
    if (!is_shared) return;
    __syncthreads();
    for (int j = threadIdx.x; j < num_sums * width; j += blockDim.x) own[j] = sums[j];
}
EXPORT(norm_backward)

// Each total, which may be null, (+)= its sums over lanes and pieces, in the order of `column_sums`; grid: (groups of 32 columns, num_sums)
KERNEL norm_sums(
    const float *partial, float *dgamma, float *dbeta, float *columns, int num_pieces, int num_lanes, int num_sums, int width, int accumulate,
    int onto_columns) {
    SHARED(float, buffer);
    float *total = blockIdx.y == 0 ? dgamma : blockIdx.y == 1 ? dbeta : columns, sum = num_pieces > 1 ? 0.0f : -0.0f;
    int column = blockIdx.x * 32 + threadIdx.x % 32;
    if (!total) return;
    if (column < width)
        for (int piece = threadIdx.x / 32; piece < num_pieces; piece += LANES) {
            const float *own = partial + ((long long)piece * num_lanes * num_sums + blockIdx.y) * width + column;
            float lanes = own[0];
            for (int lane = 1; lane < num_lanes; lane++) lanes += own[(long long)lane * num_sums * width];
            sum += lanes;
        }
    add_lanes<1>(&sum, buffer, total, column, width, blockIdx.y == 2 ? onto_columns : accumulate);
}
EXPORT(norm_sums)

// Sums of dy xhat and dy over a piece of the rows, to partial[0] and [1] of (pieces, 2, width); of one piece, dgamma (+)= the first, dbeta (+)= the
// second, and dbeta may be null. Grid: (groups of 32 N columns, pieces)
template <int N>
__device__ inline void gradients_of_columns(
    const T *x, const float *mean, const float *rstd, const T *dy, float *partial, float *dgamma, float *dbeta, int num_rows, int width, int accumulate,
    float *buffer) {
    int column = (blockIdx.x * 32 + threadIdx.x % 32) * N, lane = threadIdx.x / 32;
    float sums[2][N] = {};
    if (column < width)
        for (int r = first_of_piece(num_rows, blockIdx.y, gridDim.y) + lane; r < first_of_piece(num_rows, blockIdx.y + 1, gridDim.y); r += LANES) {
            Numbers<T, N> a = load<N>(x + (long long)r * width + column), d = load<N>(dy + (long long)r * width + column);
            float m = mean ? mean[r] : 0.0f, s = rstd[r];
            UNROLLED
            for (int e = 0; e < N; e++) {
                sums[0][e] += widen(d.x[e]) * (widen(a.x[e]) - m) * s;
                sums[1][e] += widen(d.x[e]);
            }
        }
    partial += (long long)blockIdx.y * 2 * width;
    bool is_last = gridDim.y == 1;
    add_lanes<N>(sums[0], buffer, is_last ? dgamma : partial, column, width, is_last && accumulate);
    if (!is_last || dbeta) add_lanes<N>(sums[1], buffer, is_last ? dbeta : partial + width, column, width, is_last && accumulate);
}

KERNEL norm_gradients(
    const T *x, const float *mean, const float *rstd, const T *dy, float *partial, float *dgamma, float *dbeta, int num_rows, int width, int accumulate,
    int is_wide) {
    SHARED(float, buffer);
    if (is_wide)
        gradients_of_columns<4>(x, mean, rstd, dy, partial, dgamma, dbeta, num_rows, width, accumulate, buffer);
    else
        gradients_of_columns<1>(x, mean, rstd, dy, partial, dgamma, dbeta, num_rows, width, accumulate, buffer);
}
EXPORT(norm_gradients)

KERNEL row_sums(const T *x, float *sums, int width, int accumulate) {
    SHARED(float, buffer);
    float sum = 0.0f;
    COLUMNS_OF_ROW(j) sum += widen(ROW(x)[j]);
    sum = block_sum(sum, buffer);
    if (threadIdx.x == 0) sums[blockIdx.x] = accumulate ? sums[blockIdx.x] + sum : sum;
}
EXPORT(row_sums)

// squares (+)= sum of (x - center / whole)^2
KERNEL row_squares(const T *x, const float *center, float *squares, int width, int whole, int accumulate) {
    SHARED(float, buffer);
    float m = center[blockIdx.x] / whole, sum = 0.0f;
    COLUMNS_OF_ROW(j) {
        float away = widen(ROW(x)[j]) - m;
        sum += away * away;
    }
    sum = block_sum(sum, buffer);
    if (threadIdx.x == 0) squares[blockIdx.x] = accumulate ? squares[blockIdx.x] + sum : sum;
}
EXPORT(row_squares)

KERNEL norm_finish(const float *sums, const float *squares, float *mean, float *rstd, int whole, float eps, long long count) {
    EACH(i, count) {
        mean[i] = sums[i] / whole;
        rstd[i] = 1.0f / sqrtf(squares[i] / whole + eps);
    }
}
EXPORT(norm_finish)

KERNEL norm_apply(const T *x, const float *mean, const float *rstd, const T *gamma, const T *beta, T *y, float offset, int width, long long count) {
    EACH(i, count) {
        long long row = i / width;
        int j = (int)(i % width);
        y[i] = narrow<T>((widen(x[i]) - mean[row]) * rstd[row] * (widen(gamma[j]) + offset) + (beta ? widen(beta[j]) : 0.0f));
    }
}
EXPORT(norm_apply)

// plain (+)= sum of g, weighted (+)= sum of g xhat, g = dy (gamma + offset)
KERNEL norm_backward_sums(
    const T *x, const T *gamma, const float *mean, const float *rstd, const T *dy, float *plain, float *weighted, float offset, int width, int accumulate) {
    SHARED(float, buffer);
    float m = mean[blockIdx.x], s = rstd[blockIdx.x], sum = 0.0f, dot = 0.0f;
    COLUMNS_OF_ROW(j) {
        float g = widen(ROW(dy)[j]) * (widen(gamma[j]) + offset);
        sum += g;
        dot += g * (widen(ROW(x)[j]) - m) * s;
    }
    sum = block_sum(sum, buffer);
    dot = block_sum(dot, buffer);
    if (threadIdx.x == 0) {
        plain[blockIdx.x] = accumulate ? plain[blockIdx.x] + sum : sum;
        weighted[blockIdx.x] = accumulate ? weighted[blockIdx.x] + dot : dot;
    }
}
EXPORT(norm_backward_sums)

KERNEL norm_backward_apply(
    const T *x, const T *gamma, const float *mean, const float *rstd, const T *dy, const float *plain, const float *weighted, const T *extra,
    T *dx, float offset, int width, int whole, int center, long long count) {
    EACH(i, count) {
        long long row = i / width;
        float s = rstd[row], xhat = (widen(x[i]) - mean[row]) * s;
        float d = widen(dy[i]) * (widen(gamma[i % width]) + offset) - xhat * (weighted[row] / whole);
        if (center) d -= plain[row] / whole;
        dx[i] = narrow<T>(extra ? d * s + widen(extra[i]) : d * s);
    }
}
EXPORT(norm_backward_apply)

// running maximum and sum of exponentials of each row (Milakov and Gimelshein 2018); a row of -inf adds nothing
KERNEL softmax_sums(const T *x, float *peak, float *total, int width, int accumulate) {
    SHARED(float, buffer);
    float before = accumulate ? peak[blockIdx.x] : -INFINITE, top = before, sum = 0.0f;
    COLUMNS_OF_ROW(j) top = larger(top, widen(ROW(x)[j]));
    top = block_max(top, buffer);
    if (top != -INFINITE) COLUMNS_OF_ROW(j) sum += expf(widen(ROW(x)[j]) - top);
    sum = block_sum(sum, buffer);
    if (threadIdx.x == 0) {
        total[blockIdx.x] = (before != -INFINITE ? total[blockIdx.x] * expf(before - top) : 0.0f) + sum;
        peak[blockIdx.x] = top;
    }
}
EXPORT(softmax_sums)

KERNEL log_sum_exp(const float *peak, const float *total, float *lse, long long count) {
    EACH(i, count) lse[i] = peak[i] + logf(total[i]);
}
EXPORT(log_sum_exp)
