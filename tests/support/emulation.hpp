// Makes a kernel source run on a CPU, to test its arithmetic and its barriers without a GPU: g++ -std=c++17 -shared -DEMULATED -DELEMENT=float -include emulation.hpp
//
// The threads of a block are coroutines that one thread runs in turn: each goes on until its next barrier or exchange. They are made once, and run their share of
// one block after another; they give way by jumps, for `swapcontext` asks the kernel about signals every time. Lanes of a warp hand each other numbers
// between barriers, and must do so together. A block in which some threads have ended and others wait at a barrier is an error, and so is memory behind the shared memory that was asked for. What it cannot show: races between
// barriers beyond those that show when threads run backwards.

#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __launch_bounds__(...)
#define INFINITE HUGE_VALF
#define UNROLLED
#define NOT_UNROLLED
#define SHARED(type, name) type *name = (type *)emulated.shared.data()

struct Dim {
    int x, y, z;
};

static Dim blockIdx, blockDim, gridDim;

struct Index {
    int x;
};

static Index threadIdx;

static const size_t STACK = 64 << 10, GUARD = 64;

// Where a coroutine, or whoever runs it, goes on.
struct Resumption {
    void *registers[5];
};

struct Coroutine {
    Resumption at;
    std::vector<char> stack = std::vector<char>(STACK);
};

struct Emulated {
    std::vector<char> shared;
    Resumption scheduler;
    std::deque<Coroutine> threads;
    std::vector<char> ended;
    void (*run)();  // the kernel's work of one thread of one block
};

static Emulated emulated;

static __attribute__((noinline)) void jump(Resumption &to) { __builtin_longjmp(to.registers, 1); }

static __attribute__((noinline)) void leave(Resumption &from, Resumption &to) {
    if (!__builtin_setjmp(from.registers)) jump(to);
}

// Lets every other thread go on as far as this one has come.
static inline void give_way() { leave(emulated.threads[threadIdx.x].at, emulated.scheduler); }

static int num_waiting, num_barriers;

static inline void __syncthreads() {
    int passed = num_barriers;
    if (++num_waiting == blockDim.x) {
        num_waiting = 0;
        num_barriers++;
    }
    do give_way();
    while (passed == num_barriers);
}

static int any_of_block;

static inline int __syncthreads_or(int predicate) {
    __syncthreads();
    any_of_block = 0;
    __syncthreads();
    if (predicate) any_of_block = 1;
    __syncthreads();
    return any_of_block;
}

static inline void __threadfence() {}

static inline u32 atomicInc(u32 *count, u32 most) {
    u32 before = *count;
    *count = before >= most ? 0 : before + 1;
    return before;
}

