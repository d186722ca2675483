// PTX of kernels whose warps copy ahead into shared memory (sm_80 and later), and share a result among blocks.
#pragma once
#include "mma_ptx.cuh"
#include "dependent.cuh"

// copy_async where `from` is `valid`; elsewhere zeros, and nobody looks there.
__device__ __forceinline__ void copy_async(char* to, const void* from, bool valid) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

// Waits at a barrier for THREADS threads, of whom a warp may be all or none.
template <int BARRIER, int THREADS>
__device__ __forceinline__ void sync_if(bool there) {
    asm volatile(
        "{\n\t"
        ".reg .pred there;\n\t"
        "setp.ne.s32 there, %0, 0;\n\t"
        "@there bar.sync %1, %2;\n\t"
        "}" ::"r"(static_cast<int>(there)), "n"(BARRIER), "n"(THREADS)
        : "memory");
}

// Waits for the warps of one team, THREADS in all; every team of a block has an id of its own, 0 to TEAMS - 1. Barriers' numbers
// are constants, which are all that racecheck follows; branches to them would cost registers.
template <int THREADS, int TEAMS = 1>
__device__ __forceinline__ void sync_team(int id) {
    static_assert(TEAMS < 16, "a block has 16 barriers, and the first is that of __syncthreads");
    if constexpr (THREADS == 32) {
        __syncwarp();
    } else {
        sync_if<TEAMS, THREADS>(id == TEAMS - 1);
        if constexpr (TEAMS > 1) sync_team<THREADS, TEAMS - 1>(id);
    }
}

// The same number, which the compiler cannot take apart: it would rather compute it again in every round of a loop.
__device__ __forceinline__ int settled(int number) {
    asm volatile("" : "+r"(number));
    return number;
}

// Either half of a * b, rounded.
__device__ __forceinline__ unsigned mul_pair(unsigned a, unsigned b) {
    unsigned result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// Read where all multiprocessors see the same: what another block has written.
__device__ __forceinline__ float4 load_shared_by_blocks(const float4* from) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
