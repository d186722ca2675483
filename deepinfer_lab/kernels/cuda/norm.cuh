// RMSNorm of a row by a team of 256 threads, in one order for all who do it: rms_norm.cu, and products that norm their own
// activations (normed_rows.cuh). Thread t of the team has values 8t .. 8t + 7 of every 2048, and adds their squares one by one.
// Lanes add their sums to those 16, 8, 4, 2 and 1 lanes away, and the warps' sums are added in turn. Every operation is spelt
// out, so that no two compilations round differently.
#pragma once
#include "mma.cuh"

constexpr int NORM_TEAM = 256, NORM_WARPS = NORM_TEAM / 32, NORM_STEP = NORM_TEAM * 8;

__device__ __forceinline__ float low_half(unsigned pair) { return to_float(static_cast<half_t>(pair)); }
__device__ __forceinline__ float high_half(unsigned pair) { return to_float(static_cast<half_t>(pair >> 16)); }

__device__ __forceinline__ float add_squares(float sum, unsigned pair) {
    return fmaf(high_half(pair), high_half(pair), fmaf(low_half(pair), low_half(pair), sum));
}
__device__ __forceinline__ float add_squares(float sum, const uint4& v) {
    return add_squares(add_squares(add_squares(add_squares(sum, v.x), v.y), v.z), v.w);
}

// The sums over a warp's lanes of COUNT values at once, a power of two: lane l gets that of value l / (32 / COUNT). Lanes that
// meet share the values that they have left, so eight values take nine exchanges.
template <int COUNT>
__device__ __forceinline__ float warp_sums(float (&v)[COUNT]) {
    int distance = 16;
#pragma unroll
    for (int half = COUNT / 2; half > 0; half /= 2, distance /= 2) {
        const bool upper = threadIdx.x & distance;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float kept = upper ? v[i + half] : v[i], given = upper ? v[i] : v[i + half];
            v[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, given, distance);
        }
    }
#pragma unroll
    for (; distance > 0; distance /= 2) v[0] += __shfl_xor_sync(0xFFFFFFFFu, v[0], distance);
    return v[0];
}

// 1 / sqrt(mean + eps). sums: of the squares of each of a team's warps, `stride` floats apart.
__device__ __forceinline__ float norm_factor(const float* sums, int stride, int columns, float eps) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < NORM_WARPS; ++warp) total += sums[warp * stride];
    return rsqrtf(fmaf(total, __fdividef(1.0f, columns), eps));
}

__device__ __forceinline__ unsigned normed(unsigned pair, unsigned weight, float factor) {
    return half_pair(low_half(pair) * factor * low_half(weight), high_half(pair) * factor * high_half(weight));
}
__device__ __forceinline__ uint4 normed(const uint4& v, const uint4& weight, float factor) {
    return {normed(v.x, weight.x, factor), normed(v.y, weight.y, factor), normed(v.z, weight.z, factor),
            normed(v.w, weight.w, factor)};
}
