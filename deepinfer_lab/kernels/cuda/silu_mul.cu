// out[row, i] = silu(gate) * up with one rounding. x has gate [columns] beside up, or where `interleaved` eight of either in
// turn (quant/interleave.py). A thread takes eight. Grid: (rows, columns / 2048 rounded up).
#include "silu.cuh"
#include "dependent.cuh"

__device__ __forceinline__ unsigned silu_times(unsigned gate, unsigned up) {
    return half_pair(silu_times(static_cast<half_t>(gate), static_cast<half_t>(up)),
                     silu_times(static_cast<half_t>(gate >> 16), static_cast<half_t>(up >> 16)));
}

extern "C" __global__ void __launch_bounds__(256)
    silu_mul(const half_t* x, half_t* __restrict__ out, int columns, int interleaved) {
    take_turn();
    const size_t row = blockIdx.x;
    const int i = (blockIdx.y * 256 + threadIdx.x) * 8;
    if (i >= columns) return;
    const half_t* const from = x + row * 2 * columns + (interleaved ? 2 * i : i);
    const uint4 gate = *reinterpret_cast<const uint4*>(from);
    const uint4 up = *reinterpret_cast<const uint4*>(from + (interleaved ? 8 : columns));
    *reinterpret_cast<uint4*>(out + row * columns + i) = {silu_times(gate.x, up.x), silu_times(gate.y, up.y),
                                                          silu_times(gate.z, up.z), silu_times(gate.w, up.w)};
}
