// PTX of the kernels for tensor cores that read shared memory by themselves (sm_90a), and of the barriers and copies that feed
// them. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "mbarrier" and "cp.async.bulk".
#pragma once
#include "async_ptx.cuh"

using PhaseBarrier = unsigned long long;

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Shared memory of as many bytes as the launch asked for, in whole patterns of 1024 bytes (the 128-byte swizzle).
__device__ __forceinline__ char* launch_patterns() {
    extern __shared__ __align__(1024) char patterns[];
    return patterns;
}

// A phase of a barrier ends when `count` have arrived and all bytes that it was told to expect have come.
__device__ __forceinline__ void start(PhaseBarrier* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// By the thread that started them, before __syncthreads: bulk copies see the barriers, too.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive(PhaseBarrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_expecting(PhaseBarrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// Returns when the phase of this parity is over; that before the first counts as one of parity 1.
__device__ __forceinline__ void await(PhaseBarrier* barrier, unsigned parity) {
    asm volatile(
        "{.reg .pred over;\n"
        "look: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
        "@!over bra look;}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Contiguous bytes, a multiple of 16 and aligned to it, from global to shared memory; the barrier counts them as they come.
__device__ __forceinline__ void copy_bulk(char* to, const char* from, int bytes, PhaseBarrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// 16 bytes that an earlier kernel may have written, where there are any. `volatile`, or the load would sink to its use.
__device__ __forceinline__ void load_ahead(uint4& to, const char* from, bool there) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
                 : "l"(from), "r"(static_cast<int>(there))
                 : "memory");
}

// Zeros, where `cleared`. `volatile`, or what surrounds it would no longer be a branch.
__device__ __forceinline__ void clear(uint4& value, bool cleared) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %4, 0; @p mov.b32 %0, 0; @p mov.b32 %1, 0; @p mov.b32 %2, 0; @p mov.b32 %3, 0;}"
                 : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
                 : "r"(static_cast<int>(cleared)));
}

// Four 8 x 8 matrices of 16-bit values. Of row g of matrix i, lane 4g + t has columns 2t and 2t + 1 in its word i, and lane
// 8i + g says where the row's 16 bytes go.
__device__ __forceinline__ void store_matrices(char* row, const uint4& words) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
}
// What has been stored to shared memory and this thread knows of, the tensor cores see, too.
__device__ __forceinline__ void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A value that is in its register from here on: neither computed later nor read earlier, as the compiler would like, which
// does not know that products run on while others are prepared.
__device__ __forceinline__ void pin(unsigned& value) { asm volatile("" : "+r"(value)::"memory"); }
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }

// Products of a warpgroup: `begin_products` after the last touch of their registers; those up to an `end_products` are a group;
// `await_products<N>` returns when all groups but the last N are done, of this warp.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)

// d[64, ROWS] += a[64, 16] * b[16, ROWS]: fp16 in, fp32 out. a: of rows 16w .. 16w + 15 for warp w, as mma.cuh's; d likewise,
// of columns 8j .. 8j + 7 in d[4j] .. d[4j + 3]; b: a descriptor, of a matrix with k along its rows in shared memory.
template <int ROWS>
__device__ __forceinline__ void multiply_async(float (&d)[ROWS / 2], const unsigned (&a)[4], unsigned long long b) {
    static_assert(ROWS == 32 || ROWS == 64 || ROWS == 128 || ROWS == 192 || ROWS == 256, "as many columns as are spelt out");
    if constexpr (ROWS == 32) {
        asm volatile(
            "{.reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
            "{%16, %17, %18, %19}, %20, add, 1, 1, 0;}"
            : SUMS_16(0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else if constexpr (ROWS == 64) {
        asm volatile(
            "{.reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
            "{%32, %33, %34, %35}, %36, add, 1, 1, 0;}"
            : SUMS_16(0), SUMS_16(16)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else if constexpr (ROWS == 128) {
        asm volatile(
            "{.reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
            "{%64, %65, %66, %67}, %68, add, 1, 1, 0;}"
            : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else if constexpr (ROWS == 192) {
        asm volatile(
            "{.reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
            "{%96, %97, %98, %99}, %100, add, 1, 1, 0;}"
            : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48), SUMS_16(64), SUMS_16(80)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    } else {
        asm volatile(
            "{.reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
            "{%128, %129, %130, %131}, %132, add, 1, 1, 0;}"
            : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48), SUMS_16(64), SUMS_16(80), SUMS_16(96), SUMS_16(112)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
}

#undef SUMS_16
#undef SUMS_4
