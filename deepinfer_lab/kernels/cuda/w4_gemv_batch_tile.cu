// W4A16 matrix times m activation rows, eight of which (one grid.y) share a read of the weights.
#include "gemv_warp_tile.cuh"

extern "C" __global__ void __launch_bounds__(32 * GEMV_WARPS, GEMV_BLOCKS)
w4_gemv_batch_tile(const half_t* __restrict__ x, const unsigned char* __restrict__ packed, const half_t* __restrict__ scales,
                   const half_t* __restrict__ bias, half_t* __restrict__ out, int m, int n, int k, int group) {
    gemv_warp_tile<4>(x, packed, scales, bias, out, m, n, k, group);
}
