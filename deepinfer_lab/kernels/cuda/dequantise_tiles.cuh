// Weights in tiles (quant/tiles.py) to dense fp16, the same bits as dequantise.cuh's. A warp takes units of 16 outputs by 128 of
// k. In a quarter (32 of k) of it, lane 4g + t has eight values in a row, k 8t .. 8t + 7, of output g and of output g + 8: the A
// fragments of two products, so what it takes to multiply also says where they belong. 16 bytes a store, 64 a row of a warp's.
#pragma once
#include "mma_unit.cuh"

constexpr int UNPACK_THREADS = 256;

// tiles, scales: of the first 16 outputs of a slice. rows: of the slice. out: [rows, k].
template <class Unpack>
__device__ __forceinline__ void dequantise_tiles(const unsigned char* __restrict__ tiles, const unsigned* __restrict__ scales,
                                                 half_t* __restrict__ out, int rows, int k, int group_shift) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, units = (k + MMA_K - 1) / MMA_K;
    const size_t at = static_cast<size_t>(blockIdx.x) * (UNPACK_THREADS / 32) + threadIdx.x / 32;
    const int tile = static_cast<int>(at / units), unit = static_cast<int>(at % units), row = tile * MMA_N + g;
    if (tile * MMA_N >= rows) return;
    Unit<Unpack> weights;
    weights.load(tiles + at * Unit<Unpack>::BYTES, lane);
#pragma unroll
    for (int quarter = 0; quarter < QUARTERS; ++quarter) {
        const int first = unit * MMA_K + quarter * 32;
        if (first >= k) return;  // K ends with a group
        const unsigned pair = scales[((at * MMA_K + quarter * 32) >> group_shift) * MMA_ROWS + g];  // of outputs g and g + 8
        const unsigned scale[2] = {__byte_perm(pair, 0, 0x1010), __byte_perm(pair, 0, 0x3232)};
        unsigned a[2][4];
        weights.fragment(quarter, 0, a[0]), weights.fragment(quarter, 1, a[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (row + 8 * i >= rows) continue;
            half_t* const to = out + static_cast<size_t>(row + 8 * i) * k + first + 8 * t;
            *reinterpret_cast<uint4*>(to) = {mul_pair(a[0][i], scale[i]), mul_pair(a[0][i + 2], scale[i]),
                                             mul_pair(a[1][i], scale[i]), mul_pair(a[1][i + 2], scale[i])};
        }
    }
}
