// Activations in the order in which wide.cuh has them in shared memory (wide_units.cuh), so that nothing but copies is left to
// do there. Halves of units follow one another, each of all rows, padded to a multiple of 8; beyond K are zeros.
//
// Grid: parts of K, each of all parts of M.
#include "wide_units.cuh"

// Threads of a block, few enough to find room beside one of wide.cuh, where they wait for its end; rows, and halves of units,
// that they move.
constexpr int ARRANGERS = 128, ARRANGED_ROWS = ARRANGERS / 8, ARRANGED_HALVES = 4;

// The four words of a lane become the words of the same number of all four lanes of its quad, `lane` the place in it.
__device__ __forceinline__ void transpose_quad(unsigned (&v)[4], int lane) {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
        const bool upper = lane & distance;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & distance) continue;
            unsigned &low = v[i], &high = v[i + distance];
            const unsigned given = upper ? low : high, got = __shfl_xor_sync(0xFFFFFFFFu, given, distance);
            (upper ? low : high) = got;
        }
    }
}

// A thread moves 16 bytes of each half, eight lanes the 64 of k of a row: reads and writes are of whole lines. x: [m, k];
// arranged: [2 * units, padded_rows(m), 64].
extern "C" __global__ void __launch_bounds__(ARRANGERS, 2048 / ARRANGERS)
arrange_rows(const half_t* x, half_t* arranged, int m, int k) {
    take_turn();
    const int rows = padded_rows(m), across = (rows + ARRANGED_ROWS - 1) / ARRANGED_ROWS, down = blockIdx.x / across;
    const int chunk = threadIdx.x % 8, row = (blockIdx.x - down * across) * ARRANGED_ROWS + threadIdx.x / 8;
    const int half = down * ARRANGED_HALVES, first = half * 64 + chunk * 8, halves = (k + MMA_K - 1) / MMA_K * 2;
    const half_t* const from = x + static_cast<size_t>(row) * k + first;
    uint4* const to = reinterpret_cast<uint4*>(arranged) + (static_cast<size_t>(half) * rows + row) * 8 + (chunk ^ row % 8);
    uint4 v[ARRANGED_HALVES] = {};
#pragma unroll
    for (int i = 0; i < ARRANGED_HALVES; ++i) {  // all on their way before the first is waited for
        if (row < m && first + i * 64 < k) v[i] = *reinterpret_cast<const uint4*>(from + i * 64);
    }
#pragma unroll
    for (int i = 0; i < ARRANGED_HALVES; ++i) {
        unsigned words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
        transpose_quad(words, chunk % 4);
        if (row < m && half + i < halves) to[static_cast<size_t>(i) * rows * 8] = {words[0], words[1], words[2], words[3]};
    }
}
