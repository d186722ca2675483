// PTX of kernels whose blocks are all resident and wait for one another (sm_90). A wait that nothing ends traps: a launch fails
// instead of holding the card. PTX ISA, "Memory Consistency Model" and "red", "mbarrier.try_wait".
#pragma once
#include "wgmma_ptx.cuh"

constexpr long long PATIENCE = 4000000000ll;  // cycles: some two seconds

// One more at a counter that only grows. What this thread knows of is seen by those who find it there.
__device__ __forceinline__ void arrive_at(unsigned* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ unsigned arrived_at(const unsigned* counter) {
    unsigned count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    return count;
}
// Returns when as many have arrived. Counts may pass 2^32: less than 2^31 lie between any two that are compared.
__device__ __forceinline__ void await_count(const unsigned* counter, unsigned count) {
    if (static_cast<int>(arrived_at(counter) - count) >= 0) return;
    const long long since = clock64();
    while (static_cast<int>(arrived_at(counter) - count) < 0) {
        if (clock64() - since > PATIENCE) __trap();
    }
}

__device__ __forceinline__ bool is_over(PhaseBarrier* barrier, unsigned parity) {
    unsigned over;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(over)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return over;
}
// As `await`, with patience.
__device__ __forceinline__ void await_copy(PhaseBarrier* barrier, unsigned parity) {
    if (is_over(barrier, parity)) return;
    const long long since = clock64();
    while (!is_over(barrier, parity)) {
        if (clock64() - since > PATIENCE) __trap();
    }
}
