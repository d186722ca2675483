// Many activation rows times a weight in tiles (quant/tiles.py), on the tensor cores of sm_90a: they read activations from
// shared memory by themselves, while the warps that gave them their work prepare the next.
//
//   D[64 outputs, ROWS rows] += A[64 outputs, 16 of K: weights, in registers] * B[16 of K, ROWS rows: activations]
//
// Activations come arranged (arrange_rows.cu): where they go in shared memory, only the address remains to be said. CLUSTER
// blocks, neighbours along the outputs, read the same ones; each fetches its part of them for all, so that they pass through the
// L2 once a cluster. A block owns OUTPUTS outputs of ROWS rows, and units (128 of K) of them, which lie in a ring of STAGES slots:
//
//   one slot: activations of k 0 .. 63 | of k 64 .. 127 | OUTPUTS / 16 units of weights, as they lie in tiles | their scales
//
// Warps have two roles and meet at barriers only, two to a slot: `full` and `empty`.
//   Multipliers, TEAMS teams of ACROSS warpgroups: a warpgroup takes 64 outputs, a warp the 16 of one tile. Team i takes the
//     block's units i, i + TEAMS, ... A unit is 8 products, a step STEP of them: the warps decode the weights of one step while
//     the products of the step before are under way. Scales are multiplied into the fragments.
//   One thread of the last warp orders all copies. It begins with weights before the kernels before its own are done, since they
//     do not write those.
#pragma once
#include "cluster_ptx.cuh"
#include "tile_units.cuh"
#include "wide_units.cuh"

constexpr int GROUP = 128, PRODUCTS = 8;  // threads of a warpgroup; products of 16 of K in a unit

// How a kernel's blocks are cut. UNPACK: the weights' layout, `W4Words` or `W3Words`.
template <class UNPACK, int ACROSS_, int TEAMS_, int ROWS_, int STAGES_, int CLUSTER_, int STEP_>
struct WideCut {
    using Words = UNPACK;
    static constexpr int ACROSS = ACROSS_, TEAMS = TEAMS_, ROWS = ROWS_, STAGES = STAGES_, CLUSTER = CLUSTER_, STEP = STEP_;
    static constexpr int OUTPUTS = 64 * ACROSS, TILES = OUTPUTS / MMA_N;
    static constexpr int TEAM = GROUP * ACROSS, MULTIPLIERS = TEAM * TEAMS, THREADS = MULTIPLIERS + GROUP;
    // Registers of a thread: what the launch gives all, then multipliers and the others. A quarter of each group's 128 threads
    // shares 512 of them.
    static constexpr int ENTRY = 512 / (ACROSS * TEAMS + 1) / 8 * 8, REST = 32;
    static constexpr bool TRADES = ACROSS * TEAMS > 1;
    static constexpr int OWN = (ENTRY * (ACROSS * TEAMS + 1) - REST) / (ACROSS * TEAMS) / 8 * 8;
    // Bytes of a slot's parts. Scales: of as many groups as a unit can have.
    static constexpr int HALF = ROWS * ROW_BYTES, WEIGHTS = 2 * HALF, SCALES = WEIGHTS + TILES * Words::BYTES;
    static constexpr int TILE_SCALES = QUARTERS * 32, SLOT = (SCALES + TILES * TILE_SCALES + 1023) / 1024 * 1024;
    static constexpr int ITEMS = ROWS / 8 * TEAM;  // of four sums of a thread: see `four`
    static constexpr int SUMS = (TEAMS - 1) * ITEMS * 16, STAGED = TEAM / 32 * PAIR_BYTES;
    static constexpr int STAGING = STAGES * SLOT + SUMS, BARRIERS = STAGING + STAGED, SHARED = BARRIERS + 2 * STAGES * 8 + 16;
    static constexpr int RELEASES = CLUSTER * TEAM / 32;  // arrivals at an empty slot: a warp's of each block
    static_assert(ROWS % (8 * CLUSTER) == 0 && CLUSTER <= 8, "each block fetches whole patterns of the swizzle");
    static_assert(PRODUCTS / STEP % 2 == 0, "a step's registers are known");
};

