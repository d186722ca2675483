// Few-bit fields to fp16, two at a time and exactly, in two instructions. A field of BITS at bit s of both halves of a word,
// put into the mantissa of 1024, makes 1024 + m * 2^s with m = q + 2^(BITS-1). An fma that rounds nothing scales it by 2^-s and
// takes away what is too much; where s is 0, a subtraction.
#pragma once
#include "mma_ptx.cuh"

__device__ __forceinline__ constexpr unsigned both_halves(unsigned half) { return half << 16 | half; }

template <int BITS>
__device__ __forceinline__ unsigned decode_field(unsigned word, int s) {
    const unsigned field = (1u << BITS) - 1, offset = 1u << (BITS - 1);
    const unsigned shifted = mask_set(word, both_halves(field << s), both_halves(0x6400));
    if (s == 0) return sub_pair(shifted, both_halves(0x6400 | offset));
    // 2^-s, and -(1024 * 2^-s + 2^(BITS-1)): its exponent is 10 - s, so that the offset is `offset << s` in the mantissa.
    return fma_pair(shifted, both_halves((15 - s) << 10), both_halves(0x8000 | (25 - s) << 10 | offset << s));
}
