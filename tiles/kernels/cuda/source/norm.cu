// Layer norm, RMS norm and sums of exponentials: one block per row, of a power of two of threads from 32 on.
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
    const T *x, const T *r, const T *gamma, const T *beta, T *s, T *y, float *mean, float *rstd, float eps, float offset, int width, float *buffer) {
    const T *in = r ? s : x;
    float sum = 0.0f;
    PIECES_OF_ROW(j, N) {
        Numbers<T, N> a = load<N>(x + j);
        if (r) {
            Numbers<T, N> more = load<N>(r + j);
            UNROLLED
            for (int e = 0; e < N; e++) a.x[e] = narrow<T>(widen(a.x[e]) + widen(more.x[e]));
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
KERNEL normalise(const T *x, const T *r, const T *gamma, const T *beta, T *s, T *y, float *mean, float *rstd, float eps, float offset, int width) {
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

template <int N>
__device__ inline void norm_backward_row(
    const T *x, const T *gamma, float m, float s, const T *dy, const T *extra, T *dx, float offset, int is_centered, int width, float *buffer) {
    float plain = 0.0f, weighted = 0.0f;
    PIECES_OF_ROW(j, N) {
        Numbers<T, N> a = load<N>(x + j), factor = load<N>(gamma + j), d = load<N>(dy + j);
        UNROLLED
        for (int e = 0; e < N; e++) {
            float g = widen(d.x[e]) * (widen(factor.x[e]) + offset);
            plain += g;
            weighted += g * (widen(a.x[e]) - m) * s;
        }
    }
    plain = is_centered ? block_sum(plain, buffer) / width : 0.0f;
    weighted = block_sum(weighted, buffer) / width;
    PIECES_OF_ROW(j, N) {
        Numbers<T, N> a = load<N>(x + j), factor = load<N>(gamma + j), d = load<N>(dy + j), more = extra ? load<N>(extra + j) : d;
        UNROLLED
        for (int e = 0; e < N; e++) {
            float xhat = (widen(a.x[e]) - m) * s;
            float slope = s * (widen(d.x[e]) * (widen(factor.x[e]) + offset) - plain - xhat * weighted);
            a.x[e] = narrow<T>(extra ? slope + widen(more.x[e]) : slope);
        }
        store<N>(dx + j, a);
    }
}

// dx = rstd (g - mean(g) - xhat mean(g xhat)) [+ extra], g = dy (gamma + offset); without mean: RMS norm
KERNEL norm_backward(const T *x, const T *gamma, const float *mean, const float *rstd, const T *dy, const T *extra, T *dx, float offset, int width) {
    SHARED(float, buffer);
    float m = mean ? mean[blockIdx.x] : 0.0f, s = rstd[blockIdx.x];
    const T *more = extra ? ROW(extra) : extra;
    if (width % WIDE == 0 && are_aligned(x, gamma, dy, extra, dx))
        norm_backward_row<WIDE>(ROW(x), gamma, m, s, ROW(dy), more, ROW(dx), offset, mean != 0, width, buffer);
    else
        norm_backward_row<1>(ROW(x), gamma, m, s, ROW(dy), more, ROW(dx), offset, mean != 0, width, buffer);
}
EXPORT(norm_backward)

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

// dgamma (+)= the first, dbeta (+)= the second sums of all pieces; grid: (groups of 32 columns, 2 or, without dbeta, 1)
KERNEL norm_gradients_of_pieces(const float *partial, float *dgamma, float *dbeta, int num_pieces, int width, int accumulate) {
    SHARED(float, buffer);
    add_pieces(partial + blockIdx.y * width, blockIdx.y ? dbeta : dgamma, blockIdx.x * 32 + threadIdx.x % 32, num_pieces, 2 * width, width, accumulate, buffer);
}
EXPORT(norm_gradients_of_pieces)

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
