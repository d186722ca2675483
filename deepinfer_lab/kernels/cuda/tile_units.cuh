// What the kernels share whose blocks share the units of a weight in tiles (quant/tiles.py).
//
// Blocks share all units of all tiles of the output evenly, in order, wherever one tile ends and the next begins: any number of
// blocks up to that of units will do. Where several have parts of one tile, each leaves its sums in `partial` (two places a
// block: one for the tile in which it begins, one for that in which it ends), and the last to arrive adds them, always in the
// same order. Nobody waits. `arrived` counts them, a counter to a tile: zero before and after.
#pragma once
#include "async_ptx.cuh"
#include "mma_unit.cuh"

// A lane's part of a unit: half of the tiles' with 4 bits, where the halves follow one another, and all of it with 3. Tiles are
// padded to multiples of STORED_K.
struct W4Tiles {
    static constexpr int UNIT_K = 64, STORED_K = MMA_K, BYTES = 512;
    unsigned word[4];

    __device__ __forceinline__ void load(const char* unit, int lane) {
        const uint4 v = reinterpret_cast<const uint4*>(unit)[lane];
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    }
    // The A fragment of a product: of 16 of k each.
    __device__ __forceinline__ void fragment(int product, unsigned (&a)[4]) const { UnpackW4::fragment(word, product, a); }
};
struct W3Tiles {
    static constexpr int UNIT_K = MMA_K, STORED_K = MMA_K, BYTES = 768;
    unsigned word[6];

    __device__ __forceinline__ void load(const char* unit, int lane) {
        const uint4 v = reinterpret_cast<const uint4*>(unit)[lane];
        const uint2 rest = reinterpret_cast<const uint2*>(unit + 512)[lane];
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w, word[4] = rest.x, word[5] = rest.y;
    }
    __device__ __forceinline__ void fragment(int product, unsigned (&a)[4]) const {
        UnpackW3::fragment(word + product / 4 * UnpackW3::WORDS, product % 4, a);
    }
};

// Where the evenly shared units of block `block` begin: units in front of it.
__device__ __forceinline__ int share(int block, int units) {
    return static_cast<int>(static_cast<long long>(units) * block / static_cast<int>(gridDim.x));
}
// The block that has this unit.
__device__ __forceinline__ int owner(int unit, int units) {
    return static_cast<int>(((unit + 1LL) * static_cast<int>(gridDim.x) - 1) / units);
}

// What a block has of one tile of the output: the tile, and of its units the first and how many.
struct Part {
    int tile, begin, count;

    // From unit `at` on, of all tiles' units, for a block that has those before `end`.
    __device__ __forceinline__ Part(int at, int end, int units) : tile(at / units) {
        const int from = tile * units;
        begin = at - from;
        count = min(from + units, end) - at;
    }
};

// The blocks that have parts of a tile.
struct Sharers {
    int tile, first, final;
    bool began_before;  // `first` has part of another tile, too

    __device__ __forceinline__ Sharers(int tile, int units, int all) : tile(tile) {
        first = owner(tile * units, all), final = owner(tile * units + units - 1, all);
        began_before = share(first, all) < tile * units;
    }
    __device__ __forceinline__ bool one() const { return first == final; }
    // A block's first place, or its second if it began with another tile, as only this tile's first block can have.
    __device__ __forceinline__ size_t place(int block) const {
        return 2 * static_cast<size_t>(block) + (block == first && began_before);
    }
    // Whether all others have arrived. For one thread, after all of its block have fenced their sums.
    __device__ __forceinline__ bool arrive(unsigned* arrived) const {
        const unsigned others = final - first;
        return atomicInc(arrived + tile, others) == others;
    }
};

__device__ __forceinline__ void add(float4& sum, const float4& more) {
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
}

// The sums of all blocks' parts of a tile: items thread, thread + THREADS, ... of four outputs, those before `items` of ITEMS.
template <int ITEMS, int THREADS, class Store>
__device__ __forceinline__ void add_parts(const Sharers& of, const float4* partial, int thread, int items, const Store& store) {
    constexpr int EACH = ITEMS / THREADS;
    constexpr int AT_ONCE = EACH % 8 == 0 ? 8 : EACH % 6 == 0 ? 6 : EACH % 4 == 0 ? 4 : EACH % 2 == 0 ? 2 : 1;
    __threadfence();
#pragma unroll 1
    for (int item = thread; item < items; item += AT_ONCE * THREADS) {
        float4 sum[AT_ONCE] = {};
        for (int block = of.first; block <= of.final; ++block) {
            const float4* const from = partial + of.place(block) * ITEMS + item;
            float4 more[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) more[i] = load_shared_by_blocks(from + i * THREADS);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) add(sum[i], more[i]);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) store(sum[i], item + i * THREADS);
    }
}
