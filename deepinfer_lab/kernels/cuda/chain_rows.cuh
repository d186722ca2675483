// What the products of decode_chain.cuh begin with: activations from what the phase before has left, in shared memory. A lane
// takes four at a time, a warp a unit. All words of a thread are under way at once.
#pragma once
#include "chain_attention.cuh"
#include "chain_digits.cuh"

// x += the sum of its parts, rounded; and its RMSNorm. A thread has the same values of x every time, which nobody else reads.
// product: whose parts; PRODUCTS adds nothing. keep(at, four): takes the norm's four values from `at` on.
template <class Keep>
__device__ __forceinline__ void add_norm(int phase, int product, const Keep& keep) {
    constexpr int STEP = CHAIN_THREADS * 4;  // four values each
    Space& space = chain_space();
    const unsigned thread = this_thread();
    const int hidden = space.of.hidden;
    const ChainShare& share = space.shares[min(product, PRODUCTS - 1)];
    const int parts = product < PRODUCTS ? share.parts : 0;
    const auto is_one = [&](int p) { return p < parts; };
    float sum[1] = {};
#pragma unroll 1
    for (int first = thread * 4; first < hidden; first += STEP) {
        uint4 part[MOST_PARTS];
        await_words(part, is_one, [&](int p) { return reinterpret_cast<const uint4*>(share.found + first + p * share.words); });
        uint2* const four = reinterpret_cast<uint2*>(space.x() + first);
        float a[4], b[4];
        float_four(*four, a), float_four(add_four(part, uint2{0, 0}), b);
#pragma unroll
        for (int v = 0; v < 4; ++v) a[v] += b[v];
        *four = half_four(a);
        sum[0] = add_squares(add_squares(sum[0], four->x), four->y);
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

// Attention's results, as they are.
__device__ __forceinline__ void take_attended(int phase) {
    const Space& space = chain_space();
    const auto* const joined = reinterpret_cast<const uint2*>(space.of.joined());
#pragma unroll 1
    for (int item = this_thread(); item < space.of.heads * (HEAD_DIM / 4); item += CHAIN_THREADS) {
        uint2 v[1];
        await_words(v, [](int) { return true; }, [&](int) { return joined + item; });
        keep_four(space, item / 32, v[0]);
    }
    stamp(phase, AFTER_WAIT);
    sync_chain();
}

// silu(gate) * up, as they are: some are asked for while those before become digits.
__device__ __forceinline__ void take_gated(int phase) {
    constexpr int PART = 2, STEP = PART * CHAIN_THREADS;
    const Space& space = chain_space();
    const int items = space.of.intermediate / 4, thread = this_thread();
    // The last units once more, rather than none: so there is nothing to decide.
    const auto place = [&](int first, int i) { return min(first + i * CHAIN_THREADS, items - 32 + thread % 32); };
    const auto* const from = reinterpret_cast<const uint2*>(space.of.gated);
    const auto always = [](int) { return true; };
    uint2 v[PART], next[PART];
    ask(v, always, [&](int i) { return from + place(thread, i); });
#pragma unroll 1
    for (int first = thread;; first += STEP) {
        await_asked(v, [&](int i) { return from + place(first, i); });
        const bool more = first + STEP < items;
        if (more) ask(next, always, [&](int i) { return from + place(first + STEP, i); });
        keep_fours(space, [&](int i) { return place(first, i) / 32; }, v);
        if (!more) break;
#pragma unroll
        for (int i = 0; i < PART; ++i) v[i] = next[i];
    }
    stamp(phase, AFTER_WAIT);
    sync_chain();
}
