// Enough of CUDA C++ to run a kernel on a CPU, one operating-system thread for each CUDA thread of a block, one block at a time.
// Barriers are real barriers and shared memory is really shared, so that the address and thread sanitizers see what
// compute-sanitizer's memcheck and racecheck would look for.
#pragma once
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct dim3 { int x = 1, y = 1; };

inline thread_local dim3 threadIdx, blockIdx;

struct Block {  // what the threads of a block share
    explicit Block(int threads) : all(threads), exchange(threads) {
        for (int first = 0; first < threads; first += 32) warps.push_back(std::make_unique<std::barrier<>>(32));
    }
    std::barrier<> all;
    std::vector<std::unique_ptr<std::barrier<>>> warps;
    std::vector<float> exchange;
};
inline Block* current_block = nullptr;

inline void __syncthreads() { current_block->all.arrive_and_wait(); }

inline float __shfl_xor_sync(unsigned, float value, int distance) {
    auto& warp = *current_block->warps[threadIdx.x / 32];
    current_block->exchange[threadIdx.x] = value;
    warp.arrive_and_wait();
    const float other = current_block->exchange[threadIdx.x ^ distance];
    warp.arrive_and_wait();
    return other;
}

inline float __uint_as_float(unsigned bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int min(int a, int b) { return a < b ? a : b; }
using std::fmaf;

// Every thread runs its part of block 0, then all of them that of block 1, and so on.
template <class Kernel>
void launch(int grid_x, int grid_y, int threads, Kernel kernel) {
    Block block(threads);
    current_block = &block;
    std::vector<std::thread> team;
    for (int t = 0; t < threads; ++t) {
        team.emplace_back([&, t] {
            threadIdx.x = t;
            for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y) {
                for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x) {
                    kernel();
                    __syncthreads();
                }
            }
        });
    }
    for (auto& thread : team) thread.join();
}
