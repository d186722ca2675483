// What the products of decode_chain.cuh begin with: activations from what the phase before has left, in shared memory, and of each
// unit of K what their sum makes of its shift. All words of a thread are under way at once.
#pragma once
#include "chain_attention.cuh"

// x += the sum of its parts, rounded; and its RMSNorm. A thread has the same values of x every time, which nobody else reads.
// product: whose parts; PRODUCTS adds nothing.
template <int ROWS>
__device__ __forceinline__ void add_norm(int phase, int product) {
    constexpr int AT_ONCE = 2, STEP = CHAIN_THREADS * 4;  // four values each
    Space<ROWS>& space = space_of<ROWS>();
    const unsigned thread = this_thread();
    const int hidden = space.of.hidden;
    float sum[ROWS] = {};
#pragma unroll 1
    for (int first = thread * 4; first < hidden; first += AT_ONCE * STEP) {
        uint4 part[AT_ONCE * ROWS][MOST_PARTS] = {};
        if (product < PRODUCTS) {
            const ChainShare& share = space.shares[product];
            await_words(reinterpret_cast<uint4(&)[AT_ONCE * ROWS * MOST_PARTS]>(part), [&](int i) {
                const int at = first + i / (ROWS * MOST_PARTS) * STEP, p = i % MOST_PARTS;
                return at < hidden && p < share.parts ? four_outputs<ROWS>(share, p, i / MOST_PARTS % ROWS, at) : nullptr;
            });
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE * ROWS; ++i) {
            const int at = first + i / ROWS * STEP, row = i % ROWS;
            if (at >= hidden) continue;
            uint2* const four = reinterpret_cast<uint2*>(space.x() + row * hidden + at);
            float a[4], b[4];
            float_four(*four, a), float_four(add_four(part[i], uint2{0, 0}), b);
#pragma unroll
            for (int v = 0; v < 4; ++v) a[v] += b[v];
            *four = half_four(a);
            sum[row] = add_squares(add_squares(sum[row], four->x), four->y);
        }
    }
    stamp<ROWS>(phase, AFTER_WAIT);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float one[1] = {sum[r]};
        const float all = warp_sums(one);
        if (thread % 32 == 0) space.squares[r][thread / 32] = all;
    }
    wait_copies<0>();  // the weight
    sync_chain();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float4 total = {};
#pragma unroll
        for (int i = 0; i < CHAIN_WARPS / 4; ++i) add(total, reinterpret_cast<const float4*>(space.squares[r])[i]);
        const float mean = ((total.x + total.y) + (total.z + total.w)) * __fdividef(1.0f, hidden);
        const float factor = rsqrtf(mean + space.of.eps);
#pragma unroll 1
        for (int i = thread * 4; i < hidden; i += STEP) {  // a warp has all of a unit
            const uint2 four = *reinterpret_cast<const uint2*>(space.x() + r * hidden + i);
            const uint2 its = *reinterpret_cast<const uint2*>(space.weight() + i);
            const uint2 v = {normed(four.x, its.x, factor), normed(four.y, its.y, factor)};
            *reinterpret_cast<uint2*>(space.act() + r * space.stride + i) = v;
            float one[1] = {(low_half(v.x) + high_half(v.x)) + (low_half(v.y) + high_half(v.y))};
            const float all = warp_sums(one);
            if (thread % 32 == 0) space.shifts()[i / MMA_K * ROWS + r] = all * TOO_MUCH;
        }
    }
    sync_chain();
}

// Eight activations from 8 * `item` on, by each lane. All lanes of a warp come here, also those without any.
template <int ROWS>
__device__ __forceinline__ void keep_eight(const Space<ROWS>& space, int row, int item, bool is_one, const uint4& v) {
    float sum = ((low_half(v.x) + high_half(v.x)) + (low_half(v.y) + high_half(v.y))) +
                ((low_half(v.z) + high_half(v.z)) + (low_half(v.w) + high_half(v.w)));
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    if (!is_one) return;
    *reinterpret_cast<uint4*>(space.act() + row * space.stride + item * 8) = v;
    if (item % 16 == 0) space.shifts()[item / 16 * ROWS + row] = sum * TOO_MUCH;
}

