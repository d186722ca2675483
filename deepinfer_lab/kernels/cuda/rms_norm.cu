// out = x / sqrt(mean(x^2) + eps) * weight. Grid: (rows). `columns` is a multiple of 8. With delta, x + delta takes the place
// of x and is kept in `sum`. Arithmetic in fp32; x + delta is rounded to fp16 before it is squared, as what is kept is.
#include "mma.cuh"

constexpr int NORM_THREADS = 256;

__device__ __forceinline__ float low_half(unsigned pair) { return to_float(static_cast<half_t>(pair)); }
__device__ __forceinline__ float high_half(unsigned pair) { return to_float(static_cast<half_t>(pair >> 16)); }
__device__ __forceinline__ unsigned add_pair(unsigned a, unsigned b) {
    return half_pair(low_half(a) + low_half(b), high_half(a) + high_half(b));
}
__device__ __forceinline__ float square_sum(unsigned pair) {
    return low_half(pair) * low_half(pair) + high_half(pair) * high_half(pair);
}
__device__ __forceinline__ unsigned scaled(unsigned pair, unsigned weight, float factor) {
    return half_pair(low_half(pair) * factor * low_half(weight), high_half(pair) * factor * high_half(weight));
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    rms_norm(const half_t* x, const half_t* delta, const half_t* weight, half_t* sum, half_t* out, int columns, float eps) {
    __shared__ float warp_sums[NORM_THREADS / 32];
    take_turn();
    const size_t row = static_cast<size_t>(blockIdx.x) * columns;
    float squares = 0.0f;
    for (int i = threadIdx.x * 8; i < columns; i += NORM_THREADS * 8) {
        uint4 a = *reinterpret_cast<const uint4*>(x + row + i);
        if (delta) {
            const uint4 b = *reinterpret_cast<const uint4*>(delta + row + i);
            a.x = add_pair(a.x, b.x), a.y = add_pair(a.y, b.y), a.z = add_pair(a.z, b.z), a.w = add_pair(a.w, b.w);
            *reinterpret_cast<uint4*>(sum + row + i) = a;
        }
        squares += square_sum(a.x) + square_sum(a.y) + square_sum(a.z) + square_sum(a.w);
    }
    for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, distance);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = squares;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < NORM_THREADS / 32; ++warp) total += warp_sums[warp];
    const float factor = 1.0f / sqrtf(total / columns + eps);

    const half_t* normed = delta ? sum : x;  // each thread reads back only what it wrote itself
    for (int i = threadIdx.x * 8; i < columns; i += NORM_THREADS * 8) {
        const uint4 a = *reinterpret_cast<const uint4*>(normed + row + i);
        const uint4 w = *reinterpret_cast<const uint4*>(weight + i);
        *reinterpret_cast<uint4*>(out + row + i) = {scaled(a.x, w.x, factor), scaled(a.y, w.y, factor),
                                                    scaled(a.z, w.z, factor), scaled(a.w, w.w, factor)};
    }
}
