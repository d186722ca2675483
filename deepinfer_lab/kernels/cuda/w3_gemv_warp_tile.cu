// The counter-experiment to w3_gemv_batch_tile.cu: the same idea in the warp-per-rows layout of w4_gemv_batch_tile.cu.
#include "gemv_warp_tile.cuh"

extern "C" __global__ void __launch_bounds__(32 * GEMV_WARPS, GEMV_BLOCKS)
w3_gemv_warp_tile(const half_t* __restrict__ x, const unsigned char* __restrict__ packed, const half_t* __restrict__ scales,
                  const half_t* __restrict__ bias, half_t* __restrict__ out, int m, int n, int k, int group) {
    gemv_warp_tile<3>(x, packed, scales, bias, out, m, n, k, group);
}
