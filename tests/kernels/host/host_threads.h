// CUDA threads as threads of the operating system.
#pragma once
#include <barrier>
#include <thread>

inline thread_local dim3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
inline std::unique_ptr<std::barrier<>> block_barrier, warp_barriers[32];

inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void sync_warp() { warp_barriers[threadIdx.x / 32]->arrive_and_wait(); }

template <class Kernel>
void launch(dim3 grid, int threads, Kernel kernel) {
    gridDim = grid;
    blockDim = {threads};
    block_barrier = std::make_unique<std::barrier<>>(threads);
    for (int warp = 0; warp < threads / 32; ++warp) warp_barriers[warp] = std::make_unique<std::barrier<>>(32);
    std::vector<std::thread> team;
    for (int t = 0; t < threads; ++t) {
        team.emplace_back([&, t] {
            threadIdx.x = t;
            for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
                for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
                    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
                        kernel();
                        __syncthreads();  // the next block starts when this one is over
                    }
        });
    }
    for (auto& thread : team) thread.join();
}
