// CUDA threads as fibers of one thread, resumed in turn; each runs on to its next barrier.
#pragma once
#include <algorithm>
#include <functional>
#include <random>
#include <ucontext.h>

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

struct Barrier {
    int expected = 0, arrived = 0, generation = 0;
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 17);
    bool done = false;
};
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline Barrier block_barrier, warp_barriers[32];
inline bool progress = false;  // since the scheduler last went round
inline unsigned steps = 0;     // that any fiber has come further

inline void wait_at(Barrier& barrier) {
    const int generation = barrier.generation;
    progress = true, ++steps;
    if (++barrier.arrived == barrier.expected) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    while (generation == barrier.generation) swapcontext(&fibers[threadIdx.x]->context, &scheduler);
}
inline void __syncthreads() { wait_at(block_barrier); }
inline void sync_warp() { wait_at(warp_barriers[threadIdx.x / 32]); }

inline void run_fiber() {
    body();
    fibers[threadIdx.x]->done = progress = true;
    setcontext(&scheduler);
}

inline void run_block(int threads) {
    block_barrier = {threads};
    for (auto& barrier : warp_barriers) barrier = {32};
    for (int t = 0; t < threads; ++t) {
        Fiber& fiber = *fibers[t];
        fiber.done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (int left = threads; left > 0;) {
        left = 0;
        progress = false;
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
            if (!fibers[threadIdx.x]->done) swapcontext(&scheduler, &fibers[threadIdx.x]->context);
            left += !fibers[threadIdx.x]->done;
        }
        if (!progress) {
            std::fprintf(stderr, "deadlock: a barrier that not all threads of its block or warp reach\n");
            std::exit(4);
        }
    }
}

inline unsigned shuffle_blocks = 0;  // a seed: blocks run in a random order. 0: in order

template <class Kernel>
void launch(dim3 grid, int threads, Kernel kernel) {
    body = kernel;
    gridDim = grid;
    blockDim = {threads};
    while (static_cast<int>(fibers.size()) < threads) fibers.push_back(std::make_unique<Fiber>());
    std::vector<dim3> blocks;
    for (int z = 0; z < grid.z; ++z)
        for (int y = 0; y < grid.y; ++y)
            for (int x = 0; x < grid.x; ++x) blocks.push_back({x, y, z});
    if (shuffle_blocks) std::shuffle(blocks.begin(), blocks.end(), std::mt19937(shuffle_blocks));
    for (const dim3& block : blocks) {
        blockIdx = block;
        run_block(threads);
    }
}
