// Who does what of wide.cuh, and how its operands lie.
//
// Each block first has whole tiles to itself, as many as all blocks can have; units of the tiles that are left over, all blocks
// share evenly, in order, wherever one tile ends and the next begins. So most results go straight to the output, and the sums
// that must be added are one tile a block, mostly.
#pragma once
#include "tile_units.cuh"

constexpr int ROW_BYTES = 128;  // of a row's activations: 64 of k, half a unit
constexpr int PAIR_BYTES = 512;  // of results of a tile and 16 rows
__device__ __forceinline__ int padded_rows(int m) { return (m + 7) / 8 * 8; }  // of the arranged activations

// Units of one tile that follow one another.
struct Stretch {
    int tile, begin, count;
};

struct Shares {
    int units, blocks, block;  // of K; blocks; this one
    int whole, each, more;     // tiles that a block has to itself; shared units that each has; blocks that have one more

    __device__ __forceinline__ Shares(int tiles, int units, int blocks, int block)
        : units(units), blocks(blocks), block(block), whole(tiles / blocks) {
        const int rest = tiles % blocks * units;
        each = rest / blocks, more = rest % blocks;
    }
    // Where the shared units of a block begin.
    __device__ __forceinline__ int share(int block) const { return each * block + min(block, more); }
    // The block that has this one of the shared units.
    __device__ __forceinline__ int owner(int unit) const {
        const int of_larger = (each + 1) * more;
        return unit < of_larger ? unit / (each + 1) : more + (unit - of_larger) / each;
    }
    __device__ __forceinline__ bool shared(int tile) const { return tile >= whole * blocks; }

    __device__ __forceinline__ int stretches() const {
        const int begin = share(block), end = share(block + 1);
        return whole + (end > begin ? (end - 1) / units - begin / units + 1 : 0);
    }
    __device__ __forceinline__ Stretch stretch(int index) const {
        if (index < whole) return {index * blocks + block, 0, units};
        const int begin = share(block), end = share(block + 1), tile = begin / units + index - whole;
        const int from = max(begin - tile * units, 0), to = min(end - tile * units, units);
        return {whole * blocks + tile, from, to - from};
    }
};

// The blocks that have parts of a shared tile.
struct Adders {
    int first, final;
    bool began_before;  // `first` has part of another tile, too

    // tile: of those that are shared.
    __device__ __forceinline__ Adders(const Shares& of, int tile) {
        const int begin = tile * of.units;
        first = of.owner(begin), final = of.owner(begin + of.units - 1);
        began_before = of.share(first) < begin;
    }
    // A block's first place, or its second if it began with another tile, as only this tile's first block can have.
    __device__ __forceinline__ size_t place(int block) const {
        return 2 * static_cast<size_t>(block) + (block == first && began_before);
    }
};

// A lane's words of a tile's unit.
struct W4Words {
    static constexpr int BYTES = 1024;
    unsigned word[8];

    __device__ __forceinline__ void load(const char* unit, int lane) {
        const uint4 v = reinterpret_cast<const uint4*>(unit)[lane], w = reinterpret_cast<const uint4*>(unit)[32 + lane];
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
        word[4] = w.x, word[5] = w.y, word[6] = w.z, word[7] = w.w;
    }
    // The A fragment of a product: of 16 of k each.
    __device__ __forceinline__ void fragment(int product, unsigned (&a)[4]) const {
        UnpackW4::fragment(word + product / 4 * UnpackW4::WORDS, product % 4, a);
    }
};
struct W3Words : W3Tiles {};
