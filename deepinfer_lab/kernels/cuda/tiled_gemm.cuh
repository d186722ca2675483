// out[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], tiled as in the article's section 2.2. A block owns 32 x 64 outputs and
// walks along K in steps of 32; no more than one 32 x 64 tile of weights ever exists in fp16.
//
// A thread owns 2 rows x 4 columns: for every k it reads 2 + 4 shared values and does 8 FMAs, in fp32. `Unpack::tile` fills
// shared_b; it is all that distinguishes W4 from W3. The 65th column of shared_b staggers the banks that unpacking writes to.
#pragma once
#include "unpack.cuh"

constexpr int BM = 32, BN = 64, BK = 32, THREADS = 256, B_STRIDE = BN + 1;

// BM x BK activations, four to a thread. Rows beyond m are zero: they meet real weights, whose products are never stored.
__device__ __forceinline__ void load_a(half_t (&shared_a)[BM][BK], const half_t* __restrict__ x, int m0, int k0, int m, int k) {
    const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 4;
    uint2 four = {0, 0};
    if (m0 + row < m) four = *reinterpret_cast<const uint2*>(x + static_cast<size_t>(m0 + row) * k + k0 + column);
    *reinterpret_cast<uint2*>(&shared_a[row][column]) = four;
}

template <class Unpack>
__device__ __forceinline__ void tiled_gemm(const half_t* __restrict__ x, const unsigned char* __restrict__ packed,
                                           const half_t* __restrict__ scales, const half_t* __restrict__ bias,
                                           half_t* __restrict__ out, int m, int n, int k, int group) {
    __shared__ __align__(16) half_t shared_a[BM][BK];
    __shared__ half_t shared_b[BK][B_STRIDE];
    const int m0 = blockIdx.y * BM, n0 = blockIdx.x * BN;
    const int row = threadIdx.x / 16 * 2, column = threadIdx.x % 16 * 4;
    const int group_shift = __ffs(group) - 1;  // k >> group_shift = k / group
    float sum[2][4] = {};

    for (int k0 = 0; k0 < k; k0 += BK) {
        load_a(shared_a, x, m0, k0, m, k);
        Unpack::tile(shared_b, packed, scales, n0, k0, n, k, group_shift);
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < BK; ++kk) {
            const float a[2] = {to_float(shared_a[row][kk]), to_float(shared_a[row + 1][kk])};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float b = to_float(shared_b[kk][column + j]);
                sum[0][j] = fmaf(a[0], b, sum[0][j]);
                sum[1][j] = fmaf(a[1], b, sum[1][j]);
            }
        }
        __syncthreads();  // the next step overwrites both tiles
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int om = m0 + row + i, on = n0 + column + j;
            if (om < m && on < n) out[static_cast<size_t>(om) * n + on] = finish(sum[i][j], bias, on);
        }
    }
}
