// What a block of chain_attention.cuh has of a sequence's positions, and K and V of a round of them in the registers of its
// warps.
#pragma once
#include "chain_space.cuh"
#include "paged_tile.cuh"
#include "prefetch.cuh"

constexpr int STRIPES = HEAD_DIM / 16, SHARES = CHAIN_WARPS / STRIPES;  // of D; of a round's positions, for each of them
constexpr int V_TILE = 2 * EACH_WARP, V_TILES = ROUND / V_TILE / SHARES;  // positions of a product; products of a warp

// What a block's worth of work is: a row's positions begin .. end - 1 for one KV head, which are the row's split number
// `split`.
struct Item {
    int row = 0, kv_head, split, begin, end, last;  // last: the row's last position

    template <int ROWS>
    __device__ __forceinline__ Item(const Space<ROWS>& space, unsigned number) {
#pragma unroll
        for (int r = 1; r < ROWS; ++r) {
            const unsigned before = space.sequences[r - 1].splits * space.of.kv_heads;
            if (row == r - 1 && number >= before) number -= before, row = r;
        }
        const Sequence& its = space.sequences[row];
        kv_head = number / its.splits, split = number % its.splits, last = its.length - 1;
        begin = split * its.size, end = min(its.length, begin + its.size);
    }
};

template <int ROWS>
__device__ __forceinline__ Pages pages_of(const Space<ROWS>& space, const Item& its) {
    const long long* const table = space.of.block_table + static_cast<size_t>(its.row) * space.of.columns;
    return {table, space.of.block_size, space.of.reciprocal, its.end - 1};
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

    // Positions from `round` on.
    __device__ __forceinline__ void load(const half_t* v, int kv_heads, const Pages& pages, int round) {
        const int at = first();
#pragma unroll
        for (int tile = 0; tile < V_TILES; ++tile) {
            if (round + from(tile) > pages.last) continue;
            // Four neighbours are in one block. What the cache has beyond the last position will be renewed.
            const half_t* row = v + static_cast<size_t>(pages.four(round + from(tile) + at).x) * kv_heads * HEAD_DIM + dim();
#pragma unroll
            for (int i = 0; i < 4; ++i, row += kv_heads * HEAD_DIM) word[tile][i] = *reinterpret_cast<const unsigned*>(row);
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

    // Positions from `round` on. What the item is is found out again: registers are scarce.
    template <int ROWS>
    __device__ __forceinline__ void load(const Space<ROWS>& space, int phase, int item, int round) {
        const ChainLayer& layer = space.layer(settled(phase) / PHASES);
        const Item its(space, settled(item));
        const Pages pages = pages_of(space, its);
        const int warp = this_thread() / 32, lane = this_thread() % 32, first = its.kv_head * HEAD_DIM;
        if (round + warp * EACH_WARP < its.end) {
            const int slot = pages.slot(min(round + warp * EACH_WARP + lane / 4, its.end - 1));
            keys.load(layer.k + first + static_cast<size_t>(slot) * space.of.kv_heads * HEAD_DIM, lane % 4);
        }
        stripe.load(layer.v + first, space.of.kv_heads, pages, round);
    }
};

// Has K and V of a layer brought to the L2, as far as the block will attend to them: half a row to a thread.
template <int ROWS>
__device__ __forceinline__ void prefetch_positions(const Space<ROWS>& space, const ChainLayer& layer, int item) {
    const Item its(space, item);
    const Pages pages = pages_of(space, its);
    const unsigned thread = this_thread();
#pragma unroll 1
    for (int position = its.begin + thread / 4; position < its.end; position += ROUND) {
        const size_t vector = static_cast<size_t>(pages.slot(position)) * space.of.kv_heads + its.kv_head;
        const half_t* const half = (thread & 1 ? layer.k : layer.v) + vector * HEAD_DIM + (thread / 2 & 1) * (HEAD_DIM / 2);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i += 16) prefetch_sector(half + i);
    }
}
template <int ROWS>
__device__ __forceinline__ void prefetch_layer(const Space<ROWS>& space, const ChainLayer& layer) {
#pragma unroll 1
    for (int item = blockIdx.x; item < space.items; item += gridDim.x) prefetch_positions(space, layer, item);
}
