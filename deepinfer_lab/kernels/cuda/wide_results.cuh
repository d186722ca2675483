// What becomes of the sums of wide.cuh, of which this is a part.
//
// Where groups share a tile, each block leaves its sums in `partial` and counts itself in `arrived`. Once all have, whichever of
// them is there takes slices of the tile, one at a time, and adds them, in the order of groups: the same bits whoever does it. A
// block at its end lingers a little for the others, so that all of them add; nothing depends on it, since the last to arrive
// would take every slice. `arrived` of a tile: 0; parts that have arrived; their number plus slices taken; 0 again with the
// last slice.
#pragma once

constexpr int PATIENCE = 12;  // looks at `arrived`, of some 700 cycles each

// A thread's sums: of rows 8j + 2t and 8j + 2t + 1 and outputs g and g + 8 of a tile in 4j ...
template <class C>
using Sums = float[C::ROWS / 2];

// Item j of a thread: of eight rows. Two of them, from an even one on, are a pair.
template <class C>
__device__ __forceinline__ float4 four(const Sums<C>& sum, int j) {
    return {sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]};
}

// The sums of all teams to the first's.
template <class C>
__device__ __forceinline__ void add_teams(float4* shared, int team, int thread, Sums<C>& sum) {
    constexpr int OWN = C::ITEMS / C::TEAM;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if (team > 0) shared[(team - 1) * C::ITEMS + i * C::TEAM + thread] = four<C>(sum, i);
    }
    sync_team<C::MULTIPLIERS>(0);
#pragma unroll
    for (int i = 0; i < (C::TEAMS - 1) * OWN; ++i) {
        if (team > 0) break;
        const float4 more = shared[i * C::TEAM + thread];
        float* const to = sum + i % OWN * 4;
        to[0] += more.x, to[1] += more.y, to[2] += more.z, to[3] += more.w;
    }
    sync_team<C::MULTIPLIERS>(0);  // the next stretch's sums go to the same place
}

// Where a warp's results go: by way of 16 rows of its tile's 16 outputs in shared memory, of which a lane stores eight values at
// once. Of row r, outputs 0 .. 7 lie at chunk 2r, and 8 .. 15 beside them; four rows in eight the other way round, for the banks.
struct Results {
    char* staged;
    half_t* to;
    float bias[2] = {};
    int rows, outputs, n;  // there are from `to` on; outputs of a row
    bool at_once;

    __device__ __forceinline__ Results(const Operands& of, char* staged, int row, int output) : staged(staged) {
        const int lane = threadIdx.x % 32;
        n = settled(of.n);  // or its multiples would be kept in registers through every loop
        to = of.out + static_cast<size_t>(row + lane / 2) * n + output + lane % 2 * 8;
        rows = of.m - row - lane / 2, outputs = n - output - lane % 2 * 8;
        at_once = n % 8 == 0 && reinterpret_cast<size_t>(of.out) % 16 == 0;
        if (!of.bias) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (output + lane / 4 + 8 * i < n) bias[i] = to_float(of.bias[output + lane / 4 + 8 * i]);
        }
    }
    // Of 16 rows, from row 16 * pair on.
    __device__ __forceinline__ void store(const float4& low, const float4& high, int pair) const {
        const int lane = threadIdx.x % 32, from = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
        const unsigned words[4] = {half_pair(low.x + bias[0], low.y + bias[0]), half_pair(low.z + bias[1], low.w + bias[1]),
                                   half_pair(high.x + bias[0], high.y + bias[0]), half_pair(high.z + bias[1], high.w + bias[1])};
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

// The next slice to add of a tile of so many parts, for one thread of a block that has counted itself; -1: all are taken, or
// `looks` looks have not found all parts there.
__device__ __forceinline__ int take_slice(unsigned* arrived, unsigned parts, unsigned slices, int looks) {
    while (looks > 0) {
        const unsigned seen = atomicAdd(arrived, 0u);
        if (seen == 0) return -1;
        if (seen < parts) {
            --looks;
            continue;
        }
        const unsigned slice = seen - parts;
        if (atomicCAS(arrived, seen, slice + 1 < slices ? seen + 1 : 0) == seen) return static_cast<int>(slice);
    }
    return -1;
}

// Pairs first .. last - 1 of each thread: the sums of all parts.
template <class C>
__device__ __forceinline__ void add_slice(const Adders& adders, const float4* partial, int rank, int thread, int first, int last,
                                          const Results& results) {
    constexpr int GROUPS = 4;  // whose loads are under way
#pragma unroll 1
    for (int pair = first; pair < last; ++pair) {
        float4 sum[2] = {};
#pragma unroll 1
        for (int group = adders.first; group <= adders.final; group += GROUPS) {
            float4 more[GROUPS][2];
#pragma unroll
            for (int i = 0; i < 2 * GROUPS; ++i) {
                const size_t place = adders.place(min(group + i / 2, adders.final)) * C::CLUSTER + rank;
                more[i / 2][i % 2] = load_shared_by_blocks(partial + place * C::ITEMS + (2 * pair + i % 2) * C::TEAM + thread);
            }
#pragma unroll
            for (int i = 0; i < 2 * GROUPS; ++i) {
                if (group + i / 2 <= adders.final) add(sum[i % 2], more[i / 2][i % 2]);
            }
        }
        results.store(sum[0], sum[1], pair);
    }
}

// What the first team does with a stretch's sums when all teams' are in. at_end: the block has no more. thread: of the team.
template <class C>
__device__ __forceinline__ void finish(const Block<C>& block, const Operands& of, const Stretch& part, bool at_end, int thread,
                                       const Sums<C>& sum) {
    const int first_row = block.first_row(part), first_tile = block.first_tile(part);
    if (first_tile >= block.count) return;  // the output ended with a block before this one
    const int pairs = min((of.m - first_row + 15) / 16, C::ROWS / 16);  // that there are
    const Results results(of, block.staged(thread / 32), first_row, (first_tile + thread / 32) * MMA_N);
    if (!block.shares.shared(part.tile) || part.count == block.shares.units) {
#pragma unroll
        for (int pair = 0; pair < C::ROWS / 16; ++pair) {
            if (pair < pairs) results.store(four<C>(sum, 2 * pair), four<C>(sum, 2 * pair + 1), pair);
        }
        return;
    }
    const Adders adders(block.shares, part.tile);
    float4* const own = of.partial + (adders.place(block.shares.group) * C::CLUSTER + block.rank) * C::ITEMS + thread;
#pragma unroll
    for (int i = 0; i < C::ROWS / 8; ++i) {
        if (i / 2 < pairs) own[i * C::TEAM] = four<C>(sum, i);
    }
    const int parts = adders.final - adders.first + 1, slices = min(pairs, parts);
    unsigned* const arrived =
        of.arrived + (part.tile - block.shares.whole * block.shares.groups) * C::CLUSTER + block.rank;
    sync_team<C::TEAM>(1);
    if (thread == 0) {
        __threadfence();  // who sees the counter sees the sums
        atomicAdd(arrived, 1u);
    }
    for (;;) {
        if (thread == 0) {
            *block.last() = take_slice(arrived, parts, slices, at_end ? PATIENCE : 1);
            __threadfence();
        }
        sync_team<C::TEAM>(1);
        const int slice = *block.last();
        sync_team<C::TEAM>(1);
        if (slice < 0) return;
        add_slice<C>(adders, of.partial, block.rank, thread, pairs * slice / slices, pairs * (slice + 1) / slices, results);
    }
}
