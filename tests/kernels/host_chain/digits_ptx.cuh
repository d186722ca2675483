// Stands in for kernels/cuda/digits_ptx.cuh on a CPU, by the PTX ISA's fragment tables.
#pragma once
#include "mma.cuh"

inline void mma_bytes(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const int warp = threadIdx.x / 32 * 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; ++i) lanes_a[threadIdx.x][i] = a[i];
    lanes_b[threadIdx.x][0] = b0, lanes_b[threadIdx.x][1] = b1;
    sync_warp();
    for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        for (int k = 0; k < 32; ++k) {
            const unsigned x = lanes_a[warp + row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2];
            const unsigned y = lanes_b[warp + column * 4 + k % 16 / 4][k / 16];
            d[i] += static_cast<int>(x >> 8 * (k % 4) & 0xFF) * static_cast<signed char>(y >> 8 * (k % 4) & 0xFF);
        }
    }
    sync_warp();
}

template <class T, class Add>
T of_warp(T value, const Add& add) {
    lanes_a[threadIdx.x][0] = value;
    sync_warp();
    T result = lanes_a[threadIdx.x / 32 * 32][0];
    for (int lane = 1; lane < 32; ++lane) result = add(result, static_cast<T>(lanes_a[threadIdx.x / 32 * 32 + lane][0]));
    sync_warp();
    return result;
}
inline unsigned warp_max(unsigned value) {
    return of_warp(value, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline int warp_total(int value) { return of_warp(value, [](int a, int b) { return a + b; }); }
