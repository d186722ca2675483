// What becomes of the sums of wide.cuh, of which this is a part.
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

// Item j of a thread: of eight rows. Two of them, from an even one on, are a pair.
template <class C>
__device__ __forceinline__ float4 four(const Sums<C>& sum, int j) {
    return {sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]};
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
__device__ __forceinline__ void add_slice(const Adders& adders, const float4* partial, int first, int last,
                                          const Results& results) {
    constexpr int AT_ONCE = 4;  // parts whose loads are under way
#pragma unroll 1
    for (int pair = first; pair < last; ++pair) {
        float4 sum[2] = {};
#pragma unroll 1
        for (int block = adders.first; block <= adders.final; block += AT_ONCE) {
            float4 more[AT_ONCE][2];
#pragma unroll
            for (int i = 0; i < 2 * AT_ONCE; ++i) {
                const size_t place = adders.place(min(block + i / 2, adders.final));
                more[i / 2][i % 2] = load_shared_by_blocks(partial + place * C::ITEMS + (2 * pair + i % 2) * C::TEAM + threadIdx.x);
            }
#pragma unroll
            for (int i = 0; i < 2 * AT_ONCE; ++i) {
                if (block + i / 2 <= adders.final) add(sum[i % 2], more[i / 2][i % 2]);
            }
        }
        results.store(sum[0], sum[1], pair);
    }
}

// What a block does with a stretch's sums. at_end: it has no more.
template <class C>
__device__ __forceinline__ void finish(const Block<C>& block, const Operands& of, const Stretch& part, bool at_end,
                                       const Sums<C>& sum) {
    const int thread = threadIdx.x, first_row = block.first_row(part);
    const int pairs = min((of.m - first_row + 15) / 16, C::PAIRS);  // that there are
    const Results results(of, block.staged(thread / 32), first_row, (block.first_tile(part) + thread / 32) * MMA_N);
    const Shares shares = block.shares();
    if (!shares.shared(part.tile) || part.count == block.units) {
#pragma unroll
        for (int pair = 0; pair < C::PAIRS; ++pair) {
            if (pair < pairs) results.store(four<C>(sum, 2 * pair), four<C>(sum, 2 * pair + 1), pair);
        }
        return;
    }
    const int tile = part.tile - shares.whole * shares.blocks;
    const Adders adders(shares, tile);
    float4* const own = of.partial + adders.place(shares.block) * C::ITEMS + thread;
#pragma unroll
    for (int i = 0; i < C::ROWS / 8; ++i) {
        if (i / 2 < pairs) own[i * C::TEAM] = four<C>(sum, i);
    }
    const int parts = adders.final - adders.first + 1, slices = min(pairs, parts);
    sync_team<C::TEAM>(0);
    if (thread == 0) {
        __threadfence();  // who sees the counter sees the sums
        atomicAdd(of.arrived + tile, 1u);
    }
    for (;;) {
        if (thread == 0) {
            *block.last() = take_slice(of.arrived + tile, parts, slices, at_end ? PATIENCE : 1);
            __threadfence();
        }
        sync_team<C::TEAM>(0);
        const int slice = *block.last();
        sync_team<C::TEAM>(0);
        if (slice < 0) return;
        add_slice<C>(adders, of.partial, pairs * slice / slices, pairs * (slice + 1) / slices, results);
    }
}
