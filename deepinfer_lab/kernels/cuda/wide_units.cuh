// How the operands of wide.cuh lie.
//
// Lane 4g + t of a warp holds weights of k 8t .. 8t + 7 of a quarter (32 of K; quant/tiles.py), where a product wants k 2t,
// 2t + 1, 2t + 8 and 2t + 9 of 16. So the 16 pairs of activations of a quarter, 4t + i, lie transposed, at 4i + t. A row of 64
// of k, two quarters, is 128 bytes in the 128-byte swizzle: chunk c, of 16 bytes, of row r at 16 (c ^ r % 8). Rows beyond M
// stay as they were: nobody uses what comes of them.
#pragma once
#include "tile_units.cuh"

constexpr int ROW_BYTES = 128;   // of a row's activations: 64 of k, half a unit
constexpr int PAIR_BYTES = 512;  // of results of a tile and 16 rows
__device__ __forceinline__ int padded_rows(int m) { return (m + 7) / 8 * 8; }  // of arranged activations

// a / b, neither negative, and mostly at once: a division takes some 150 cycles, and blocks begin with several.
__device__ __forceinline__ int over(int a, int b) { return b == 1 ? a : a < b ? 0 : static_cast<unsigned>(a) / b; }

// Units of one tile that follow one another.
struct Stretch {
    int tile, begin, count;
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
