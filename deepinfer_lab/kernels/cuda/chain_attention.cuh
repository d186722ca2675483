// Attention of a few new tokens over the paged cache (fp16, heads of 128), as a part of decode_chain.cuh: the query heads of one
// KV head and one split of the positions to a block, as in paged_attention.cuh, whose tiles these are (paged_tile.cuh).
//
// K and V of the token itself are not in the cache yet: each block makes them, and puts them in the place of what it read there.
// So what it reads has nothing to do with the kernel's other work and is under way before that is done.
#pragma once
#include "chain_weights.cuh"
#include "norm.cuh"
#include "paged_tile.cuh"

constexpr int HEAD_DIM = 128, HEADS = 8, POSITIONS = 16, ROUND = CHAIN_WARPS * POSITIONS;
constexpr int SPLIT_STATS = 4;  // floats behind each split's sum: max, sum of exp2(score - max), and two that fill 16 bytes
constexpr int SPLIT_FLOATS = HEAD_DIM + SPLIT_STATS;
constexpr int MOST_SPLITS = 8, LEAST_SPLIT = 2 * ROUND;  // further positions of a block take less time than adding up splits
constexpr float LOWEST = -1e30f;                         // below every score, and differences of two are never NaN

// How many positions a sequence has, and how they are split.
struct Sequence {
    int length, size, splits;

    Sequence() = default;
    __device__ __forceinline__ explicit Sequence(int length) : length(length) {
        const int wanted = min((length + LEAST_SPLIT - 1) / LEAST_SPLIT, MOST_SPLITS);
        size = ((length + wanted - 1) / wanted + ROUND - 1) / ROUND * ROUND;
        splits = (length + size - 1) / size;
    }
};

// Attention of a step: what all layers share.
struct ChainAttention {
    const half_t *cos, *sin;  // [positions, D / 2]
    const long long *block_table, *seq_lens;
    float* attended;  // [rows, heads, MOST_SPLITS, SPLIT_FLOATS]
    int heads, kv_heads, block_size, columns;
    unsigned reciprocal;
    float scale_log2;

    __device__ __forceinline__ float* split(int row, int head, int split) const {
        return attended + ((row * heads + head) * MOST_SPLITS + split) * SPLIT_FLOATS;
    }
};

// What a block's worth of work is: a row's positions begin .. end - 1 for one KV head, which are the row's split number `split`.
struct Item {
    int row = 0, kv_head, split, begin, end, last;  // last: the row's last position

    template <int ROWS>
    __device__ __forceinline__ Item(const ChainAttention& of, const Sequence (&sequences)[ROWS], unsigned number) {
#pragma unroll
        for (int r = 1; r < ROWS; ++r) {
            const unsigned before = sequences[r - 1].splits * of.kv_heads;
            if (row == r - 1 && number >= before) number -= before, row = r;
        }
        const Sequence& its = sequences[row];
        kv_head = number / its.splits, split = number % its.splits, last = its.length - 1;
        begin = split * its.size, end = min(its.length, begin + its.size);
    }
};

// A block's shared memory.
struct AttentionSpace {
    half_t rows[HEADS + 2][HEAD_DIM + 32];  // query heads, then K and V of the token; rows begin at different banks
    float top[CHAIN_WARPS][HEADS], sum[CHAIN_WARPS][HEADS];
    float out[CHAIN_WARPS][HEADS][HEAD_DIM];
};

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

__device__ __forceinline__ uint2 half_four(const float (&v)[4]) { return {half_pair(v[0], v[1]), half_pair(v[2], v[3])}; }
__device__ __forceinline__ void float_four(const uint2& four, float (&v)[4]) {
    v[0] = low_half(four.x), v[1] = high_half(four.x), v[2] = low_half(four.y), v[3] = high_half(four.y);
}

