// One new token of each sequence against its paged K and V: softmax(q K^T * scale) V, for grouped heads.
//
// Each block of 4 warps takes one sequence, one KV head (with up to 8 of its query heads) and one split of the positions; each
// warp takes every fourth tile of 16 positions. A warp multiplies on tensor cores with positions as rows, so that 8 query heads
// fill the 8 columns:   S^T[16 positions, 8 heads] = K Q^T,   O^T[D, 8 heads] += V^T P^T.
//
// K and V go from global memory straight into registers (paged_tile.cuh): no shared memory, no barrier in the loop. The loads
// of the next tile are issued while this one is computed: K's as soon as the scores are known, V's after the output.
//
// Before that, a block may have to rotate its query heads, and the one with a sequence's last position to write that position's
// K and V. No other block reads them, but those with further query heads of the same KV head, which write the same bytes. After
// it, the last block to be done with a sequence and its query heads adds up what the splits have found.
#pragma once
#include "async_ptx.cuh"
#include "paged_tile.cuh"
#include "prefetch.cuh"
#include "rope.cuh"

constexpr int WARPS = 4, TILE = 16, HEADS = 8;
constexpr int STATS = 4;   // floats behind each split's sum: max, sum of exp2(score - max), and two that fill 16 bytes
constexpr int AT_ONCE = 8;  // splits whose results are on their way to a thread
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

// What blockIdx.y stands for: `count` query heads of a sequence, from `head` on, that share one KV head.
struct Share {
    int sequence, kv_head, head, count;
    __device__ __forceinline__ Share(unsigned row, unsigned ratio, unsigned kv_heads) {
        const unsigned groups = (ratio + HEADS - 1) / HEADS, first = row % groups * HEADS;
        sequence = row / groups / kv_heads, kv_head = row / groups % kv_heads;
        head = kv_head * ratio + first, count = min(HEADS, ratio - first);
    }
};

// One split of a sequence's heads, [splits, D + STATS] of each head.
template <int D>
__device__ __forceinline__ const float4* of_split(const float* partial, int split) {
    return reinterpret_cast<const float4*>(partial + static_cast<size_t>(split) * (D + STATS));
}

// Adds up the `used` first splits of `count` heads, always in the same order: each counts by exp2(its max - the highest max).
template <int D>
__device__ __forceinline__ void combine(const float* partial, half_t* __restrict__ out, float* shared_max, int count, int used,
                                        int splits) {
    const auto head_of = [&](int head) { return partial + static_cast<size_t>(head) * splits * (D + STATS); };
    for (int head = threadIdx.x / 32; head < count; head += WARPS) {
        float highest = LOWEST;
        for (int split = threadIdx.x % 32; split < used; split += 32)
            highest = fmaxf(highest, load_shared_by_blocks(of_split<D>(head_of(head), split) + D / 4).x);
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2)
            highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, distance));
        if (threadIdx.x % 32 == 0) shared_max[head] = highest;
    }
    __syncthreads();
    for (int item = threadIdx.x; item < count * (D / 4); item += WARPS * 32) {
        const int head = item / (D / 4), four = item % (D / 4);
        const float highest = shared_max[head];
        float total = 0.0f, sum[4] = {};
        for (int first = 0; first < used; first += AT_ONCE) {
            float4 value[AT_ONCE], stats[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const float4* split = of_split<D>(head_of(head), min(first + i, used - 1));
                value[i] = load_shared_by_blocks(split + four), stats[i] = load_shared_by_blocks(split + D / 4);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (first + i >= used) continue;
                const float weight = exp2_approx(stats[i].x - highest);
                total += weight * stats[i].y;
                sum[0] += weight * value[i].x, sum[1] += weight * value[i].y;
                sum[2] += weight * value[i].z, sum[3] += weight * value[i].w;
            }
        }
        *reinterpret_cast<uint2*>(out + head * D + four * 4) = {half_pair(sum[0] / total, sum[1] / total),
                                                               half_pair(sum[2] / total, sum[3] / total)};
    }
}

