// The instruction that brings memory to the L2 before it is needed.
#pragma once

// Has the 32 bytes around an address brought to the L2.
__device__ __forceinline__ void prefetch_sector(const void* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at)) : "memory");
}