// Four outputs of a product from `output` on: the sum of its parts, and the bias, rounded. found: [tiles, parts, ROWS, 16].
template <int ROWS>
__device__ __forceinline__ uint2 four_outputs(const float* found, int parts, int row, int output, const half_t* bias) {
    const float* const from = found + (output / MMA_N * parts * ROWS + row) * MMA_N + output % MMA_N;
    float4 part[MOST_PARTS];
#pragma unroll
    for (int p = 0; p < MOST_PARTS; ++p) {
        part[p] = {};
        if (p < parts) part[p] = load_shared_by_blocks(reinterpret_cast<const float4*>(from + p * ROWS * MMA_N));
    }
    float shift[4] = {};
    if (bias) float_four(*reinterpret_cast<const uint2*>(bias + output), shift);
#pragma unroll
    for (int p = 1; p < MOST_PARTS; ++p) add(part[0], part[p]);
    const float sum[4] = {part[0].x + shift[0], part[0].y + shift[1], part[0].z + shift[2], part[0].w + shift[3]};
    return half_four(sum);
}

// In the place of what the cache has for the last position, and of what is beyond it and counts for nothing, the token's own K.
__device__ __forceinline__ void renew_k(Tile<HEAD_DIM, 2>& tile, const half_t* row, int position, int last, int t) {
    using S = Spread<HEAD_DIM, 2>;
    const auto* const bytes = reinterpret_cast<const unsigned char*>(row);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (position + 2 * i < last) continue;
#pragma unroll
        for (int j = 0; j < S::K_LOADS; ++j) {
            load<S::K_BYTES>(&tile.k[i][j * words_of(S::K_BYTES)], bytes + (j * 4 + t) * S::K_BYTES);
        }
    }
}
__device__ __forceinline__ void renew_v(Tile<HEAD_DIM, 2>& tile, const half_t* row, int position, int last, int g) {
    using S = Spread<HEAD_DIM, 2>;
    const auto* const bytes = reinterpret_cast<const unsigned char*>(row);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (position + i < last) continue;
#pragma unroll
        for (int j = 0; j < S::V_LOADS; ++j) {
            load<S::V_BYTES>(&tile.v[i][j * words_of(S::V_BYTES)], bytes + (j * 8 + g) * S::V_BYTES);
        }
    }
}

// What the warps have found of a split becomes one. to: of the first head, the others MOST_SPLITS splits further on each.
__device__ __forceinline__ void leave_split(float* to, AttentionSpace& space, int heads, const float (&top)[2],
                                            const float (&sum)[2], const float (&o)[HEAD_DIM / 16][4]) {
    const unsigned thread = this_thread();
    const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float total = sum_over_g(sum[i]);
        if (g == 0) space.top[warp][2 * t + i] = top[i], space.sum[warp][2 * t + i] = total;
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step) {
            const int dim = Spread<HEAD_DIM, 2>::v_dim(step, g);
            space.out[warp][2 * t + i][dim] = o[step][i], space.out[warp][2 * t + i][dim + 1] = o[step][i + 2];
        }
    }
    sync_chain();
#pragma unroll 1
    for (int cell = thread; cell < heads * HEAD_DIM; cell += CHAIN_THREADS) {
        const int head = cell / HEAD_DIM, dim = cell % HEAD_DIM;
        float highest = LOWEST, total = 0.0f, value = 0.0f;
#pragma unroll
        for (int w = 0; w < CHAIN_WARPS; ++w) highest = fmaxf(highest, space.top[w][head]);
#pragma unroll
        for (int w = 0; w < CHAIN_WARPS; ++w) {
            const float weight = exp2_approx(space.top[w][head] - highest);
            total += weight * space.sum[w][head], value += weight * space.out[w][head][dim];
        }
        float* const split = to + head * MOST_SPLITS * SPLIT_FLOATS;
        split[dim] = value;
        if (dim == 0) *reinterpret_cast<float4*>(split + HEAD_DIM) = {highest, total, 0.0f, 0.0f};
    }
}