// What a kernel is given. arranged: activations.
struct Operands {
    const char *arranged, *tiles, *scales;
    const half_t* bias;
    half_t* out;
    float4* partial;
    unsigned* arrived;
    int m, n, k, group_shift;
};

// A slot and how often the ring went round before it.
template <int STAGES>
struct Turn {
    int slot;
    unsigned parity = 0;

    __device__ __forceinline__ explicit Turn(int slot) : slot(slot) {}
    __device__ __forceinline__ void advance(int slots) {
        slot += slots;
        if (slot >= STAGES) slot -= STAGES, parity ^= 1;
    }
};

// The block's shared memory, and where in the output it works.
template <class C>
struct Block {
    char* shared;
    int rank, count, down;  // in its cluster; tiles along N; blocks of rows
    Shares shares;

    __device__ __forceinline__ Block(char* shared, const Operands& of)
        : shared(shared),
          rank(blockIdx.x % C::CLUSTER),
          count((of.n + MMA_N - 1) / MMA_N),
          down((of.m + C::ROWS - 1) / C::ROWS),
          shares((count + C::TILES * C::CLUSTER - 1) / (C::TILES * C::CLUSTER) * down, (of.k + MMA_K - 1) / MMA_K,
                 static_cast<int>(gridDim.x) / C::CLUSTER, static_cast<int>(blockIdx.x) / C::CLUSTER) {}
    __device__ __forceinline__ char* slot(int i) const { return shared + i * C::SLOT; }
    __device__ __forceinline__ float4* sums() const { return reinterpret_cast<float4*>(shared + C::STAGES * C::SLOT); }
    __device__ __forceinline__ char* staged(int warp) const { return shared + C::STAGING + warp * PAIR_BYTES; }
    __device__ __forceinline__ PhaseBarrier* full(int slot) const {
        return reinterpret_cast<PhaseBarrier*>(shared + C::BARRIERS) + slot;
    }
    __device__ __forceinline__ PhaseBarrier* empty(int slot) const { return full(C::STAGES + slot); }
    __device__ __forceinline__ int* last() const { return reinterpret_cast<int*>(full(2 * C::STAGES)); }
    // Tiles that share weights follow one another: the second reader finds them in the L2.
    __device__ __forceinline__ int first_row(const Stretch& part) const { return part.tile % down * C::ROWS; }
    __device__ __forceinline__ int first_tile(const Stretch& part) const {
        return (part.tile / down * C::CLUSTER + rank) * C::TILES;
    }
    // Of a warp, for all blocks of the cluster: it has no more use for the slot.
    __device__ __forceinline__ void release(int slot) const {
        const int lane = threadIdx.x % 32;
        if constexpr (C::CLUSTER == 1) {
            if (lane == 0) arrive(empty(slot));
        } else {
            if (lane < C::CLUSTER) arrive_at(empty(slot), lane);
        }
    }
};

#include "wide_results.cuh"

// The block's units, in order.
template <class C>
struct Walk {
    Stretch part;
    int index = 0, unit;  // of the stretch; of K

    __device__ __forceinline__ explicit Walk(const Block<C>& block) : part(block.shares.stretch(0)), unit(part.begin) {}
    __device__ __forceinline__ void advance(const Block<C>& block) {
        if (++unit == part.begin + part.count) part = block.shares.stretch(++index), unit = part.begin;
    }
};

// Of a stretch's rows, those that the arranged activations have.
template <class C>
__device__ __forceinline__ int rows_there(const Block<C>& block, const Operands& of, const Stretch& part) {
    return min(padded_rows(of.m) - block.first_row(part), C::ROWS);
}

