// Products and lookups with quantised weights, whose layout `tiles/block_format.py` describes: rows of blocks of 32 numbers, a fp16 scale before each.
//
// `size` is the number of bytes of a block: 34 of q8_0, 18 of q4_0. Scales are finite.

#include "common.cuh"

// the fp16 number of two bytes: exponent and mantissa moved in place, times 2^112, which is exact for denormals too
__device__ inline float scale_of(const unsigned char *block) {
    u32 bits = (u32)block[0] | (u32)block[1] << 8;
    return __uint_as_float((bits & 0x7fff) << 13 | (bits & 0x8000) << 16) * 5192296858534827628530496329220096.0f;
}

// the whole number that a block has in place j of 32
__device__ inline float number_of(const unsigned char *block, int j, int size) {
    if (size == 34) return (float)(signed char)block[2 + j];
    unsigned char both = block[2 + j % 16];
    return (float)((j < 16 ? both & 15 : both >> 4) - 8);
}

// out = the numbers of blocks
KERNEL decode_blocks(const unsigned char *w, T *out, int size, long long count) {
    EACH(i, count) {
        const unsigned char *block = w + i / 32 * size;
        out[i] = narrow<T>(number_of(block, (int)(i % 32), size) * scale_of(block));
    }
}
EXPORT(decode_blocks)

// x[n] = table[tokens[n] - v_start] where this tile has the row; the first tile zeroes the rest
KERNEL quantised_embedding(
    const int *tokens, const unsigned char *table, T *x, int v_start, int num_rows, int width, int size, int accumulate, long long count) {
    EACH(i, count) {
        int row = tokens[i / width] - v_start, j = (int)(i % width);
        if (row >= 0 && row < num_rows) {
            const unsigned char *block = table + ((long long)row * (width / 32) + j / 32) * size;
            x[i] = narrow<T>(number_of(block, j % 32, size) * scale_of(block));
        } else if (!accumulate)
            x[i] = narrow<T>(0.0f);
    }
}
EXPORT(quantised_embedding)

// y (+)= x w^T [+ bias] of few rows  // (R, K), (N, K) -> (R, N). Grid: (N, R); a block of threads takes one sum, neighbours neighbouring numbers.
KERNEL multiply_rows(const T *x, const unsigned char *w, const T *bias, T *y, int width, int size, int accumulate) {
    SHARED(float, buffer);
    const T *row = x + (long long)blockIdx.y * width;
    const unsigned char *blocks = w + (long long)blockIdx.x * (width / 32) * size;
    float sum = 0.0f;
    for (int j = threadIdx.x; j < width; j += blockDim.x) {
        const unsigned char *block = blocks + (long long)(j / 32) * size;
        sum += widen(row[j]) * (number_of(block, j % 32, size) * scale_of(block));
    }
    sum = block_sum(sum, buffer);
    if (threadIdx.x == 0) {
        long long at = (long long)blockIdx.y * gridDim.x + blockIdx.x;
        y[at] = narrow<T>(sum + (bias ? widen(bias[blockIdx.x]) : 0.0f) + (accumulate ? widen(y[at]) : 0.0f));
    }
}
EXPORT(multiply_rows)
