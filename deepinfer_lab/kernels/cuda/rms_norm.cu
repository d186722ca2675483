// out = x / sqrt(mean(x^2) + eps) * weight. Grid: (rows). `columns` is a multiple of 8. With delta, x + delta takes the place
// of x and is kept in `sum`. Arithmetic in fp32; x + delta is rounded to fp16 before it is squared, as what is kept is.
#include "norm.cuh"
#include "dependent.cuh"

__device__ __forceinline__ unsigned add_pair(unsigned a, unsigned b) {
    return half_pair(low_half(a) + low_half(b), high_half(a) + high_half(b));
}

extern "C" __global__ void __launch_bounds__(NORM_TEAM)
    rms_norm(const half_t* x, const half_t* delta, const half_t* weight, half_t* sum, half_t* out, int columns, float eps) {
    __shared__ float of_warps[NORM_WARPS];
    take_turn();
    const size_t row = static_cast<size_t>(blockIdx.x) * columns;
    float squares[1] = {};
    for (int i = threadIdx.x * 8; i < columns; i += NORM_STEP) {
        uint4 a = *reinterpret_cast<const uint4*>(x + row + i);
        if (delta) {
            const uint4 b = *reinterpret_cast<const uint4*>(delta + row + i);
            a.x = add_pair(a.x, b.x), a.y = add_pair(a.y, b.y), a.z = add_pair(a.z, b.z), a.w = add_pair(a.w, b.w);
            *reinterpret_cast<uint4*>(sum + row + i) = a;
        }
        squares[0] = add_squares(squares[0], a);
    }
    const float of_warp = warp_sums(squares);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
    __syncthreads();
    const float factor = norm_factor(of_warps, 1, columns, eps);

    const half_t* kept = delta ? sum : x;  // each thread reads back only what it wrote itself
    for (int i = threadIdx.x * 8; i < columns; i += NORM_STEP) {
        const uint4 a = *reinterpret_cast<const uint4*>(kept + row + i);
        const uint4 w = *reinterpret_cast<const uint4*>(weight + i);
        *reinterpret_cast<uint4*>(out + row + i) = normed(a, w, factor);
    }
}