// q: of each sequence, `row_stride` values after another's: heads * D values. With cos and sin, [positions, D / 2], they are to
// be rotated, and kv_heads rows of D for K (to be rotated) and as many for V follow them, to be written to the last position.
// k, v: [slots, kv_heads, D]. k_scales, v_scales: [slots, kv_heads] for int8.
// Grid: (splits, sequences * kv_heads * groups), where ratio = heads / kv_heads, and groups = ceil(ratio / 8).
// alone: a sequence of up to so many positions is one split, at least split_size. It then takes three rounds more of its
// warps' loads at most, which are on their way before; results of several splits take a fence, a counter and two reads.
// out: [sequences, heads, D]. Sequences that have several splits also take partial, [sequences, heads, splits, D + STATS], each
// split's sum of exp2(score - max) * v and STATS; and a counter for each blockIdx.y, zero before and after.
template <int D, int SIZE>
__device__ __forceinline__ void paged_decode(const half_t* q, const half_t* __restrict__ cos, const half_t* __restrict__ sin,
                                             unsigned char* k, unsigned char* v, unsigned char* k_scales,
                                             unsigned char* v_scales, const long long* block_table, const long long* seq_lens,
                                             half_t* __restrict__ out, float* __restrict__ partial,
                                             unsigned* __restrict__ arrived, int row_stride, int ratio, int kv_heads,
                                             int block_size, unsigned reciprocal, int columns, int splits, int split_size,
                                             int alone, float scale_log2) {
    using S = Spread<D, SIZE>;
    constexpr int Q_STRIDE = D + 32;  // rows of shared_q begin at different banks
    __shared__ __align__(16) half_t shared_q[HEADS][Q_STRIDE];
    __shared__ float shared_max[WARPS][HEADS], shared_sum[WARPS][HEADS];
    __shared__ __align__(16) float shared_out[WARPS][HEADS][D];
    __shared__ bool last;
    release_next();
    // What rotate_write_decode reads before the wait, no kernel of the step writes: lengths, tables, angles, and all of K and V
    // but the last position. By itself attention knows nothing of where they come from.
    if (!cos) await_previous();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Share share(blockIdx.y, ratio, kv_heads);
    const int sequence = share.sequence, kv_head = share.kv_head;
    const int length = static_cast<int>(seq_lens[sequence]), begin = blockIdx.x * split_size;
    const bool whole = length <= alone;
    if (blockIdx.x > 0 && (whole || begin >= length)) return await_previous();  // nobody will read this split
    const int end = whole ? length : min(length, begin + split_size);
    const Pages pages = {block_table + static_cast<size_t>(sequence) * columns, block_size, reciprocal, end - 1};
    const unsigned char *k_base = k + kv_head * (D * SIZE), *v_base = v + kv_head * (D * SIZE);
    k_scales += SIZE == 1 ? kv_head * 2 : 0, v_scales += SIZE == 1 ? kv_head * 2 : 0;

    const int k_offset = g / 2 * 4, k_odd = g % 2, v_offset = t * 4;  // of this lane's positions within a tile
    constexpr int ROUND = WARPS * TILE;
    int position = begin + warp * TILE;
    int2 k_four, v_four;
    Tile<D, SIZE> tile;
    const auto load_first = [&] {
        k_four = pages.four(position + k_offset), v_four = pages.four(position + v_offset);
        tile.load_k(k_base, k_scales, v_scales, kv_heads, k_four, k_odd, t);
        tile.load_v(v_base, kv_heads, v_four, g);
        k_four = pages.four(position + ROUND + k_offset), v_four = pages.four(position + ROUND + v_offset);
    };
    const bool early = !cos || position + TILE < length;
    if (early) load_first();
    const bool is_v = warp % 2, writes = cos && end == length && length > 0 && warp < 2;
    const int new_slot = writes ? pages.slot(length - 1) : 0;
    Angles<(D + 63) / 64> angles;
    if (cos) {
        const size_t first = static_cast<size_t>(max(length - 1, 0)) * (D / 2);
        angles.load(cos + first, sin + first, D);
        // The other tiles of a sequence that one block attends to: to the L2, a lane K or V of one position.
        for (int from = position + ROUND; whole && from < end; from += ROUND) {
            if (from + lane / 2 >= end) continue;
            const int slot = pages.slot(from + lane / 2);
            const unsigned char* row = row_of(lane % 2 ? v_base : k_base, slot, kv_heads * (D * SIZE));
#pragma unroll
            for (int at = 0; at < D * SIZE; at += 32) prefetch_sector(row + at);
            if constexpr (SIZE == 1) prefetch_sector(row_of(lane % 2 ? v_scales : k_scales, slot, kv_heads * 2));
        }
        // Never true, which the compiler cannot know: it would put off what has nothing to do with the wait until after it.
        if (settled(length) < 0) __trap();
        await_previous();
    }
    {  // Each warp takes two query heads to shared memory, the first a new K to the cache, the second a new V.
        const half_t* new_rows = q + static_cast<size_t>(sequence) * row_stride;
        HeadRow<(D + 63) / 64> query[HEADS / WARPS], written;
        if (writes) written.load(new_rows + ((ratio + is_v) * kv_heads + kv_head) * D, D);
#pragma unroll
        for (int i = 0; i < HEADS / WARPS; ++i) {
            const int head = warp + i * WARPS;
            if (head < share.count) query[i].load(new_rows + (share.head + head) * D, D);
        }
#pragma unroll
        for (int i = 0; i < HEADS / WARPS; ++i) {
            const int head = warp + i * WARPS;
            if (head >= share.count) continue;
            if (cos) query[i].rotate(angles, D);
            query[i].store(shared_q[head], D);
        }
        if (writes) {
            if (!is_v) written.rotate(angles, D);
            const size_t vector = static_cast<size_t>(new_slot) * kv_heads;  // from the KV head's first on
            unsigned char* to = (is_v ? v : k) + (vector + kv_head) * (D * SIZE);
            if constexpr (SIZE == 1) {
                half_t* scale = reinterpret_cast<half_t*>(is_v ? v_scales : k_scales) + vector;
                written.store(reinterpret_cast<signed char*>(to), scale, D);
            } else {
                written.store(reinterpret_cast<half_t*>(to), D);
            }
        }
        __syncthreads();
    }
    if (!early) load_first();

    unsigned q_fragment[S::STEPS][2] = {};
    if (g < share.count) {
#pragma unroll
        for (int step = 0; step < S::STEPS; ++step) {
            const uint2 four = *reinterpret_cast<const uint2*>(&shared_q[g][S::k_dim(step, t)]);
            q_fragment[step][0] = four.x, q_fragment[step][1] = four.y;
        }
    }

    // From here on, [2] counts this lane's two heads, 2t and 2t + 1.
    float top[2] = {LOWEST, LOWEST}, sum[2] = {}, o[S::STEPS][4] = {};

    for (; position < end; position += ROUND) {  // what is settled here is worked out in each round: registers are scarce
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
            const bool exists = position + settled(k_offset + k_odd) + i / 2 * 2 < end;
            s[i] = exists ? s[i] * factor : 2 * LOWEST;
        }
        tile.load_k(k_base, k_scales, v_scales, kv_heads, k_four, k_odd, t);
        k_four = pages.four(position + 2 * ROUND + k_offset);

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
        tile.load_v(v_base, kv_heads, v_four, settled(g));
        v_four = pages.four(position + 2 * ROUND + v_offset);
    }

    // The four warps' results become one. Whose they are is found out again, for the same reason.
    const Share mine(settled(blockIdx.y), ratio, kv_heads);
    const size_t first_row = static_cast<unsigned>(mine.sequence * ratio * kv_heads + mine.head);
    const int found = static_cast<int>(seq_lens[mine.sequence]);
    const int used = found <= alone ? 1 : min(splits, (found + split_size - 1) / split_size);
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
    for (int cell = threadIdx.x; cell < mine.count * D; cell += WARPS * 32) {
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
        if (used == 1) {
            out[first_row * D + cell] = to_half(found > 0 ? value / total : 0.0f);
        } else {
            float* split = partial + ((first_row + head) * splits + blockIdx.x) * (D + STATS);
            split[dim] = value;
            if (dim == 0) *reinterpret_cast<float4*>(split + D) = {highest, total, 0.0f, 0.0f};
        }
    }
    if (used == 1) return;
    __threadfence();  // a block that sees the counter sees the sums
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(arrived + blockIdx.y, used - 1) == static_cast<unsigned>(used - 1);
    __syncthreads();
    if (!last) return;
    __threadfence();
    combine<D>(partial + first_row * splits * (D + STATS), out + first_row * D, shared_max[0], mine.count, used, splits);
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
        NAME(const half_t* q, const half_t* cos, const half_t* sin, unsigned char* k, unsigned char* v,                  \
             unsigned char* k_scales, unsigned char* v_scales, const long long* block_table, const long long* seq_lens,  \
             half_t* out, float* partial, unsigned* arrived, int row_stride, int ratio, int kv_heads, int block_size,    \
             unsigned reciprocal, int columns, int splits, int split_size, int alone, float scale_log2) {                \
        paged_decode<D, SIZE>(q, cos, sin, k, v, k_scales, v_scales, block_table, seq_lens, out, partial, arrived,       \
                              row_stride, ratio, kv_heads, block_size, reciprocal, columns, splits, split_size, alone,   \
                              scale_log2);                                                                               \
    }
