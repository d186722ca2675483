// PTX instructions of the products for few rows, beyond mma.cuh's.
#pragma once
#include "mma.cuh"

// (bits & mask) ^ flip in one instruction: mask_set's relative.
__device__ __forceinline__ unsigned mask_flip(unsigned bits, unsigned mask, unsigned flip) {
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(result) : "r"(bits), "r"(mask), "r"(flip));
    return result;
}

// a * b + c of either half, rounded once.
__device__ __forceinline__ unsigned fma_pair(unsigned a, unsigned b, unsigned c) {
    unsigned result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// What nobody will read again, so that the L1 keeps what will be. `volatile`, or loads would sink to their first use.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}
__device__ __forceinline__ uint2 load_once(const uint2* from) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
    return v;
}
