// A lane's W4 weights of 16 outputs and 64 of k (quant/tiles.py) to A fragments: 9 instructions for 8 values.
#pragma once
#include "unpack_field.cuh"

struct UnpackW4 {
    static constexpr int BITS = 4, WORDS = 4;

    // Fragment j, of four, has a word of its own: a pair of values in bits 0-3 of both halves, in bits 4-7, and so on.
    static __device__ __forceinline__ void fragment(const unsigned* words, int j, unsigned (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = decode_field<BITS>(i < 2 ? words[j] : words[j] >> 8, 4 * (i % 2));
    }
};
