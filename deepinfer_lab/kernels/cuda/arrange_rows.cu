// Activations in the order in which wide.cuh has them in shared memory, so that nothing but copies is left to do there.
//
// Lane 4g + t of a warp holds weights of k 8t .. 8t + 7 of a quarter (32 of K; quant/tiles.py), where a product wants k 2t,
// 2t + 1, 2t + 8 and 2t + 9 of 16. So the 16 pairs of activations of a quarter, 4t + i, lie transposed, at 4i + t. A row of 64
// of k, two quarters, is 128 bytes in the 128-byte swizzle: chunk c, of 16 bytes, of row r at 16 (c ^ r % 8). Such rows follow
// one another along M, padded to a multiple of 8, and then along K, padded to units with zeros. Rows beyond M stay as they
// were.
#include "tile_units.cuh"
#include "wide_units.cuh"

// Threads of a block, few enough to find room beside one of wide.cuh, where they wait for its end; rows, and halves of units,
// that they move.
constexpr int ARRANGERS = 128, SOME_ROWS = ARRANGERS / 8, SOME_HALVES = 4;

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
    const int rows = padded_rows(m), across = (rows + SOME_ROWS - 1) / SOME_ROWS, down = blockIdx.x / across;
    const int chunk = threadIdx.x % 8, row = (blockIdx.x - down * across) * SOME_ROWS + threadIdx.x / 8;
    const int half = down * SOME_HALVES, first = half * 64 + chunk * 8, halves = (k + MMA_K - 1) / MMA_K * 2;
    const half_t* const from = x + static_cast<size_t>(row) * k + first;
    uint4* const to = reinterpret_cast<uint4*>(arranged) + (static_cast<size_t>(half) * rows + row) * 8 + (chunk ^ row % 8);
    uint4 v[SOME_HALVES] = {};
#pragma unroll
    for (int i = 0; i < SOME_HALVES; ++i) {  // all on their way before the first is waited for
        if (row < m && first + i * 64 < k) v[i] = *reinterpret_cast<const uint4*>(from + i * 64);
    }
#pragma unroll
    for (int i = 0; i < SOME_HALVES; ++i) {
        unsigned words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
        transpose_quad(words, chunk % 4);
        if (row < m && half + i < halves) to[static_cast<size_t>(i) * rows * 8] = {words[0], words[1], words[2], words[3]};
    }
}
