// How 4-bit weights get into shared_b (article, 2.3): a warp fills two weight rows at a time. Lanes 0-15 read the 16 bytes of
// the first row's 32 values, lanes 16-31 those of the second, and each lane writes its two values, even k and odd k.
#pragma once
#include "tiled_gemm.cuh"

struct UnpackW4 {
    static constexpr int PASSES = BN / 16;
    unsigned char two[PASSES];
    half_t scale[PASSES];

    static __device__ __forceinline__ int column(int pass) {
        return pass * 16 + threadIdx.x / 32 * 2 + threadIdx.x % 32 / 16;
    }

    __device__ __forceinline__ void fetch(const unsigned char* __restrict__ packed, const half_t* __restrict__ scales, int n0,
                                          int k0, int n, int k, int group_shift) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int row = n0 + column(pass);
            two[pass] = 0, scale[pass] = 0;  // rows beyond n: zero weights
            if (row < n) {
                two[pass] = packed[static_cast<size_t>(row) * (k / 2) + k0 / 2 + threadIdx.x % 16];
                scale[pass] = scales[static_cast<size_t>(row) * (k >> group_shift) + (k0 >> group_shift)];  // 32 divides group
            }
        }
    }

    __device__ __forceinline__ void store(half_t (&shared_b)[BK][B_STRIDE]) const {
        const int even = threadIdx.x % 16 * 2;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const float s = to_float(scale[pass]);
            shared_b[even][column(pass)] = to_half(static_cast<float>(((two[pass] & 15) ^ 8) - 8) * s);
            shared_b[even + 1][column(pass)] = to_half(static_cast<float>((two[pass] >> 4 ^ 8) - 8) * s);
        }
    }
};
