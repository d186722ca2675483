// What the attention kernels need beyond ptx.cuh: 16-bit pairs in one register, and the two instructions in which a whole warp
// works on one small matrix (sm_80 and later). Where each lane's values lie is fixed by the PTX ISA, "Matrix Fragments for
// mma.m16n8k16 with floating point type" and "movmatrix". With g = lane / 4 and t = lane % 4:
//   a[0], a[1]: rows g and g + 8, columns 2t and 2t + 1.  a[2], a[3]: the same rows, columns 2t + 8 and 2t + 9.
//   b0, b1: column g, rows 2t and 2t + 1, then 2t + 8 and 2t + 9.
//   d[0], d[1]: row g, columns 2t and 2t + 1.  d[2], d[3]: row g + 8.
#pragma once
#include "ptx.cuh"

// d[16, 8] += a[16, 16] * b[16, 8]: fp16 in, fp32 out.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An 8 x 8 matrix of 16-bit values, transposed. A lane holds row g, columns 2t and 2t + 1, before and after.
__device__ __forceinline__ unsigned transpose(unsigned pair) {
    unsigned result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

__device__ __forceinline__ unsigned half_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ unsigned sub_pair(unsigned a, unsigned b) {
    unsigned result;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

__device__ __forceinline__ float exp2_approx(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
