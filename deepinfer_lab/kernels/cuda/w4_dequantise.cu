// W4 weights to dense fp16.
#include "dequantise.cuh"

extern "C" __global__ void __launch_bounds__(DEQUANTISE_THREADS)
w4_dequantise(const unsigned char* __restrict__ packed, const half_t* __restrict__ scales, half_t* __restrict__ out,
              size_t units, int group) {
    dequantise<4>(packed, scales, out, units, group);
}
