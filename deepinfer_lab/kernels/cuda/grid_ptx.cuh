// PTX of kernels whose blocks are all resident and wait for one another (sm_90). A wait that nothing ends traps: a launch fails
// instead of holding the card. PTX ISA, "Memory Consistency Model", "ld" and "st", "mbarrier.try_wait".
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

// Words that blocks leave for one another: each is written whole and read whole, where all multiprocessors see the same.
__device__ __forceinline__ void put_word(unsigned* to, unsigned word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ __forceinline__ uint4 look(const uint4* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ uint2 look(const uint2* from) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
    return v;
}

// As `copy_bulk`, of what nobody reads again: it leaves the L2 first, so that what others leave for one another and K and V stay.
__device__ __forceinline__ void stream_bulk(char* to, const char* from, int bytes, PhaseBarrier* barrier) {
    asm volatile(
        "{.reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;}" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
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
    Patience patience;
    while (!is_over(barrier, parity)) patience.spend();
}
