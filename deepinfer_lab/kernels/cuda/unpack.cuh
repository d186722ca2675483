// Packed weights to floats. Layouts (article, 2.3 and 2.4), eight values at a time, value i in bits BITS*i .. BITS*i+BITS-1:
//   W4: 4 bytes, low nibble first.   W3: 3 bytes, little-endian, so that values 2 and 5 straddle two bytes.
#pragma once
#include "ptx.cuh"

constexpr int UNIT = 8;  // values that one lane unpacks at a time: BITS bytes of weights, 16 bytes of activations

// The bytes of unit `unit` of a packed row. K is a multiple of 32, so W4 rows start on a 16-byte boundary and the word is
// aligned; W3 units are 3 bytes wide and are aligned to nothing.
template <int BITS>
__device__ __forceinline__ unsigned load_unit(const unsigned char* __restrict__ row, int unit) {
    if (BITS == 4) return reinterpret_cast<const unsigned*>(row)[unit];
    const unsigned char* p = row + 3 * unit;
    return p[0] | p[1] << 8 | p[2] << 16;
}

// The eight signed values of a unit, exactly. Flipping a two's complement sign bit gives q + 2^(BITS-1), unsigned. Those bits,
// placed at bit s of the mantissa of 2^23, make the float 2^23 + (q + 2^(BITS-1)) * 2^s, and one FMA takes the rest away: two
// instructions a value, where shifting, sign-extending and converting take four.
template <int BITS>
__device__ __forceinline__ void decode_unit(unsigned bits, float (&q)[UNIT]) {
    constexpr unsigned FIELD = (1u << BITS) - 1, SIGN = 1u << (BITS - 1);
    constexpr unsigned SIGNS = BITS == 4 ? 0x88888888u : 0x00924924u;
    const unsigned low = bits ^ SIGNS, high = low >> 4 * BITS;  // four fields each, all of them below bit 23
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
        const int s = BITS * (i % 4);
        const float shifted = __uint_as_float(mask_set(i < 4 ? low : high, FIELD << s, 0x4B000000u));
        q[i] = fmaf(shifted, 1.0f / (1 << s), -(8388608.0f / (1 << s) + SIGN));
    }
}

// Eight consecutive activations, 16-byte aligned.
__device__ __forceinline__ void load_activations(const half_t* __restrict__ x, float (&a)[UNIT]) {
    const uint4 raw = *reinterpret_cast<const uint4*>(x);
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < UNIT; ++i) a[i] = to_float(static_cast<half_t>(words[i / 2] >> 16 * (i % 2)));
}

// Every kernel adds in this order, so that a row's result does not depend on how many rows share its launch.
__device__ __forceinline__ float dot_unit(const float (&q)[UNIT], const float (&a)[UNIT]) {
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < UNIT; ++i) dot = fmaf(q[i], a[i], dot);
    return dot;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, distance);
    return v;
}

__device__ __forceinline__ half_t finish(float sum, const half_t* __restrict__ bias, int row) {
    return to_half(bias ? sum + to_float(bias[row]) : sum);
}
