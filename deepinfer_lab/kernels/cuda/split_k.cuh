// The tiled GEMM with K split over gridDim.z: 2,048 outputs are 32 blocks of 64, which leaves three quarters of a large card
// idle. Each block adds up its part of K in fp32; a second launch adds the parts, always in the same order.
#pragma once
#include "tiled_gemm.cuh"

// partial[z, m, n] = sum over the z-th part of K. Parts are whole steps of 32; the last may be shorter, or empty.
template <class Unpack>
__device__ __forceinline__ void split_k(const half_t* __restrict__ x, const unsigned char* __restrict__ packed,
                                        const half_t* __restrict__ scales, float* __restrict__ partial, int m, int n, int k,
                                        int group) {
    const int steps = (k / BK + gridDim.z - 1) / gridDim.z, begin = blockIdx.z * steps * BK;
    float sum[2][4] = {};
    accumulate<Unpack>(x, packed, scales, m, n, k, group, begin, min(k, begin + steps * BK), sum);
    partial += static_cast<size_t>(blockIdx.z) * m * n;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = blockIdx.y * BM + output_row() + i, column = blockIdx.x * BN + output_column() + j;
            if (row < m && column < n) partial[static_cast<size_t>(row) * n + column] = sum[i][j];
        }
    }
}

// out[m, n] = sum_z partial[z, m, n] + bias[n], a thread for each output of row blockIdx.y.
extern "C" __global__ void __launch_bounds__(THREADS)
add_partials(const float* __restrict__ partial, const half_t* __restrict__ bias, half_t* __restrict__ out, int m, int n,
             int splits) {
    const int column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= n) return;
    const size_t at = static_cast<size_t>(blockIdx.y) * n + column, stride = static_cast<size_t>(m) * n;
    float sum = 0.0f;
    for (int z = 0; z < splits; ++z) sum += partial[z * stride + at];
    out[at] = finish(sum, bias, column);
}
