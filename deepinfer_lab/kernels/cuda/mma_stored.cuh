// A few activation rows times a weight as it is stored (quant/layout.py): mma_small.cuh without the re-packing, for both layouts.
//
// A unit is 16 outputs by SPAN of K, a group or half of one. Lane 4g + t has outputs g and g + 8, and of the unit the k from
// t * SPAN / 4 on: a run of consecutive bytes, and of consecutive activations. It goes eight values, a piece, at a time. A piece of all lanes together
// is two products of 16 k: values 0 and 4 are neighbours in the first, then 1 and 5; 2 and 6 in the second, then 3 and 7. The
// reason for this order is that W4 has these pairs 16 bits apart, so that both become fp16 in one instruction, and W3 nearly.
//
// K is a multiple of the group, so nothing is padded. Beyond N the last output is read once more and never stored.
#pragma once
#include "mma_small.cuh"

// One lane's values of a unit and an output: BITS * SPAN / 32 bytes in as few loads as their alignment allows.
template <int BITS, int SPAN>
struct Run {
    unsigned word[(BITS * SPAN + 127) / 128];

    __device__ __forceinline__ void load(const unsigned char* __restrict__ from) {
        const unsigned* words = reinterpret_cast<const unsigned*>(from);
        const unsigned short* halves = reinterpret_cast<const unsigned short*>(from);
        if constexpr (BITS == 4 && SPAN == 128) {
            const uint4 v = load_once(reinterpret_cast<const uint4*>(from));
            word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
        } else if constexpr (BITS == 4 && SPAN == 64) {
            const uint2 v = load_once(reinterpret_cast<const uint2*>(from));
            word[0] = v.x, word[1] = v.y;
        } else if constexpr (BITS == 3 && SPAN == 128) {
            word[0] = words[0], word[1] = words[1], word[2] = words[2];
        } else if constexpr (BITS == 3 && SPAN == 64) {
            word[0] = halves[0] | static_cast<unsigned>(halves[1]) << 16, word[1] = halves[2];
        } else {
            word[0] = load_unit<BITS>(from, 0);
        }
    }

    // Eight values, with value i + 4 sixteen bits above value i. What else is in the word, decode_pair does not look at.
    __device__ __forceinline__ unsigned piece(int i) const {
        if constexpr (BITS == 4) return word[i];
        const int bit = 24 * i, last = (bit + 23) / 32;
        const unsigned bits = static_cast<unsigned>((static_cast<unsigned long long>(word[last]) << 32 | word[bit / 32]) >> bit % 32);
        const unsigned eight = last == bit / 32 ? word[last] >> bit % 32 : bits;
        return mask_set(eight << 4, 0x0FFF0000u, eight & 0xFFFFu);
    }
};

// Values i and i + 4 of a piece as fp16, exactly. A field at bit s of the mantissa of 1024, its sign flipped, makes 1024 +
// 2^s * (q + 2^(BITS-1)); that is scaled by 2^-s where s is not 0, and what is too much is taken away.
template <int BITS>
__device__ __forceinline__ unsigned decode_pair(unsigned piece, int i) {
    if constexpr (BITS == 4) {
        if (i >= 2) piece >>= 8;
        if (i % 2 == 0) return sub_pair(mask_flip(piece, 0x000F000Fu, 0x64086408u), 0x64086408u);  // 1032
        return fma_pair(mask_flip(piece, 0x00F000F0u, 0x64806480u), 0x2C002C00u, 0xD480D480u);    // 1/16, -72
    } else {
        if (i == 3) piece >>= 9;
        if (i % 3 == 0) return sub_pair(mask_flip(piece, 0x00070007u, 0x64046404u), 0x64046404u);            // 1028
        if (i == 1) return fma_pair(mask_flip(piece, 0x00380038u, 0x64206420u), 0x30003000u, 0xD820D820u);  // 1/8, -132
        return fma_pair(mask_flip(piece, 0x01C001C0u, 0x65006500u), 0x24002400u, 0xCD00CD00u);              // 1/64, -20
    }
}

