// Blocks of 128 activation rows and 192 outputs of a W4 weight in tiles, on the tensor cores of sm_90a.
#include "wgmma.cuh"

using W4Groups192x128 = GroupCut<W4Tiles, 3, 1, 128, 4, 2>;

extern "C" __global__ void __launch_bounds__(W4Groups192x128::THREADS, 1)
w4_wgmma_192_128(const half_t* x, const char* __restrict__ tiles, const char* __restrict__ scales,
                const half_t* __restrict__ bias, half_t* __restrict__ out, float4* __restrict__ partial,
                unsigned* __restrict__ arrived, int m, int n, int k, int group) {
    wgmma_block<W4Groups192x128>(x, tiles, scales, bias, out, partial, arrived, m, n, k, group);
}
