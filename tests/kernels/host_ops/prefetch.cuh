// Stands in for kernels/cuda/prefetch.cuh on a CPU.
#pragma once
#include <mutex>
#include <vector>

#include "cuda_host.h"

// What a launch has had brought to the L2. No kernel's result shows it, so the program notes it down.
struct Prefetch {
    const char* from;
    int bytes;
};
inline std::vector<Prefetch> prefetches;
inline std::mutex prefetching;
inline void prefetch_l2(const void* from, int bytes) {
    if (reinterpret_cast<size_t>(from) % 16 || bytes % 16 || bytes <= 0) std::abort();
    std::lock_guard lock(prefetching);
    prefetches.push_back({static_cast<const char*>(from), bytes});
}
inline void prefetch_sector(const void* at) { static_cast<void>(*static_cast<const volatile char*>(at)); }
