// What a block of chain_attention.cuh has of a sequence's positions, and K and V of a round of them in the registers of its
// warps.
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

// What a warp has of a round's K: lane 4g + t a quarter of position g's row. Dimensions as paged_tile.cuh has them.
struct Keys {
    using S = Spread<HEAD_DIM, 2>;
    unsigned word[S::K_WORDS] = {};  // defined, as in `multiply_units`

    __device__ __forceinline__ void load(const half_t* row, int t) {
        const auto* const bytes = reinterpret_cast<const unsigned char*>(row);
#pragma unroll
        for (int j = 0; j < S::K_LOADS; ++j) {
            ::load<S::K_BYTES>(word + j * words_of(S::K_BYTES), bytes + (j * 4 + t) * S::K_BYTES);
        }
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

    // Of the round that `positions` are about, of which there are `count`.
    __device__ __forceinline__ void load(const half_t* v, int stride, const int* positions, int count) {
#pragma unroll
        for (int tile = 0; tile < V_TILES; ++tile) {
            if (from(tile) >= count) continue;
            const half_t* row = v + positions[from(tile) + first()] + dim();  // four neighbours are in one block
#pragma unroll
            for (int i = 0; i < 4; ++i, row += stride) word[tile][i] = *reinterpret_cast<const unsigned*>(row);
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

// What a warp has of a round.
struct RoundTile {
    Keys keys;
    Stripe stripe;

    // From position `round` on.
    __device__ __forceinline__ void load(const Space& space, const ChainLayer& layer, int round) {
        const Item& its = space.item;
        const int* const positions = space.positions() + round - its.begin;
        const int own = this_thread() / 32 * EACH_WARP, lane = this_thread() % 32;
        if (round + own < its.end) keys.load(layer.k + positions[own + lane / 4], lane % 4);
        stripe.load(layer.v, space.of.kv_heads * HEAD_DIM, positions, its.end - round);
    }
};

// Has K and V of a layer brought to the L2, as far as the block will attend to them: half a row to a thread.
__device__ __forceinline__ void prefetch_layer(const Space& space, const ChainLayer& layer) {
    const unsigned thread = this_thread();
#pragma unroll 1
    for (int i = thread / 4; i < space.item.end - space.item.begin; i += ROUND) {
        const half_t* const half = (thread & 1 ? layer.k : layer.v) + space.positions()[i] + (thread / 2 & 1) * (HEAD_DIM / 2);
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 2; j += 16) prefetch_sector(half + j);
    }
}
