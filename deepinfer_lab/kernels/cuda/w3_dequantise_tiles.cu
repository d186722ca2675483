// W3 weights in tiles to dense fp16.
#include "dequantise_tiles.cuh"

extern "C" __global__ void __launch_bounds__(UNPACK_THREADS)
w3_dequantise_tiles(const unsigned char* __restrict__ tiles, const unsigned* __restrict__ scales, half_t* __restrict__ out,
                     int rows, int k, int group_shift) {
    dequantise_tiles<UnpackW3>(tiles, scales, out, rows, k, group_shift);
}
