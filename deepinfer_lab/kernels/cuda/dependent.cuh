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
#pragma once

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
