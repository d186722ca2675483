// silu(gate) * up, where silu(a) = a / (1 + exp(-a)), in fp32.
#pragma once
#include "mma.cuh"

__device__ __forceinline__ float silu_times(half_t gate, half_t up) {
    const float a = to_float(gate);
    return a / (1.0f + exp2_approx(a * -1.44269504f)) * to_float(up);
}
