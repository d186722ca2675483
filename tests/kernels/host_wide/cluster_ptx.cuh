// Stands in for kernels/cuda/cluster_ptx.cuh on a CPU.
#pragma once
#include "wgmma_ptx.cuh"

// The blocks of a cluster take turns: each runs on until all its threads are done or wait for the others.
struct HostBlock {
    dim3 index;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::unique_ptr<char[]> shared;
    bool done = false;
};
inline std::vector<HostBlock> cluster;
inline std::vector<char*> cluster_shared;
inline Barrier cluster_barrier;

inline int cluster_blocks() { return static_cast<int>(cluster.size()); }
inline void await_or_trap(PhaseBarrier* barrier, unsigned parity) { await(barrier, parity); }
inline void copy_async_where(char* to, const void* from, bool wanted) {
    if (wanted) copy_async(to, from, true);
}
inline void sync_cluster() { wait_at(cluster_barrier); }
inline void leave_cluster() { wait_at(cluster_barrier); }
inline float4 load_from_block(const float4* from, int rank) {
    return *reinterpret_cast<const float4*>(cluster_shared[rank] + shared_address(from));
}

inline void run_on(HostBlock& block, int threads) {
    std::swap(fibers, block.fibers), std::swap(shared_bytes, block.shared);
    blockIdx = block.index;
    do {
        progress = false, block.done = true;
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
            if (!fibers[threadIdx.x]->done) swapcontext(&scheduler, &fibers[threadIdx.x]->context);
            block.done &= fibers[threadIdx.x]->done;
        }
    } while (progress);
    std::swap(fibers, block.fibers), std::swap(shared_bytes, block.shared);
}

// As `launch`, of clusters of so many blocks along x, each with so many bytes of shared memory.
template <class Kernel>
void launch_clusters(int grid, int blocks, int threads, int shared, int seed, Kernel kernel) {
    body = kernel, gridDim = {grid}, blockDim = {threads};
    block_barrier = {threads}, cluster_barrier = {threads * blocks};
    for (auto& barrier : warp_barriers) barrier = {32};
    std::vector<int> order(grid / blocks);
    for (int i = 0; i < grid / blocks; ++i) order[i] = i;
    if (seed) std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    cluster.resize(blocks), cluster_shared.resize(blocks);
    for (int at : order) {
        for (int rank = 0; rank < blocks; ++rank) {
            HostBlock& block = cluster[rank];
            block.index = {at * blocks + rank}, block.done = false;
            block.shared = std::make_unique<char[]>(shared);
            std::memset(cluster_shared[rank] = block.shared.get(), 0xFF, shared);  // NaN
            while (static_cast<int>(block.fibers.size()) < threads) block.fibers.push_back(std::make_unique<Fiber>());
            for (int t = 0; t < threads; ++t) {
                Fiber& fiber = *block.fibers[t];
                fiber.done = false;
                getcontext(&fiber.context);
                fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
                makecontext(&fiber.context, run_fiber, 0);
            }
        }
        for (unsigned before = steps - 1; before != steps;) {
            before = steps;
            for (HostBlock& block : cluster)
                if (!block.done) run_on(block, threads);
        }
        for (const HostBlock& block : cluster)
            if (!block.done) complain("deadlock: a barrier that not all threads of its block or cluster reach");
    }
}

inline bool elected() { return threadIdx.x % 32 == 0; }
inline char* transposed_rows[1024];
inline void store_transposed(char* row, const unsigned (&words)[4]) {
    if (reinterpret_cast<size_t>(row) % 16) std::abort();
    transposed_rows[threadIdx.x] = row;
    sync_warp();
    const int warp = threadIdx.x / 32 * 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int matrix = 0; matrix < 4; ++matrix)
        for (int half = 0; half < 2; ++half) {
            char* const to = transposed_rows[warp + 8 * matrix + 2 * t + half] + 2 * g;
            std::memcpy(to, reinterpret_cast<const char*>(words + matrix) + 2 * half, 2);
        }
    sync_warp();
}
