// w4_mma_8 of rows that the block norms itself.
#include "mma_small.cuh"

extern "C" __global__ void __launch_bounds__(512, 1)
w4_mma_8_norm(const half_t* x, const unsigned char* __restrict__ tiles, const unsigned* __restrict__ scales,
              const half_t* bias, const half_t* residual, half_t* out, const half_t* norm, int m, int n, int k, int group,
              int gated, float eps) {
    const NormedRows rows{x, m, k, norm, eps, reinterpret_cast<half_t*>(launch_shared())};
    mma_small<UnpackW4, 1, 1, 4, 2, 16>(rows, tiles, scales, {bias, residual, out, m, n, gated}, group);
}
