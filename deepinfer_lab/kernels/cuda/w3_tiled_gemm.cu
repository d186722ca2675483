// W3A16 tiled GEMM. Unpacking (article, 2.4): a warp fills eight weight rows at once. lane >> 2 chooses the row, lane & 3 one of
// the four 8-value units of its 32 values; eight warps fill all 64 rows in one pass, three bytes to a lane.
#include "tiled_gemm.cuh"

struct UnpackW3 {
    static __device__ __forceinline__ void tile(half_t (&shared_b)[BK][B_STRIDE], const unsigned char* __restrict__ packed,
                                                const half_t* __restrict__ scales, int n0, int k0, int n, int k,
                                                int group_shift) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, unit = lane & 3;
        const int column = warp * 8 + (lane >> 2), row = n0 + column;
        float q[UNIT] = {};  // rows beyond n: zero weights
        float scale = 0.0f;
        if (row < n) {
            decode_unit<3>(load_unit<3>(packed + static_cast<size_t>(row) * (k / UNIT * 3), k0 / UNIT + unit), q);
            scale = to_float(scales[static_cast<size_t>(row) * (k >> group_shift) + (k0 >> group_shift)]);  // 32 divides group
        }
#pragma unroll
        for (int i = 0; i < UNIT; ++i) shared_b[unit * UNIT + i][column] = to_half(q[i] * scale);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
w3_tiled_gemm(const half_t* __restrict__ x, const unsigned char* __restrict__ packed, const half_t* __restrict__ scales,
              const half_t* __restrict__ bias, half_t* __restrict__ out, int m, int n, int k, int group) {
    tiled_gemm<UnpackW3>(x, packed, scales, bias, out, m, n, k, group);
}
