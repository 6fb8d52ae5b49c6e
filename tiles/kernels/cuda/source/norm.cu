// Layer norm, RMS norm and sums of exponentials: one block per row, of a power of two of threads.
//
// Where the width is cut into tiles, sums are chained over them and the row is finished in a second pass.

#include "common.cuh"

#define ROW(a) ((a) + (long long)blockIdx.x * width)
#define COLUMNS_OF_ROW(j) for (int j = threadIdx.x; j < width; j += blockDim.x)

// [s = x + r;] y = (s - mean) rstd (gamma + offset) [+ beta]; r may be null, then s is x. Without beta: RMS norm, mean is not written.
KERNEL normalise(const T *x, const T *r, const T *gamma, const T *beta, T *s, T *y, float *mean, float *rstd, float eps, float offset, int width) {
    SHARED(float, buffer);
    const T *in = ROW(x);
    T *kept = s ? ROW(s) : (T *)0, *out = ROW(y);
    float sum = 0.0f;
    COLUMNS_OF_ROW(j) {
        if (r) kept[j] = narrow<T>(widen(in[j]) + widen(ROW(r)[j]));
        if (beta) sum += widen(r ? kept[j] : in[j]);
    }
    if (r) in = kept;
    float m = beta ? block_sum(sum, buffer) / width : 0.0f, squares = 0.0f;
    COLUMNS_OF_ROW(j) {
        float away = widen(in[j]) - m;
        squares += away * away;
    }
    float scale = 1.0f / sqrtf(block_sum(squares, buffer) / width + eps);
    if (threadIdx.x == 0) {
        if (beta) mean[blockIdx.x] = m;
        rstd[blockIdx.x] = scale;
    }
    COLUMNS_OF_ROW(j) out[j] = narrow<T>((widen(in[j]) - m) * scale * (widen(gamma[j]) + offset) + (beta ? widen(beta[j]) : 0.0f));
}
EXPORT(normalise)

// dx = rstd (g - mean(g) - xhat mean(g xhat)) [+ extra], g = dy (gamma + offset); without mean: RMS norm
KERNEL norm_backward(const T *x, const T *gamma, const float *mean, const float *rstd, const T *dy, const T *extra, T *dx, float offset, int width) {
    SHARED(float, buffer);
    float m = mean ? mean[blockIdx.x] : 0.0f, s = rstd[blockIdx.x], plain = 0.0f, weighted = 0.0f;
    COLUMNS_OF_ROW(j) {
        float g = widen(ROW(dy)[j]) * (widen(gamma[j]) + offset);
        plain += g;
        weighted += g * (widen(ROW(x)[j]) - m) * s;
    }
    plain = mean ? block_sum(plain, buffer) / width : 0.0f;
    weighted = block_sum(weighted, buffer) / width;
    COLUMNS_OF_ROW(j) {
        float xhat = (widen(ROW(x)[j]) - m) * s;
        float d = s * (widen(ROW(dy)[j]) * (widen(gamma[j]) + offset) - plain - xhat * weighted);
        ROW(dx)[j] = narrow<T>(extra ? d + widen(ROW(extra)[j]) : d);
    }
}
EXPORT(norm_backward)

// dgamma (+)= sum of dy xhat, dbeta (+)= sum of dy over rows; dbeta may be null. 32 columns and 8 lanes of rows a block, lanes added in order.
KERNEL norm_gradients(const T *x, const float *mean, const float *rstd, const T *dy, float *dgamma, float *dbeta, int num_rows, int width, int accumulate) {
    SHARED(float, buffer);
    int column = blockIdx.x * 32 + threadIdx.x % 32, lane = threadIdx.x / 32;
    float plain = 0.0f, weighted = 0.0f;
    if (column < width)
        for (int r = lane; r < num_rows; r += 8) {
            long long at = (long long)r * width + column;
            float d = widen(dy[at]);
            plain += d;
            weighted += d * (widen(x[at]) - (mean ? mean[r] : 0.0f)) * rstd[r];
        }
    buffer[threadIdx.x] = plain;
    buffer[256 + threadIdx.x] = weighted;
    __syncthreads();
    if (lane == 0 && column < width) {
        for (int l = 1; l < 8; l++) {
            plain += buffer[l * 32 + threadIdx.x];
            weighted += buffer[256 + l * 32 + threadIdx.x];
        }
        dgamma[column] = accumulate ? dgamma[column] + weighted : weighted;
        if (dbeta) dbeta[column] = accumulate ? dbeta[column] + plain : plain;
    }
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
