// A few activation rows times a weight in tiles, as mma_small.cuh, made for more bytes on their way: a warp's weights pass
// through a ring of STAGES units in shared memory, and activations wait there, all of them, from the start.
//
//     weights      global memory --16 bytes a lane--> ring of the warp --> registers --> A fragments
//     activations  global memory ---once a block----> rows of the block -> registers --> B fragments
//
// Blocks stay: a block goes from 16 outputs to those 16 * gridDim.y further on, and while the sums of its warps meet, the next
// weights are on their way already. Warps share K as in mma_small.cuh. A lane copies the weights that itself will read, so
// nobody waits for another warp but to add up.
#pragma once
#include "mma_unit.cuh"

// Bytes between rows of activations: whole units and half a line of the banks, so that two rows, which eight lanes read at
// once, keep out of each other's banks.
__device__ __forceinline__ int ring_row(int units) { return units * MMA_K * 2 + 64; }

template <class Unpack, int TILES, int STAGES, int GROUP>
__device__ __forceinline__ void mma_ring_block(const half_t* x, const unsigned char* __restrict__ tiles,
                                               const unsigned* __restrict__ scales, const half_t* __restrict__ bias,
                                               half_t* __restrict__ out, int m, int n, int k) {
    constexpr int SCALES = MMA_K / GROUP, BYTES = Unit<Unpack>::BYTES, SCALE_BYTES = 128 * SCALES, STAGE = BYTES + SCALE_BYTES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
    const int units = (k + MMA_K - 1) / MMA_K, count = (n + MMA_N - 1) / MMA_N;
    const int first_row = blockIdx.x * MMA_ROWS * TILES, rows = min(MMA_ROWS * TILES, m - first_row);
    // Of 16 outputs, all warps take `steps`, and this one has a unit in the first `mine` of them.
    const int steps = (units + warps - 1) / warps, mine = (units - warp + warps - 1) / warps;
    unsigned char* const shared = launch_shared();
    float* const partial = reinterpret_cast<float*>(shared + warps * STAGES * STAGE);
    unsigned char* const staged = reinterpret_cast<unsigned char*>(partial + warps * 128 * TILES);

    // What the lane sends next, and whereto. These go along from step to step: from the step's number the compiler would work
    // them out each time anew, in twice as many instructions as it takes to send.
    int tile_ahead = blockIdx.y, step_ahead = 0, stage_ahead = 0;
    const unsigned char* weights = tiles + (static_cast<size_t>(tile_ahead) * units + warp) * BYTES + 16 * lane;
    const unsigned* scale = scales + (static_cast<size_t>(tile_ahead) * units + warp) * SCALES * MMA_ROWS + g;
    unsigned char* const ring = shared + warp * STAGES * STAGE;
    unsigned char *slot = ring + 16 * lane, *scale_slot = ring + STAGES * BYTES + 4 * lane;
    const long long skip = static_cast<long long>(gridDim.y) * units - steps * warps;  // units to the block's next outputs
    const auto send = [&] {
        if (tile_ahead < count && step_ahead < mine) {
            Unit<Unpack>::send(slot, weights, lane);
#pragma unroll
            for (int i = 0; i < SCALES; ++i) copy_async<4>(scale_slot + 128 * i, scale + MMA_ROWS * i);
        }
        weights += warps * BYTES, scale += warps * SCALES * MMA_ROWS;
        if (++step_ahead == steps) {
            step_ahead = 0, tile_ahead += gridDim.y;
            weights += skip * BYTES, scale += skip * (SCALES * MMA_ROWS);
        }
        slot += BYTES, scale_slot += SCALE_BYTES;
        if (++stage_ahead == STAGES) stage_ahead = 0, slot -= STAGES * BYTES, scale_slot -= STAGES * SCALE_BYTES;
    };
    release_next();
    send();
    await_previous();  // weights are nobody's output; activations are
    for (int row = 0; row < rows; ++row) {  // behind the first weights, which take longer to come
        for (int at = threadIdx.x * UNIT; at < units * MMA_K; at += blockDim.x * UNIT) {
            uint4* const to = reinterpret_cast<uint4*>(staged + row * ring_row(units) + at * 2);
            // Weights beyond K are zeros. Activations must be zeros too: 0 times infinity is not.
            if (at < k) copy_async<16>(to, x + static_cast<size_t>(first_row + row) * k + at);
            else *to = {};
        }
    }
    commit_copies();
#pragma unroll
    for (int stage = 1; stage < STAGES; ++stage) send(), commit_copies();
    const unsigned char* row[TILES];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {  // past the end: the last row once more, never stored
        row[i] = staged + min(MMA_ROWS * i + g, rows - 1) * ring_row(units) + warp * (MMA_K * 2) + 16 * t;
    }
    wait_copies<STAGES - 1>();
    __syncthreads();

    for (int tile = blockIdx.y; tile < count; tile += gridDim.y) {
        float sum[TILES][4] = {};
        for (int step = 0; step < steps; ++step) {
            wait_copies<STAGES - 1>();
            if (step < mine) {  // the oldest stage is the one that will be sent to next
                Unit<Unpack> unit;
                unit.arrive(slot, lane);
                float part[TILES][4] = {};
#pragma unroll
                for (int quarter = 0; quarter < QUARTERS; ++quarter) {
                    uint4 b[TILES];
#pragma unroll
                    for (int i = 0; i < TILES; ++i) b[i] = *reinterpret_cast<const uint4*>(row[i] + quarter * 64);
                    unit.multiply(quarter, b, part);
                    if ((quarter + 1) * 32 % GROUP == 0) {
                        const int i = quarter * 32 / GROUP;
                        add_scaled(sum, part, *reinterpret_cast<const unsigned*>(scale_slot + 128 * i));
                    }
                }
            }
            send();
            commit_copies();  // of nothing, too: wait_copies counts
#pragma unroll
            for (int i = 0; i < TILES; ++i) row[i] += warps * (MMA_K * 2);
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) row[i] -= steps * warps * (MMA_K * 2);
        if (tile != blockIdx.y) __syncthreads();  // all have read the sums of the outputs before
        add_warps(partial, sum, bias, out, warps, tile, m, n);
    }
}

template <class Unpack, int TILES, int STAGES>
__device__ __forceinline__ void mma_ring(const half_t* x, const unsigned char* __restrict__ tiles,
                                         const unsigned* __restrict__ scales, const half_t* __restrict__ bias,
                                         half_t* __restrict__ out, int m, int n, int k, int group) {
    if (group == 128) mma_ring_block<Unpack, TILES, STAGES, 128>(x, tiles, scales, bias, out, m, n, k);
    if (group == 64) mma_ring_block<Unpack, TILES, STAGES, 64>(x, tiles, scales, bias, out, m, n, k);
    if (group == 32) mma_ring_block<Unpack, TILES, STAGES, 32>(x, tiles, scales, bias, out, m, n, k);
}
