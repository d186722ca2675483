// Blocks of 64 activation rows and 64 outputs of a W3 weight in tiles, on tensor cores.
#include "mma_block.cuh"

using W3Block64x64 = Cut<W3Tiles, 64, 64, 2, 1, 2, 2>;

extern "C" __global__ void __launch_bounds__(W3Block64x64::THREADS, 2)
w3_mma_block_64_64(const half_t* x, const char* __restrict__ tiles, const char* __restrict__ scales,
                   const half_t* __restrict__ bias, half_t* __restrict__ out, float4* __restrict__ partial,
                   unsigned* __restrict__ arrived, int m, int n, int k, int group) {
    mma_block<W3Block64x64>(x, tiles, scales, bias, out, partial, arrived, m, n, k, group);
}
