// A lane's W3 weights of 16 outputs and 64 of k (quant/tiles.py) to A fragments: 37 instructions for 32 values.
//
// Those are 16 pairs in three words. Each half of a word has room for five values and one bit more, and the bits that are left
// over in the three words make up the last pair. Word w has, the first values of its pairs in the low half, the second in the
// high:
//
//     bits 15             | 14 .. 12 | 11 .. 9 | 8 .. 6 | 5 .. 3 | 2 .. 0
//     bit w of pair 15    | 5w + 4   | 5w + 3  | 5w + 2 | 5w + 1 | 5w
//
// The mantissa of fp16 has ten bits: three fields are within its reach, and after a shift the rest is. Each word has a shift of
// its own, so that the bits left over come to lie at 6, 7 and 8.
#pragma once
#include "unpack_field.cuh"

struct UnpackW3 {
    static constexpr int BITS = 3, WORDS = 3;

    static __device__ __forceinline__ unsigned upper(const unsigned* words, int w) { return words[w] >> (9 - w); }

    static __device__ __forceinline__ unsigned pair(const unsigned* words, int p) {
        if (p == 15) {
            const unsigned two = choose_bits(0x00400040u, upper(words, 0), upper(words, 1));
            return decode_field<BITS>(choose_bits(0x00C000C0u, two, upper(words, 2)), 6);
        }
        const int w = p / 5, field = p % 5;
        if (field < 3) return decode_field<BITS>(words[w], 3 * field);
        return decode_field<BITS>(upper(words, w), 3 * (field - 3) + w);
    }

    // Fragment j, of four, has pairs 4j .. 4j + 3.
    static __device__ __forceinline__ void fragment(const unsigned* words, int j, unsigned (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = pair(words, 4 * j + i);
    }
};
