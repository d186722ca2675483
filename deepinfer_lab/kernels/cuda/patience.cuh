// Waits that end: one that nothing ends traps, and the launch fails instead of holding the card. PTX ISA, "mbarrier.try_wait".
#pragma once
#include "wgmma_ptx.cuh"

constexpr long long PATIENCE = 4000000000ll;  // cycles: some two seconds

// A thread that waits. `spend`: once more.
struct Patience {
    long long since = 0;

    __device__ __forceinline__ void spend() {
        const long long now = clock64();
        if (since == 0) since = now;
        if (now - since > PATIENCE) __trap();
    }
};

__device__ __forceinline__ bool is_over(PhaseBarrier* barrier, unsigned parity) {
    unsigned over;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(over)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return over;
}
// As `await`.
__device__ __forceinline__ void await_or_trap(PhaseBarrier* barrier, unsigned parity) {
    if (is_over(barrier, parity)) return;
    Patience patience;
    while (!is_over(barrier, parity)) patience.spend();
}
