// Many activation rows times a weight in tiles (quant/tiles.py), on the tensor cores of sm_90a: they read activations from
// shared memory by themselves, while the warps that gave them their work prepare the next.
//
//   D[64 outputs, ROWS rows] += A[64 outputs, 16 of K: weights, in registers] * B[16 of K, ROWS rows: activations]
//
// A block owns OUTPUTS outputs of ROWS rows, a tile, and units (128 of K) of it. Warps have two roles.
//   Multipliers, TEAMS teams of ACROSS warpgroups: a warpgroup takes 64 outputs, a warp the 16 of one tile. Team i takes the
//     block's units i, i + TEAMS, ... A unit is 8 products, a step STEP of them: the warps decode the weights of one step while
//     the products of the step before are under way. Scales are multiplied into the fragments. Nobody else reads a warp's
//     weights, so each copies its own, DEPTH - 1 units ahead, and waits for no other. (A thread that ordered bulk copies of all
//     of a block's tiles, two a tile and unit, took longer to do so than tensor cores to multiply.)
//   Copiers, of one more warpgroup, bring activations to a ring of STAGES slots in the order that products want. A slot has two
//     barriers, `full` and `empty`. Either its four warps read activations as they lie in memory, AHEAD batches of 32 rows at
//     once: no launch comes before this one, but such a copy of 64 rows takes some 1,560 cycles. Or activations come ARRANGED
//     (arrange_rows.cu), and one thread orders bulk copies.
//
// Each block first has whole tiles to itself, as many as all blocks can have. Of those that are left over a cluster of blocks
// has at most one, and its blocks and their teams share that by K (wide_results.cuh): no sum passes through the L2.
#pragma once
#include "cluster_ptx.cuh"
#include "wide_units.cuh"

// Threads and warps of a warpgroup; products of 16 of K in a unit; rows of a batch.
constexpr int GROUP = 128, COPIERS = GROUP / 32, PRODUCTS = 8, BATCH = 32;

// How a kernel's blocks are cut. UNPACK: the weights' layout, `W4Words` or `W3Words`.
template <class UNPACK, int ACROSS_, int TEAMS_, int ROWS_, int STAGES_, int DEPTH_, int STEP_, bool ARRANGED_>
struct WideCut {
    using Words = UNPACK;
    static constexpr int ACROSS = ACROSS_, TEAMS = TEAMS_, ROWS = ROWS_, STAGES = STAGES_, DEPTH = DEPTH_, STEP = STEP_;
    static constexpr bool ARRANGED = ARRANGED_;
    static constexpr int OUTPUTS = 64 * ACROSS, TILES = OUTPUTS / MMA_N, PAIRS = ROWS / 16;
    static constexpr int BAND = (2048 + ROWS - 1) / ROWS;  // blocks of rows whose activations stay in the L2
    static constexpr int TEAM = GROUP * ACROSS, MULTIPLIERS = TEAM * TEAMS, WARPS = MULTIPLIERS / 32;
    static constexpr int THREADS = MULTIPLIERS + GROUP;
    // Batches of activations that are read at once, a wait for the L2 for each so many: where there are registers for them.
    static constexpr int AHEAD = ACROSS * TEAMS > 3 ? 2 : 4;
    // Registers of a thread: what the launch gives all, then multipliers and the others. A quarter of each group's 128 threads
    // shares 512 of them.
    static constexpr int ENTRY = 512 / (ACROSS * TEAMS + 1) / 8 * 8, REST = ARRANGED ? 32 : 32 + 16 * AHEAD;
    static constexpr bool TRADES = ACROSS * TEAMS > 1;
    static constexpr int OWN = (ENTRY * (ACROSS * TEAMS + 1) - REST) / (ACROSS * TEAMS) / 8 * 8;
    // Bytes: half a slot; the ring; a warp's unit, with scales of as many groups as it can have; all that sums may use.
    static constexpr int HALF = ROWS * ROW_BYTES, RING = STAGES * 2 * HALF, UNIT = Words::BYTES + QUARTERS * 32;
    static constexpr int STAGING = RING + WARPS * DEPTH * UNIT, BARRIERS = STAGING + WARPS * PAIR_BYTES;
    static constexpr int SHARED = BARRIERS + 2 * STAGES * 8;
    static_assert(TEAMS * OUTPUTS * ROWS * 4 <= STAGING, "the sums of all teams lie where slots and weights lay");
    // Slots are free again when their teams go on to the next: each team has one.
    static_assert((STAGES - TEAMS) * ROWS >= (ARRANGED ? ROWS : AHEAD * BATCH), "all that comes at once has slots");
    static_assert(DEPTH >= 3 && ROWS % BATCH == 0 && PRODUCTS / STEP % 2 == 0, "a step's registers are known");
};

