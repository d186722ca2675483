// One new token of each sequence against its paged K and V: softmax(q K^T * scale) V, for grouped heads.
//
// Each block of 4 warps takes one sequence, one KV head (with up to 8 of its query heads) and one split of the positions; each
// warp takes every fourth tile of 16 positions. A warp multiplies on tensor cores with positions as rows, so that 8 query heads
// fill the 8 columns:   S^T[16 positions, 8 heads] = K Q^T,   O^T[D, 8 heads] += V^T P^T.
//
// K and V go from global memory straight into registers (paged_tile.cuh): no shared memory, no barrier in the loop. The loads
// of the next tile are issued while this one is computed: K's as soon as the scores are known, V's after the output.
#pragma once
#include "paged_tile.cuh"

constexpr int WARPS = 4, TILE = 16, HEADS = 8;
// Probabilities are multiplied with V's scales before they become fp16. A scale is at most 65504 / 127, so that 64 times that
// is still a number, and typical scales, of a hundredth, stay clear of fp16's subnormal numbers.
constexpr float SCALE_UP = 64.0f;
constexpr float LOWEST = -1e30f;  // below every score and still finite: differences of two maxima are never NaN

__device__ __forceinline__ float max_over_g(float x) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, distance));
    return x;
}
__device__ __forceinline__ float sum_over_g(float x) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
    return x;
}

// q: [sequences, heads, D]. k, v: [slots, kv_heads, D]. k_scales, v_scales: [slots, kv_heads] for int8.
// Grid: (splits, sequences * kv_heads * groups), where groups = ceil(heads / kv_heads / 8).
// With one split, out [sequences, heads, D] is the result. With more, partial [sequences, heads, splits, D] and
// stats [sequences, heads, splits, 2] take each split's sum of exp2(score - max) * v, max, and sum of exp2(score - max).
template <int D, int SIZE>
__device__ __forceinline__ void paged_decode(const half_t* q, const unsigned char* __restrict__ k,
                                             const unsigned char* __restrict__ v, const unsigned char* __restrict__ k_scales,
                                             const unsigned char* __restrict__ v_scales,
                                             const long long* block_table, const long long* seq_lens,
                                             half_t* __restrict__ out, float* __restrict__ partial,
                                             float* __restrict__ stats, int heads, int kv_heads, int block_size,
                                             unsigned reciprocal, int columns, int splits, int split_size, float scale_log2) {
    using S = Spread<D, SIZE>;
    __shared__ float shared_max[WARPS][HEADS], shared_sum[WARPS][HEADS];
    __shared__ __align__(16) float shared_out[WARPS][HEADS][D];
    take_turn();
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int ratio = heads / kv_heads, groups = (ratio + HEADS - 1) / HEADS;
    const int group = blockIdx.y % groups, kv_head = blockIdx.y / groups % kv_heads;
    const size_t sequence = blockIdx.y / groups / kv_heads;
    const int first_head = kv_head * ratio + group * HEADS, my_heads = min(HEADS, ratio - group * HEADS);

    const int length = static_cast<int>(seq_lens[sequence]), begin = blockIdx.x * split_size;
    if (begin >= length && splits > 1) return;  // nobody will read this split
    const int end = min(length, begin + split_size);
    const Pages pages = {block_table + sequence * columns, block_size, reciprocal, end - 1};

    unsigned q_fragment[S::STEPS][2] = {};
    if (g < my_heads) {
        const half_t* row = q + (sequence * heads + first_head + g) * D;
#pragma unroll
        for (int step = 0; step < S::STEPS; ++step) {
            const uint2 four = *reinterpret_cast<const uint2*>(row + S::k_dim(step, t));
            q_fragment[step][0] = four.x, q_fragment[step][1] = four.y;
        }
    }

    // From here on, [2] counts this lane's two heads, 2t and 2t + 1.
    float top[2] = {LOWEST, LOWEST}, sum[2] = {}, o[S::STEPS][4] = {};
    const unsigned char *k_base = k + kv_head * (D * SIZE), *v_base = v + kv_head * (D * SIZE);
    k_scales += SIZE == 1 ? kv_head * 2 : 0, v_scales += SIZE == 1 ? kv_head * 2 : 0;
    const int k_offset = g / 2 * 4, k_odd = g % 2, v_offset = t * 4;  // of this lane's positions within a tile
    int position = begin + warp * TILE;
    Tile<D, SIZE> tile;
    tile.load_k(k_base, k_scales, v_scales, kv_heads, pages.four(position + k_offset), k_odd, t);
    tile.load_v(v_base, kv_heads, pages.four(position + v_offset), g);
    int next = position + WARPS * TILE;
    int2 k_four = pages.four(next + k_offset), v_four = pages.four(next + v_offset);

    for (; position < end; position = next, next += WARPS * TILE) {
        float s[4] = {};
#pragma unroll
        for (int step = 0; step < S::STEPS; ++step) {
            unsigned a[4];
            tile.k_fragment(a, step);
            mma(s, a, q_fragment[step][0], q_fragment[step][1]);
        }
        const unsigned scales[2] = {SIZE == 1 ? tile.scales[0] : 0, SIZE == 1 ? tile.scales[1] : 0};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float factor = SIZE == 1 ? scale_log2 * to_float(static_cast<half_t>(scales[i / 2])) : scale_log2;
            const bool exists = position + k_offset + k_odd + i / 2 * 2 < end;
            s[i] = exists ? s[i] * factor : 2 * LOWEST;
        }
        tile.load_k(k_base, k_scales, v_scales, kv_heads, k_four, k_odd, t);
        k_four = pages.four(next + WARPS * TILE + k_offset);

        float correction[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float higher = fmaxf(top[i], max_over_g(fmaxf(s[i], s[i + 2])));
            correction[i] = exp2_approx(top[i] - higher);
            top[i] = higher;
            s[i] = exp2_approx(s[i] - higher), s[i + 2] = exp2_approx(s[i + 2] - higher);
            sum[i] = sum[i] * correction[i] + (s[i] + s[i + 2]);
        }
        if (SIZE == 1) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] *= SCALE_UP * to_float(static_cast<half_t>(scales[i / 2] >> 16));
        }
        const unsigned b0 = transpose(half_pair(s[0], s[1])), b1 = transpose(half_pair(s[2], s[3]));
