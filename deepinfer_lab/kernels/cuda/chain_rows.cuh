// What the products of decode_chain.cuh begin with: activations from what the phase before has left, in shared memory. A lane
// takes four at a time, a warp a unit. All words of a thread are under way at once.
#pragma once
#include "chain_attention.cuh"
#include "chain_digits.cuh"

// x += the sum of its parts, rounded; and its RMSNorm. A thread has the same values of x every time, which nobody else reads.
// product: whose parts; PRODUCTS adds nothing. keep(at, four): takes the norm's four values from `at` on.
template <class Keep>
__device__ __forceinline__ void add_norm(int phase, int product, const Keep& keep) {
    constexpr int AT_ONCE = 2, STEP = CHAIN_THREADS * 4;  // four values each
    Space& space = chain_space();
    const unsigned thread = this_thread();
    const int hidden = space.of.hidden;
    float sum[1] = {};
#pragma unroll 1
    for (int first = thread * 4; first < hidden; first += AT_ONCE * STEP) {
        uint4 part[AT_ONCE][MOST_PARTS] = {};
        if (product < PRODUCTS) {
            const ChainShare& share = space.shares[product];
            const unsigned* const part_of[MOST_PARTS] = {share.found + first, share.found + first + share.words};
            const int parts = share.parts;
            await_words(
                reinterpret_cast<uint4(&)[AT_ONCE * MOST_PARTS]>(part),
                [&](int i) { return first + i / MOST_PARTS * STEP < hidden && i % MOST_PARTS < parts; },
                [&](int i) { return reinterpret_cast<const uint4*>(part_of[i % MOST_PARTS] + i / MOST_PARTS * STEP); });
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = first + i * STEP;
            if (at >= hidden) continue;
            uint2* const four = reinterpret_cast<uint2*>(space.x() + at);
            float a[4], b[4];
            float_four(*four, a), float_four(add_four(part[i], uint2{0, 0}), b);
#pragma unroll
            for (int v = 0; v < 4; ++v) a[v] += b[v];
            *four = half_four(a);
            sum[0] = add_squares(add_squares(sum[0], four->x), four->y);
        }
    }
    stamp(phase, AFTER_WAIT);
    const float all = warp_sums(sum);
    if (thread % 32 == 0) space.squares[thread / 32] = all;
    wait_copies<0>();  // the weight
    sync_chain();
    float4 total = {};
#pragma unroll
    for (int i = 0; i < CHAIN_WARPS / 4; ++i) add(total, reinterpret_cast<const float4*>(space.squares)[i]);
    const float mean = ((total.x + total.y) + (total.z + total.w)) * __fdividef(1.0f, hidden);
    const float factor = rsqrtf(mean + space.of.eps);
#pragma unroll 1
    for (int i = thread * 4; i < hidden; i += STEP) {
        const uint2 four = *reinterpret_cast<const uint2*>(space.x() + i);
        const uint2 its = *reinterpret_cast<const uint2*>(space.weight() + i);
        const uint2 v = {normed(four.x, its.x, factor), normed(four.y, its.y, factor)};
        keep(i, v);
    }
    sync_chain();
}

// What the splits of a head have found, at most MOST of them, of the four dimensions from 4 * `item` on.
template <int MOST>
__device__ __forceinline__ uint2 added_splits(const Chain& of, int item, int used) {
    uint2 v[2][MOST];  // values; and top and sum
    await_words(
        reinterpret_cast<uint2(&)[2 * MOST]>(v), [&](int i) { return i % MOST < used; },
        [&](int i) {
            const auto* const from = reinterpret_cast<const uint2*>(of.split(i % MOST));
            return from + (i < MOST ? item : of.stats() / 2 + item / (HEAD_DIM / 4) * 2);
        });
    float highest = LOWEST, total = 0.0f, sum[4] = {};
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        if (i < used) highest = fmaxf(highest, __uint_as_float(v[1][i].x));
    }
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        if (i >= used) continue;
        const float weight = exp2_approx(__uint_as_float(v[1][i].x) - highest) * __uint_as_float(v[1][i].y);
        float a[4];
        float_four(v[0][i], a);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += weight * a[j];
        total += weight;
    }
    const float part = __fdividef(1.0f, total);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] *= part;
    return half_four(sum);
}

// Attention's results: as they are, where there is one split. Few splits have code of their own: with many it is as long as
// that of a whole phase.
__device__ __forceinline__ void take_attended(int phase) {
    const Space& space = chain_space();
    const int used = space.splits;
#pragma unroll 1
    for (int item = this_thread(); item < space.of.heads * (HEAD_DIM / 4); item += CHAIN_THREADS) {
        uint2 v[1];
        if (used == 1) {
            const auto* const from = reinterpret_cast<const uint2*>(space.of.split(0)) + item;
            await_words(v, [](int) { return true; }, [&](int) { return from; });
        } else if (used <= 2) {
            v[0] = added_splits<2>(space.of, item, used);
        } else if (used <= 4) {
            v[0] = added_splits<4>(space.of, item, used);
        } else {
            v[0] = added_splits<MOST_SPLITS>(space.of, item, used);
        }
        keep_four(space, item / 32, v[0]);
    }
    stamp(phase, AFTER_WAIT);
    sync_chain();
}

// silu(gate) * up, as they are.
__device__ __forceinline__ void take_gated(int phase) {
    constexpr int AT_ONCE = 6, PART = 3;
    const Space& space = chain_space();
    const int items = space.of.intermediate / 4;
    // The last units once more, rather than none: so there is nothing to decide.
    const auto place = [&](int first, int i) { return min(first + i * CHAIN_THREADS, items - 32 + this_thread() % 32); };
    const auto* const from = reinterpret_cast<const uint2*>(space.of.gated);
#pragma unroll 1
    for (int first = this_thread(); first < items; first += AT_ONCE * CHAIN_THREADS) {
        uint2 v[AT_ONCE];
        await_words(v, [](int) { return true; }, [&](int i) { return from + place(first, i); });
#pragma unroll
        for (int begin = 0; begin < AT_ONCE; begin += PART) {
            uint2 part[PART];
#pragma unroll
            for (int i = 0; i < PART; ++i) part[i] = v[begin + i];
            keep_fours(space, [&](int i) { return place(first, begin + i) / 32; }, part);
        }
    }
    stamp(phase, AFTER_WAIT);
    sync_chain();
}