static inline float __uint_as_float(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// A sum that no compiler fuses with a product.
static inline float __fadd_rn(float a, float b) {
    volatile float product = a;
    return product + b;
}

static inline u32 __float_as_uint(float x) {
    u32 bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// What lanes of a warp hand each other; every lane of a warp calls these, as often as any other.
static u32 exchanged[1024][6];

static inline float __shfl_xor_sync(u32, float x, int mask) {
    exchanged[threadIdx.x][0] = __float_as_uint(x);
    give_way();
    float other = __uint_as_float(exchanged[threadIdx.x ^ mask][0]);
    give_way();
    return other;
}

// half of two bf16 numbers, the first in the low half
static inline float half_of(u32 pair, int which) { return __uint_as_float(which ? pair & 0xffff0000u : pair << 16); }

// mma.m16n8k16 as the PTX ISA lays it out: what lane has which numbers of a (16 x 16), b (16 x 8) and c (16 x 8)
static inline void mma(float *c, const u32 *a, u32 b0, u32 b1) {
    u32 *mine = exchanged[threadIdx.x];
    for (int n = 0; n < 4; n++) mine[n] = a[n];
    mine[4] = b0;
    mine[5] = b1;
    give_way();
    int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
    for (int e = 0; e < 4; e++) {
        int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        float sum = 0.0f;
        for (int k = 0; k < 16; k++) {
            u32 left = exchanged[warp + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            u32 right = exchanged[warp + column * 4 + k % 8 / 2][4 + k / 8];
            sum += half_of(left, k % 2) * half_of(right, k % 2);
        }
        c[e] += sum;
    }
    give_way();
}

// Four 8 x 8 matrices whose rows the lanes have: lane 8 m + r that of row r of matrix m; each lane gets two numbers of a row, or of a column
static inline void load4_of(u32 *x, const unsigned short *row, bool transposed) {
    memcpy(exchanged[threadIdx.x], &row, sizeof(row));
    give_way();
    int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
    for (int m = 0; m < 4; m++) {
        unsigned short two[2];
        for (int e = 0; e < 2; e++) {
            int r = transposed ? lane % 4 * 2 + e : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + e;
            const unsigned short *from;
            memcpy(&from, exchanged[warp + m * 8 + r], sizeof(from));
            two[e] = from[column];
        }
        x[m] = two[0] | (u32)two[1] << 16;
    }
    give_way();
}

static inline void load4(u32 *x, const unsigned short *row) { load4_of(x, row, false); }

static inline void load4_transposed(u32 *x, const unsigned short *row) { load4_of(x, row, true); }

// Copies that a thread has started: they happen as late as they may, when it waits for them.
struct Copy {
    char *target;
    const char *source;
    size_t nbytes;
};

static std::vector<Copy> copies[1024];

static inline void copy_later(void *target, const void *source, size_t nbytes, int is_there) {
    if ((size_t)target % nbytes || (is_there && (size_t)source % nbytes)) {
        fprintf(stderr, "a copy of %zu bytes begins at no multiple of them\n", nbytes);
        abort();
    }
    memset(target, 0xff, nbytes);  // NaN, as garbage
    copies[threadIdx.x].push_back({(char *)target, is_there ? (const char *)source : nullptr, nbytes});
}

static inline void copy16(void *target, const void *source, int is_there) { copy_later(target, source, 16, is_there); }

static inline void copy4(void *target, const void *source, int is_there) { copy_later(target, source, 4, is_there); }

static inline void await_copies() {
    for (Copy copy : copies[threadIdx.x]) {
        if (copy.source)
            memcpy(copy.target, copy.source, copy.nbytes);
        else
            memset(copy.target, 0, copy.nbytes);
    }
    copies[threadIdx.x].clear();
}

static inline float power_of_2(float x) { return exp2f(x); }

static inline float log_to_2(float x) { return log2f(x); }

static inline int min(int a, int b) { return a < b ? a : b; }

static inline int max(int a, int b) { return a > b ? a : b; }

// A coroutine's life: one thread of one block after another.
static void work() {
    for (;;) {
        give_way();
        emulated.run();
        emulated.ended[threadIdx.x] = 1;
    }
}

// Makes the coroutine of `threadIdx`, which waits for its first block.
static __attribute__((noinline)) void make_thread() {
    emulated.threads.emplace_back();
    ucontext_t first;
    getcontext(&first);
    first.uc_stack.ss_sp = emulated.threads.back().stack.data();
    first.uc_stack.ss_size = STACK;
    first.uc_link = nullptr;
    makecontext(&first, work, 0);
    if (!__builtin_setjmp(emulated.scheduler.registers)) setcontext(&first);
}

// One kernel launch, whose arguments are behind the pointers `arguments`.
template <class... A> struct Launch {
    void (*kernel)(A...);
    std::tuple<A...> arguments;

    template <size_t... I> static std::tuple<A...> unpack(void **from, std::index_sequence<I...>) { return std::tuple<A...>(*(A *)from[I]...); }

    static Launch *running;

    static void thread() { std::apply(running->kernel, running->arguments); }

    void block(bool backwards) {
        int count = blockDim.x, left = count;
        emulated.ended.assign(count, 0);
        num_waiting = 0;
        while (left) {
            for (int n = 0; n < count; n++) {
                threadIdx.x = backwards ? count - 1 - n : n;
                if (emulated.ended[threadIdx.x]) continue;
                leave(emulated.scheduler, emulated.threads[threadIdx.x].at);
                left -= emulated.ended[threadIdx.x];
            }
            if (left && left < count && left == num_waiting) {
                fprintf(stderr, "%d threads of a block wait at a barrier that the others have not reached\n", left);
                abort();
            }
        }
    }
};

template <class... A> Launch<A...> *Launch<A...>::running;

template <class... A> void emulate(void (*kernel)(A...), const int *dims, void **arguments) {
    Launch<A...> launch{kernel, Launch<A...>::unpack(arguments, std::index_sequence_for<A...>())};
    Launch<A...>::running = &launch;
    emulated.run = Launch<A...>::thread;
    gridDim = {dims[0], dims[1], dims[2]};
    blockDim = {dims[3], 1, 1};
    size_t nbytes = dims[4];
    bool backwards = dims[5];
    while ((int)emulated.threads.size() < blockDim.x) {
        threadIdx.x = (int)emulated.threads.size();
        make_thread();
    }
    for (int z = 0; z < dims[2]; z++)
        for (int y = 0; y < dims[1]; y++)
            for (int x = 0; x < dims[0]; x++) {
                blockIdx = {x, y, z};
                emulated.shared.assign(nbytes + GUARD, (char)0xff);  // NaN, as garbage
                launch.block(backwards);
                for (size_t at = nbytes; at < nbytes + GUARD; at++)
                    if (emulated.shared[at] != (char)0xff) {
                        fprintf(stderr, "a block wrote behind its %zu bytes of shared memory\n", nbytes);
                        abort();
                    }
            }
}

#define EXPORT(name) \
    extern "C" void emulate_##name(const int *dims, void **arguments) { emulate(name, dims, arguments); }
