// What every kernel source shares: element types, block reductions, counter-based random bits.
//
// A source is compiled once per element type T (-DELEMENT=float or bf16) of activations and parameters (float or bf16); statistics, gradients of weights, moments and master
// weights are float, sums are taken in float. No sum is atomic: every one has one order, so the same tiling gives the same bits. No headers beyond
// this one are needed, so NVRTC compiles a source without a toolkit, and a C++ compiler with tests/support/emulation.hpp makes it run on a CPU.
//
// Letters: R rows, N columns, T tokens, H heads, D columns of a head, V rows of a table.

#pragma once

#ifndef EMULATED
#define SHARED(type, name) extern __shared__ __align__(16) type name[]  // all of them begin in one place, whatever they are read as
#define EXPORT(name)
#define INFINITE __int_as_float(0x7f800000)
#define UNROLLED _Pragma("unroll")  // what is indexed lies in registers
#define NOT_UNROLLED _Pragma("unroll 1")
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

// Sum, or largest, of one number of every thread of a block of whole warps; every thread gets it. `buffer`: a float for each warp.
__device__ inline float block_sum(float x, float *buffer) {
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = x;
    __syncthreads();
    float total = buffer[0];
    for (int warp = 1; warp < (int)blockDim.x / 32; warp++) total += buffer[warp];
    __syncthreads();
    return total;
}

__device__ inline float block_max(float x, float *buffer) {
    for (int mask = 16; mask > 0; mask /= 2) x = larger(__shfl_xor_sync(0xffffffffu, x, mask), x);
    if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = x;
    __syncthreads();
    float top = buffer[0];
    for (int warp = 1; warp < (int)blockDim.x / 32; warp++) top = larger(buffer[warp], top);
    __syncthreads();
    return top;
}

// Whether this block is the last of `count` blocks that come here; it may then read what the others wrote before. `arrivals` is 0 before and after.
__device__ inline bool is_last_of(int count, u32 *arrivals) {
    __threadfence();
    __syncthreads();
    bool is_last = __syncthreads_or(threadIdx.x == 0 && atomicInc(arrivals, (u32)count - 1) == (u32)count - 1);
    if (is_last) __threadfence();
    return is_last;
}

// N numbers side by side, which are read or written by as few instructions as their bytes allow: 16 bytes each
template <class U, int N> struct alignas(N * sizeof(U) < 16 ? N * sizeof(U) : 16) Numbers {
    U x[N];
};

// Numbers of type T in 16 bytes
#define WIDE (16 / (int)sizeof(T))

template <int N, class U> __device__ inline Numbers<U, N> load(const U *x) { return *(const Numbers<U, N> *)x; }

template <int N, class U> __device__ inline void store(U *x, Numbers<U, N> numbers) { *(Numbers<U, N> *)x = numbers; }

// a + b, rounded
template <int N> __device__ inline Numbers<T, N> sum_of(Numbers<T, N> a, Numbers<T, N> b) {
    UNROLLED
    for (int e = 0; e < N; e++) a.x[e] = narrow<T>(widen(a.x[e]) + widen(b.x[e]));
    return a;
}

// A loop over the pieces of N numbers of `count`, i the first number of each: this thread's share of them
#define EACH_PIECE(i, N, count)                                                                                    \
    for (long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * N; i < (count); i += (long long)gridDim.x * blockDim.x * N)

// Column of number i of rows whose width is a multiple of N; fewer than 2^32 pieces of more than one number have 32 bits
template <int N> __device__ inline int column_of(long long i, int width) {
    return N == 1 ? (int)(i % width) : (int)((u32)(i / N) % (u32)(width / N)) * N;
}

// a / b within 2 ulp
__device__ inline float quotient(float a, float b) {
#ifdef EMULATED
    return a / b;
#else
    return __fdividef(a, b);
#endif
}

// Whether all arrays begin at multiples of 16 bytes; missing arrays are ignored
template <class... U> __device__ inline bool are_aligned(const U *...x) { return (((u64)x | ...) & 15) == 0; }

// out[i] = f(in[i]...) of `count` numbers, 16 bytes of T at a time where all arrays allow that. Arrays may be the same.
template <class O, class F, class... I> __device__ inline Numbers<O, WIDE> applied(F f, Numbers<I, WIDE>... in) {
    Numbers<O, WIDE> out;
    UNROLLED
    for (int e = 0; e < WIDE; e++) out.x[e] = narrow<O>(f(widen(in.x[e])...));
    return out;
}

template <class O, class F, class... I> __device__ inline void map(long long count, F f, O *out, const I *...in) {
    long long pieces = are_aligned(out, in...) ? count / WIDE : 0;
    EACH(n, pieces) store<WIDE>(out + n * WIDE, applied<O>(f, load<WIDE>(in + n * WIDE)...));
    EACH(rest, count - pieces * WIDE) {
        long long i = pieces * WIDE + rest;
        out[i] = narrow<O>(f(widen(in[i])...));
    }
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
