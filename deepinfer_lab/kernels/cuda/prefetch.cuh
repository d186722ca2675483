// Instructions that bring memory to the L2 before it is needed.
#pragma once

// Has the 32 bytes around an address brought to the L2.
__device__ __forceinline__ void prefetch_sector(const void* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at)) : "memory");
}

// Has memory brought to the L2: `bytes` from an address on, both multiples of 16. Nothing before sm_90.
__device__ __forceinline__ void prefetch_l2(const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes) : "memory");
#endif
}
