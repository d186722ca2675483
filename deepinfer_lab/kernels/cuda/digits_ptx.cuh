// PTX of products of bytes, and of warps that agree on a number (sm_80 and later). PTX ISA, "Matrix Fragments for
// mma.m16n8k32", "redux.sync". With g = lane / 4 and t = lane % 4, byte i of
//   a[0], a[1]: rows g and g + 8, column 4t + i.  a[2], a[3]: the same rows, column 4t + i + 16.
//   b0, b1: column g, rows 4t + i, then 4t + i + 16.
//   d: as mma.cuh's.
#pragma once
#include "mma.cuh"

// d[16, 8] += a[16, 32] * b[32, 8]: unsigned and signed bytes in, 32 bits out.
__device__ __forceinline__ void mma_bytes(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Of all lanes of a warp.
__device__ __forceinline__ unsigned warp_max(unsigned value) {
    unsigned result;
    asm volatile("redux.sync.max.u32 %0, %1, 0xFFFFFFFF;" : "=r"(result) : "r"(value));
    return result;
}
__device__ __forceinline__ int warp_total(int value) {
    int result;
    asm volatile("redux.sync.add.s32 %0, %1, 0xFFFFFFFF;" : "=r"(result) : "r"(value));
    return result;
}
