// Blocks of 16 activation rows and 192 outputs of a W3 weight in tiles, on tensor cores.
#include "mma_block.cuh"

using W3Block192x16 = Cut<W3Tiles, 192, 16, 4, 1, 3, 3>;

extern "C" __global__ void __launch_bounds__(W3Block192x16::THREADS, 1)
w3_mma_block_192_16(const half_t* x, const char* __restrict__ tiles, const char* __restrict__ scales,
                    const half_t* __restrict__ bias, half_t* __restrict__ out, float4* __restrict__ partial,
                    unsigned* __restrict__ arrived, int m, int n, int k, int group) {
    mma_block<W3Block192x16>(x, tiles, scales, bias, out, partial, arrived, m, n, k, group);
}
