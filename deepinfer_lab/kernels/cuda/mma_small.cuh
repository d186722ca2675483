// A few activation rows times a W4 weight that was re-packed for tensor cores (quant/tiles.py): weights are read once, 16 bytes
// a lane, and are in registers, in the places where mma.m16n8k16 wants them, after nine instructions for every eight.
//
// A block owns 16 outputs. Its warps share K: warp w takes the units (64 of K) w, w + WARPS, w + 2 WARPS, ... and their sums
// meet in shared memory at the end. No other block is waited for: with 16 warps a block, 2,048 outputs fill an H200.
//
//   D[16 outputs, 8 rows] += A[16 outputs, 16 of K: weights] * B[16 of K, 8 rows: activations]
//
// A unit is four such products. Which of its 64 k stand at which place of a product is free, as long as A and B agree: lane
// 4g + t has activations 8t .. 8t + 7 of each half of 32, two 16-byte loads of row g as it lies in memory. Weights go in as
// the integers that they are and a scale meets fp32 sums, so nothing is rounded or can overflow before the output.
#pragma once
#include "mma_ptx.cuh"
#include "unpack.cuh"

constexpr int MMA_N = 16, MMA_K = 64, MMA_ROWS = 8;
constexpr int MMA_DEPTH = 4;   // units whose weights are on their way to a warp

// One 32-bit word of a unit, eight values + 8, to the A fragment of one product. With m in its mantissa's last bits, the half of
// 1024 is 1024 + m: values in bits 0-3 lose 1032; those in bits 4-7 are 16 times as large.
__device__ __forceinline__ void weight_fragment(unsigned word, unsigned (&a)[4]) {
    constexpr unsigned THOUSAND = 0x64006400u, LOW = 0x000F000Fu, HIGH = 0x00F000F0u;
    constexpr unsigned THOUSAND_AND_EIGHT = 0x64086408u, SIXTEENTH = 0x2C002C00u, MINUS_72 = 0xD480D480u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        a[2 * i] = sub_pair(mask_set(word, LOW, THOUSAND), THOUSAND_AND_EIGHT);
        a[2 * i + 1] = fma_pair(mask_set(word, HIGH, THOUSAND), SIXTEENTH, MINUS_72);
        word >>= 8;
    }
}

// sum += part * scales, and part = 0. A pair holds the scales of outputs g and g + 8.
template <int TILES>
__device__ __forceinline__ void add_scaled(float (&sum)[TILES][4], float (&part)[TILES][4], unsigned pair) {
    const float low = to_float(static_cast<half_t>(pair)), high = to_float(static_cast<half_t>(pair >> 16));
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            sum[i][j] = fmaf(j < 2 ? low : high, part[i][j], sum[i][j]);
            part[i][j] = 0.0f;
        }
    }
}

