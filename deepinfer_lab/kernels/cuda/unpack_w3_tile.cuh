// How 3-bit weights get into shared_b (article, 2.4): a warp fills eight weight rows at once. lane >> 2 chooses the row,
// lane & 3 one of the four 8-value units of its 32 values; eight warps fill all 64 rows in one pass, three bytes to a lane.
#pragma once
#include "tiled_gemm.cuh"

struct UnpackW3 {
    unsigned bits;
    half_t scale;

    static __device__ __forceinline__ int column() { return threadIdx.x >> 2; }  // warp * 8 + (lane >> 2)

    __device__ __forceinline__ void fetch(const unsigned char* __restrict__ packed, const half_t* __restrict__ scales, int n0,
                                          int k0, int n, int k, int group_shift) {
        const int row = n0 + column();
        bits = 0, scale = 0;  // rows beyond n: zero weights
        if (row < n) {
            bits = load_unit<3>(packed + static_cast<size_t>(row) * (k / UNIT * 3), k0 / UNIT + (threadIdx.x & 3));
            scale = scales[static_cast<size_t>(row) * (k >> group_shift) + (k0 >> group_shift)];  // 32 divides group
        }
    }

    __device__ __forceinline__ void store(half_t (&shared_b)[BK][B_STRIDE]) const {
        const int first = (threadIdx.x & 3) * UNIT;
        const float s = to_float(scale);
        float q[UNIT];
        decode_unit<3>(bits, q);
#pragma unroll
        for (int i = 0; i < UNIT; ++i) shared_b[first + i][column()] = to_half(q[i] * s);
    }
};
