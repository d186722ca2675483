// Activations in the order in which wide.cuh has them in shared memory, so that nothing but copies is left to do there.
//
// Lane 4g + t of a warp holds weights of k 8t .. 8t + 7 of a quarter (32 of K; quant/tiles.py), where a product wants k 2t,
// 2t + 1, 2t + 8 and 2t + 9 of 16. So the 16 pairs of activations of a quarter, 4t + i, lie transposed, at 4i + t. A row of 64 of
// k, two quarters, is 128 bytes in the 128-byte swizzle: chunk c, of 16 bytes, of row r at 16 (c ^ r % 8). Such rows follow one
// another along M, padded to a multiple of 8, and then along K, padded to units with zeros. Rows beyond M stay as they were.
#include "tile_units.cuh"
#include "wide_units.cuh"

constexpr int ARRANGERS = 128;

// A thread arranges a quarter of a row. x: [m, k]; arranged: [2 * units, padded_rows(m), 64].
extern "C" __global__ void __launch_bounds__(ARRANGERS) arrange_rows(const half_t* x, half_t* arranged, int m, int k) {
    take_turn();
    const int at = blockIdx.x * ARRANGERS + threadIdx.x, rows = padded_rows(m);
    const int quarter = at % 2, row = at / 2 % rows, half = at / 2 / rows, first = half * 64 + quarter * 32;
    if (row >= m || half >= (k + MMA_K - 1) / MMA_K * 2) return;
    uint4 v[4] = {};
    if (first < k) {
        const uint4* const from = reinterpret_cast<const uint4*>(x + static_cast<size_t>(row) * k + first);
#pragma unroll
        for (int t = 0; t < 4; ++t) v[t] = from[t];
    }
    uint4* const to = reinterpret_cast<uint4*>(arranged) + (static_cast<size_t>(half) * rows + row) * 8;
    to[quarter * 4 + 0 ^ row % 8] = {v[0].x, v[1].x, v[2].x, v[3].x};
    to[quarter * 4 + 1 ^ row % 8] = {v[0].y, v[1].y, v[2].y, v[3].y};
    to[quarter * 4 + 2 ^ row % 8] = {v[0].z, v[1].z, v[2].z, v[3].z};
    to[quarter * 4 + 3 ^ row % 8] = {v[0].w, v[1].w, v[2].w, v[3].w};
}
