// What a block of chain_attention.cuh has of a sequence's positions, and K and V of a round of them: in shared memory, and in the
// registers of its warps.
#pragma once
#include "chain_space.cuh"
#include "paged_tile.cuh"
#include "prefetch.cuh"

constexpr int STRIPES = HEAD_DIM / 16, SHARES = CHAIN_WARPS / STRIPES;  // of D; of a round's positions, for each of them
constexpr int V_TILE = 2 * EACH_WARP, V_TILES = ROUND / V_TILE / SHARES;  // positions of a product; products of a warp

// Where the item's positions are, and how far they turn: the same in all layers. Whole rounds: beyond the end come the last
// four positions of the cache's block once more. By all threads.
__device__ __forceinline__ void place_positions(const Space& space) {
    const Chain& of = space.of;
    const Item its = space.item;
    if (its.end == 0) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < its.rounds() * ROUND; i += CHAIN_THREADS) {
        const int position = its.begin + i < its.end ? its.begin + i : (its.end - 1) / 4 * 4 + i % 4;
        const int block = __umulhi(position, of.reciprocal);
        const int slot = static_cast<int>(of.block_table[block]) * of.block_size + position - block * of.block_size;
        space.positions()[i] = (slot * of.kv_heads + its.kv_head) * HEAD_DIM;
    }
    for (int i = threadIdx.x; i < HEAD_DIM; i += CHAIN_THREADS) {
        const half_t* const from = i < HEAD_DIM / 2 ? of.cos : of.sin;
        space.angles()[i] = from[static_cast<size_t>(its.last) * (HEAD_DIM / 2) + i % (HEAD_DIM / 2)];
    }
}

// A round's rows of K, then of V, in a block's shared memory: 16 pieces of 16 bytes each, in an order by which the lanes of a warp
// that read at once find them at different banks.
constexpr int ROW_PIECES = HEAD_DIM / 8;
__device__ __forceinline__ int key_piece(int row, int piece) { return row * ROW_PIECES + (piece ^ row % 2 * 4); }
__device__ __forceinline__ int value_piece(int row, int piece) { return (ROUND + row) * ROW_PIECES + (piece ^ row / 4 % 4 * 2); }

// Has the round from position `round` on of a layer's K and V copied there: whole products of V.
__device__ __forceinline__ void copy_round(const Space& space, const ChainLayer& layer, int round) {
    const int rows = min((space.item.end - round + V_TILE * SHARES - 1) / (V_TILE * SHARES) * (V_TILE * SHARES), ROUND);
    const int* const positions = space.positions() + round - space.item.begin;
#pragma unroll 1
    for (int i = this_thread(); i < rows * ROW_PIECES; i += CHAIN_THREADS) {
        const int row = i / ROW_PIECES, piece = i % ROW_PIECES, from = positions[row] + piece * 8;
        copy_async(space.cached() + key_piece(row, piece), layer.k + from);
        copy_async(space.cached() + value_piece(row, piece), layer.v + from);
    }
    commit_copies();
}

// What a warp has of a round's K: lane 4g + t a quarter of position g's row. Dimensions as paged_tile.cuh has them.
struct Keys {
    using S = Spread<HEAD_DIM, 2>;
    static_assert(S::K_BYTES == 16, "a load is a piece");
    unsigned word[S::K_WORDS] = {};  // defined, as in `multiply_units`

    __device__ __forceinline__ void take(int j, const uint4& v) {
        word[4 * j] = v.x, word[4 * j + 1] = v.y, word[4 * j + 2] = v.z, word[4 * j + 3] = v.w;
    }
    // Row `row` of the round.
    __device__ __forceinline__ void load(const Space& space, int row, int t) {
        const uint4* const from = space.cached() + key_piece(row, t);
#pragma unroll
        for (int j = 0; j < S::K_LOADS; ++j) take(j, from[row % 2 ? (j ^ 1) * 4 - 4 : j * 4]);
    }
    // The token's own.
    __device__ __forceinline__ void renew(const half_t* row, int t) {
#pragma unroll
        for (int j = 0; j < S::K_LOADS; ++j) take(j, reinterpret_cast<const uint4*>(row)[j * 4 + t]);
    }
    __device__ __forceinline__ void fragment(int step, unsigned (&a)[4]) const {
        a[0] = word[2 * step], a[2] = word[2 * step + 1], a[1] = a[3] = 0;
    }
};

// What a warp has of a round's V: lane 4g + t of four neighbouring positions of each product the dimensions `dim` and dim + 1,
// which are rows g and g + 8 of V^T.
struct Stripe {
    unsigned word[V_TILES][4] = {};

    // The lane's dimensions; and its first position within a product's first.
    static __device__ __forceinline__ int dim() {
        const unsigned thread = this_thread();
        return thread / 32 % STRIPES * 16 + thread % 32 / 4 * 2;
    }
    static __device__ __forceinline__ int first() { return this_thread() / 32 / STRIPES * V_TILE + this_thread() % 4 * 4; }
    __device__ __forceinline__ static constexpr int from(int tile) { return tile * SHARES * V_TILE; }

    // Of a round of which there are `count` positions.
    __device__ __forceinline__ void load(const Space& space, int count) {
        const uint4* const piece = space.cached() + value_piece(first(), dim() / 8);  // as far into all rows of the lane
        const unsigned* const its = reinterpret_cast<const unsigned*>(piece) + dim() / 2 % 4;
#pragma unroll
        for (int tile = 0; tile < V_TILES; ++tile) {
            if (from(tile) >= count) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) word[tile][i] = its[(from(tile) + i) * (HEAD_DIM / 2)];
        }
    }
    // In the place of what the cache has for position `last`, and of what is beyond it and counts for nothing: the token's own.
    __device__ __forceinline__ void renew(const half_t* row, int round, int last) {
        const int at = first();
        const unsigned own = *reinterpret_cast<const unsigned*>(row + dim());
#pragma unroll
        for (int tile = 0; tile < V_TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (round + from(tile) + at + i >= last) word[tile][i] = own;
            }
        }
    }
    __device__ __forceinline__ void fragment(int tile, unsigned (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = __byte_perm(word[tile][i / 2 * 2], word[tile][i / 2 * 2 + 1], i % 2 ? 0x7632 : 0x5410);
        }
    }
};

// Has K and V of a layer, as far as the block will attend to them, brought nearer: the first round's to shared memory, what is
// beyond to the L2, half a row to a thread.
__device__ __forceinline__ void fetch_layer(const Space& space, const ChainLayer& layer) {
    if (space.item.end == 0) return;
    copy_round(space, layer, space.item.begin);
    const unsigned thread = this_thread();
#pragma unroll 1
    for (int i = ROUND + thread / 4; i < space.item.end - space.item.begin; i += ROUND) {
        const half_t* const half = (thread & 1 ? layer.k : layer.v) + space.positions()[i] + (thread / 2 & 1) * (HEAD_DIM / 2);
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 2; j += 16) prefetch_sector(half + j);
    }
}
