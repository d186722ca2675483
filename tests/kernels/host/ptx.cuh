// Stands in for kernels/cuda/ptx.cuh on a CPU: the same functions in C++.
#pragma once
#include "cuda_host.h"

typedef unsigned short half_t;

inline float to_float(half_t h) {
    const unsigned sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3FF;
    if (exponent == 31) return __uint_as_float(sign | 0x7F800000u | mantissa << 13);
    if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
    const float subnormal = mantissa * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -subnormal : subnormal;
}

inline half_t to_half(float f) {  // to nearest even
    unsigned bits;
    std::memcpy(&bits, &f, 4);
    const half_t sign = bits >> 16 & 0x8000;
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return 0x7FFF;          // NaN
    if (bits >= 0x477FF000) return sign | 0x7C00;  // 65520 and more round to infinity
    if (bits < 0x38800000) {                       // below 2^-14: zero or a subnormal, in units of 2^-24
        return sign | static_cast<half_t>(std::nearbyint(__uint_as_float(bits) * 16777216.0f));
    }
    bits += 0xFFF + (bits >> 13 & 1);
    return sign | static_cast<half_t>((bits - 0x38000000) >> 13);
}

inline unsigned mask_set(unsigned bits, unsigned mask, unsigned set) { return (bits & mask) | set; }
