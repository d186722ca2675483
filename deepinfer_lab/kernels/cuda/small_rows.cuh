// Where the products of mma_small.cuh have their activations from.
#pragma once
#include "mma_unit.cuh"
#include "norm.cuh"

// As they lie in memory.
struct StoredRows {
    static constexpr bool STAGED = false;
    const half_t* x;  // [m, k]
    int m, k;

    __device__ __forceinline__ const half_t* row(int i) const { return x + static_cast<size_t>(i) * k; }
    template <int WARPS>
    __device__ __forceinline__ void prepare(float*) const {
        // Never true, which the compiler cannot know. Weights have nothing to do with the wait, so it would load them after it,
        // but does not after a way out.
        if (settled(m) < 1) __trap();
        await_previous();
    }
};

// RMSNorm of up to eight rows, bit for bit what rms_norm.cu writes. Each block makes it for itself, in shared memory: while its
// first weights are on their way it has nothing else to do, and a launch of its own costs two microseconds.
struct NormedRows {
    static constexpr bool STAGED = true;
    const half_t* x;       // [m, k]
    int m, k;
    const half_t* weight;  // [k]: nobody's output
    float eps;
    half_t* staged;  // m rows, and the weight

    // Rows begin half a line of the banks apart, so that the two which eight lanes read at once keep out of each other's banks.
    __device__ __forceinline__ half_t* row(int i) const { return staged + i * ((k + MMA_K - 1) / MMA_K * MMA_K + 32); }

    // By all threads of a block. sums: shared, 64 floats.
    template <int WARPS>
    __device__ __forceinline__ void prepare(float* sums) const {
        constexpr int TEAMS = WARPS / NORM_WARPS, EACH = MMA_ROWS / TEAMS;  // a team takes every TEAMS-th row
        const unsigned thread = this_thread();
        const int lane = thread % 32, warp = thread / 32 % NORM_WARPS;
        const int first = thread % NORM_TEAM * 8, team = thread / NORM_TEAM;
#pragma unroll 1
        for (int i = thread * 8; i < k; i += 32 * WARPS * 8) copy_async(row(m) + i, weight + i);
        await_previous();
#pragma unroll 1
        for (int r = team; r < m; r += TEAMS) {
#pragma unroll 1
            for (int i = first; i < k; i += NORM_STEP) copy_async(row(r) + i, x + static_cast<size_t>(r) * k + i);
        }
        commit_copies();
        wait_copies<0>();
        float squares[EACH] = {};
#pragma unroll
        for (int j = 0; j < EACH; ++j) {  // of what the thread has copied itself
            if (team + TEAMS * j >= m) break;
            const half_t* const from = row(team + TEAMS * j);
#pragma unroll 1
            for (int i = first; i < k; i += NORM_STEP) {
                squares[j] = add_squares(squares[j], *reinterpret_cast<const uint4*>(from + i));
            }
        }
        const float sum = warp_sums(squares);
        if (lane % (32 / EACH) == 0) sums[warp * MMA_ROWS + team + TEAMS * (lane / (32 / EACH))] = sum;
        __syncthreads();
        const float factor = norm_factor(sums + lane % MMA_ROWS, MMA_ROWS, k, eps);  // of row lane % 8
#pragma unroll 1
        for (int r = team; r < m; r += TEAMS) {
            const float its = __shfl_sync(0xFFFFFFFFu, factor, r);
#pragma unroll 1
            for (int i = first; i < k; i += NORM_STEP) {
                uint4* const at = reinterpret_cast<uint4*>(row(r) + i);
                *at = normed(*at, *reinterpret_cast<const uint4*>(row(m) + i), its);
            }
        }
        __syncthreads();
    }
};
