// Who does what of wide.cuh, and how its operands lie. "Group": the blocks of a cluster, which do the same units of K of the same
// rows, for outputs of their own; a group's tile is as many outputs as all of them own.
//
// Each group first has whole tiles to itself, as many as all groups can have; units of the tiles that are left over, all groups
// share evenly, in order, wherever one tile ends and the next begins. So most results go straight to the output, and the sums
// that must be added are one tile a group, mostly.
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
    int units, groups, group;  // of K; groups; this one
    int whole, each, more;     // tiles that a group has to itself; shared units that each has; groups that have one more

    __device__ __forceinline__ Shares(int tiles, int units, int groups, int group)
        : units(units), groups(groups), group(group), whole(tiles / groups) {
        const int rest = tiles % groups * units;
        each = rest / groups, more = rest % groups;
    }
    // Where the shared units of a group begin.
    __device__ __forceinline__ int share(int group) const { return each * group + min(group, more); }
    // The group that has this one of the shared units.
    __device__ __forceinline__ int owner(int unit) const {
        const int of_larger = (each + 1) * more;
        return unit < of_larger ? unit / (each + 1) : more + (unit - of_larger) / each;
    }
    __device__ __forceinline__ bool shared(int tile) const { return tile >= whole * groups; }

    // All units of this group.
    __device__ __forceinline__ int mine() const { return whole * units + share(group + 1) - share(group); }
    __device__ __forceinline__ int stretches() const {
        const int begin = share(group), end = share(group + 1);
        return whole + (end > begin ? (end - 1) / units - begin / units + 1 : 0);
    }
    __device__ __forceinline__ Stretch stretch(int index) const {
        if (index < whole) return {index * groups + group, 0, units};
        const int begin = share(group), end = share(group + 1), tile = begin / units + index - whole;
        const int from = max(begin - tile * units, 0), to = min(end - tile * units, units);
        return {whole * groups + tile, from, to - from};
    }
};

// The groups that have parts of a shared tile.
struct Adders {
    int first, final;
    bool began_before;  // `first` has part of another tile, too

    __device__ __forceinline__ Adders(const Shares& of, int tile) {
        const int begin = (tile - of.whole * of.groups) * of.units;
        first = of.owner(begin), final = of.owner(begin + of.units - 1);
        began_before = of.share(first) < begin;
    }
    // A group's first place, or its second if it began with another tile, as only this tile's first group can have.
    __device__ __forceinline__ size_t place(int group) const {
        return 2 * static_cast<size_t>(group) + (group == first && began_before);
    }
};

// A lane's words of a tile's unit, loaded half by half: 64 of k, four products each.
struct W4Words {
    static constexpr int BYTES = 1024;
    unsigned word[4];

    __device__ __forceinline__ void load(const char* unit, int lane, int half) {
        const uint4 v = reinterpret_cast<const uint4*>(unit)[32 * half + lane];
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    }
    // The A fragment of a product of the half at hand.
    __device__ __forceinline__ void fragment(int product, unsigned (&a)[4]) const {
        UnpackW4::fragment(word, product % 4, a);
    }
};
struct W3Words {
    static constexpr int BYTES = 768;
    unsigned word[3], kept;  // the second half's first word comes with the first half's

    __device__ __forceinline__ void load(const char* unit, int lane, int half) {
        if (half == 0) {
            const uint4 v = reinterpret_cast<const uint4*>(unit)[lane];
            word[0] = v.x, word[1] = v.y, word[2] = v.z, kept = v.w;
        } else {
            const uint2 v = reinterpret_cast<const uint2*>(unit + 512)[lane];
            word[0] = kept, word[1] = v.x, word[2] = v.y;
        }
    }
    __device__ __forceinline__ void fragment(int product, unsigned (&a)[4]) const {
        UnpackW3::fragment(word, product % 4, a);
    }
};
