// The PTX instruction of likeliest.cu.
#pragma once
#include "ptx.cuh"

// The larger of either half of two pairs; NaN where one is (sm_80 and later).
__device__ __forceinline__ unsigned max_pair(unsigned a, unsigned b) {
    unsigned result;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
