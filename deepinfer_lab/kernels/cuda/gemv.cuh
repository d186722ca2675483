// One activation row times a packed weight: out[b, n] = sum_k x[b, k] * weight[n, k] + bias[n], with b = blockIdx.y.
//
// A warp owns two output rows and reads both along K, one unit a lane: 32 lanes take 256 consecutive weights, coalesced, and
// use each activation twice. Two rows rather than one because activations, though they hit L1, are four (W4) to over five (W3)
// times as many bytes as the weights that they meet.
#pragma once
#include "unpack.cuh"

constexpr int GEMV_WARPS = 8, GEMV_ROWS = 2;
constexpr int GEMV_BLOCKS = 4;  // a multiprocessor: leaves 64 registers a thread, enough to have four units' loads in flight

template <int BITS>
__device__ __forceinline__ void gemv(const half_t* __restrict__ x, const unsigned char* __restrict__ packed,
                                     const half_t* __restrict__ scales, const half_t* __restrict__ bias,
                                     half_t* __restrict__ out, int n, int k, int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row0 = (blockIdx.x * GEMV_WARPS + warp) * GEMV_ROWS;
    if (row0 >= n) return;  // the whole warp
    const int units = k / UNIT, group_shift = __ffs(group / UNIT) - 1;
    x += static_cast<size_t>(blockIdx.y) * k;

    const unsigned char* weight_row[GEMV_ROWS];
    const half_t* scale_row[GEMV_ROWS];
    float sum[GEMV_ROWS];
#pragma unroll
    for (int r = 0; r < GEMV_ROWS; ++r) {
        const size_t row = min(row0 + r, n - 1);  // past the end: the last row once more, never stored
        weight_row[r] = packed + row * units * BITS;
        scale_row[r] = scales + row * (units >> group_shift);
        sum[r] = 0.0f;
    }

#pragma unroll 4
    for (int unit = lane; unit < units; unit += 32) {
        unsigned bits[GEMV_ROWS];
        float scale[GEMV_ROWS], a[UNIT], q[UNIT];
#pragma unroll
        for (int r = 0; r < GEMV_ROWS; ++r) {  // all loads first: latencies overlap
            bits[r] = load_unit<BITS>(weight_row[r], unit);
            scale[r] = to_float(scale_row[r][unit >> group_shift]);
        }
        load_activations(x + unit * UNIT, a);
#pragma unroll
        for (int r = 0; r < GEMV_ROWS; ++r) {
            decode_unit<BITS>(bits[r], q);
            sum[r] = fmaf(scale[r], dot_unit(q, a), sum[r]);
        }
    }

#pragma unroll
    for (int r = 0; r < GEMV_ROWS; ++r) {
        const float total = warp_sum(sum[r]);
        if (lane == 0 && row0 + r < n) out[static_cast<size_t>(blockIdx.y) * n + row0 + r] = finish(total, bias, row0 + r);
    }
}
