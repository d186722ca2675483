// Stands in for kernels/cuda/mma_ptx.cuh on a CPU.
#pragma once
#include "mma.cuh"

inline unsigned choose_bits(unsigned mask, unsigned a, unsigned b) { return (a & mask) | (b & ~mask); }
inline unsigned fma_pair(unsigned a, unsigned b, unsigned c) {  // a double holds the exact sum wherever a weight is decoded
    const auto one = [&](int i) { return static_cast<float>(double(half_of(a, i)) * half_of(b, i) + half_of(c, i)); };
    return half_pair(one(0), one(1));
}
inline uint4 load_once(const uint4* from) { return *from; }
inline uint2 load_once(const uint2* from) { return *from; }

// Asynchronous copies happen as late as they may: when the thread waits for their group. Reading earlier finds what was there.
struct Copy {
    void* to;
    const void* from;  // null: zeros
    size_t bytes;
};
inline std::vector<Copy> open_copies[1024];
inline std::vector<std::vector<Copy>> copy_groups[1024];  // oldest first

inline void copy_async(void* to, const void* from) {
    if (reinterpret_cast<size_t>(to) % 16 || reinterpret_cast<size_t>(from) % 16) std::abort();
    open_copies[threadIdx.x].push_back({to, from, 16});
}
inline void commit_copies() {
    copy_groups[threadIdx.x].push_back(std::move(open_copies[threadIdx.x]));
    open_copies[threadIdx.x].clear();
}
template <int N>
inline void wait_copies() {
    auto& groups = copy_groups[threadIdx.x];
    const size_t arrived = groups.size() > N ? groups.size() - N : 0;
    for (size_t i = 0; i < arrived; ++i)
        for (const Copy& copy : groups[i]) {
            if (copy.from) std::memcpy(copy.to, copy.from, copy.bytes);
            else std::memset(copy.to, 0, copy.bytes);
        }
    groups.erase(groups.begin(), groups.begin() + arrived);
}

inline std::unique_ptr<char[]> shared_bytes;  // of one launch, exactly as many as it asked for
inline unsigned char* launch_shared() { return reinterpret_cast<unsigned char*>(shared_bytes.get()); }