// A unit's weights and scales. Where the output ends inside a block there are fewer, and what was in the place of the others
// meets only sums that are not stored.
template <class C>
__device__ __forceinline__ void copy_weights(const Block<C>& block, const Operands& of, const Walk<C>& walk, int slot) {
    const int first = block.first_tile(walk.part), there = max(min(block.count - first, C::TILES), 0);
    const int scale_bytes = 16 << 8 - of.group_shift;  // of a tile's unit
    PhaseBarrier* const full = block.full(slot);
    if (!elected()) return;
    arrive_expecting(full, there * (C::Words::BYTES + scale_bytes) + rows_there(block, of, walk.part) * 2 * ROW_BYTES);
    const size_t at = static_cast<size_t>(first) * block.shares.units + walk.unit;
    const char *weights = of.tiles + at * C::Words::BYTES, *scales = of.scales + at * scale_bytes;
    char* to = block.slot(slot) + C::WEIGHTS;
#pragma unroll 4
    for (int tile = 0; tile < there; ++tile) {
        copy_bulk(to + tile * C::Words::BYTES, weights, C::Words::BYTES, full);
        copy_bulk(to + C::SCALES - C::WEIGHTS + tile * C::TILE_SCALES, scales, scale_bytes, full);
        weights += block.shares.units * C::Words::BYTES, scales += block.shares.units * scale_bytes;
    }
}

// This block's part of a unit's rows, for all blocks of the cluster.
template <class C>
__device__ __forceinline__ void copy_rows(const Block<C>& block, const Operands& of, const Walk<C>& walk, int slot) {
    constexpr int EACH = C::ROWS / C::CLUSTER;
    const int first = block.rank * EACH, bytes = min(rows_there(block, of, walk.part) - first, EACH) * ROW_BYTES;
    if (bytes <= 0) return;
    const size_t rows = padded_rows(of.m);  // of a half
    const char* const from = of.arranged + (2 * walk.unit * rows + block.first_row(walk.part) + first) * ROW_BYTES;
    char* const to = block.slot(slot) + first * ROW_BYTES;
    PhaseBarrier* const full = block.full(slot);
    if (!elected()) return;
    if constexpr (C::CLUSTER == 1) {
        copy_bulk(to, from, bytes, full);
        copy_bulk(to + C::HALF, from + rows * ROW_BYTES, bytes, full);
    } else {
        copy_to_cluster<C::CLUSTER>(to, from, bytes, full);
        copy_to_cluster<C::CLUSTER>(to + C::HALF, from + rows * ROW_BYTES, bytes, full);
    }
}

// The warp that orders copies.
template <class C>
__device__ __forceinline__ void fill(const Block<C>& block, const Operands& of) {
    const int all = block.shares.mine(), ahead = min(all, C::STAGES);
    {
        Walk<C> walk(block);
        for (int slot = 0; slot < ahead; ++slot, walk.advance(block)) copy_weights(block, of, walk, slot);
    }
    await_previous();
    Walk<C> walk(block);
    for (int slot = 0; slot < ahead; ++slot, walk.advance(block)) copy_rows(block, of, walk, slot);
    Turn<C::STAGES> turn(0);
    for (int i = ahead; i < all; ++i, walk.advance(block), turn.advance(1)) {
        await(block.empty(turn.slot), turn.parity);
        copy_weights(block, of, walk, turn.slot);
        copy_rows(block, of, walk, turn.slot);
    }
}

// Of a matrix of rows of 128 bytes in the 128-byte swizzle, k along them: 1024 bytes from eight rows to the next eight. It begins
// `bytes` after an address that is the same for all lanes, and the compiler knows that: descriptors are uniform registers.
__device__ __forceinline__ unsigned long long describe(unsigned address, int bytes) {
    return static_cast<unsigned long long>(1u << 30 | 1024 >> 4) << 32 | ((address & 0x3FFFF) >> 4) + bytes / 16 | 1u << 16;
}

// The A fragments of the STEP products from `first` on.
template <class C>
__device__ __forceinline__ void decode(const typename C::Words& words, const char* scales, int group_shift, int first,
                                       unsigned (&a)[C::STEP][4]) {
#pragma unroll
    for (int p = 0; p < C::STEP; ++p) {
        const int quarter = (first + p) / 2;
        const unsigned pair = *reinterpret_cast<const unsigned*>(scales + (quarter * 32 >> group_shift) * 32);
        const unsigned scale[2] = {__byte_perm(pair, 0, 0x1010), __byte_perm(pair, 0, 0x3232)};  // of outputs g, g + 8
        words.fragment(first + p, a[p]);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[p][i] = mul_pair(a[p][i], scale[i % 2]), pin(a[p][i]);
    }
}