// What the splits have found becomes one, [ROWS, heads * D] with rows `stride` apart, by all threads of a block.
template <int ROWS>
__device__ __forceinline__ void add_splits(const ChainAttention& of, const Sequence (&sequences)[ROWS], half_t* out, int stride) {
    constexpr int FOURS = HEAD_DIM / 4;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const int used = sequences[row].splits;
#pragma unroll 1
        for (int item = this_thread(); item < of.heads * FOURS; item += CHAIN_THREADS) {
            const auto* const from = reinterpret_cast<const float4*>(of.split(row, item / FOURS, 0));
            float4 value[MOST_SPLITS], stats[MOST_SPLITS];
#pragma unroll
            for (int i = 0; i < MOST_SPLITS; ++i) {
                value[i] = {}, stats[i] = {LOWEST, 0.0f, 0.0f, 0.0f};
                if (i >= used) continue;
                value[i] = load_shared_by_blocks(from + i * (SPLIT_FLOATS / 4) + item % FOURS);
                stats[i] = load_shared_by_blocks(from + i * (SPLIT_FLOATS / 4) + FOURS);
            }
            float highest = LOWEST, total = 0.0f, sum[4] = {};
#pragma unroll
            for (int i = 0; i < MOST_SPLITS; ++i) highest = fmaxf(highest, stats[i].x);
#pragma unroll
            for (int i = 0; i < MOST_SPLITS; ++i) {
                const float weight = exp2_approx(stats[i].x - highest);
                total += weight * stats[i].y;
                sum[0] += weight * value[i].x, sum[1] += weight * value[i].y;
                sum[2] += weight * value[i].z, sum[3] += weight * value[i].w;
            }
            const float whole[4] = {sum[0] / total, sum[1] / total, sum[2] / total, sum[3] / total};
            *reinterpret_cast<uint2*>(out + row * stride + item * 4) = half_four(whole);
        }
    }
}

