// Blocks of 64 activation rows and 192 outputs of a W4 weight in tiles, on tensor cores.
#include "mma_block.cuh"

using W4Block192x64 = Cut<W4Tiles, 192, 64, 4, 1, 2, 5>;

extern "C" __global__ void __launch_bounds__(W4Block192x64::THREADS, 1)
w4_mma_block_192_64(const half_t* x, const char* __restrict__ tiles, const char* __restrict__ scales,
                    const half_t* __restrict__ bias, half_t* __restrict__ out, float4* __restrict__ partial,
                    unsigned* __restrict__ arrived, int m, int n, int k, int group) {
    mma_block<W4Block192x64>(x, tiles, scales, bias, out, partial, arrived, m, n, k, group);
}
