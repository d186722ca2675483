// The article's failed experiment (section 3.2): a block owns a group of output rows, reads their weights once, and keeps eight
// groups of accumulators, one for each activation row. It is correct, and it is never dispatched by default.
//
// What it pays for reading the weights once: 4 x 8 accumulators a thread next to 4 x 8 decoded weights, hence many registers
// and few resident warps to hide latency; and 32 sums to reduce over a block, a fixed cost that a short K does not spread.
#include "unpack.cuh"

constexpr int TILE_WARPS = 4, TILE_ROWS = 4, TILE_BATCH = 8, TILE_SUMS = TILE_ROWS * TILE_BATCH;

extern "C" __global__ void __launch_bounds__(32 * TILE_WARPS)
w3_gemv_batch_tile(const half_t* __restrict__ x, const unsigned char* __restrict__ packed, const half_t* __restrict__ scales,
                   const half_t* __restrict__ bias, half_t* __restrict__ out, int m, int n, int k, int group) {
    __shared__ float partial[TILE_WARPS][TILE_SUMS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row0 = blockIdx.x * TILE_ROWS;
    const int batch0 = blockIdx.y * TILE_BATCH, batch = min(TILE_BATCH, m - batch0);
    const int units = k / UNIT, group_shift = __ffs(group / UNIT) - 1;
    x += static_cast<size_t>(batch0) * k;

    float sum[TILE_ROWS][TILE_BATCH];
#pragma unroll
    for (int i = 0; i < TILE_SUMS; ++i) sum[i / TILE_BATCH][i % TILE_BATCH] = 0.0f;

    for (int unit = threadIdx.x; unit < units; unit += 32 * TILE_WARPS) {
        float q[TILE_ROWS][UNIT], scale[TILE_ROWS];
#pragma unroll
        for (int r = 0; r < TILE_ROWS; ++r) {
            const size_t row = min(row0 + r, n - 1);  // past the end: the last row once more, never stored
            decode_unit<3>(load_unit<3>(packed + row * units * 3, unit), q[r]);
            scale[r] = to_float(scales[row * (units >> group_shift) + (unit >> group_shift)]);
        }
#pragma unroll
        for (int b = 0; b < TILE_BATCH; ++b) {
            if (b >= batch) break;
            float a[UNIT];
            load_activations(x + static_cast<size_t>(b) * k + unit * UNIT, a);
#pragma unroll
            for (int r = 0; r < TILE_ROWS; ++r) sum[r][b] = fmaf(scale[r], dot_unit(q[r], a), sum[r][b]);
        }
    }

#pragma unroll
    for (int i = 0; i < TILE_SUMS; ++i) {
        const float total = warp_sum(sum[i / TILE_BATCH][i % TILE_BATCH]);
        if (lane == 0) partial[warp][i] = total;
    }
    __syncthreads();
    const int r = threadIdx.x / TILE_BATCH, b = threadIdx.x % TILE_BATCH;  // one thread for each of the 32 sums
    if (threadIdx.x < TILE_SUMS && b < batch && row0 + r < n) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < TILE_WARPS; ++w) total += partial[w][threadIdx.x];
        out[static_cast<size_t>(batch0 + b) * n + row0 + r] = finish(total, bias, row0 + r);
    }
}
