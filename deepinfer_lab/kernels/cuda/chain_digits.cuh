// Activations of a product in shared memory, as its weights want them (chain_weights.cuh).
//
// For weights of 4 bits a unit of 128 activations becomes whole numbers of 16 bits, two bytes each: the largest of them is
// MOST_DIGITS steps, so that none is further off than half a step, a 65,000th of the largest. What fp16 had rounded before was
// more. A product of bytes has eight columns, of which a row needs two.
#pragma once
#include "chain_space.cuh"

constexpr float MOST_DIGITS = 127 * 256 + 127;
constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded, and its lower bits are the number

// Four activations of unit `unit` by each lane, from 4 * lane on. Bytes go where the lane that multiplies them reads eight
// words in a row, in the order of quant/tiles.py's words: of four, the first, third, second and fourth.
template <int ROWS>
__device__ __forceinline__ void keep_four(const Space<ROWS>& space, int row, int unit, const uint2& four, bool in_digits) {
    const int lane = this_thread() % 32;
    if (!in_digits) {
        *reinterpret_cast<uint2*>(space.act() + row * space.stride + unit * MMA_K + 4 * lane) = four;
        return;
    }
    float v[4];
    float_four(four, v);
    unsigned most = 0;  // as bits, of which NaN has the largest: what comes of it is NaN, too
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned own = __float_as_uint(v[i]) & 0x7FFFFFFFu;
        most = own > most ? own : most;
    }
    const float largest = __uint_as_float(warp_max(most));
    const float steps = largest > 0.0f ? __fdividef(MOST_DIGITS, largest) : 0.0f;
    unsigned bits[4], upper[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        bits[i] = __float_as_uint(fmaf(v[i], steps, TO_INTEGER));
        upper[i] = bits[i] + 128;  // the lower byte is signed, too
        sum += bits[i];
    }
    const int total = warp_total(static_cast<int>(sum - 4 * __float_as_uint(TO_INTEGER)));
    const int place = unit * MMA_K + lane % 8 / 2 * 32 + lane / 8 * 8 + lane % 2 * 4;
    const auto bytes = [](const unsigned (&of)[4], int selector) {
        return __byte_perm(__byte_perm(of[0], of[2], selector), __byte_perm(of[1], of[3], selector), 0x5410);
    };
    *reinterpret_cast<unsigned*>(space.digits(row, 0) + place) = bytes(upper, 0x5151);
    *reinterpret_cast<unsigned*>(space.digits(row, 1) + place) = bytes(bits, 0x4040);
    if (lane == 0) space.totals()[unit * ROWS + row] = {-8 * total, largest * (1.0f / MOST_DIGITS)};
}
