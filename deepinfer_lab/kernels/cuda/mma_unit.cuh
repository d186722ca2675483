// What the products of a few activation rows and a weight in tiles (quant/tiles.py) share, whatever its bits.
//
//   D[16 outputs, 8 rows] += A[16 outputs, 16 of K: weights] * B[16 of K, 8 rows: activations]
//
// A unit, 16 outputs by 128 of k, is eight such products. Which of its k stand at which place of a product is free, as long as
// A and B agree: lane 4g + t has activations 8t .. 8t + 7 of each quarter of 32, 16 bytes of row g as they lie in memory.
// Weights go in as the integers that they are and a scale meets fp32 sums, so nothing is rounded or can overflow before the
// output.
#pragma once
#include "async_ptx.cuh"
#include "silu.cuh"
#include "unpack.cuh"
#include "unpack_w3_mma.cuh"
#include "unpack_w4_mma.cuh"

// threadIdx.x, at which the compiler starts anew: it would keep all that follows from it in registers, through every loop.
__device__ __forceinline__ unsigned this_thread() { return settled(threadIdx.x); }

constexpr int MMA_N = 16, MMA_K = 128, MMA_ROWS = 8, QUARTERS = 4;

// A lane's part of a unit: 16 bytes, and where those of all lanes end 16 more (W4) or 8 (W3).
template <class Unpack>
struct Unit {
    static constexpr int BYTES = MMA_N * MMA_K / 8 * Unpack::BITS;
    unsigned word[2 * Unpack::WORDS];

    // From global memory, for the only time.
    __device__ __forceinline__ void load(const unsigned char* __restrict__ unit, int lane) {
        const uint4* lines = reinterpret_cast<const uint4*>(unit);
        set(load_once(lines + lane));
        if constexpr (Unpack::BITS == 4) set_rest(load_once(lines + 32 + lane));
        if constexpr (Unpack::BITS == 3) set_rest(load_once(reinterpret_cast<const uint2*>(lines + 32) + lane));
    }

    // The A fragment of the first or the second product of a quarter.
    __device__ __forceinline__ void fragment(int quarter, int product, unsigned (&a)[4]) const {
        Unpack::fragment(word + quarter / 2 * Unpack::WORDS, quarter % 2 * 2 + product, a);
    }

    // sum += the products of a quarter. b: of each eight rows, this lane's eight activations.
    template <int TILES>
    __device__ __forceinline__ void multiply(int quarter, const uint4 (&b)[TILES], float (&sum)[TILES][4]) const {
        unsigned a[4];
        fragment(quarter, 0, a);
#pragma unroll
        for (int i = 0; i < TILES; ++i) mma(sum[i], a, b[i].x, b[i].y);
        fragment(quarter, 1, a);
#pragma unroll
        for (int i = 0; i < TILES; ++i) mma(sum[i], a, b[i].z, b[i].w);
    }

private:
    __device__ __forceinline__ void set(const uint4& v) { word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w; }
    __device__ __forceinline__ void set_rest(const uint4& v) { word[4] = v.x, word[5] = v.y, word[6] = v.z, word[7] = v.w; }
    __device__ __forceinline__ void set_rest(const uint2& v) { word[4] = v.x, word[5] = v.y; }
};

// sum += part * scales, and part = 0. A pair holds the scales of outputs g and g + 8.
template <int TILES>
__device__ __forceinline__ void add_scaled(float (&sum)[TILES][4], float (&part)[TILES][4], unsigned pair) {
    const float low = to_float(static_cast<half_t>(pair)), high = to_float(static_cast<half_t>(pair >> 16));
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            sum[i][j] = fmaf(j < 2 ? low : high, part[i][j], sum[i][j]);
            part[i][j] = 0.0f;
        }
    }
}

// What becomes of the sums. bias: [n] or null. residual: [m, n] or null, maybe `out` itself. gated: outputs 0 .. 7 of each 16
// are gates of 8 .. 15, and out is [m, n / 2]; no residual then.
struct Output {
    const half_t* bias;
    const half_t* residual;
    half_t* out;
    int m, n, gated;
};

// The sums of a block's warps, added always in the same order, to the output. partial: shared, 128 * TILES floats a warp.
// Whoever writes there again waits for all threads first.
template <int TILES, int WARPS>
__device__ __forceinline__ void add_warps(float* partial, const float (&sum)[TILES][4], const Output& o, int tile) {
    constexpr int SUMS = 128 * TILES, THREADS = 32 * WARPS, EACH = (SUMS + THREADS - 1) / THREADS;
    const unsigned thread = this_thread();
    float* const mine = partial + thread / 32 * SUMS + thread % 32;
#pragma unroll
    for (int i = 0; i < 4 * TILES; ++i) mine[i * 32] = sum[i / 4][i % 4];
    int output[EACH], row[EACH];
    bool inside[EACH];
    half_t before[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const unsigned at = thread + j * THREADS, i = at / 32, lane = at % 32;
        output[j] = tile * MMA_N + lane / 4 + i % 4 / 2 * 8;
        row[j] = blockIdx.x * MMA_ROWS * TILES + i / 4 * MMA_ROWS + lane % 4 * 2 + i % 2;
        inside[j] = at < SUMS && row[j] < o.m && output[j] < o.n && !(o.gated && i % 4 / 2);
        // Comes from the L2 while warps wait for one another.
        before[j] = o.residual && inside[j] ? o.residual[static_cast<size_t>(row[j]) * o.n + output[j]] : half_t(0);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        if (!inside[j]) continue;
        const auto added = [&](const float* from) {
            float total = 0.0f;
#pragma unroll 8
            for (int warp = 0; warp < WARPS; ++warp) total += from[warp * SUMS];
            return total;
        };
        const float* const sums = partial + thread + j * THREADS;
        half_t value = finish(added(sums), o.bias, output[j]);
        half_t* const to = o.out + static_cast<size_t>(row[j]) * (o.gated ? o.n / 2 : o.n);
        if (o.gated) {
            value = to_half(silu_times(value, finish(added(sums + 64), o.bias, output[j] + 8)));
            to[tile * (MMA_N / 2) + output[j] % 8] = value;
        } else {
            to[output[j]] = o.residual ? to_half(to_float(before[j]) + to_float(value)) : value;
        }
    }
}
