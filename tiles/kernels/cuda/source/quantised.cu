// Products and lookups with quantised weights, whose layouts `tiles/block_numbers.py` has: rows of blocks of 32 or 256 numbers.
//
// `kind` is ggml's number of the format, `values` and `size` are numbers and bytes of a block. Scales are finite. A number has the bits of `decode`:
// each product and each sum is rounded once (__fadd_rn is never fused).

#include "common.cuh"

typedef const unsigned char *Block;

// the fp16 number of two bytes: exponent and mantissa moved in place, times 2^112, which is exact for denormals too
__device__ inline float scale_of(Block block) {
    u32 bits = (u32)block[0] | (u32)block[1] << 8;
    return __uint_as_float((bits & 0x7fff) << 13 | (bits & 0x8000) << 16) * 5192296858534827628530496329220096.0f;
}

// the half byte in place j of 32: low halves of 16 bytes, then high halves
__device__ inline int nibble_of(Block bytes, int j) { return j < 16 ? bytes[j] & 15 : bytes[j - 16] >> 4; }

// bit j of bytes
__device__ inline int bit_of(Block bytes, int j) { return bytes[j / 8] >> j % 8 & 1; }

// the number that a half byte of iq4_nl and iq4_xs stands for
__device__ inline float level_of(int place) {
    const signed char levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return (float)levels[place];
}

// scale * whole - least of group g of q4_k and q5_k, whose scales and minima have 6 bits in 12 bytes
__device__ inline float in_group(Block block, int g, int whole) {
    Block bits = block + 4;
    int scale = g < 4 ? bits[g] & 63 : (bits[g + 4] & 15) | bits[g - 4] >> 6 << 4;
    int least = g < 4 ? bits[g + 4] & 63 : bits[g + 4] >> 4 | bits[g] >> 6 << 4;
    float product = scale_of(block) * (float)scale * (float)whole;
    return __fadd_rn(product, -(scale_of(block + 2) * (float)least));
}

// number j of 256, of a block with groups
__device__ inline float number_of_256(Block block, int j, int kind) {
    int half = j / 128, byte = j % 32, pair = j / 32 % 4, group = j / 16;
    if (kind == 10) {  // q2_k
        float scale = scale_of(block + 80) * (float)(block[group] & 15), least = scale_of(block + 82) * (float)(block[group] >> 4);
        return __fadd_rn(scale * (float)(block[16 + 32 * half + byte] >> 2 * pair & 3), -least);
    }
    if (kind == 11) {  // q3_k
        Block bits = block + 96;
        int scale = (group < 8 ? bits[group] & 15 : bits[group - 8] >> 4) | (bits[8 + group % 4] >> 2 * (group / 4) & 3) << 4;
        int whole = (block[32 + 32 * half + byte] >> 2 * pair & 3) | (block[byte] >> j / 32 & 1) << 2;
        return scale_of(block + 108) * (float)(scale - 32) * (float)(whole - 4);
    }
    if (kind == 12) return in_group(block, j / 32, block[16 + 32 * (j / 64) + byte] >> 4 * (j / 32 % 2) & 15);  // q4_k
    if (kind == 13) {  // q5_k
        int whole = block[48 + 32 * (j / 64) + byte] >> 4 * (j / 32 % 2) & 15;
        return in_group(block, j / 32, whole | (block[16 + byte] >> j / 32 & 1) << 4);
    }
    if (kind == 14) {  // q6_k
        int whole = block[64 * half + j % 64] >> 4 * (j / 64 % 2) & 15, high = block[128 + 32 * half + byte] >> 2 * pair & 3;
        return scale_of(block + 208) * (float)(signed char)block[192 + group] * (float)((whole | high << 4) - 32);
    }
    int g = j / 32, scale = (block[4 + g / 2] >> 4 * (g % 2) & 15) | (block[2 + g / 4] >> 2 * (g % 4) & 3) << 4;  // iq4_xs
    return scale_of(block) * (float)(scale - 32) * level_of(nibble_of(block + 8 + 16 * g, byte));
}

// number j of a block
__device__ inline float number_of(Block block, int j, int kind) {
    switch (kind) {
        case 1: return scale_of(block + 2 * j);  // f16
        case 30: return __uint_as_float((u32)block[2 * j] << 16 | (u32)block[2 * j + 1] << 24);  // bf16
        case 8: return (float)(signed char)block[2 + j] * scale_of(block);  // q8_0
        case 2: return (float)(nibble_of(block + 2, j) - 8) * scale_of(block);  // q4_0
        case 20: return level_of(nibble_of(block + 2, j)) * scale_of(block);  // iq4_nl
        case 3: return __fadd_rn((float)nibble_of(block + 4, j) * scale_of(block), scale_of(block + 2));  // q4_1
        case 6: return (float)((nibble_of(block + 6, j) | bit_of(block + 2, j) << 4) - 16) * scale_of(block);  // q5_0
        case 7:  // q5_1
            return __fadd_rn((float)(nibble_of(block + 8, j) | bit_of(block + 4, j) << 4) * scale_of(block), scale_of(block + 2));
    }
    return number_of_256(block, j, kind);
}

// out = the numbers of blocks
KERNEL decode_blocks(const unsigned char *w, T *out, int kind, int values, int size, long long count) {
    EACH(i, count) out[i] = narrow<T>(number_of(w + i / values * size, (int)(i % values), kind));
}
EXPORT(decode_blocks)

// x[n] = table[tokens[n] - v_start] where this tile has the row; the first tile zeroes the rest
KERNEL quantised_embedding(
    const int *tokens, const unsigned char *table, T *x, int v_start, int num_rows, int width, int kind, int values, int size, int accumulate, long long count) {
    EACH(i, count) {
        int row = tokens[i / width] - v_start, j = (int)(i % width);
        if (row >= 0 && row < num_rows)
            x[i] = narrow<T>(number_of(table + ((long long)row * (width / values) + j / values) * size, j % values, kind));
        else if (!accumulate)
            x[i] = narrow<T>(0.0f);
    }
}
EXPORT(quantised_embedding)

// y (+)= x w^T [+ bias] of few rows  // (R, K), (N, K) -> (R, N). Grid: (N, R); a block of threads takes one sum, neighbours neighbouring numbers.
KERNEL multiply_rows(const T *x, const unsigned char *w, const T *bias, T *y, int width, int kind, int values, int size, int accumulate) {
    SHARED(float, buffer);
    const T *row = x + (long long)blockIdx.y * width;
    Block blocks = w + (long long)blockIdx.x * (width / values) * size;
    float sum = 0.0f;
    for (int j = threadIdx.x; j < width; j += blockDim.x) sum += widen(row[j]) * number_of(blocks + (long long)(j / values) * size, j % values, kind);
    sum = block_sum(sum, buffer);
    if (threadIdx.x == 0) {
        long long at = (long long)blockIdx.y * gridDim.x + blockIdx.x;
        y[at] = narrow<T>(sum + (bias ? widen(bias[blockIdx.x]) : 0.0f) + (accumulate ? widen(y[at]) : 0.0f));
    }
}
EXPORT(multiply_rows)
