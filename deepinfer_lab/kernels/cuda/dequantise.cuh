// Packed weights to dense fp16, bit for bit as PackedWeight.dequantise has them (quant/layout.py): a scale of 11 significant
// bits times a value of at most 3 is exact in fp32, and one rounding makes it fp16.
//
// Rows follow one another without a gap and K is a multiple of the group. So any range of rows is one run of units: unit u
// becomes the values from 8u on, with scale u / (group / 8). Neighbouring lanes take neighbouring units: a warp reads 96 or
// 128 consecutive bytes and writes 512, 16 to a lane.
#pragma once
#include "unpack.cuh"

// Two units a thread: their loads are in flight together, and 32 registers leave a multiprocessor full of warps.
constexpr int DEQUANTISE_THREADS = 256, DEQUANTISE_UNITS = 2;
constexpr int DEQUANTISE_BLOCK = DEQUANTISE_THREADS * DEQUANTISE_UNITS;  // units, and whole groups of them

// Unit `unit` of words that are aligned. A unit of W3 ends in the word where it begins or in the next. What stands above its 24
// bits belongs to others, and decode_unit does not look at it.
template <int BITS>
__device__ __forceinline__ unsigned load_words(const unsigned* __restrict__ words, unsigned unit) {
    if (BITS == 4) return words[unit];
    const unsigned first = 3 * unit;  // byte
    const unsigned long long last_word = words[(first + 2) / 4];
    return static_cast<unsigned>((last_word << 32 | words[first / 4]) >> first % 4 * 8);
}

// Offsets of blocks are 64-bit, those within a block 32-bit.
template <int BITS>
__device__ __forceinline__ void dequantise(const unsigned char* __restrict__ packed, const half_t* __restrict__ scales,
                                           half_t* __restrict__ out, size_t units, int group) {
    const int group_shift = __ffs(group / UNIT) - 1;
    const size_t begin = static_cast<size_t>(blockIdx.x) * DEQUANTISE_BLOCK;
    const int left = units - begin < DEQUANTISE_BLOCK ? static_cast<int>(units - begin) : DEQUANTISE_BLOCK;
    const unsigned* words = reinterpret_cast<const unsigned*>(packed + begin * BITS);
    uint4* to = reinterpret_cast<uint4*>(out + begin * UNIT);
    scales += begin >> group_shift;

    unsigned bits[DEQUANTISE_UNITS];
    half_t scale[DEQUANTISE_UNITS];
#pragma unroll
    for (int i = 0; i < DEQUANTISE_UNITS; ++i) {
        const int mine = threadIdx.x + i * DEQUANTISE_THREADS;
        const int unit = min(mine, left - 1);  // past the end: the last once more, never stored
        bits[i] = load_words<BITS>(words, unit);
        scale[i] = scales[unit >> group_shift];
    }
#pragma unroll
    for (int i = 0; i < DEQUANTISE_UNITS; ++i) {
        const int unit = threadIdx.x + i * DEQUANTISE_THREADS;
        float q[UNIT];
        unsigned pair[UNIT / 2];
        decode_unit<BITS>(bits[i], q);
        const float s = to_float(scale[i]);
#pragma unroll
        for (int j = 0; j < UNIT / 2; ++j) {
            pair[j] = to_half(q[2 * j] * s) | static_cast<unsigned>(to_half(q[2 * j + 1] * s)) << 16;
        }
        if (unit < left) to[unit] = {pair[0], pair[1], pair[2], pair[3]};
    }
}
