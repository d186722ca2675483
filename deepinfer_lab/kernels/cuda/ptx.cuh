// The PTX instructions that these kernels spell out. Two convert IEEE half precision, stored as its 16 bits: all that is needed
// of cuda_fp16.h, which NVRTC does not bring along.
#pragma once

typedef unsigned short half_t;

__device__ __forceinline__ float to_float(half_t h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

// Rounds to nearest even. Beyond 65504 the result is infinite, as in torch.
__device__ __forceinline__ half_t to_half(float f) {
    half_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

// (bits & mask) | set in one instruction. The compiler, left to itself, takes two where mask and set are both constants.
__device__ __forceinline__ unsigned mask_set(unsigned bits, unsigned mask, unsigned set) {
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(bits), "r"(mask), "r"(set));
    return result;
}

// Programmatic dependent launch, for kernels that are launched so (kernels/dependent_launch.py): blocks of the next kernel may
// take their places once all of this one's have taken theirs, and each waits until the kernels before its own are done. No
// thread touches what an earlier kernel wrote, or writes anything, before it has awaited them; and none leaves before: the
// kernel would be done before them. What an earlier kernel wrote is read through pointers without __restrict__, or at addresses
// that were: what is promised not to change, the compiler may read before the wait. Launched otherwise, and before sm_90, there
// is nothing to wait for.
//
// "Earlier" is within one captured graph: nowhere else are kernels launched so (kernels/loader.py). A graph's first kernels
// start when all that was enqueued before its replay is done, and no kernel starts before they do. So what no kernel of the
// graph writes can be read before the wait: weights; numbers of the step that were copied in before the replay; and what the
// steps before this one have left in the cache.
__device__ __forceinline__ void release_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void take_turn() {
    release_next();
    await_previous();
}

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
