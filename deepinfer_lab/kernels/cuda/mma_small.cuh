// A few activation rows times a weight in tiles: weights are read once, straight to registers, and are in the places where
// mma.m16n8k16 wants them after nine instructions for every eight values. Activations are read from the L2 as they are needed.
//
// A block owns 16 * COLUMNS outputs, which share what is read of the activations. Its warps share K: warp w takes the units w,
// w + WARPS, w + 2 WARPS, ... and their sums meet in shared memory at the end. No other block is waited for: with 16 warps a
// block, 2,048 outputs fill an H200. (Weights on their way through a ring in shared memory were never faster there.)
#pragma once
#include "mma_unit.cuh"

// One warp's part of the sums: up to 8 * TILES activation rows, from 8 * TILES * blockIdx.x on, and the block's outputs.
// DEPTH: units of each 16 outputs whose weights are on their way. AHEAD: quarters whose activations are.
template <class Unpack, int TILES, int COLUMNS, int DEPTH, int AHEAD, int GROUP, int WARPS>
__device__ __forceinline__ void mma_small_warp(const half_t* x, const unsigned char* __restrict__ tiles,
                                               const unsigned* __restrict__ scales, float (&sum)[COLUMNS][TILES][4], int m,
                                               int n, int k) {
    static_assert(MMA_K % GROUP == 0 && QUARTERS * DEPTH % AHEAD == 0, "whole groups, whole rings");
    constexpr int SCALES = MMA_K / GROUP, BYTES = Unit<Unpack>::BYTES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int units = (k + MMA_K - 1) / MMA_K, last = (n - 1) / MMA_N, first_row = blockIdx.x * MMA_ROWS * TILES;
    // Where the warp's next unit begins. A step from there is WARPS units.
    const unsigned char* weights_of[COLUMNS];
    const unsigned* scales_of[COLUMNS];
    const half_t* row[TILES];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {  // past the end: the last outputs once more, never stored
        const size_t unit = static_cast<size_t>(min(blockIdx.y * COLUMNS + c, last)) * units + warp;
        weights_of[c] = tiles + unit * BYTES;
        scales_of[c] = scales + unit * SCALES * MMA_ROWS + g;
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) {  // and the last row
        row[i] = x + static_cast<size_t>(min(first_row + MMA_ROWS * i + g, m - 1)) * k + warp * MMA_K + 8 * t;
    }

    int next = warp;
    Unit<Unpack> weights[DEPTH][COLUMNS];
    uint4 rows[AHEAD][TILES];
    unsigned scale[DEPTH][COLUMNS][SCALES];  // of outputs g and g + 8
    // Whether K has, at this k of the unit, for the whole warp. It ends with a group, so seldom inside a unit.
    const auto ended = [&](int step, int from) {
        const int unit = next + step * WARPS;
        return GROUP == MMA_K ? unit >= units : unit * MMA_K + from >= k;
    };
    const auto fetch_weights = [&](int step) {
        if (ended(step, 0)) return;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            weights[step % DEPTH][c].load(weights_of[c] + step * WARPS * BYTES, lane);
#pragma unroll
            for (int i = 0; i < SCALES; ++i) {
                scale[step % DEPTH][c][i] = scales_of[c][(step * WARPS * SCALES + i) * MMA_ROWS];
            }
        }
    };
    const auto fetch_rows = [&](int quarter) {  // counted through all the warp's units
        const int step = quarter / QUARTERS, from = quarter % QUARTERS * 32;
        if (ended(step, from)) return;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            rows[quarter % AHEAD][i] = *reinterpret_cast<const uint4*>(row[i] + step * WARPS * MMA_K + from);
        }
    };

#pragma unroll
    for (int step = 0; step < DEPTH; ++step) fetch_weights(step);
    await_previous();  // weights are nobody's output; activations are
#pragma unroll
    for (int quarter = 0; quarter < AHEAD; ++quarter) fetch_rows(quarter);
    while (next < units) {
#pragma unroll
        for (int step = 0; step < DEPTH; ++step) {
            float part[COLUMNS][TILES][4] = {};
#pragma unroll
            for (int quarter = 0; quarter < QUARTERS; ++quarter) {
                if (quarter * 32 % GROUP == 0 && ended(step, quarter * 32)) return;
                const int counted = step * QUARTERS + quarter;
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) weights[step][c].multiply(quarter, rows[counted % AHEAD], part[c]);
                fetch_rows(counted + AHEAD);  // into registers that are free now
                if ((quarter + 1) * 32 % GROUP == 0) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) add_scaled(sum[c], part[c], scale[step][c][quarter * 32 / GROUP]);
                }
            }
            fetch_weights(step + DEPTH);
        }
        next += DEPTH * WARPS;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            weights_of[c] += DEPTH * WARPS * BYTES;
            scales_of[c] += DEPTH * WARPS * SCALES * MMA_ROWS;
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) row[i] += DEPTH * WARPS * MMA_K;
    }
}

template <class Unpack, int TILES, int COLUMNS, int DEPTH, int AHEAD, int WARPS>
__device__ __forceinline__ void mma_small(const half_t* x, const unsigned char* __restrict__ tiles,
                                          const unsigned* __restrict__ scales, const half_t* __restrict__ bias,
                                          half_t* __restrict__ out, int m, int n, int k, int group) {
    constexpr int FINE_AHEAD = AHEAD < 2 ? AHEAD : 2;  // more scales take registers, too
    __shared__ float partial[COLUMNS][WARPS * 128 * TILES];
    float sum[COLUMNS][TILES][4] = {};
    release_next();
    if (group == 128) mma_small_warp<Unpack, TILES, COLUMNS, DEPTH, AHEAD, 128, WARPS>(x, tiles, scales, sum, m, n, k);
    if (group == 64) mma_small_warp<Unpack, TILES, COLUMNS, DEPTH, FINE_AHEAD, 64, WARPS>(x, tiles, scales, sum, m, n, k);
    if (group == 32) mma_small_warp<Unpack, TILES, COLUMNS, DEPTH, FINE_AHEAD, 32, WARPS>(x, tiles, scales, sum, m, n, k);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) add_warps(partial[c], sum[c], bias, out, WARPS, blockIdx.y * COLUMNS + c, m, n);
}
