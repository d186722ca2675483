// PTX of kernels whose blocks are all resident and wait for one another (sm_90). PTX ISA, "Memory Consistency Model", "ld" and
// "st", "cp.async.bulk".
#pragma once
#include "patience.cuh"

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

// A number in shared memory that threads set and look at without waiting for one another.
__device__ __forceinline__ void set_flag(int* flag, int value) { atomicExch(flag, value); }
__device__ __forceinline__ bool is_set(int* flag) { return atomicAdd(flag, 0); }

// Before a bulk copy may be let write where the thread has read: that is of another proxy (PTX ISA, "Proxies"), and a load that
// has been issued need not have read yet. (Without this, and with slots left as soon as their loads were issued, one step in a
// thousand of a 7B model was off on an H200.)
__device__ __forceinline__ void finish_reads() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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
