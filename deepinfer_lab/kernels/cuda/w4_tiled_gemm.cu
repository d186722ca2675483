// W4A16 tiled GEMM: a block computes whole outputs.
#include "unpack_w4_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
w4_tiled_gemm(const half_t* __restrict__ x, const unsigned char* __restrict__ packed, const half_t* __restrict__ scales,
              const half_t* __restrict__ bias, half_t* __restrict__ out, int m, int n, int k, int group) {
    tiled_gemm<UnpackW4>(x, packed, scales, bias, out, m, n, k, group);
}
