// Up to 8 activation rows times a W4 weight in tiles, on tensor cores; 16 warps share K.
#include "mma_small.cuh"

extern "C" __global__ void __launch_bounds__(512, 1)
w4_mma_8(const half_t* x, const unsigned char* __restrict__ tiles, const unsigned* __restrict__ scales,
         const half_t* bias, const half_t* residual, half_t* out, int m, int n, int k, int group, int gated) {
    mma_small<UnpackW4, 1, 1, 4, 8, 16>(StoredRows{x, m, k}, tiles, scales, {bias, residual, out, m, n, gated}, group);
}
