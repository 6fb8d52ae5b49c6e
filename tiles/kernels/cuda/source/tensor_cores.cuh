// Products on tensor cores, and copies to shared memory that go on while a thread computes.
//
// A product is mma.m16n8k16: a lane has of a 16 x 8 result the numbers (lane / 4 [+ 8], 2 (lane % 4) [+ 1]), and what it has of two results side by
// side is what it gives as the left factor of the next product (PTX ISA, "Matrix fragments for mma.m16n8k16"). ldmatrix reads a right factor from
// rows that hold its columns, or transposed from rows that hold its rows.

#pragma once

#define PER_2 1.4426950408889634f  // log2(e): natural logarithms become those of base 2
#define PER_E 0.6931471805599453f
#define LANE (threadIdx.x & 31)
#define WARP (threadIdx.x >> 5)

typedef unsigned short u16;

#ifndef EMULATED
// c (16 x 8) += a (16 x 16) b (16 x 8)
__device__ inline void mma(float *c, const u32 *a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices from shared memory; lane 8 m + r gives the address of row r of matrix m
__device__ inline void load4(u32 *x, const u16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}

__device__ inline void load4_transposed(u32 *x, const u16 *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}

// Copies to shared memory that go on while the thread computes, of zeros where nothing is there; they have ended after `await_copies`
__device__ inline void copy16(u16 *target, const bf16 *source, int is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(target)), "l"(source), "r"(is_there ? 16 : 0) : "memory");
}

__device__ inline void copy4(float *target, const float *source, int is_there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"((u32)__cvta_generic_to_shared(target)), "l"(source), "r"(is_there ? 4 : 0) : "memory");
}

__device__ inline void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ inline float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float log_to_2(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

// over the four lanes that share a row
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

