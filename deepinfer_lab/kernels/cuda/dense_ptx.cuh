// The PTX instruction of dense_rows.cu.
#pragma once
#include "async_ptx.cuh"

// As `copy_async`, of what nobody reads again: it leaves the L2 first (sm_80 and later).
__device__ __forceinline__ void copy_once(char* to, const void* from, bool valid) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile(
        "{.reg .b64 policy;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
        "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, policy;}" ::"r"(address),
        "l"(from), "r"(valid ? 16 : 0)
        : "memory");
}
