// Attention of a new token over the paged cache (fp16, heads of 128), as a part of decode_chain.cuh: the query heads of
// one KV head and one split of the positions to a block. A round is 8 positions to a warp:
//
//     S^T[8 positions, 8 heads] = K Q^T: the other 8 rows of a product are nobody's; exp2(S - the warp's top) is left
//     O^T[16 of D, 8 heads] += V^T P^T: of every other 16 positions of the round, for what the warp has of D
//
// so that K and V take 16 registers each and a warp's part of O four, and two warps' meet in the end. K and V of the token
// itself are not in the cache yet: each block makes them, and puts them in the place of what it read there. So what it reads
// has nothing to do with the kernel's other work and is in shared memory before that is done: what attention waits for would
// stand in line behind it. What the splits of a KV head have found its own blocks make one.
#pragma once
#include "chain_positions.cuh"

constexpr float LOWEST = -1e30f;  // below every score, and differences of two are never NaN

// Of two values at once, over the lanes 4g + t of one t: neither waits for the other's shuffles.
__device__ __forceinline__ void max_over_g(const float (&x)[2], float (&top)[2]) {
    top[0] = x[0], top[1] = x[1];
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) top[i] = fmaxf(top[i], __shfl_xor_sync(0xFFFFFFFFu, top[i], distance));
    }
}
__device__ __forceinline__ void sum_over_g(const float (&x)[2], float (&sum)[2]) {
    sum[0] = x[0], sum[1] = x[1];
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], distance);
    }
}

// A lane's two heads, 2t and 2t + 1, of a value that lane 4g + t has for head g.
__device__ __forceinline__ void of_two_heads(float value, int t, float (&two)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) two[i] = __shfl_sync(0xFFFFFFFFu, value, 4 * (2 * t + i));
}

// The token's own rows: its query heads and K, rotated, and V. Where the item has the last position, K and V to the cache.
__device__ __forceinline__ void make_rows(const Space& space, const ChainLayer& layer) {
    const Item& its = space.item;
    const Chain& of = space.of;
    const int ratio = space.ratio;
    // A thread takes four dimensions of a row and those that rotate with them.
    const int head = this_thread() / 16, dim = this_thread() % 16 * 4;
    if (head >= HEADS + 2) return;
    const uint2 cosines = *reinterpret_cast<const uint2*>(space.angles() + dim);
    const uint2 sines = *reinterpret_cast<const uint2*>(space.angles() + HEAD_DIM / 2 + dim);
    const int from = head < ratio ? its.kv_head * ratio + head : of.heads + (head - ratio) * of.kv_heads + its.kv_head;
    const int output = from * HEAD_DIM + dim;
    const bool is_one = head < ratio + 2;  // the others are heads that there are not
    uint2 bias[2] = {};
    if (layer.qkv_bias && is_one) {
        bias[0] = *reinterpret_cast<const uint2*>(layer.qkv_bias + output);
        bias[1] = *reinterpret_cast<const uint2*>(layer.qkv_bias + output + HEAD_DIM / 2);
    }
    uint4 part[2][MOST_PARTS];
    const ChainShare& share = space.shares[QKV];
    const int parts = is_one ? share.parts : 0;
    await_words(
        reinterpret_cast<uint4(&)[2 * MOST_PARTS]>(part), [&](int i) { return i % MOST_PARTS < parts; },
        [&](int i) {
            const unsigned* const half = share.found + output + i / MOST_PARTS * (HEAD_DIM / 2);
            return reinterpret_cast<const uint4*>(half + i % MOST_PARTS * share.words);
        });
    uint2 first = add_four(part[0], bias[0]), second = add_four(part[1], bias[1]);
    if (head <= ratio) {
        float a[4], b[4], c[4], d[4], cosine[4], sine[4];
        float_four(first, a), float_four(second, b), float_four(cosines, cosine), float_four(sines, sine);
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = a[i] * cosine[i] - b[i] * sine[i], d[i] = b[i] * cosine[i] + a[i] * sine[i];
        first = half_four(c), second = half_four(d);
    }
    half_t* const to = space.attention().rows[head < ratio ? head : is_one ? HEADS + head - ratio : head - 2] + dim;
    *reinterpret_cast<uint2*>(to) = first, *reinterpret_cast<uint2*>(to + HEAD_DIM / 2) = second;
    if (head >= ratio && is_one && its.end > its.last) {
        half_t* const cached = (head == ratio ? layer.k : layer.v) + space.positions()[its.last - its.begin] + dim;
        *reinterpret_cast<uint2*>(cached) = first, *reinterpret_cast<uint2*>(cached + HEAD_DIM / 2) = second;
    }
}