// What a kernel is given. x: activations, as they lie or arranged.
struct Operands {
    const char *x, *tiles, *scales;
    const half_t* bias;
    half_t* out;
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
    int count, units, down;    // tiles of 16 along N; units of K; blocks of rows
    int cluster, which, rank;  // blocks of a cluster; which cluster; place in it
    int whole, rest;           // tiles that a block has to itself; those left over

    __device__ __forceinline__ Block(char* shared, const Operands& of)
        : shared(shared),
          count((of.n + MMA_N - 1) / MMA_N),
          units((of.k + MMA_K - 1) / MMA_K),
          down((of.m + C::ROWS - 1) / C::ROWS),
          cluster(cluster_blocks()),
          which(over(blockIdx.x, cluster)),
          rank(blockIdx.x - which * cluster) {
        const int tiles = across() * down, blocks = gridDim.x;
        whole = C::TEAMS > 1 ? 0 : over(tiles, blocks);
        rest = tiles - whole * blocks;
    }
    __device__ __forceinline__ char* slot(int i) const { return shared + i * 2 * C::HALF; }
    __device__ __forceinline__ char* weights(int warp) const { return shared + C::RING + warp * C::DEPTH * C::UNIT; }
    __device__ __forceinline__ char* staged(int warp) const { return shared + C::STAGING + warp * PAIR_BYTES; }
    __device__ __forceinline__ PhaseBarrier* full(int slot) const {
        return reinterpret_cast<PhaseBarrier*>(shared + C::BARRIERS) + slot;
    }
    __device__ __forceinline__ PhaseBarrier* empty(int slot) const { return full(C::STAGES + slot); }
    // Tiles that share weights follow one another, in bands of so many blocks of rows that a band's activations stay in the L2
    // while all weights pass by.
    __device__ __forceinline__ int first_row(const Stretch& part) const {
        const int band = band_of(part), inside = part.tile - band * C::BAND * across();
        return (band * C::BAND + inside - over(inside, height(band)) * height(band)) * C::ROWS;
    }
    __device__ __forceinline__ int first_tile(const Stretch& part) const {
        const int band = band_of(part);
        return over(part.tile - band * C::BAND * across(), height(band)) * C::TILES;
    }
    __device__ __forceinline__ int across() const { return (count + C::TILES - 1) / C::TILES; }
    __device__ __forceinline__ int band_of(const Stretch& part) const { return over(part.tile, C::BAND * across()); }
    __device__ __forceinline__ int height(int band) const { return min(down - band * C::BAND, C::BAND); }
    __device__ __forceinline__ int stretches() const { return whole + (which < rest); }
    __device__ __forceinline__ Stretch stretch(int index) const {
        const int block = blockIdx.x, blocks = gridDim.x;
        if (index < whole) return {index * blocks + block, 0, units};
        const int begin = over(units * rank, cluster);
        return {whole * blocks + which, begin, over(units * (rank + 1), cluster) - begin};
    }
    // Whether the last stretch has sums that others add to.
    __device__ __forceinline__ bool shares() const { return (C::TEAMS > 1 || cluster > 1) && stretches() > whole; }
};

#include "wide_copies.cuh"
#include "wide_results.cuh"

// Of a matrix of rows of 128 bytes in the 128-byte swizzle, k along them: 1024 bytes from eight rows to the next eight. It
// begins `bytes` after an address that is the same for all lanes, and the compiler knows that: descriptors are uniform
// registers.
__device__ __forceinline__ unsigned long long describe(unsigned address, int bytes) {
    return static_cast<unsigned long long>(1u << 30 | 1024 >> 4) << 32 | ((address & 0x3FFFF) >> 4 | 1u << 16) + bytes / 16;
}

