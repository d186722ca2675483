// W4A16 tiled GEMM. Unpacking (article, 2.3): a warp fills two weight rows at a time. Lanes 0-15 read the 16 bytes of the first
// row's 32 values, lanes 16-31 those of the second, and each lane writes its two values, even k and odd k.
#include "tiled_gemm.cuh"

struct UnpackW4 {
    static __device__ __forceinline__ void tile(half_t (&shared_b)[BK][B_STRIDE], const unsigned char* __restrict__ packed,
                                                const half_t* __restrict__ scales, int n0, int k0, int n, int k,
                                                int group_shift) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, byte = lane % 16;
#pragma unroll
        for (int pass = 0; pass < BN / 16; ++pass) {
            const int column = pass * 16 + warp * 2 + lane / 16, row = n0 + column;
            half_t even = 0, odd = 0;  // rows beyond n
            if (row < n) {
                const int two = packed[static_cast<size_t>(row) * (k / 2) + k0 / 2 + byte];
                const float scale = to_float(scales[static_cast<size_t>(row) * (k >> group_shift) + (k0 >> group_shift)]);  // 32 divides group
                even = to_half(static_cast<float>(((two & 15) ^ 8) - 8) * scale);
                odd = to_half(static_cast<float>((two >> 4 ^ 8) - 8) * scale);
            }
            shared_b[2 * byte][column] = even;
            shared_b[2 * byte + 1][column] = odd;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
w4_tiled_gemm(const half_t* __restrict__ x, const unsigned char* __restrict__ packed, const half_t* __restrict__ scales,
              const half_t* __restrict__ bias, half_t* __restrict__ out, int m, int n, int k, int group) {
    tiled_gemm<UnpackW4>(x, packed, scales, bias, out, m, n, k, group);
}
