// All blocks of a grid at once, each with fibers, barriers and shared memory of its own: a block runs until none of its threads
// can go on, then the next does.
#pragma once
#include "wgmma_ptx.cuh"

struct HostBlock {
    std::vector<std::unique_ptr<Fiber>> fibers;
    Barrier block, warps[32], teams[16];
    std::unique_ptr<char[]> shared;
    int left;  // threads that are not done
    // What its threads have under way: copies, and what lanes that wait for others have given for them.
    std::vector<Copy> copies[1024];
    std::vector<std::vector<Copy>> groups[1024];
    Slot given[2][1024];
    char turns[1024];
    unsigned a[1024][4], b[1024][2];

    void swap_in() {
        std::swap(copies, open_copies), std::swap(groups, copy_groups), std::swap(given, exchange), std::swap(turns, turn);
        std::swap(a, lanes_a), std::swap(b, lanes_b);
        std::swap(fibers, ::fibers), std::swap(block, block_barrier), std::swap(warps, warp_barriers);
        std::swap(teams, team_barriers), std::swap(shared, shared_bytes);
    }
};

// Threads of the running block that are not done, after all have run as far as they can. moved: whether any has.
inline int run_threads(int threads, bool& moved) {
    for (;;) {
        int left = 0;
        progress = false;
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
            if (!fibers[threadIdx.x]->done) swapcontext(&scheduler, &fibers[threadIdx.x]->context);
            left += !fibers[threadIdx.x]->done;
        }
        if (!progress) return left;
        moved = true;
    }
}

template <class Kernel>
void launch_together(dim3 grid, int threads, int shared, unsigned seed, Kernel kernel) {
    body = kernel, gridDim = grid, blockDim = {threads};
    std::vector<HostBlock> blocks(grid.x);
    std::vector<int> order;
    for (int b = 0; b < grid.x; ++b) {
        HostBlock& block = blocks[b];
        order.push_back(b);
        block.block = {threads}, block.left = threads;
        for (auto& barrier : block.warps) barrier = {32};
        block.shared = std::make_unique<char[]>(shared);
        std::memset(block.shared.get(), 0xFF, shared);  // NaN
        for (int t = 0; t < threads; ++t) {
            block.fibers.push_back(std::make_unique<Fiber>());
            Fiber& fiber = *block.fibers.back();
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            makecontext(&fiber.context, run_fiber, 0);
        }
    }
    std::mt19937 random(seed);
    int left = 1;
    for (int idle = 0; left > 0; ++idle) {  // rounds since any thread came further
        if (idle > (seed ? 1000 : 0)) complain("deadlock: no thread of any block can go on");
        left = 0;
        bool moved = false;
        if (seed) std::shuffle(order.begin(), order.end(), random);
        for (const int b : order) {
            if (blocks[b].left > 0 && !(seed && random() % 3)) {  // otherwise no turn: others may be far ahead
                blockIdx = {b};
                blocks[b].swap_in();
                blocks[b].left = run_threads(threads, moved);
                blocks[b].swap_in();
            }
            left += blocks[b].left;
        }
        if (moved) idle = -1;
    }
    phases.clear();
}