// What the splits of a head have found, of the eight dimensions from 8 * `item` on.
__device__ __forceinline__ uint4 added_splits(const Chain& of, int row, int item, int used) {
    uint4 v[2][MOST_SPLITS];  // values; and top and sum
    await_words(reinterpret_cast<uint4(&)[2 * MOST_SPLITS]>(v), [&](int i) {
        const auto* const from = reinterpret_cast<const uint4*>(of.split(row, i % MOST_SPLITS));
        return i % MOST_SPLITS < used ? from + (i < MOST_SPLITS ? item : of.stats() / 4 + item / (HEAD_DIM / 8)) : nullptr;
    });
    float highest = LOWEST, total = 0.0f, sum[2][4] = {};
#pragma unroll
    for (int i = 0; i < MOST_SPLITS; ++i) {
        if (i < used) highest = fmaxf(highest, __uint_as_float(v[1][i].x));
    }
#pragma unroll
    for (int i = 0; i < MOST_SPLITS; ++i) {
        if (i >= used) continue;
        const float weight = exp2_approx(__uint_as_float(v[1][i].x) - highest) * __uint_as_float(v[1][i].y);
        float a[2][4];
        float_four({v[0][i].x, v[0][i].y}, a[0]), float_four({v[0][i].z, v[0][i].w}, a[1]);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j / 4][j % 4] += weight * a[j / 4][j % 4];
        total += weight;
    }
    const float part = __fdividef(1.0f, total);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j / 4][j % 4] *= part;
    const uint2 low = half_four(sum[0]), high = half_four(sum[1]);
    return {low.x, low.y, high.x, high.y};
}

// Attention's results: as they are, where there is one split.
template <int ROWS>
__device__ __forceinline__ void take_attended(int phase) {
    const Space<ROWS>& space = space_of<ROWS>();
    const int items = space.of.heads * (HEAD_DIM / 8);
#pragma unroll 1
    for (int row = 0; row < ROWS; ++row) {
        const int used = space.sequences[row].splits;
#pragma unroll 1
        for (int begin = this_thread() / 32 * 32; begin < items; begin += CHAIN_THREADS) {
            const int item = begin + this_thread() % 32;
            uint4 v[1] = {};
            if (used == 1) {
                const auto* const from = reinterpret_cast<const uint4*>(space.of.split(row, 0));
                await_words(v, [&](int) { return item < items ? from + item : nullptr; });
            } else if (item < items) {
                v[0] = added_splits(space.of, row, item, used);
            }
            keep_eight<ROWS>(space, row, item, item < items, v[0]);
        }
    }
    stamp<ROWS>(phase, AFTER_WAIT);
    sync_chain();
}

// silu(gate) * up, as they are.
template <int ROWS>
__device__ __forceinline__ void take_gated(int phase) {
    constexpr int AT_ONCE = 3;
    const Space<ROWS>& space = space_of<ROWS>();
    const int items = space.of.intermediate / 8;
#pragma unroll 1
    for (int row = 0; row < ROWS; ++row) {
        const auto* const from = reinterpret_cast<const uint4*>(space.of.gated + row * (space.of.intermediate / 2));
#pragma unroll 1
        for (int begin = this_thread() / 32 * 32; begin < items; begin += AT_ONCE * CHAIN_THREADS) {
            const int first = begin + this_thread() % 32;
            uint4 v[AT_ONCE];
            await_words(v, [&](int i) { return first + i * CHAIN_THREADS < items ? from + first + i * CHAIN_THREADS : nullptr; });
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int item = first + i * CHAIN_THREADS;
                keep_eight<ROWS>(space, row, item, item < items, v[i]);
            }
        }
    }
    stamp<ROWS>(phase, AFTER_WAIT);
    sync_chain();
}
