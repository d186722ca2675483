// Up to eight activation rows share one read of the weights: gemv.cuh with eight accumulators for each of a warp's two rows.
// The weights of a unit are loaded and decoded once; the activations of each row in turn meet them in registers. Rows beyond m
// are skipped by a branch that the whole grid row takes alike, so that two rows do not cost what eight do.
#pragma once
#include "gemv.cuh"

constexpr int BATCH_TILE = 8;

template <int BITS>
__device__ __forceinline__ void gemv_warp_tile(const half_t* __restrict__ x, const unsigned char* __restrict__ packed,
                                               const half_t* __restrict__ scales, const half_t* __restrict__ bias,
                                               half_t* __restrict__ out, int m, int n, int k, int group) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row0 = (blockIdx.x * GEMV_WARPS + warp) * GEMV_ROWS;
    if (row0 >= n) return;  // the whole warp
    const int batch0 = blockIdx.y * BATCH_TILE, batch = min(BATCH_TILE, m - batch0);
    const int units = k / UNIT, group_shift = __ffs(group / UNIT) - 1;
    x += static_cast<size_t>(batch0) * k;

    const unsigned char* weight_row[GEMV_ROWS];
    const half_t* scale_row[GEMV_ROWS];
    float sum[GEMV_ROWS][BATCH_TILE];
#pragma unroll
    for (int r = 0; r < GEMV_ROWS; ++r) {
        const size_t row = min(row0 + r, n - 1);  // past the end: the last row once more, never stored
        weight_row[r] = packed + row * units * BITS;
        scale_row[r] = scales + row * (units >> group_shift);
#pragma unroll
        for (int b = 0; b < BATCH_TILE; ++b) sum[r][b] = 0.0f;
    }

    unsigned bits[GEMV_ROWS];  // of the next unit: on their way while the present one is multiplied
    half_t next_scale[GEMV_ROWS];
    auto fetch = [&](int unit) {
#pragma unroll
        for (int r = 0; r < GEMV_ROWS; ++r) {
            bits[r] = load_unit<BITS>(weight_row[r], unit);
            next_scale[r] = scale_row[r][unit >> group_shift];
        }
    };
    if (lane < units) fetch(lane);
    for (int unit = lane; unit < units; unit += 32) {
        float q[GEMV_ROWS][UNIT], scale[GEMV_ROWS];
#pragma unroll
        for (int r = 0; r < GEMV_ROWS; ++r) {
            decode_unit<BITS>(bits[r], q[r]);
            scale[r] = to_float(next_scale[r]);
        }
        if (unit + 32 < units) fetch(unit + 32);
#pragma unroll
        for (int b = 0; b < BATCH_TILE; ++b) {
            if (b >= batch) break;
            float a[UNIT];
            load_activations(x + static_cast<size_t>(b) * k + unit * UNIT, a);
#pragma unroll
            for (int r = 0; r < GEMV_ROWS; ++r) sum[r][b] = fmaf(scale[r], dot_unit(q[r], a), sum[r][b]);
        }
    }

#pragma unroll
    for (int b = 0; b < BATCH_TILE; ++b) {
        if (b >= batch) break;
#pragma unroll
        for (int r = 0; r < GEMV_ROWS; ++r) {
            const float total = warp_sum(sum[r][b]);
            if (lane == 0 && row0 + r < n) out[static_cast<size_t>(batch0 + b) * n + row0 + r] = finish(total, bias, row0 + r);
        }
    }
}
