// Stands in for kernels/cuda/async_ptx.cuh on a CPU. Copies happen as late as they may, and there is NaN in their place from
// the moment that they are ordered. So neither a wait too few nor one for readers too few goes unnoticed.
#pragma once
#include <condition_variable>
#include <mutex>

#include "mma_ptx.cuh"
#include "dependent.cuh"

struct alignas(16) float4 { float x, y, z, w; };

inline void copy_async(char* to, const void* from, bool valid) {
    if (reinterpret_cast<size_t>(to) % 16 || (valid && reinterpret_cast<size_t>(from) % 16)) std::abort();
    open_copies[threadIdx.x].push_back({to, valid ? from : nullptr, 16});
    std::memset(to, 0xFF, 16);
}

#ifdef HOST_THREADS
struct TeamBarrier {
    std::mutex mutex;
    std::condition_variable all;
    int arrived = 0, generation = 0;
};
inline TeamBarrier team_barriers[16];
template <int THREADS, int TEAMS = 1>
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
template <int THREADS, int TEAMS = 1>
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
inline unsigned atomicAdd(unsigned* counter, unsigned more) {
    const unsigned old = *counter;
    *counter += more;
    return old;
}
inline unsigned atomicCAS(unsigned* counter, unsigned expected, unsigned value) {
    const unsigned old = *counter;
    if (old == expected) *counter = value;
    return old;
}
inline unsigned atomicInc(unsigned* counter, unsigned most) {  // blocks take turns
    const unsigned old = *counter;
    *counter = old >= most ? 0 : old + 1;
    return old;
}
