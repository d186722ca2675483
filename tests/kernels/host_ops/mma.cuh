// Stands in for kernels/cuda/mma.cuh on a CPU. The two warp-wide instructions follow the PTX ISA's fragment tables literally.
#pragma once
#include "ptx.cuh"

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }

inline unsigned half_pair(float low, float high) { return to_half(low) | static_cast<unsigned>(to_half(high)) << 16; }
inline float half_of(unsigned pair, int which) { return to_float(static_cast<half_t>(pair >> 16 * which)); }
inline unsigned sub_pair(unsigned a, unsigned b) {
    return half_pair(half_of(a, 0) - half_of(b, 0), half_of(a, 1) - half_of(b, 1));
}
inline float exp2_approx(float x) { return std::exp2(x); }

inline unsigned lanes_a[1024][4], lanes_b[1024][2];

inline bool __any_sync(unsigned, bool mine) {
    const int warp = threadIdx.x / 32 * 32;
    lanes_a[threadIdx.x][0] = mine;
    sync_warp();
    bool any = false;
    for (int lane = 0; lane < 32; ++lane) any |= lanes_a[warp + lane][0] != 0;
    sync_warp();
    return any;
}

inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const int warp = threadIdx.x / 32 * 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i) lanes_a[threadIdx.x][i] = a[i];
    lanes_b[threadIdx.x][0] = b0, lanes_b[threadIdx.x][1] = b1;
    sync_warp();
    for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        for (int k = 0; k < 16; ++k) {  // a: element k of a row; b: element k of a column
            const unsigned x = lanes_a[warp + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const unsigned y = lanes_b[warp + column * 4 + k % 8 / 2][k / 8];
            d[i] += half_of(x, k % 2) * half_of(y, k % 2);
        }
    }
    sync_warp();
}

inline unsigned transpose(unsigned pair) {
    const int warp = threadIdx.x / 32 * 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    lanes_a[threadIdx.x][0] = pair;
    sync_warp();
    unsigned result = 0;
    for (int i = 0; i < 2; ++i) {  // element [g, 2t + i] of the result is [2t + i, g] of the source
        const unsigned source = lanes_a[warp + (2 * t + i) * 4 + g / 2][0];
        result |= (source >> 16 * (g % 2) & 0xFFFF) << 16 * i;
    }
    sync_warp();
    return result;
}