// A multiplier.
template <class C>
__device__ __forceinline__ void multiply(const Block<C>& block, const Operands& of) {
    const int team = threadIdx.x / C::TEAM, thread = threadIdx.x % C::TEAM, tile = thread / 32, lane = thread % 32;
    const int to_weights = settled(C::WEIGHTS + tile * C::Words::BYTES);
    const int to_scales = settled(C::SCALES + tile * C::TILE_SCALES + lane / 4 * 4);
    Turn<C::STAGES> turn(team);
    int next_unit = team;  // this team's next, from where the stretch begins
    const int stretches = block.shares.stretches();
    for (int index = 0; index < stretches; ++index) {
        const Stretch part = block.shares.stretch(index);
        Sums<C> sum;
#pragma unroll
        for (int i = 0; i < C::ROWS / 2; ++i) sum[i] = 0.0f, pin(sum[i]);
        unsigned a[2][C::STEP][4];
        int before = -1;  // the slot that the products under way read
        for (; next_unit < part.count; next_unit += C::TEAMS) {
            char* const slot = block.slot(turn.slot);
            await(block.full(turn.slot), turn.parity);
            typename C::Words words;
            const unsigned rows = __shfl_sync(0xFFFFFFFF, shared_address(slot), 0);
#pragma unroll
            for (int step = 0; step < PRODUCTS / C::STEP; ++step) {
                const int first = step * C::STEP;
                if (first % 4 == 0) words.load(slot + to_weights, lane, first / 4);
                decode<C>(words, slot + to_scales, of.group_shift, first, a[step % 2]);
                begin_products();
#pragma unroll
                for (int p = 0; p < C::STEP; ++p) {
                    multiply_async<C::ROWS>(sum, a[step % 2][p], describe(rows, (first + p) / 4 * C::HALF + (first + p) % 4 * 32));
                }
                end_products();
                await_products<1>();
                if (step == 0 && before >= 0) block.release(before);
            }
            before = turn.slot;
            turn.advance(C::TEAMS);
        }
        next_unit -= part.count;
        await_products<0>();
#pragma unroll
        for (int i = 0; i < C::ROWS / 2; ++i) pin(sum[i]);
        if (before >= 0) block.release(before);
        if constexpr (C::TEAMS > 1) add_teams<C>(block.sums(), team, thread, sum);
        if (team == 0) finish<C>(block, of, part, index + 1 == stretches, thread, sum);
    }
}

template <class C>
__device__ __forceinline__ void wide_block(const char* arranged, const char* tiles, const char* scales, const half_t* bias,
                                           half_t* out, float4* partial, unsigned* arrived, int m, int n, int k, int group) {
    const Operands of = {arranged, tiles, scales, bias, out, partial, arrived, m, n, k, __ffs(group) - 1};
    const Block<C> block(launch_patterns(), of);
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < C::STAGES; ++slot) {
            start(block.full(slot), 1);
            start(block.empty(slot), C::RELEASES);
        }
        publish_barriers();
    }
    release_next();
    if constexpr (C::CLUSTER == 1) __syncthreads();
    else sync_cluster();
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);  // and the compiler knows that it is the same for all lanes
    if (warp < C::MULTIPLIERS / 32) {
        if constexpr (C::TRADES) take_registers<C::OWN>();
        await_previous();
        multiply(block, of);
        if constexpr (C::CLUSTER > 1) sync_cluster();  // others may still reach for this block's barriers
    } else {
        if constexpr (C::TRADES) give_registers<C::REST>();
        if (warp == C::MULTIPLIERS / 32) fill(block, of);
        else await_previous();
        if constexpr (C::CLUSTER > 1) sync_cluster();
    }
}
