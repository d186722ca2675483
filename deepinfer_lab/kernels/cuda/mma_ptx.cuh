// PTX instructions of the products for few rows, beyond mma.cuh's.
#pragma once
#include "mma.cuh"

// The bits of `a` where the mask has ones, of `b` elsewhere, in one instruction.
__device__ __forceinline__ unsigned choose_bits(unsigned mask, unsigned a, unsigned b) {
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(result) : "r"(mask), "r"(a), "r"(b));
    return result;
}

// a * b + c of either half, rounded once.
__device__ __forceinline__ unsigned fma_pair(unsigned a, unsigned b, unsigned c) {
    unsigned result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// What nobody will read again, so that the L1 keeps what will be. `volatile`, or loads would sink to their first use.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}
__device__ __forceinline__ uint2 load_once(const uint2* from) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
    return v;
}

// 16 bytes from global to shared memory, past the L1 and without a register. Copies up to a `commit_copies` are a group;
// `wait_copies<N>` returns when all of the thread's groups but the last N have arrived. That holds for the thread alone: before
// others read what it has copied, __syncthreads.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
    const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Shared memory of as many bytes as the launch asked for.
__device__ __forceinline__ unsigned char* launch_shared() {
    extern __shared__ uint4 bytes[];
    return reinterpret_cast<unsigned char*>(bytes);
}
