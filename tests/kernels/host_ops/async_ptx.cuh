// Stands in for kernels/cuda/async_ptx.cuh on a CPU, where copies are as late as they may be: a slot holds NaN from the moment
// that a copy into it is ordered until its order is waited for. So neither a wait too few nor one for readers goes unnoticed.
#pragma once
#include <condition_variable>
#include <deque>
#include <mutex>

#include "mma_ptx.cuh"

struct alignas(16) float4 { float x, y, z, w; };

inline std::unique_ptr<uint4[]> dynamic_memory;  // of the launch, of the right size for the address sanitizer
inline char* dynamic_shared() { return reinterpret_cast<char*>(dynamic_memory.get()); }

struct Copy {
    char* to;
    const void* from;
};
inline std::deque<std::vector<Copy>> batches[1024];  // of each thread: all but the last are committed

inline void copy_async(char* to, const void* from, bool valid) {
    auto& own = batches[threadIdx.x];
    if (own.empty()) own.emplace_back();
    own.back().push_back({to, valid ? from : nullptr});
    std::memset(to, 0xFF, 16);
}
inline void commit_copies() {
    auto& own = batches[threadIdx.x];
    if (own.empty()) own.emplace_back();
    own.emplace_back();
}
template <int LEFT>
void wait_copies() {
    auto& own = batches[threadIdx.x];
    while (static_cast<int>(own.size()) - 1 > LEFT) {
        for (const Copy& copy : own.front()) {
            if (copy.from) {
                *reinterpret_cast<uint4*>(copy.to) = *static_cast<const uint4*>(copy.from);
            } else {
                *reinterpret_cast<uint4*>(copy.to) = {};
            }
        }
        own.pop_front();
    }
}

#ifdef HOST_THREADS
struct TeamBarrier {
    std::mutex mutex;
    std::condition_variable all;
    int arrived = 0, generation = 0;
};
inline TeamBarrier team_barriers[16];
template <int THREADS>
void sync_team(int id) {
    TeamBarrier& barrier = team_barriers[id + 1];
    std::unique_lock lock(barrier.mutex);
    const int generation = barrier.generation;
    if (++barrier.arrived == THREADS) {
        barrier.arrived = 0, ++barrier.generation;
        barrier.all.notify_all();
    }
    barrier.all.wait(lock, [&] { return generation != barrier.generation; });
}
#else
inline Barrier team_barriers[16];
template <int THREADS>
void sync_team(int id) {
    team_barriers[id + 1].expected = THREADS;
    wait_at(team_barriers[id + 1]);
}
#endif

inline int settled(int number) { return number; }
inline unsigned mul_pair(unsigned a, unsigned b) {
    return half_pair(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1));
}
inline float4 load_shared_by_blocks(const float4* from) { return *from; }
inline void __threadfence() {}
inline unsigned atomicInc(unsigned* counter, unsigned most) {  // blocks take turns
    const unsigned old = *counter;
    *counter = old >= most ? 0 : old + 1;
    return old;
}
