// out[row, i] = silu(x[row, i]) * x[row, columns + i], where silu(a) = a / (1 + exp(-a)), in fp32 with one rounding. A thread
// takes eight. Grid: (rows, columns / 2048 rounded up).
#include "mma.cuh"

__device__ __forceinline__ float silu_times(half_t gate, half_t up) {
    const float a = to_float(gate);
    return a / (1.0f + exp2_approx(a * -1.44269504f)) * to_float(up);
}
__device__ __forceinline__ unsigned silu_times(unsigned gate, unsigned up) {
    return half_pair(silu_times(static_cast<half_t>(gate), static_cast<half_t>(up)),
                     silu_times(static_cast<half_t>(gate >> 16), static_cast<half_t>(up >> 16)));
}

extern "C" __global__ void __launch_bounds__(256)
    silu_mul(const half_t* x, half_t* __restrict__ out, int columns) {
    take_turn();
    const size_t row = blockIdx.x;
    const int i = (blockIdx.y * 256 + threadIdx.x) * 8;
    if (i >= columns) return;
    const uint4 gate = *reinterpret_cast<const uint4*>(x + row * 2 * columns + i);
    const uint4 up = *reinterpret_cast<const uint4*>(x + (row * 2 + 1) * columns + i);
    *reinterpret_cast<uint4*>(out + row * columns + i) = {silu_times(gate.x, up.x), silu_times(gate.y, up.y),
                                                          silu_times(gate.z, up.z), silu_times(gate.w, up.w)};
}
