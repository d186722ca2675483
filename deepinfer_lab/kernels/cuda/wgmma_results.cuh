// What becomes of the sums of wgmma.cuh, of which this is a part.
//
// Where blocks share a tile, each leaves its sums in `partial` and counts itself in `arrived`. Once all have, whichever of them
// is there takes slices of the tile, one at a time, and adds them, in the order of blocks: the same bits whoever does it. A
// block at its end lingers a little for the others, so that all of them add; nothing depends on it, since the last to arrive
// would take every slice. `arrived` of a tile: 0; parts that have arrived; their number plus slices taken; 0 again with the
// last slice.
#pragma once

constexpr int PATIENCE = 12;  // looks at `arrived`, of some 700 cycles each

// A thread's sums: of rows 8j + 2t and 8j + 2t + 1 and outputs g and g + 8 of a tile in 4j ...
template <class C>
using Sums = float[C::ROWS / 2];

// Item j of a thread: of eight rows.
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
    sync_team<C::MULTIPLIERS>(0);  // the next part's sums go to the same place
}

// Where a lane's results go. Its sums are of rows 8j + 2t and 2t + 1 and of outputs g and g + 8 of a tile; it stores those of
// row 8j + g and of outputs 2t, 2t + 1, and the same + 8.
struct Results {
    half_t* to;
    float bias[2] = {};
    int rows, outputs, n;  // there are from `to` on; outputs of a row
    bool in_pairs;

    __device__ __forceinline__ Results(const Operands& of, int row, int output) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        n = settled(of.n);  // or its multiples would be kept in registers through every loop
        to = of.out + static_cast<size_t>(row + g) * n + output + 2 * t;
        rows = of.m - row - g, outputs = n - output - 2 * t;
        in_pairs = n % 2 == 0 && reinterpret_cast<size_t>(of.out) % 4 == 0;
        if (!of.bias) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (output + g + 8 * i < n) bias[i] = to_float(of.bias[output + g + 8 * i]);
        }
    }
    // Of N times eight rows, from row 8j on.
    template <int N>
    __device__ __forceinline__ void store(const float4 (&sums)[N], int j) const {
        unsigned pairs[2 * N];  // all first: a transposition takes its time
#pragma unroll
        for (int i = 0; i < N; ++i) {
            pairs[2 * i] = transpose(half_pair(sums[i].x + bias[0], sums[i].y + bias[0]));
            pairs[2 * i + 1] = transpose(half_pair(sums[i].z + bias[1], sums[i].w + bias[1]));
        }
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) {
            const int row = 8 * (j + i / 2), at = i % 2 * 8;
            const bool first = row < rows && at < outputs, second = row < rows && at + 1 < outputs;
            half_t* const pair = to + static_cast<size_t>(row) * n + at;
            if (first && in_pairs) *reinterpret_cast<unsigned*>(pair) = pairs[i];
            if (first && !in_pairs) pair[0] = static_cast<half_t>(pairs[i]);
            if (second && !in_pairs) pair[1] = static_cast<half_t>(pairs[i] >> 16);
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

// Items first .. last - 1 of each thread: the sums of all parts.
template <class C, class Store>
__device__ __forceinline__ void add_slice(const Sharers& sharers, const float4* partial, int thread, int first, int last,
                                          const Store& store) {
    constexpr int BLOCKS = 4, PAIR = 2;  // loads under way
#pragma unroll 1
    for (int item = first; item < last; item += PAIR) {
        float4 sum[PAIR] = {};
#pragma unroll 1
        for (int block = sharers.first; block <= sharers.final; block += BLOCKS) {
            float4 more[BLOCKS][PAIR];
#pragma unroll
            for (int i = 0; i < BLOCKS * PAIR; ++i) {
                const float4* const part = partial + sharers.place(min(block + i / PAIR, sharers.final)) * C::ITEMS;
                more[i / PAIR][i % PAIR] = load_shared_by_blocks(part + min(item + i % PAIR, last - 1) * C::TEAM + thread);
            }
#pragma unroll
            for (int i = 0; i < BLOCKS * PAIR; ++i) {
                if (block + i / PAIR <= sharers.final) add(sum[i % PAIR], more[i / PAIR][i % PAIR]);
            }
        }
#pragma unroll
        for (int i = 0; i < PAIR; ++i) {
            if (item + i < last) store({sum[i]}, item + i);
        }
    }
}

// What the first team does with a tile's sums when all teams' are in. at_end: the block has no more. thread: of the team.
template <class C>
__device__ __forceinline__ void finish_part(const Block<C>& block, const Operands& of, const Part& part, bool at_end,
                                            int thread, const Sums<C>& sum) {
    const int first_row = block.first_row(part), first_tile = block.first_tile(part) + thread / 32;
    const int items = min((of.m - first_row + 7) / 8, C::ROWS / 8);  // of eight rows that there are
    const Results results(of, first_row, first_tile * MMA_N);
    const Sharers sharers(part.tile, block.units, block.all);
    if (sharers.one()) {
#pragma unroll
        for (int j = 0; j < C::ROWS / 8; j += 4) {
            float4 sums[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] = four<C>(sum, j + i);
            if (j < items) results.store(sums, j);
        }
        return;
    }
    float4* const own = of.partial + sharers.place(blockIdx.x) * C::ITEMS + thread;
#pragma unroll
    for (int i = 0; i < C::ITEMS / C::TEAM; ++i) {
        if (i < items) own[i * C::TEAM] = four<C>(sum, i);
    }
    const int parts = sharers.final - sharers.first + 1, pairs = (items + 1) / 2, slices = min(pairs, parts);
    unsigned* const arrived = of.arrived + part.tile;
    sync_team<C::TEAM>(1);
    if (thread == 0) {
        __threadfence();  // who sees the counter sees the sums
        atomicAdd(arrived, 1u);
    }
    const auto store = [&](const float4 (&sums)[1], int item) { results.store(sums, item); };
    for (;;) {
        if (thread == 0) {
            *block.last() = take_slice(arrived, parts, slices, at_end ? PATIENCE : 1);
            __threadfence();
        }
        sync_team<C::TEAM>(1);
        const int slice = *block.last();
        sync_team<C::TEAM>(1);
        if (slice < 0) return;
        const int end = pairs * (slice + 1) / slices * 2;
        add_slice<C>(sharers, of.partial, thread, pairs * slice / slices * 2, min(end, items), store);
    }
}