// One warp's part of the sums: up to 8 * TILES activation rows, from 8 * TILES * blockIdx.x on; outputs from 16 * blockIdx.y on.
// AHEAD: half units whose activations are on their way.
template <int TILES, int AHEAD, int GROUP, int WARPS>
__device__ __forceinline__ void mma_small_warp(const half_t* __restrict__ x, const uint4* __restrict__ tiles,
                                               const unsigned* __restrict__ scales, float (&sum)[TILES][4], int m, int k) {
    static_assert(WARPS * MMA_K % GROUP == 0 && AHEAD % 2 == 0 && 2 * MMA_DEPTH % AHEAD == 0, "whole groups, whole rings");
    constexpr bool FINE = GROUP < MMA_K;  // the halves of a unit have scales of their own, and K may end with the first
    constexpr int SCALES = FINE ? 2 : 1, SCALE_STEP = WARPS * MMA_K / GROUP * MMA_ROWS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int units = (k + MMA_K - 1) / MMA_K, first_row = blockIdx.x * MMA_ROWS * TILES;
    // Where the warp's next unit begins. A step from there is WARPS units.
    tiles += (static_cast<size_t>(blockIdx.y) * units + warp) * 32 + lane;
    scales += (static_cast<size_t>(blockIdx.y) * units * MMA_K / GROUP + warp * MMA_K / GROUP) * MMA_ROWS + g;
    const half_t* row[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {  // past the end: the last row once more, never stored
        row[i] = x + static_cast<size_t>(min(first_row + MMA_ROWS * i + g, m - 1)) * k + warp * MMA_K + 8 * t;
    }

    int next = warp;
    uint4 weights[MMA_DEPTH], rows[AHEAD][TILES];
    unsigned scale[MMA_DEPTH][SCALES];  // of outputs g and g + 8
    const auto fetch_weights = [&](int step) {
        if (next + step * WARPS >= units) return;
        weights[step % MMA_DEPTH] = load_once(tiles + step * WARPS * 32);
#pragma unroll
        for (int half = 0; half < SCALES; ++half) {
            scale[step % MMA_DEPTH][half] = scales[step * SCALE_STEP + half * MMA_ROWS];
        }
    };
    const auto fetch_rows = [&](int step, int half) {
        const int unit = next + step * WARPS, slot = (2 * step + half) % AHEAD;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            // Half a unit beyond K has zeros as weights. Its activations must be zeros too: 0 times infinity is not.
            if (FINE) rows[slot][i] = {};
            if (FINE ? unit * MMA_K + 32 * half < k : unit < units) {
                rows[slot][i] = *reinterpret_cast<const uint4*>(row[i] + step * WARPS * MMA_K + 32 * half);
            }
        }
    };

#pragma unroll
    for (int step = 0; step < MMA_DEPTH; ++step) fetch_weights(step);
#pragma unroll
    for (int slot = 0; slot < AHEAD; ++slot) fetch_rows(slot / 2, slot % 2);
    while (next < units) {
#pragma unroll
        for (int step = 0; step < MMA_DEPTH; ++step) {
            if (next + step * WARPS >= units) return;  // the whole warp
            const uint4 bits = weights[step];
            const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
            float part[TILES][4] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4(&b)[TILES] = rows[(2 * step + half) % AHEAD];
                unsigned a[4];
                weight_fragment(words[2 * half], a);
#pragma unroll
                for (int i = 0; i < TILES; ++i) mma(part[i], a, b[i].x, b[i].y);
                weight_fragment(words[2 * half + 1], a);
#pragma unroll
                for (int i = 0; i < TILES; ++i) mma(part[i], a, b[i].z, b[i].w);
                fetch_rows(step + AHEAD / 2, half);  // into registers that are free now
                if (FINE || half == 1) add_scaled(sum, part, scale[step][half % SCALES]);
            }
            fetch_weights(step + MMA_DEPTH);
        }
        next += MMA_DEPTH * WARPS;
        tiles += MMA_DEPTH * WARPS * 32;
        scales += MMA_DEPTH * SCALE_STEP;
#pragma unroll
        for (int i = 0; i < TILES; ++i) row[i] += MMA_DEPTH * WARPS * MMA_K;
    }
}

// out = the sums of a block's warps, added always in the same order, + bias.
template <int TILES, int WARPS>
__device__ __forceinline__ void add_warps(const float (&sum)[TILES][4], const half_t* __restrict__ bias,
                                          half_t* __restrict__ out, int m, int n) {
    __shared__ float partial[WARPS][4 * TILES][32];
#pragma unroll
    for (int i = 0; i < 4 * TILES; ++i) partial[threadIdx.x / 32][i][threadIdx.x % 32] = sum[i / 4][i % 4];
    __syncthreads();
    for (int at = threadIdx.x; at < 128 * TILES; at += 32 * WARPS) {
        const int i = at / 32, lane = at % 32;
        float total = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) total += partial[warp][i][lane];
        const int output = blockIdx.y * MMA_N + lane / 4 + i % 4 / 2 * 8;
        const int row = blockIdx.x * MMA_ROWS * TILES + i / 4 * MMA_ROWS + lane % 4 * 2 + i % 2;
        if (row < m && output < n) out[static_cast<size_t>(row) * n + output] = finish(total, bias, output);
    }
}

template <int TILES, int AHEAD, int WARPS>
__device__ __forceinline__ void mma_small(const half_t* __restrict__ x, const uint4* __restrict__ tiles,
                                          const unsigned* __restrict__ scales, const half_t* __restrict__ bias,
                                          half_t* __restrict__ out, int m, int n, int k, int group) {
    float sum[TILES][4] = {};
    if (group == 128) mma_small_warp<TILES, AHEAD, 128, WARPS>(x, tiles, scales, sum, m, k);
    if (group == 64) mma_small_warp<TILES, AHEAD, 64, WARPS>(x, tiles, scales, sum, m, k);
    if (group == 32) mma_small_warp<TILES, 2, 32, WARPS>(x, tiles, scales, sum, m, k);  // its scales take registers, too
    add_warps<TILES, WARPS>(sum, bias, out, m, n);
}
