// Blocks of 128 activation rows and 64 outputs of a W4 weight in tiles, on tensor cores.
#include "mma_block.cuh"

using W4Block64x128 = Cut<W4Tiles, 64, 128, 2, 2, 1, 4>;

extern "C" __global__ void __launch_bounds__(W4Block64x128::THREADS, 2)
w4_mma_block_64_128(const half_t* x, const char* __restrict__ tiles, const char* __restrict__ scales,
                    const half_t* __restrict__ bias, half_t* __restrict__ out, float4* __restrict__ partial,
                    unsigned* __restrict__ arrived, int m, int n, int k, int group) {
    mma_block<W4Block64x128>(x, tiles, scales, bias, out, partial, arrived, m, n, k, group);
}
