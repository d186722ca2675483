// Attention over parts of the keys to attention over all: each part's result counts by exp(its log-sum-exp). The last part
// is by itself; `splits` others lie one after the other. A log-sum-exp of plus infinity marks a part without keys.
// Eight values a thread.
#include "mma.cuh"

struct Eight {
    float value[8];
};
__device__ __forceinline__ void add_part(Eight& sum, float weight, const half_t* part) {
    const uint4 bits = *reinterpret_cast<const uint4*>(part);
    const unsigned pair[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum.value[2 * i] += weight * to_float(static_cast<half_t>(pair[i]));
        sum.value[2 * i + 1] += weight * to_float(static_cast<half_t>(pair[i] >> 16));
    }
}

extern "C" __global__ void __launch_bounds__(256)
    merge_attention(const half_t* __restrict__ parts, const float* __restrict__ parts_lse, const half_t* __restrict__ last,
                    const float* __restrict__ last_lse, half_t* __restrict__ out, int tokens, int heads, int dims, int splits) {
    const int unit = blockIdx.x * 256 + threadIdx.x;
    const int row = unit / (dims / 8);  // token by head
    if (row >= tokens * heads) return;
    const int token = row / heads, head = row % heads;
    const size_t at = static_cast<size_t>(unit) * 8, size = static_cast<size_t>(tokens) * heads * dims;
    const float none = __uint_as_float(0x7F800000u), log2e = 1.44269504f;
    const float* lse = parts_lse + static_cast<size_t>(head) * splits * tokens + token;

    float highest = last_lse[static_cast<size_t>(head) * tokens + token];
    const float own = highest;
    for (int i = 0; i < splits; ++i) {
        const float each = lse[static_cast<size_t>(i) * tokens];
        if (each != none && each > highest) highest = each;
    }
    Eight sum = {};
    float total = exp2_approx((own - highest) * log2e);
    add_part(sum, total, last + at);
#pragma unroll 4
    for (int i = 0; i < splits; ++i) {
        const float each = lse[static_cast<size_t>(i) * tokens];
        if (each == none) continue;  // and its result is not read: nothing was written there
        const float weight = exp2_approx((each - highest) * log2e);
        total += weight;
        add_part(sum, weight, parts + i * size + at);
    }
    const float scale = 1.0f / total;
    const float* v = sum.value;
    *reinterpret_cast<uint4*>(out + at) = {half_pair(v[0] * scale, v[1] * scale), half_pair(v[2] * scale, v[3] * scale),
                                           half_pair(v[4] * scale, v[5] * scale), half_pair(v[6] * scale, v[7] * scale)};
}
