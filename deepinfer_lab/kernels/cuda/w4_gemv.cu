// W4A16 matrix times one activation row (grid.y = 1).
#include "gemv.cuh"

extern "C" __global__ void __launch_bounds__(32 * GEMV_WARPS, GEMV_BLOCKS)
w4_gemv(const half_t* __restrict__ x, const unsigned char* __restrict__ packed, const half_t* __restrict__ scales,
        const half_t* __restrict__ bias, half_t* __restrict__ out, int m, int n, int k, int group) {
    gemv<4>(x, packed, scales, bias, out, n, k, group);
}