#pragma unroll
        for (int step = 0; step < S::STEPS; ++step) {
            unsigned a[4];
            tile.v_fragment(a, step);
#pragma unroll
            for (int i = 0; i < 4; ++i) o[step][i] *= correction[i % 2];
            mma(o[step], a, b0, b1);
        }
        tile.load_v(v_base, kv_heads, v_four, g);
        v_four = pages.four(next + WARPS * TILE + v_offset);
    }

    // The four warps' results become one.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float total = sum_over_g(sum[i]);
        if (g == 0) shared_max[warp][2 * t + i] = top[i], shared_sum[warp][2 * t + i] = total;
#pragma unroll
        for (int step = 0; step < S::STEPS; ++step) {
            const int dim = S::v_dim(step, g);
            shared_out[warp][2 * t + i][dim] = o[step][i];
            shared_out[warp][2 * t + i][dim + 1] = o[step][i + 2];
        }
    }
    __syncthreads();
    for (int cell = threadIdx.x; cell < my_heads * D; cell += WARPS * 32) {
        const int head = cell / D, dim = cell % D;
        float highest = LOWEST, total = 0.0f, value = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, shared_max[w][head]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = exp2_approx(shared_max[w][head] - highest);
            total += weight * shared_sum[w][head];
            value += weight * shared_out[w][head][dim];
        }
        if (SIZE == 1) value *= 1.0f / SCALE_UP;
        const size_t row = sequence * heads + first_head + head;
        if (splits == 1) {
            out[row * D + dim] = to_half(length > 0 ? value / total : 0.0f);
        } else {
            const size_t split = row * splits + blockIdx.x;
            partial[split * D + dim] = value;
            if (dim == 0) stats[split * 2] = highest, stats[split * 2 + 1] = total;
        }
    }
}

// BLOCKS: thread blocks that a multiprocessor must be able to hold, which limits the registers. For sm_120 ptxas takes more
// of them and would spill: there, they are not limited.
#if __CUDA_ARCH__ >= 1200
#define AT_LEAST(BLOCKS) 1
#else
#define AT_LEAST(BLOCKS) BLOCKS
#endif
#define PAGED_DECODE(NAME, D, SIZE, BLOCKS)                                                                              \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, AT_LEAST(BLOCKS))                                           \
        NAME(const half_t* q, const unsigned char* k, const unsigned char* v, const unsigned char* k_scales,             \
             const unsigned char* v_scales, const long long* block_table, const long long* seq_lens, half_t* out,        \
             float* partial, float* stats, int heads, int kv_heads, int block_size, unsigned reciprocal, int columns,    \
             int splits, int split_size, float scale_log2) {                                                             \
        paged_decode<D, SIZE>(q, k, v, k_scales, v_scales, block_table, seq_lens, out, partial, stats, heads, kv_heads,  \
                              block_size, reciprocal, columns, splits, split_size, scale_log2);                          \
    }