// What the splits have found becomes one: the block's share of that, so that others need to read no more.
__device__ __forceinline__ void join_splits(const Space& space) {
    const Chain& of = space.of;
    const int splits = space.splits, end = space.joined_at(space.item.split + 1);
#pragma unroll 1
    for (int at = space.joined_at(space.item.split) + this_thread(); at < end; at += CHAIN_THREADS) {
        uint2 v[2][MOST_SPLITS];  // values; and top and sum
        await_words(
            reinterpret_cast<uint2(&)[2 * MOST_SPLITS]>(v), [&](int i) { return i % MOST_SPLITS < splits; },
            [&](int i) {
                const auto* const from = reinterpret_cast<const uint2*>(of.split(i % MOST_SPLITS));
                return from + (i < MOST_SPLITS ? at : of.stats() / 2 + at / (HEAD_DIM / 4) * 2);
            });
        float highest = LOWEST, total = 0.0f, sum[4] = {};
#pragma unroll
        for (int i = 0; i < MOST_SPLITS; ++i) {
            if (i < splits) highest = fmaxf(highest, __uint_as_float(v[1][i].x));
        }
#pragma unroll
        for (int i = 0; i < MOST_SPLITS; ++i) {
            if (i >= splits) continue;
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
        const uint2 four = half_four(sum);
        put(of.joined() + 2 * at, four.x), put(of.joined() + 2 * at + 1, four.y);
    }
}

// A block's part of it.
__device__ __forceinline__ void attend(int phase) {
    using S = Spread<HEAD_DIM, 2>;
    const Space& space = chain_space();
    const Item& its = space.item;
    if (its.end == 0) return;
    const ChainLayer& layer = space.layer(phase / PHASES);
    const unsigned thread = this_thread();
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int end = its.end, last = its.last;
    Keys keys;
    Stripe stripe;
    const auto take_round = [&](int round) {
        if (round + warp * EACH_WARP < end) keys.load(space, warp * EACH_WARP + g, t);
        stripe.load(space, end - round);
    };
    take_round(its.begin);  // there since `add_norm`
    make_rows(space, layer);
    stamp(phase, AFTER_WAIT);
    sync_chain();
    stamp(phase, AFTER_INPUT);
    static_assert(MOST_POSITIONS == 2 * ROUND, "one more");
    if (its.rounds() > 1) copy_round(space, layer, its.begin + ROUND);
    AttentionSpace& shared = space.attention();
    const float scale = space.of.scale_log2;
    int round = its.begin;

    float highest = LOWEST, total = 0.0f, o[2][4] = {};  // of head g; and two chains
#pragma unroll 1
    for (;;) {
        const int position = round + warp * EACH_WARP + g;  // of K
        const bool renew = end > last && round + ROUND > last;
        if (position - g < end) {
            if (renew && position >= last) keys.renew(shared.rows[HEADS], t);
            float s[2][4] = {};
#pragma unroll
            for (int step = 0; step < S::STEPS; ++step) {
                unsigned a[4];
                keys.fragment(step, a);
                const uint2 four = *reinterpret_cast<const uint2*>(&shared.rows[g][S::k_dim(step, t)]);
                mma(s[step % 2], a, four.x, four.y);
            }
            float score[2], top[2], weight[2], sum[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) score[i] = position < end ? (s[0][i] + s[1][i]) * scale : 2 * LOWEST;
            max_over_g(score, top);
#pragma unroll
            for (int i = 0; i < 2; ++i) weight[i] = exp2_approx(score[i] - top[i]);
            sum_over_g(weight, sum);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                shared.weights[warp][2 * t + i][g] = to_half(weight[i]);
                if (g == 0) shared.top[warp][2 * t + i] = top[i], shared.sum[warp][2 * t + i] = sum[i];
            }
        } else {  // counts for nothing
            *reinterpret_cast<uint2*>(&shared.weights[warp][g][2 * t / 4 * 4]) = {};
            shared.top[warp][g] = LOWEST, shared.sum[warp][g] = 0.0f;
        }
        if (renew) stripe.renew(shared.rows[HEADS + 1], round, last);
        sync_chain();
        float higher = highest, added = 0.0f, factor[2], tops[4], sums[4];  // of a quarter of the warps
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            tops[i] = shared.top[4 * i + t][g], sums[i] = shared.sum[4 * i + t][g];
            higher = fmaxf(higher, tops[i]);
        }
        higher = fmaxf(higher, __shfl_xor_sync(0xFFFFFFFFu, higher, 1));
        higher = fmaxf(higher, __shfl_xor_sync(0xFFFFFFFFu, higher, 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) added += exp2_approx(tops[i] - higher) * sums[i];
        added += __shfl_xor_sync(0xFFFFFFFFu, added, 1);
        added += __shfl_xor_sync(0xFFFFFFFFu, added, 2);
        const float correction = exp2_approx(highest - higher);
        total = total * correction + added, highest = higher;
        of_two_heads(correction, t, factor);
#pragma unroll
        for (int i = 0; i < 4; ++i) o[0][i] *= factor[i % 2], o[1][i] *= factor[i % 2];
#pragma unroll
        for (int i = 0; i < V_TILES; ++i) {
            const int whose = (stripe.from(i) + stripe.first()) / EACH_WARP;
            const float its_weight = exp2_approx(shared.top[whose][g] - highest);
            const uint2 four = *reinterpret_cast<const uint2*>(&shared.weights[whose][g][t % 2 * 4]);
            const unsigned both = half_pair(its_weight, its_weight);
            unsigned a[4];
            stripe.fragment(i, a);
            mma(o[i % 2], a, mul_pair(four.x, both), mul_pair(four.y, both));
        }
        round += ROUND;
        if (round >= end) break;
        wait_copies<0>();
        sync_chain();  // and all have read what the warps have left
        take_round(round);
    }

    float part[2];
    of_two_heads(__fdividef(1.0f, total), t, part);
#pragma unroll
    for (int i = 0; i < 4; ++i) o[0][i] = (o[0][i] + o[1][i]) * part[i % 2];
    if (warp >= STRIPES) shared.out[warp - STRIPES][lane] = {o[0][0], o[0][1], o[0][2], o[0][3]};
    sync_chain();
    stamp(phase, AFTER_PRODUCTS);
    if (warp < STRIPES) {
        const float4 more = shared.out[warp][lane];
        const int ratio = space.ratio, first_head = its.kv_head * ratio;
        unsigned* const to = space.splits > 1 ? space.of.split(its.split) : space.of.joined();
        unsigned* const words = to + (first_head * HEAD_DIM + Stripe::dim()) / 2 + t * HEAD_DIM;  // of two heads
        if (2 * t < ratio) put(words, half_pair(o[0][0] + more.x, o[0][2] + more.z));
        if (2 * t + 1 < ratio) put(words + HEAD_DIM / 2, half_pair(o[0][1] + more.y, o[0][3] + more.w));
        if (warp == 0 && g < ratio && space.splits > 1) {
            put(to + space.of.stats() + (first_head + g) * 4 + t, t == 0 ? highest : t == 1 ? total : 0.0f);
        }
    }
    if (space.splits > 1) join_splits(space);
    sync_chain();  // the space is free again
    stamp(phase, AFTER_LEAVING);
}

// Takes back what `attend` has left.
__device__ __forceinline__ void empty_attended(const Space& space) {
    const Item& its = space.item;
    if (its.end == 0) return;
#pragma unroll 1
    for (int i = 2 * space.joined_at(its.split) + this_thread(); i < 2 * space.joined_at(its.split + 1); i += CHAIN_THREADS) {
        empty(space.of.joined() + i);
    }
    if (space.splits == 1) return;
    unsigned* const to = space.of.split(its.split);
    const int first = its.kv_head * space.ratio, words = space.ratio * (HEAD_DIM / 2);
#pragma unroll 1
    for (int i = this_thread(); i < words + space.ratio * 4; i += CHAIN_THREADS) {
        empty(to + (i < words ? first * (HEAD_DIM / 2) : space.of.stats() + first * 4 - words) + i);
    }
}