// All of a block's items. await_sums: returns when all blocks have left the parts of q, K and V in `found`; called once.
template <int ROWS, class Await>
__device__ __forceinline__ void attend(const ChainAttention& of, const Sequence (&sequences)[ROWS], const ChainLayer& layer,
                                       const float* found, int parts, AttentionSpace& space, int items,
                                       const Await& await_sums) {
    using S = Spread<HEAD_DIM, 2>;
    const unsigned thread = this_thread();
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int kv_heads = of.kv_heads, ratio = static_cast<unsigned>(of.heads) / kv_heads;
#pragma unroll 1
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const Item its(of, sequences, item);
        const int end = its.end, last = its.last;
        const bool has_last = end > last;
        const Pages pages = {of.block_table + static_cast<size_t>(its.row) * of.columns, of.block_size, of.reciprocal, end - 1};
        const auto *k_base = reinterpret_cast<const unsigned char*>(layer.k + its.kv_head * HEAD_DIM);
        const auto *v_base = reinterpret_cast<const unsigned char*>(layer.v + its.kv_head * HEAD_DIM);
        const int k_offset = g / 2 * 4, k_odd = g % 2, v_offset = t * 4;  // of this lane's positions within a tile
        int position = its.begin + warp * POSITIONS;
        int2 k_four = pages.four(position + k_offset), v_four = pages.four(position + v_offset);
        Tile<HEAD_DIM, 2> tile;
        tile.load_k(k_base, nullptr, nullptr, kv_heads, k_four, k_odd, t);
        tile.load_v(v_base, kv_heads, v_four, g);
        k_four = pages.four(position + ROUND + k_offset), v_four = pages.four(position + ROUND + v_offset);

        // A thread takes four dimensions of a row and those that rotate with them.
        const int head = thread / 16, dim = thread % 16 * 4;
        const size_t angle = static_cast<size_t>(last) * (HEAD_DIM / 2) + dim;
        const uint2 cosines = *reinterpret_cast<const uint2*>(of.cos + angle);
        const uint2 sines = *reinterpret_cast<const uint2*>(of.sin + angle);
        if (item == static_cast<int>(blockIdx.x)) await_sums();
        if (head < ratio + 2) {
            const int from = head < ratio ? its.kv_head * ratio + head : of.heads + (head - ratio) * kv_heads + its.kv_head;
            uint2 first = four_outputs<ROWS>(found, parts, its.row, from * HEAD_DIM + dim, layer.qkv_bias);
            uint2 second = four_outputs<ROWS>(found, parts, its.row, from * HEAD_DIM + HEAD_DIM / 2 + dim, layer.qkv_bias);
            if (head <= ratio) {
                float a[4], b[4], c[4], d[4], cosine[4], sine[4];
                float_four(first, a), float_four(second, b), float_four(cosines, cosine), float_four(sines, sine);
#pragma unroll
                for (int i = 0; i < 4; ++i) c[i] = a[i] * cosine[i] - b[i] * sine[i], d[i] = b[i] * cosine[i] + a[i] * sine[i];
                first = half_four(c), second = half_four(d);
            }
            half_t* const to = space.rows[head < ratio ? head : HEADS + head - ratio] + dim;
            *reinterpret_cast<uint2*>(to) = first, *reinterpret_cast<uint2*>(to + HEAD_DIM / 2) = second;
            if (head >= ratio && has_last) {
                const size_t vector = static_cast<size_t>(pages.slot(last)) * kv_heads + its.kv_head;
                half_t* const cached = (head == ratio ? layer.k : layer.v) + vector * HEAD_DIM + dim;
                *reinterpret_cast<uint2*>(cached) = first, *reinterpret_cast<uint2*>(cached + HEAD_DIM / 2) = second;
            }
        }
        if (head >= ratio + 2 && head < HEADS + 2) {  // heads that there are not
            half_t* const to = space.rows[head - 2] + dim;
            *reinterpret_cast<uint2*>(to) = {}, *reinterpret_cast<uint2*>(to + HEAD_DIM / 2) = {};
        }
        sync_chain();

        // From here on, [2] counts this lane's two heads, 2t and 2t + 1.
        float top[2] = {LOWEST, LOWEST}, sum[2] = {}, o[S::STEPS][4] = {};
#pragma unroll 1
        for (; position < end; position += ROUND) {
            const bool renew = has_last && position + POSITIONS > last;
            if (renew) renew_k(tile, space.rows[HEADS], position + k_offset + k_odd, last, t);
            float s[4] = {};
#pragma unroll
            for (int step = 0; step < S::STEPS; ++step) {
                unsigned a[4];
                tile.k_fragment(a, step);
                const uint2 four = *reinterpret_cast<const uint2*>(&space.rows[g][S::k_dim(step, t)]);
                mma(s, a, four.x, four.y);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool exists = position + k_offset + k_odd + i / 2 * 2 < end;
                s[i] = exists ? s[i] * of.scale_log2 : 2 * LOWEST;
            }
            tile.load_k(k_base, nullptr, nullptr, kv_heads, k_four, k_odd, t);
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
            const unsigned b0 = transpose(half_pair(s[0], s[1])), b1 = transpose(half_pair(s[2], s[3]));
            if (renew) renew_v(tile, space.rows[HEADS + 1], position + v_offset, last, g);
#pragma unroll
            for (int step = 0; step < S::STEPS; ++step) {
                unsigned a[4];
                tile.v_fragment(a, step);
#pragma unroll
                for (int i = 0; i < 4; ++i) o[step][i] *= correction[i % 2];
                mma(o[step], a, b0, b1);
            }
            tile.load_v(v_base, kv_heads, v_four, g);
            v_four = pages.four(position + 2 * ROUND + v_offset);
        }
        const Item found_again(of, sequences, settled(item));  // registers are scarce
        leave_split(of.split(found_again.row, found_again.kv_head * ratio, found_again.split), space, ratio, top, sum, o);
        sync_chain();  // the space is free again, and all of the split is written
    }
}
