// What chain_weights.cuh multiplies: weights as bytes, and activations in digits (chain_digits.cuh).
#pragma once
#include "chain_space.cuh"

// Weights as bytes, as they lie in a word or nearly so: q + ZERO, and those of outputs 8 .. 15 HIGH times that. registers: of
// word w of two quarters of k (quant/tiles.py), for output g and g + 8 the four values of k, k + 2, k + 1 and k + 3.
//
// 4 bits: the lower halves of a word's bytes, and the upper ones.
template <class Unpack>
struct Bytes {
    static constexpr int ZERO = 8, HIGH = 16, WORDS = 4;

    static __device__ __forceinline__ void registers(const unsigned* words, int w, unsigned& low, unsigned& high) {
        low = words[w] & 0x0F0F0F0Fu, high = words[w] & 0xF0F0F0F0u;
    }
};
// 3 bits: pairs 4w and 4w + 2 of the sixteen, and 4w + 1 and 4w + 3, where they are brought to bits 0 and 8, and 3 and 11.
template <>
struct Bytes<W3Tiles> {
    static constexpr int ZERO = 4, HIGH = 8, WORDS = 3;

    // The bytes' lower bits or the next ones, bytes 0 and 2 of `even`, and 1 and 3 of `odd`.
    static __device__ __forceinline__ unsigned lower(unsigned even, unsigned odd) { return even & 0x00070007u | odd & 0x07000700u; }
    static __device__ __forceinline__ unsigned upper(unsigned even, unsigned odd) { return even & 0x00380038u | odd & 0x38003800u; }
    static __device__ __forceinline__ void registers(const unsigned* words, int w, unsigned& low, unsigned& high) {
        const unsigned a = words[0], b = words[1], c = words[2];
        if (w == 0) low = lower(a, a << 2), high = upper(a, a << 2);
        if (w == 1) low = lower(a >> 12, b << 5), high = upper(b << 3, b << 5);
        if (w == 2) low = lower(b >> 9, c << 8), high = upper(b >> 9, c << 8);
        if (w == 3) {
            const unsigned last = a >> 4 & 0x08000800u | b >> 3 & 0x10001000u | c >> 2 & 0x20002000u;  // pair 15, bit by bit
            low = lower(c >> 6, c >> 4), high = c >> 6 & 0x00380038u | last;
        }
    }
};

// Activations of a unit, as a product of lane 4g + t takes them: two bytes, as `keep_fours` (chain_digits.cuh) has made them,
// column 0 the upper, 1 the lower; zeros in the other six. Sums are whole numbers, and exact. ZERO times the activations' own
// comes off in the end, since weights are stored with so much more.
template <class Unpack>
struct Operand {
    uint4 b[2] = {};
    Total total = {};
    const char* digits;
    const Total* totals;
    bool there;

    __device__ __forceinline__ Operand(const Space& space, int g, int t)
        : digits(space.digits(g % 2) + 32 * t), totals(space.totals()), there(g < 2) {}
    __device__ __forceinline__ void load(int unit) {
        total = totals[unit];
        if (!there) return;
        const auto* const from = reinterpret_cast<const uint4*>(digits + unit * MMA_K);
        b[0] = from[0], b[1] = from[1];
    }
    struct Found {
        int sum[4];
        Total total;
    };
    __device__ __forceinline__ Found multiply(const unsigned* words) const {
        Found found = {{}, total};
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            unsigned a[4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Bytes<Unpack>::registers(words + p / 2 * Bytes<Unpack>::WORDS, p % 2 * 2 + i, a[2 * i], a[2 * i + 1]);
            }
            mma_bytes(found.sum, a, p % 2 ? b[p / 2].z : b[p / 2].x, p % 2 ? b[p / 2].w : b[p / 2].y);
        }
        return found;
    }
    // By lanes 4g: outputs g and g + 8, without the weights' scales, the latter HIGH-fold.
    static __device__ __forceinline__ float low(const Found& found) {
        return (found.sum[0] * 256 + found.sum[1] - Bytes<Unpack>::ZERO * found.total.sum) * found.total.step;
    }
    static __device__ __forceinline__ float high(const Found& found) {
        constexpr int ZERO = Bytes<Unpack>::ZERO * Bytes<Unpack>::HIGH;
        return (found.sum[2] * 256 + found.sum[3] - ZERO * found.total.sum) * found.total.step;
    }
};
