// Stands in for kernels/cuda/mma_ptx.cuh on a CPU.
#pragma once
#include "mma.cuh"

inline unsigned mask_flip(unsigned bits, unsigned mask, unsigned flip) { return (bits & mask) ^ flip; }
inline unsigned fma_pair(unsigned a, unsigned b, unsigned c) {  // a double holds the exact sum wherever a weight is decoded
    const auto one = [&](int i) { return static_cast<float>(double(half_of(a, i)) * half_of(b, i) + half_of(c, i)); };
    return half_pair(one(0), one(1));
}
inline uint4 load_once(const uint4* from) { return *from; }
inline uint2 load_once(const uint2* from) { return *from; }
