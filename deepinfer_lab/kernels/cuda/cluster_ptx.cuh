// PTX of kernels whose blocks form clusters (sm_90 and later): neighbours that run at the same time, reach one another's shared
// memory, and fetch together what all of them read. PTX ISA, "barrier.cluster", "mapa", "mbarrier.arrive", "cp.async.bulk".
#pragma once
#include "wgmma_ptx.cuh"

// For all threads of a cluster's blocks. Of what they have done before, others see only what was published to them: barriers.
__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

// One lane of a whole warp, always the same. The compiler knows that it is one, which it does not of any that is chosen by number.
__device__ __forceinline__ bool elected() {
    unsigned one;
    asm volatile("{.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;}" : "=r"(one));
    return one;
}

// At the barrier that lies in block `rank` of the cluster where this one lies in the thread's own. It releases slots that have
// been read, and nothing that was written: a release to the cluster would wait for all of the thread's stores.
__device__ __forceinline__ void arrive_at(PhaseBarrier* barrier, int rank) {
    asm volatile(
        "{.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}
// As `copy_bulk`, to the same place in the first BLOCKS blocks of the cluster; each one's own barrier counts what comes there.
template <int BLOCKS>
__device__ __forceinline__ void copy_to_cluster(char* to, const char* from, int bytes, PhaseBarrier* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"(static_cast<unsigned short>((1 << BLOCKS) - 1))
        : "memory");
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
