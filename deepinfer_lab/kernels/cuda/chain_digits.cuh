// Activations of a product in shared memory, as its weights want them (chain_operand.cuh).
//
// A unit of 128 activations becomes whole numbers of 16 bits, two bytes each: the largest of them is MOST_DIGITS steps, so that
// none is further off than half a step, a 65,000th of the largest. What fp16 had rounded before was more. A product of bytes
// has eight columns, of which they need two.
#pragma once
#include "chain_space.cuh"

constexpr float MOST_DIGITS = 127 * 256 + 127;
constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded, and its lower bits are the number

// Four activations of each of COUNT units by each lane, from 4 * lane on: steps of one unit wait for nothing of another's.
// Bytes go where the lane that multiplies them reads eight words in a row, in the order of quant/tiles.py's words: of four, the
// first, third, second and fourth. unit: which the i-th is.
template <int COUNT, class Unit>
__device__ __forceinline__ void keep_fours(const Space& space, const Unit& unit, const uint2 (&four)[COUNT]) {
    const int lane = this_thread() % 32;
    float v[COUNT][4], largest[COUNT];
    unsigned most[COUNT] = {};  // as bits, of which NaN has the largest: what comes of it is NaN, too
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        float_four(four[i], v[i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned own = __float_as_uint(v[i][j]) & 0x7FFFFFFFu;
            most[i] = own > most[i] ? own : most[i];
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) largest[i] = __uint_as_float(warp_max(most[i]));
    unsigned bits[COUNT][4];
    int total[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float steps = largest[i] > 0.0f ? __fdividef(MOST_DIGITS, largest[i]) : 0.0f;
        unsigned sum = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) bits[i][j] = __float_as_uint(fmaf(v[i][j], steps, TO_INTEGER)), sum += bits[i][j];
        total[i] = static_cast<int>(sum - 4 * __float_as_uint(TO_INTEGER));
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) total[i] = warp_total(total[i]);
    const int place = lane % 8 / 2 * 32 + lane / 8 * 8 + lane % 2 * 4;
    const auto bytes = [](const unsigned (&of)[4], unsigned more, int selector) {
        return __byte_perm(__byte_perm(of[0] + more, of[2] + more, selector), __byte_perm(of[1] + more, of[3] + more, selector),
                           0x5410);
    };
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int at = unit(i) * MMA_K + place;
        *reinterpret_cast<unsigned*>(space.digits(0) + at) = bytes(bits[i], 128, 0x5151);  // the lower byte is signed, too
        *reinterpret_cast<unsigned*>(space.digits(1) + at) = bytes(bits[i], 0, 0x4040);
        if (lane == 0) space.totals()[unit(i)] = {total[i], largest[i] * (1.0f / MOST_DIGITS)};
    }
}
__device__ __forceinline__ void keep_four(const Space& space, int unit, const uint2& four) {
    const uint2 one[1] = {four};
    keep_fours(space, [&](int) { return unit; }, one);
}
