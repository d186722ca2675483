// Blocks of 16 activation rows and 64 outputs of a W3 weight in tiles, on tensor cores.
#include "mma_block.cuh"

using W3Block64x16 = Cut<W3Tiles, 64, 16, 1, 1, 4, 3>;

extern "C" __global__ void __launch_bounds__(W3Block64x16::THREADS, 2)
w3_mma_block_64_16(const half_t* x, const char* __restrict__ tiles, const char* __restrict__ scales,
                   const half_t* __restrict__ bias, half_t* __restrict__ out, float4* __restrict__ partial,
                   unsigned* __restrict__ arrived, int m, int n, int k, int group) {
    mma_block<W3Block64x16>(x, tiles, scales, bias, out, partial, arrived, m, n, k, group);
}
