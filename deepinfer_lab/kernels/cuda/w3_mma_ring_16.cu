// Up to 16 activation rows times a W3 weight in tiles, on tensor cores, through rings in shared memory; up to 16 warps share K.
#include "mma_ring.cuh"

extern "C" __global__ void __launch_bounds__(512, 1)
w3_mma_ring_16(const half_t* x, const unsigned char* __restrict__ tiles, const unsigned* __restrict__ scales,
               const half_t* __restrict__ bias, half_t* __restrict__ out, int m, int n, int k, int group) {
    mma_ring<UnpackW3, 2, 5>(x, tiles, scales, bias, out, m, n, k, group);
}
