// What every kernel source shares: element types, block reductions, counter-based random bits.
//
// A source is compiled once per element type T (-DELEMENT=float or bf16) of activations and parameters (float or bf16); statistics, gradients of weights, moments and master
// weights are float, sums are taken in float. No atomics: every sum has one order, so the same tiling gives the same bits. No headers beyond
// this one are needed, so NVRTC compiles a source without a toolkit, and a C++ compiler with tests/support/emulation.hpp makes it run on a CPU.
//
// Letters: R rows, N columns, T tokens, H heads, D columns of a head, V rows of a table.

#pragma once

#ifndef EMULATED
#define SHARED(type, name) extern __shared__ __align__(16) type name[]  // all of them begin in one place, whatever they are read as
#define EXPORT(name)
#define INFINITE __int_as_float(0x7f800000)
typedef unsigned int u32;
typedef unsigned long long u64;
#endif

#define KERNEL extern "C" __global__ void

struct bf16 {
    unsigned short bits;
};

__device__ inline float widen(float x) { return x; }

__device__ inline float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

typedef ELEMENT T;

template <class U> __device__ inline U narrow(float x);

template <> __device__ inline float narrow<float>(float x) { return x; }

// round to nearest, ties to even; NaN stays NaN
template <> __device__ inline bf16 narrow<bf16>(float x) {
    bf16 out;
#if !defined(EMULATED) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
#else
    u32 bits = __float_as_uint(x);
    out.bits = x != x ? (unsigned short)((bits >> 16) | 0x40) : (unsigned short)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
#endif
    return out;
}

// two rounded numbers, the first in the low half
__device__ inline u32 pack(float low, float high) {
#if !defined(EMULATED) && __CUDA_ARCH__ >= 800
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return (u32)narrow<bf16>(low).bits | (u32)narrow<bf16>(high).bits << 16;
#endif
}

// index of this thread among all, and how many there are: for loops over elements
#define EACH(i, count) \
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < (count); i += (long long)gridDim.x * blockDim.x)

// The larger of two numbers; NaN if one of them is: a loss that diverged must show
__device__ inline float larger(float a, float b) { return a > b || a != a ? a : b; }

// Sum, or largest, of one number of every thread of a block whose size is a power of two; every thread gets it. `buffer`: blockDim.x floats.
__device__ inline float block_sum(float x, float *buffer) {
    int t = threadIdx.x;
    buffer[t] = x;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (t < half) buffer[t] += buffer[t + half];
        __syncthreads();
    }
    float total = buffer[0];
    __syncthreads();
    return total;
}

__device__ inline float block_max(float x, float *buffer) {
    int t = threadIdx.x;
    buffer[t] = x;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (t < half) buffer[t] = larger(buffer[t], buffer[t + half]);
        __syncthreads();
    }
    float top = buffer[0];
    __syncthreads();
    return top;
}

// random bits: the mixers of `reference/random.py`
__device__ inline u64 mix_in(u64 state, u64 part) {
    state += part + 0x9E3779B97F4A7C15ull;
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBull;
    return state ^ (state >> 31);
}

__device__ inline u64 mixed(u64 seed, u64 step, u64 stream) { return mix_in(mix_in(mix_in(0, seed), step), stream); }

__device__ inline u32 scrambled(u32 x, u32 salt) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return x + salt;
}

__device__ inline u32 random_bits(u64 key, u64 index) {
    u32 x = (u32)index ^ (u32)key;
    x ^= (u32)(index >> 32) * 0x9E3779B9u;
    return scrambled(scrambled(x, (u32)(key >> 32)), 0);
}