// One warp's part of the sums, as mma_small_warp. AHEAD: pieces whose activations are on their way.
template <int BITS, int TILES, int AHEAD, int SPAN, int GROUP, int WARPS>
__device__ __forceinline__ void mma_stored_warp(const half_t* __restrict__ x, const unsigned char* __restrict__ packed,
                                                const half_t* __restrict__ scales, float (&sum)[TILES][4], int m, int n, int k) {
    constexpr int PIECES = SPAN / 32, DEPTH = SPAN == 128 ? 2 : 4;  // units whose weights are on their way
    constexpr int STEP_BYTES = WARPS * SPAN * BITS / 8, STEP_SCALES = WARPS * SPAN / GROUP;
    static_assert(DEPTH * PIECES % AHEAD == 0 && WARPS * SPAN % GROUP == 0 && GROUP % SPAN == 0, "whole rings and groups");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int units = k / SPAN, first_row = blockIdx.x * MMA_ROWS * TILES, first_output = blockIdx.y * MMA_N;
    const unsigned char* weight[2];  // where the warp's next unit begins. A step from there is WARPS units
    const half_t *scale_of[2], *row[TILES];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const size_t output = min(first_output + g + 8 * r, n - 1);
        weight[r] = packed + output * (k / 8 * BITS) + (warp * 4 + t) * (SPAN / 32 * BITS);
        scale_of[r] = scales + output * (k / GROUP) + warp * SPAN / GROUP;
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        row[i] = x + static_cast<size_t>(min(first_row + MMA_ROWS * i + g, m - 1)) * k + (warp * 4 + t) * (SPAN / 4);
    }

    int next = warp;
    Run<BITS, SPAN> weights[DEPTH][2];
    half_t scale[DEPTH][2];
    uint4 rows[AHEAD][TILES];
    const auto fetch_weights = [&](int step) {
        if (next + step * WARPS >= units) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) weights[step % DEPTH][r].load(weight[r] + step * STEP_BYTES);
#pragma unroll
        for (int r = 0; r < 2; ++r) scale[step % DEPTH][r] = scale_of[r][step * STEP_SCALES];
    };
    const auto fetch_rows = [&](int piece) {  // counted through all the warp's units
        const int step = piece / PIECES;
        if (next + step * WARPS >= units) return;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            rows[piece % AHEAD][i] =
                *reinterpret_cast<const uint4*>(row[i] + step * WARPS * SPAN + piece % PIECES * UNIT);
        }
    };

#pragma unroll
    for (int step = 0; step < DEPTH; ++step) fetch_weights(step);
#pragma unroll
    for (int piece = 0; piece < AHEAD; ++piece) fetch_rows(piece);
    while (next < units) {
#pragma unroll
        for (int step = 0; step < DEPTH; ++step) {
            if (next + step * WARPS >= units) return;  // the whole warp
            float part[TILES][4] = {};
#pragma unroll
            for (int piece = step * PIECES; piece < (step + 1) * PIECES; ++piece) {
                const unsigned upper = weights[step][0].piece(piece % PIECES), lower = weights[step][1].piece(piece % PIECES);
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const unsigned a[4] = {decode_pair<BITS>(upper, i), decode_pair<BITS>(lower, i),
                                           decode_pair<BITS>(upper, i + 1), decode_pair<BITS>(lower, i + 1)};
#pragma unroll
                    for (int j = 0; j < TILES; ++j) {
                        const uint4 b = rows[piece % AHEAD][j];
                        const unsigned near = i ? b.y : b.x, far = i ? b.w : b.z;  // activations i, i + 1; i + 4, i + 5
                        mma(part[j], a, __byte_perm(near, far, 0x5410), __byte_perm(near, far, 0x7632));
                    }
                }
                fetch_rows(piece + AHEAD);  // into registers that are free now
            }
            add_scaled(sum, part, scale[step][0] | static_cast<unsigned>(scale[step][1]) << 16);
            fetch_weights(step + DEPTH);
        }
        next += DEPTH * WARPS;
#pragma unroll
        for (int r = 0; r < 2; ++r) weight[r] += DEPTH * STEP_BYTES, scale_of[r] += DEPTH * STEP_SCALES;
#pragma unroll
        for (int i = 0; i < TILES; ++i) row[i] += DEPTH * WARPS * SPAN;
    }
}

template <int BITS, int TILES, int AHEAD, int WARPS>
__device__ __forceinline__ void mma_stored(const half_t* __restrict__ x, const unsigned char* __restrict__ packed,
                                           const half_t* __restrict__ scales, const half_t* __restrict__ bias,
                                           half_t* __restrict__ out, int m, int n, int k, int group) {
    float sum[TILES][4] = {};
    // The four lanes of a row read activations SPAN / 2 bytes apart: at 64 bytes, half of them wait for the same banks. A run of
    // W3 has no use for less: its loads would be of two bytes.
    constexpr int SPAN = BITS == 4 ? 64 : 128;
    if (group == 128) mma_stored_warp<BITS, TILES, AHEAD, SPAN, 128, WARPS>(x, packed, scales, sum, m, n, k);
    if (group == 64) mma_stored_warp<BITS, TILES, AHEAD, 64, 64, WARPS>(x, packed, scales, sum, m, n, k);
    if (group == 32) mma_stored_warp<BITS, TILES, AHEAD, 32, 32, WARPS>(x, packed, scales, sum, m, n, k);
    add_warps<TILES, WARPS>(sum, bias, out, m, n);
}
