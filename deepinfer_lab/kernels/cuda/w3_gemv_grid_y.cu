// W3A16 matrix times m activation rows, one block row (grid.y) for each: the weights are read m times, from L2 at best.
#include "gemv.cuh"

extern "C" __global__ void __launch_bounds__(32 * GEMV_WARPS, GEMV_BLOCKS)
w3_gemv_grid_y(const half_t* __restrict__ x, const unsigned char* __restrict__ packed, const half_t* __restrict__ scales,
               const half_t* __restrict__ bias, half_t* __restrict__ out, int m, int n, int k, int group) {
    gemv<3>(x, packed, scales, bias, out, n, k, group);
}
