// The three PTX instructions that these kernels spell out. Two convert IEEE half precision, stored as its 16 bits: all that is
// needed of cuda_fp16.h, which NVRTC does not bring along.
#pragma once

typedef unsigned short half_t;

__device__ __forceinline__ float to_float(half_t h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

// Rounds to nearest even. Beyond 65504 the result is infinite, as in torch.
__device__ __forceinline__ half_t to_half(float f) {
    half_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

// (bits & mask) | set in one instruction. The compiler, left to itself, takes two where mask and set are both constants.
__device__ __forceinline__ unsigned mask_set(unsigned bits, unsigned mask, unsigned set) {
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(bits), "r"(mask), "r"(set));
    return result;
}
