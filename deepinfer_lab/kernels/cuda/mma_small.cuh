// A few activation rows times a weight in tiles: weights are read once, straight to registers, and are in the places where
// mma.m16n8k16 wants them after nine instructions for every eight values. Activations are read from the L2 as they are needed.
//
// A block owns 16 * COLUMNS outputs, which share what is read of the activations. Its warps share K: warp w takes the units w,
// w + WARPS, w + 2 WARPS, ... and their sums meet in shared memory at the end. No other block is waited for: with 16 warps a
// block, 2,048 outputs fill an H200. (Weights on their way through a ring in shared memory were never faster there.)
#pragma once
#include "small_rows.cuh"

// One warp's part of the sums: up to 8 * TILES activation rows, from 8 * TILES * blockIdx.x on, and outputs from 16 * tile on.
// DEPTH: units of each 16 outputs whose weights are on their way. AHEAD: quarters whose activations are. scratch: what
// preparing the rows takes (small_rows.cuh), null where they are prepared.
template <class Unpack, int TILES, int COLUMNS, int DEPTH, int AHEAD, int GROUP, int WARPS, class Rows>
__device__ __forceinline__ void mma_small_warp(const Rows& rows, float* scratch, const unsigned char* __restrict__ tiles,
                                               const unsigned* __restrict__ scales, float (&sum)[COLUMNS][TILES][4], int tile,
                                               int n) {
    static_assert(MMA_K % GROUP == 0 && QUARTERS * DEPTH % AHEAD == 0, "whole groups, whole rings");
    constexpr int SCALES = MMA_K / GROUP, BYTES = Unit<Unpack>::BYTES;
    const unsigned thread = this_thread();
    const int lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int k = rows.k, units = (k + MMA_K - 1) / MMA_K, last = (n - 1) / MMA_N, first_row = blockIdx.x * MMA_ROWS * TILES;
    // Where the warp's next unit begins. A step from there is WARPS units.
    const unsigned char* weights_of[COLUMNS];
    const unsigned* scales_of[COLUMNS];
    const half_t* row[TILES];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {  // past the end: the last outputs once more, never stored
        const size_t unit = static_cast<size_t>(min(tile + c, last)) * units + warp;
        weights_of[c] = tiles + unit * BYTES;
        scales_of[c] = scales + unit * SCALES * MMA_ROWS + g;
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) {  // and the last row
        row[i] = rows.row(min(first_row + MMA_ROWS * i + g, rows.m - 1)) + warp * MMA_K + 8 * t;
    }

    int next = warp;
    Unit<Unpack> weights[DEPTH][COLUMNS];
    uint4 ahead[AHEAD][TILES];
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
            ahead[quarter % AHEAD][i] = *reinterpret_cast<const uint4*>(row[i] + step * WARPS * MMA_K + from);
        }
    };

#pragma unroll
    for (int step = 0; step < DEPTH; ++step) fetch_weights(step);
    if (scratch) rows.template prepare<WARPS>(scratch);  // weights are nobody's output; activations are
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
                for (int c = 0; c < COLUMNS; ++c) weights[step][c].multiply(quarter, ahead[counted % AHEAD], part[c]);
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

// A block's outputs. Where rows are staged it stays for those 16 * COLUMNS * gridDim.y further on, too.
template <class Unpack, int TILES, int COLUMNS, int DEPTH, int AHEAD, int GROUP, int WARPS, class Rows>
__device__ __forceinline__ void mma_small_block(const Rows& rows, const unsigned char* __restrict__ tiles,
                                                const unsigned* __restrict__ scales, const Output& output,
                                                float (&partial)[COLUMNS][WARPS * 128 * TILES]) {
    float* scratch = partial[0];
    int tile = blockIdx.y * COLUMNS;
    do {
        float sum[COLUMNS][TILES][4] = {};
        mma_small_warp<Unpack, TILES, COLUMNS, DEPTH, AHEAD, GROUP, WARPS>(rows, scratch, tiles, scales, sum, tile, output.n);
        if (!scratch) __syncthreads();  // all have read the sums of the outputs before
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) add_warps<TILES, WARPS>(partial[c], sum[c], output, tile + c);
        scratch = nullptr;
        tile += COLUMNS * gridDim.y;
    } while (Rows::STAGED && tile * MMA_N < output.n);
}

template <class Unpack, int TILES, int COLUMNS, int DEPTH, int AHEAD, int WARPS, class Rows>
__device__ __forceinline__ void mma_small(const Rows& rows, const unsigned char* __restrict__ tiles,
                                          const unsigned* __restrict__ scales, const Output& output, int group) {
    constexpr int FINE_AHEAD = AHEAD < 2 ? AHEAD : 2;  // more scales take registers, too
    __shared__ float partial[COLUMNS][WARPS * 128 * TILES];
    release_next();
    if (group == 128) {
        mma_small_block<Unpack, TILES, COLUMNS, DEPTH, AHEAD, 128, WARPS>(rows, tiles, scales, output, partial);
    } else if (group == 64) {
        mma_small_block<Unpack, TILES, COLUMNS, DEPTH, FINE_AHEAD, 64, WARPS>(rows, tiles, scales, output, partial);
    } else {
        mma_small_block<Unpack, TILES, COLUMNS, DEPTH, FINE_AHEAD, 32, WARPS>(rows, tiles, scales, output, partial);
    }
}
