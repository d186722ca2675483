// W3 weights to dense fp16.
#include "dequantise.cuh"

extern "C" __global__ void __launch_bounds__(DEQUANTISE_THREADS)
w3_dequantise(const unsigned char* __restrict__ packed, const half_t* __restrict__ scales, half_t* __restrict__ out,
              size_t units, int group) {
    dequantise<3>(packed, scales, out, units, group);
}
