// A few activation rows times a weight in tiles: weights are read once, straight to registers, and are in the places where
// mma.m16n8k16 wants them after nine instructions for every eight values.
//
// A block owns 16 outputs. Its warps share K: warp w takes the units w, w + WARPS, w + 2 WARPS, ... and their sums meet in shared
// memory at the end. No other block is waited for: with 16 warps a block, 2,048 outputs fill an H200.
#pragma once
#include "mma_unit.cuh"

constexpr int MMA_DEPTH = 2;   // units whose weights are on their way to a warp

// One warp's part of the sums: up to 8 * TILES activation rows, from 8 * TILES * blockIdx.x on; outputs from 16 * blockIdx.y on.
// AHEAD: quarters whose activations are on their way.
template <class Unpack, int TILES, int AHEAD, int GROUP, int WARPS>
__device__ __forceinline__ void mma_small_warp(const half_t* __restrict__ x, const unsigned char* __restrict__ tiles,
                                               const unsigned* __restrict__ scales, float (&sum)[TILES][4], int m, int k) {
    static_assert(MMA_K % GROUP == 0 && QUARTERS * MMA_DEPTH % AHEAD == 0, "whole groups, whole rings");
    constexpr int SCALES = MMA_K / GROUP, BYTES = Unit<Unpack>::BYTES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int units = (k + MMA_K - 1) / MMA_K, first_row = blockIdx.x * MMA_ROWS * TILES;
    // Where the warp's next unit begins. A step from there is WARPS units.
    tiles += (static_cast<size_t>(blockIdx.y) * units + warp) * BYTES;
    scales += (static_cast<size_t>(blockIdx.y) * units + warp) * SCALES * MMA_ROWS + g;
    const half_t* row[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {  // past the end: the last row once more, never stored
        row[i] = x + static_cast<size_t>(min(first_row + MMA_ROWS * i + g, m - 1)) * k + warp * MMA_K + 8 * t;
    }

    int next = warp;
    Unit<Unpack> weights[MMA_DEPTH];
    uint4 rows[AHEAD][TILES];
    unsigned scale[MMA_DEPTH][SCALES];  // of outputs g and g + 8
    // Whether K has, at this k of the unit, for the whole warp. It ends with a group, so seldom inside a unit.
    const auto ended = [&](int step, int from) {
        const int unit = next + step * WARPS;
        return GROUP == MMA_K ? unit >= units : unit * MMA_K + from >= k;
    };
    const auto fetch_weights = [&](int step) {
        if (ended(step, 0)) return;
        weights[step % MMA_DEPTH].load(tiles + step * WARPS * BYTES, lane);
#pragma unroll
        for (int i = 0; i < SCALES; ++i) {
            scale[step % MMA_DEPTH][i] = scales[(step * WARPS * SCALES + i) * MMA_ROWS];
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
    for (int step = 0; step < MMA_DEPTH; ++step) fetch_weights(step);
#pragma unroll
    for (int quarter = 0; quarter < AHEAD; ++quarter) fetch_rows(quarter);
    while (next < units) {
#pragma unroll
        for (int step = 0; step < MMA_DEPTH; ++step) {
            float part[TILES][4] = {};
#pragma unroll
            for (int quarter = 0; quarter < QUARTERS; ++quarter) {
                if (quarter * 32 % GROUP == 0 && ended(step, quarter * 32)) return;
                const int counted = step * QUARTERS + quarter;
                weights[step].multiply(quarter, rows[counted % AHEAD], part);
                fetch_rows(counted + AHEAD);  // into registers that are free now
                if ((quarter + 1) * 32 % GROUP == 0) add_scaled(sum, part, scale[step][quarter * 32 / GROUP]);
            }
            fetch_weights(step + MMA_DEPTH);
        }
        next += MMA_DEPTH * WARPS;
        tiles += MMA_DEPTH * WARPS * BYTES;
        scales += MMA_DEPTH * WARPS * SCALES * MMA_ROWS;
#pragma unroll
        for (int i = 0; i < TILES; ++i) row[i] += MMA_DEPTH * WARPS * MMA_K;
    }
}

template <class Unpack, int TILES, int AHEAD, int WARPS>
__device__ __forceinline__ void mma_small(const half_t* __restrict__ x, const unsigned char* __restrict__ tiles,
                                          const unsigned* __restrict__ scales, const half_t* __restrict__ bias,
                                          half_t* __restrict__ out, int m, int n, int k, int group) {
    __shared__ float partial[WARPS * 128 * TILES];
    float sum[TILES][4] = {};
    if (group == 128) mma_small_warp<Unpack, TILES, AHEAD, 128, WARPS>(x, tiles, scales, sum, m, k);
    if (group == 64) mma_small_warp<Unpack, TILES, 2, 64, WARPS>(x, tiles, scales, sum, m, k);  // more scales take registers, too
    if (group == 32) mma_small_warp<Unpack, TILES, 2, 32, WARPS>(x, tiles, scales, sum, m, k);
    add_warps(partial, sum, bias, out, WARPS, blockIdx.y, m, n);
}
