// Blocks of 64 activation rows and 128 outputs of a W3 weight in tiles, on the tensor cores of sm_90a.
#include "wgmma.cuh"

using W3Groups128x64 = GroupCut<W3Tiles, 2, 1, 64, 9, 4>;

extern "C" __global__ void __launch_bounds__(W3Groups128x64::THREADS, 1)
w3_wgmma_128_64(const half_t* x, const char* __restrict__ tiles, const char* __restrict__ scales,
                const half_t* __restrict__ bias, half_t* __restrict__ out, float4* __restrict__ partial,
                unsigned* __restrict__ arrived, int m, int n, int k, int group) {
    wgmma_block<W3Groups128x64>(x, tiles, scales, bias, out, partial, arrived, m, n, k, group);
}
