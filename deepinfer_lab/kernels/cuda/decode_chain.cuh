// One decode step of one sequence in one launch: all layers of a decoder, for blocks each of which has a multiprocessor for
// itself, all of them resident. A layer is five phases:
//
//     norm, qkv | rotate, write, attend | o | + x, norm, gate_up, silu(gate) * up | down | (+ x, norm, qkv of the next one ...
//
// A block begins with a phase when all is there that the one before it leaves (chain_exchange.cuh); but weights, which are
// nobody's output, come all the time (chain_weights.cuh).
//
// Blocks share qkv, o, gate_up and down evenly, so that each has something of all four, and in pieces of so many units of K
// that a tile falls into one or two parts. They leave fp32 sums of their parts, and what reads them adds them, in order; of
// gate_up they have whole tiles and leave silu(gate) * up. Each block has the hidden states for itself and makes every norm
// itself. Rounding to fp16 is where the launches one by one have it; activations are rounded once more, and finer
// (chain_digits.cuh).
#pragma once
#include "chain_results.cuh"
#include "chain_rows.cuh"

// By all threads.
__device__ __forceinline__ void copy_row(half_t* to, const half_t* from, int count) {
#pragma unroll 1
    for (int i = this_thread() * 8; i < count; i += CHAIN_THREADS * 8) copy_async(to + i, from + i);
    commit_copies();
}

// After a phase, what all have read by now, or nobody would have begun with it: chain_exchange.cuh says why these. And the
// weight of the next norm is on its way.
__device__ __forceinline__ void take_back(const Space& space, int phase) {
    const ChainLayer* const layer = &space.layer(phase / PHASES);
    const int kind = phase % PHASES;
    if (kind == OF_QKV) {
        copy_row(space.weight(), layer->post_norm, space.of.hidden);
        empty_gated();
    } else if (kind == OF_GATE_UP) {
        const bool last = phase / PHASES + 1 == space.of.layer_count;
        copy_row(space.weight(), last ? space.of.norm : layer[1].input_norm, space.of.hidden);
        empty_attended(space);
    }
    if (kind != OF_QKV) empty_parts(kind == OF_O ? DOWN : kind == OF_GATE_UP ? QKV : O);
}

template <class Attention, class Mlp>
__device__ __forceinline__ void decode_chain(const Chain& of) {
    using R = Ring<Attention, Mlp>;
    constexpr bool SAME = unit_bytes<Attention>() == unit_bytes<Mlp>();
    Space& space = chain_space();
    if (threadIdx.x % 32 == 0 && threadIdx.x < 32 * PRODUCTS) space.deal(of, threadIdx.x / 32);
    if (threadIdx.x == 32 * PRODUCTS) {
        space.begin(of, R::SLOT);
        R(space.ring_at, space.of.depth, {0, 0}).begin();
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < of.layer_count * static_cast<int>(sizeof(ChainLayer) / 8); i += CHAIN_THREADS + 32) {
        space.template at<long long>(space.layers_at)[i] = reinterpret_cast<const long long*>(of.layers)[i];
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < of.hidden; i += CHAIN_THREADS + 32) space.x()[i] = of.x[i];
    if (threadIdx.x < CHAIN_THREADS) place_positions(space);
    __syncthreads();
    if (threadIdx.x >= CHAIN_THREADS) {
        const int left = of.phases % PHASES, products = of.phases / PHASES * PRODUCTS + left - (left >= 2);
        if (threadIdx.x == CHAIN_THREADS) R(space.ring_at, space.of.depth, {0, 0}).copy_all(space, products);
        return;
    }
    const auto keep = [&](int at, const uint2& four) { keep_four(space, at / MMA_K, four); };
    copy_row(space.weight(), space.layer(0).input_norm, of.hidden);
    fetch_layer(space, space.layer(0));
#pragma unroll 1
    for (int phase = 0; phase < space.of.phases; ++phase) {
        const int kind = phase % PHASES;
        if (kind == OF_ATTENTION) {
            attend(phase);
            continue;
        }
        if (kind == OF_DOWN && phase + 1 < space.of.phases) fetch_layer(space, space.layer(phase / PHASES + 1));
        const bool in_attention = SAME || kind <= OF_O;
        const int product = kind == OF_QKV ? QKV : kind - 1;
        const ChainShare& share = space.shares[settled(product)];
        FirstUnit first;
        if (in_attention) first.look_at<Attention, R>(share);
        else first.look_at<Mlp, R>(share);
        if (kind == OF_O) take_attended(phase);
        else if (kind == OF_DOWN) take_gated(phase);
        else add_norm(phase, phase == 0 ? PRODUCTS : kind == OF_QKV ? DOWN : O, keep);
        stamp(phase, AFTER_INPUT);
        if (this_thread() == 0) set_flag(&space.multiplies, 1);
        if (in_attention) multiply_units<Attention, R>(share, first);
        else multiply_units<Mlp, R>(share, first);
        stamp(phase, AFTER_PRODUCTS);
        sync_chain();
        if (kind == OF_GATE_UP) leave_gated<Mlp>();
        else if (in_attention) leave_parts<Attention>(product);
        else leave_parts<Mlp>(product);
        stamp(phase, AFTER_LEAVING);
        if (this_thread() == 0) set_flag(&space.multiplies, 0);
        take_back(space, phase);
    }
    if (blockIdx.x > 0 || space.of.phases % PHASES) return wait_copies<0>();
    add_norm(space.of.phases, space.of.phases == 0 ? PRODUCTS : DOWN, [&](int at, const uint2& four) {
        *reinterpret_cast<uint2*>(space.of.normed_out + at) = four;
    });
#pragma unroll 1
    for (int i = this_thread(); i < space.of.hidden; i += CHAIN_THREADS) space.of.hidden_out[i] = space.x()[i];
}

#define DECODE_CHAIN(NAME, ATTENTION, MLP)                                                                                   \
    extern "C" __global__ void __launch_bounds__(CHAIN_THREADS + 32, 1)                                                      \
        NAME(const half_t* x, const ChainLayer* layers, const half_t* norm, half_t* hidden_out, half_t* normed_out,          \
             const half_t* cos, const half_t* sin, const long long* block_table, const long long* seq_len, unsigned* found,  \
             unsigned* gated, unsigned* attended, long long* stamps, int layer_count, int hidden, int intermediate,          \
             int heads, int kv_heads, int block_size, unsigned reciprocal, int depth, int qkv_grain, int o_grain,            \
             int down_grain, int most_tiles, int phases, int stamped, float eps, float scale_log2) {                         \
        decode_chain<ATTENTION, MLP>({x, layers, norm, hidden_out, normed_out, cos, sin, block_table, seq_len, found, gated, \
                                      attended, stamps, layer_count, hidden, intermediate, heads, kv_heads, block_size,      \
                                      reciprocal, depth, qkv_grain, o_grain, down_grain, most_tiles, phases, stamped, eps,   \
                                      scale_log2});                                                                          \
    }
