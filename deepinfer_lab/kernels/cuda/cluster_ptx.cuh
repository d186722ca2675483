// PTX of kernels whose blocks form clusters (sm_90 and later): neighbours that run at the same time and read one another's
// shared memory. PTX ISA, "barrier.cluster", "mapa", "ld".
#pragma once
#include "patience.cuh"

// Blocks of this block's cluster, which are neighbours; 1 where the launch asked for none.
__device__ __forceinline__ int cluster_blocks() {
    unsigned blocks;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
    return static_cast<int>(blocks);
}

// 16 bytes as `copy_async` has them, by threads that want it, and without a branch.
__device__ __forceinline__ void copy_async_where(char* to, const void* from, bool wanted) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(shared_address(to)),
                 "l"(from), "r"(static_cast<int>(wanted))
                 : "memory");
}

// For all threads of a cluster's blocks, by whole warps. What they have written to their shared memory before, the others see.
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Likewise, where they have only read: nobody waits for what is still on its way to global memory.
__device__ __forceinline__ void leave_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// From where `from` would be in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ float4 load_from_block(const float4* from, int rank) {
    float4 v;
    asm volatile(
        "{.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(shared_address(from)), "r"(rank)
        : "memory");
    return v;
}

// One lane of a whole warp, always the same. The compiler knows that it is one, which it does not of a lane chosen by number.
__device__ __forceinline__ bool elected() {
    unsigned one;
    asm volatile("{.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;}" : "=r"(one));
    return one;
}

// Four 8 x 8 matrices of 16-bit values, transposed on their way: of row g of matrix i, lane 4g + t has columns 2t and 2t + 1 in
// its word i; they come to rows 2t and 2t + 1, as 16-bit value g of the 16 bytes to which lanes 8i + 2t and 8i + 2t + 1 point.
__device__ __forceinline__ void store_transposed(char* row, const unsigned (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

// Registers of a whole warpgroup's threads: those that it gives others may take. Multiples of 8.
template <int N>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
