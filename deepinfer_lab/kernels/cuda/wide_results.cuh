// What becomes of the sums of wide.cuh, of which this is a part.
//
// Where the teams of a cluster's blocks share a tile, each writes its sums to its own block's shared memory, where the block
// adds them up. Then all warps of the cluster take shares of the tile, 16 outputs of 16 rows, and add what they read where it
// is: each block begins with itself and goes on to the next, so that not all read from one, and always in the same order. A
// block reads some 13 bytes a cycle from others on an H200. (By way of the L2, blocks of 256 outputs and 64 rows on all
// multiprocessors left 8.6 MB and waited for one another: 9 us.)
#pragma once

// A thread's sums: of rows 8j + 2t and 8j + 2t + 1 and outputs g and g + 8 of a tile in 4j ...
template <class C>
using Sums = float[C::ROWS / 2];

// Item j of a thread: of eight rows. Two of them, from an even one on, are a pair.
template <class C>
__device__ __forceinline__ float4 four(const Sums<C>& sum, int j) {
    return {sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]};
}

// Where a warp's results go: by way of 16 rows of its tile's 16 outputs in shared memory, of which a lane stores eight values
// at once. Of row r, outputs 0 .. 7 lie at chunk 2r, and 8 .. 15 beside them; four rows in eight the other way round, for the
// banks.
struct Results {
    char* staged;
    half_t* to;
    float bias[2] = {};
    int rows, outputs, n;  // there are from `to` on; outputs of a row
    bool at_once;

    __device__ __forceinline__ Results(const Operands& of, char* staged, int row, int output) : staged(staged) {
        const int lane = this_thread() % 32;
        if (of.bias) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (output + lane / 4 + 8 * i < of.n) bias[i] = to_float(of.bias[output + lane / 4 + 8 * i]);
            }
        }
        n = settled(of.n);  // or its multiples would be kept in registers through every loop
        to = of.out + static_cast<size_t>(row + lane / 2) * n + output + lane % 2 * 8;
        rows = of.m - row - lane / 2, outputs = n - output - lane % 2 * 8;
        at_once = n % 8 == 0 && reinterpret_cast<size_t>(of.out) % 16 == 0;
    }
    // Of 16 rows, from row 16 * pair on.
    __device__ __forceinline__ void store(const float4& low, const float4& high, int pair) const {
        const int lane = threadIdx.x % 32, from = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
        const auto both = [&](float x, float y, int i) { return half_pair(x + bias[i], y + bias[i]); };
        const unsigned words[4] = {both(low.x, low.y, 0), both(low.z, low.w, 1), both(high.x, high.y, 0),
                                   both(high.z, high.w, 1)};
        __syncwarp();  // the pair before has been read
        store_transposed(staged + 16 * (2 * from + (half ^ from / 4 % 2)), words);
        __syncwarp();
        const uint4 v = reinterpret_cast<const uint4*>(staged)[lane ^ lane / 8 % 2];
        if (16 * pair >= rows) return;
        half_t* const at = to + static_cast<size_t>(16 * pair) * n;
        if (at_once) {
            if (outputs > 0) *reinterpret_cast<uint4*>(at) = v;
            return;
        }
        const unsigned values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < outputs) at[i] = static_cast<half_t>(values[i / 2] >> i % 2 * 16);
        }
    }
};

// Of a tile that a warp's team has to itself.
template <class C>
__device__ __forceinline__ void finish(const Block<C>& block, const Operands& of, const Stretch& part, int warp,
                                       const Sums<C>& sum) {
    const int first_row = block.first_row(part);
    const Results results(of, block.staged(warp), first_row, (block.first_tile(part) + warp) * MMA_N);
#pragma unroll
    for (int pair = 0; pair < C::PAIRS; ++pair) {
        if (16 * pair < of.m - first_row) results.store(four<C>(sum, 2 * pair), four<C>(sum, 2 * pair + 1), pair);
    }
}

// For threads that have no sums.
__device__ __forceinline__ void join_shared() {
    sync_cluster();
    leave_cluster();
}

template <class C>
__device__ __forceinline__ void finish_shared(const Block<C>& block, const Operands& of, const Stretch& part, int warp,
                                             const Sums<C>& sum) {
    constexpr int SHARES = C::PAIRS * C::TILES, AT_ONCE = 4;
    const int lane = this_thread() % 32, first_row = block.first_row(part), first_tile = block.first_tile(part);
    const int tiles = min(block.count - first_tile, C::TILES), pairs = min((of.m - first_row + 15) / 16, C::PAIRS);
    float4* const sums = reinterpret_cast<float4*>(block.shared) + lane;
    sync_team<C::MULTIPLIERS>(0);  // all have done with slots and weights, whose place this is
#pragma unroll
    for (int pair = 0; pair < C::PAIRS; ++pair) {
        float4* const own = sums + ((warp / C::TILES * C::PAIRS + pair) * C::TILES + warp % C::TILES) * 64;
        own[0] = four<C>(sum, 2 * pair), own[32] = four<C>(sum, 2 * pair + 1);
    }
    if constexpr (C::TEAMS > 1) {  // one sum a block: the way to other blocks is narrow
        sync_team<C::MULTIPLIERS>(0);
        for (int share = warp; share < SHARES; share += C::WARPS) {
            float4* const first = sums + share * 64;
            float4 total[2] = {first[0], first[32]};
#pragma unroll
            for (int team = 1; team < C::TEAMS; ++team) {
                add(total[0], first[team * SHARES * 64]), add(total[1], first[team * SHARES * 64 + 32]);
            }
            first[0] = total[0], first[32] = total[1];
        }
    }
    sync_cluster();
    const int blocks = block.cluster;
#pragma unroll 1
    for (int share = block.rank + warp * blocks; share < pairs * C::TILES; share += blocks * C::WARPS) {
        const int tile = share % C::TILES, pair = share / C::TILES;
        if (tile >= tiles) continue;
        const float4* const its = sums + share * 64;
        float4 total[2] = {};
#pragma unroll 1
        for (int done = 0; done < blocks; done += AT_ONCE) {
            float4 more[AT_ONCE][2];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (done + i >= blocks) break;
                const int next = block.rank + done + i, from = next < blocks ? next : next - blocks;
                more[i][0] = load_from_block(its, from), more[i][1] = load_from_block(its + 32, from);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (done + i < blocks) add(total[0], more[i][0]), add(total[1], more[i][1]);
            }
        }
        Results(of, block.staged(warp), first_row, (first_tile + tile) * MMA_N).store(total[0], total[1], pair);
    }
    leave_cluster();  // a block's shared memory is there until all have read it
}
