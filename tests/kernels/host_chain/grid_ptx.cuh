// Stands in for kernels/cuda/grid_ptx.cuh on a CPU: a block that waits for others lets them run.
#pragma once
#include "wgmma_ptx.cuh"

inline long long clock64() { return 1; }
inline void arrive_at(unsigned* counter) { ++*counter, progress = true; }
inline unsigned arrived_at(const unsigned* counter) { return *counter; }
inline void await_count(const unsigned* counter, unsigned count) {
    while (static_cast<int>(*counter - count) < 0) swapcontext(&fibers[threadIdx.x]->context, &scheduler);
    progress = true;
}
inline void await_copy(PhaseBarrier* barrier, unsigned parity) { await(barrier, parity); }
