// W3A16 tiled GEMM whose blocks share outputs along K, for grids that leave multiprocessors idle.
#include "split_k.cuh"
#include "unpack_w3_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
w3_tiled_gemm_split_k(const half_t* __restrict__ x, const unsigned char* __restrict__ packed,
                      const half_t* __restrict__ scales, const half_t*, float* __restrict__ partial, int m, int n, int k,
                      int group) {
    split_k<UnpackW3>(x, packed, scales, partial, m, n, k, group);
}
