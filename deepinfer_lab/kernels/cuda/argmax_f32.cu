#include "argmax.cuh"

extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS)
    argmax_f32(const float* __restrict__ x, long long* __restrict__ out, int columns) {
    argmax(x, out, columns);
}