// The A fragments of the STEP products from `first` on.
template <class C>
__device__ __forceinline__ void decode(const Piece<C>& piece, int first, unsigned (&a)[C::STEP][4]) {
#pragma unroll
    for (int p = 0; p < C::STEP; ++p) {
        const unsigned pair = piece.scale[(first + p) / 2];
        const unsigned scale[2] = {__byte_perm(pair, 0, 0x1010), __byte_perm(pair, 0, 0x3232)};  // of outputs g, g + 8
        piece.words.fragment(first + p, a[p]);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[p][i] = mul_pair(a[p][i], scale[i % 2]), pin(a[p][i]);
    }
}

// A multiplier. Its next unit is in registers when the products of the one before are ordered.
template <class C>
__device__ __forceinline__ void multiply(const Block<C>& block, const Operands& of, int warp) {
    const int lane = threadIdx.x % 32, team = warp / C::TILES;
    Weights<C> weights(block, of, warp);
#pragma unroll 1  // what a block begins with is not in the cache of instructions
    for (int i = 1; i < C::DEPTH; ++i) weights.fetch(block, of);
    __syncthreads();  // the barriers have been started
    await_previous();
    Turn<C::STAGES> turn(team);
    const int stretches = block.stretches();
    for (int index = 0; index < stretches; ++index) {
        const Stretch part = block.stretch(index);
        Sums<C> sum;
#pragma unroll
        for (int i = 0; i < C::ROWS / 2; ++i) sum[i] = 0.0f, pin(sum[i]);
        unsigned a[2][C::STEP][4];
        int before = -1;  // the slot that the products under way read
        Piece<C> piece;
        if (team_units<C>(part, team) > 0) weights.take(block, of, piece);
        for (int left = team_units<C>(part, team); left > 0; --left) {
            const unsigned rows = __shfl_sync(0xFFFFFFFF, shared_address(block.slot(turn.slot)), 0);
#pragma unroll
            for (int step = 0; step < PRODUCTS / C::STEP; ++step) {
                const int first = step * C::STEP;
                decode<C>(piece, first, a[step % 2]);
                if (step == 0) await_or_trap(block.full(turn.slot), turn.parity);
                begin_products();
#pragma unroll
                for (int p = 0; p < C::STEP; ++p) {
                    const int bytes = (first + p) / 4 * C::HALF + (first + p) % 4 * 32;
                    multiply_async<C::ROWS>(sum, a[step % 2][p], describe(rows, bytes));
                }
                end_products();
                if (first + C::STEP == PRODUCTS && left > 1) weights.take(block, of, piece);
                await_products<1>();
                if (step == 0 && before >= 0 && lane == 0) arrive(block.empty(before));
            }
            before = turn.slot;
            turn.advance(C::TEAMS);
        }
        await_products<0>();
#pragma unroll
        for (int i = 0; i < C::ROWS / 2; ++i) pin(sum[i]);
        if (before >= 0 && lane == 0) arrive(block.empty(before));
        if (index == block.whole && block.shares()) return finish_shared<C>(block, of, part, warp, sum);  // the last one
        finish<C>(block, of, part, warp, sum);
    }
}

template <class C>
__device__ __forceinline__ void wide_block(const char* x, const char* tiles, const char* scales, const half_t* bias,
                                           half_t* out, int m, int n, int k, int group) {
    const Operands of = {x, tiles, scales, bias, out, m, n, k, __ffs(group) - 1};
    const Block<C> block(launch_patterns(), of);
    release_next();
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);  // and the compiler knows that it is the same for all lanes
    if (warp < C::WARPS) {
        if constexpr (C::TRADES) take_registers<C::OWN>();
        multiply(block, of, warp);
        return;
    }
    if constexpr (C::TRADES) give_registers<C::REST>();
    if constexpr (C::ARRANGED) copy_arranged(block, of, warp);
    else copy_rows(block, of, warp - C::WARPS);
    if (block.shares()) join_shared();
}

// The kernel of this name, whose blocks are cut so: the arguments of `WideCut`.
#define WIDE_KERNEL(name, ...)                                                                                             \
    extern "C" __global__ void __launch_bounds__(WideCut<__VA_ARGS__>::THREADS, 1)                                         \
    name(const char* x, const char* __restrict__ tiles, const char* __restrict__ scales, const half_t* __restrict__ bias,  \
         half_t* __restrict__ out, int m, int n, int k, int group) {                                                       \
        wide_block<WideCut<__VA_ARGS__>>(x, tiles, scales, bias, out, m, n, k, group);                                     \
    }
