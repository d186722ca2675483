// One decode step of a few rows in one launch: all layers of a decoder, for as many blocks as there are multiprocessors, all of
// them resident. A layer is five phases:
//
//     norm, qkv | rotate, write, attend | o | + x, norm, gate_up, silu(gate) * up | down | (+ x, norm, qkv of the next layer ...
//
// A phase begins when all blocks are done with the one before it, some 1.5 us on an H200; but weights, which are nobody's output,
// come all the time (chain_weights.cuh).
//
// Blocks share the units of qkv, o and down evenly, wherever one tile ends and the next begins, and leave fp32 sums of their parts
// of a tile, always in the same places. What reads them adds them, in order; places that no block has are zero and stay so.
// gate_up goes to blocks in whole tiles, and is finished there: everybody reads all of it. Each block has the hidden states for
// itself and makes every norm itself. Rounding to fp16 is where the launches one by one have it.
#pragma once
#include "chain_attention.cuh"
#include "silu.cuh"

enum Stamp { AFTER_WAIT, AFTER_ROWS, AFTER_PRODUCTS, AFTER_ARRIVAL, STAMPS };
enum Phase { OF_QKV, OF_ATTENTION, OF_O, OF_GATE_UP, OF_DOWN, PHASES };

// What a launch is given. x: [ROWS, hidden]. found: parts of qkv, o and down, one after another. gated: [ROWS, intermediate].
struct Chain {
    const ChainLayer* layers;
    const half_t* x;
    const half_t* norm;  // the final one
    half_t *hidden_out, *normed_out;  // [ROWS, hidden], its norm
    float* found;
    half_t* gated;
    unsigned* arrived;  // [2]: blocks, ever; and how many before this launch
    long long* stamps;  // [blocks, PHASES, STAMPS] of layer `stamped`, or null
    int layer_count, hidden, intermediate, depth, parts, most_tiles, phases, stamped;
    float eps;
};

// A block's shared memory.
template <class R, int ROWS>
struct Space {
    ChainLayer* layers;
    ChainShare* shares;
    Sequence* sequences;      // [ROWS]
    float *squares, *sums;    // [NORM_WARPS, ROWS]; [most_tiles, CHAIN_WARPS, ROWS, 16]
    half_t *x, *weight, *act;  // [ROWS, hidden]; [hidden]; activations of a product, rows `stride` apart
    int stride;

    // most: values of a row of activations.
    __device__ __forceinline__ Space(const R& ring, const Chain& of, int most) : stride(most + 32) {
        act = reinterpret_cast<half_t*>(ring.end());
        x = act + max(ROWS * stride * 2, static_cast<int>(sizeof(AttentionSpace))) / 2, weight = x + ROWS * of.hidden;
        sums = reinterpret_cast<float*>(weight + of.hidden), squares = sums + of.most_tiles * CHAIN_WARPS * ROWS * MMA_N;
        shares = reinterpret_cast<ChainShare*>(squares + NORM_WARPS * 8);
        sequences = reinterpret_cast<Sequence*>(shares + PRODUCTS);
        layers = reinterpret_cast<ChainLayer*>(shares + PRODUCTS + 8);
    }
    __device__ __forceinline__ Sequence (&lengths() const)[ROWS] { return *reinterpret_cast<Sequence(*)[ROWS]>(sequences); }
    __device__ __forceinline__ AttentionSpace& attention() const { return *reinterpret_cast<AttentionSpace*>(act); }
};

// Copies whole pieces of 16 bytes, by all threads; for what each has copied itself `wait_copies` is enough.
__device__ __forceinline__ void copy_row(half_t* to, const half_t* from, int count) {
#pragma unroll 1
    for (int i = this_thread() * 8; i < count; i += CHAIN_THREADS * 8) copy_async(to + i, from + i);
    commit_copies();
}

// x += the sum of its parts, rounded; and its RMSNorm, bit for bit what rms_norm.cu writes, to `to`.
template <int ROWS>
__device__ __forceinline__ void add_norm(half_t* x, const half_t* weight, const float* found, int parts, float* squares,
                                         half_t* to, int stride, int hidden, float eps) {
    const unsigned thread = this_thread();
    float sum[ROWS] = {};
#pragma unroll 1
    for (int i = thread * 8; i < hidden; i += NORM_STEP) {
        uint2 more[ROWS][2];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            more[r][0] = four_outputs<ROWS>(found, parts, r, i, nullptr);
            more[r][1] = four_outputs<ROWS>(found, parts, r, i + 4, nullptr);
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            uint2* const at = reinterpret_cast<uint2*>(x + r * hidden + i);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float a[4], b[4];
                float_four(at[j], a), float_four(more[r][j], b);
#pragma unroll
                for (int v = 0; v < 4; ++v) a[v] += b[v];
                at[j] = half_four(a);
                sum[r] = add_squares(add_squares(sum[r], at[j].x), at[j].y);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float one[1] = {sum[r]};
        const float all = warp_sums(one);
        if (thread % 32 == 0) squares[thread / 32 * ROWS + r] = all;
    }
    wait_copies<0>();  // the weight, of which a thread uses what it has copied itself
    sync_chain();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float factor = norm_factor(squares + r, ROWS, hidden, eps);
#pragma unroll 1
        for (int i = thread * 8; i < hidden; i += NORM_STEP) {
            const uint4 v = *reinterpret_cast<const uint4*>(x + r * hidden + i);
            *reinterpret_cast<uint4*>(to + r * stride + i) = normed(v, *reinterpret_cast<const uint4*>(weight + i), factor);
        }
    }
    sync_chain();
}

// The sums of a block's warps, of one output, always in the same order.
template <int ROWS>
__device__ __forceinline__ float add_chain_warps(const float* sums, int tile, int row, int output) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < CHAIN_WARPS; ++warp) {
        total += sums[((tile * CHAIN_WARPS + warp) * ROWS + row) * MMA_N + output];
    }
    return total;
}

// A block's part of a product to where all see it.
template <int ROWS>
__device__ __forceinline__ void leave_parts(const ChainShare& share, const float* sums, float* found, int parts) {
    const int cells = share.tiles() * ROWS * MMA_N;
#pragma unroll 1
    for (int cell = this_thread(); cell < cells; cell += CHAIN_THREADS) {
        const int tile = cell / (ROWS * MMA_N), row = cell / MMA_N % ROWS, output = cell % MMA_N;
        const int place = (share.first_tile() + tile) * parts + (tile == 0 ? share.part : 0);
        found[(place * ROWS + row) * MMA_N + output] = add_chain_warps<ROWS>(sums, tile, row, output);
    }
}
template <int ROWS>
__device__ __forceinline__ void leave_gated(const ChainShare& share, const float* sums, half_t* gated, int intermediate) {
    constexpr int EACH = MMA_N / 2;
    const int cells = share.tiles() * ROWS * EACH;
#pragma unroll 1
    for (int cell = this_thread(); cell < cells; cell += CHAIN_THREADS) {
        const int tile = cell / (ROWS * EACH), row = cell / EACH % ROWS, output = cell % EACH;
        const half_t gate = to_half(add_chain_warps<ROWS>(sums, tile, row, output));
        const half_t up = to_half(add_chain_warps<ROWS>(sums, tile, row, output + EACH));
        gated[row * intermediate + (share.first_tile() + tile) * EACH + output] = to_half(silu_times(gate, up));
    }
}

// A block's share of a product: whole tiles of gate_up, units of the others.
__device__ __forceinline__ ChainShare deal(int product, const Chain& of, int q_size, int kv_size) {
    const int outputs = product == QKV ? q_size + 2 * kv_size : product == GATE_UP ? 2 * of.intermediate : of.hidden;
    const int inputs = product == O ? q_size : product == DOWN ? of.intermediate : of.hidden;
    const int units = inputs / MMA_K, tiles = outputs / MMA_N, all = tiles * units, block = blockIdx.x;
    if (product == GATE_UP) {
        const int begin = share(block, tiles), end = share(block + 1, tiles);
        return {begin * units, (end - begin) * units, 0, units};
    }
    const int begin = share(block, all), end = share(block + 1, all);
    return {begin, end - begin, block - owner(begin / units * units, all), units};
}

template <class Attention, class Mlp, int ROWS>
__device__ __forceinline__ void decode_chain(const Chain& of, const ChainAttention& attention) {
    using R = Ring<Attention, Mlp>;
    constexpr bool SAME = unit_bytes<Attention>() == unit_bytes<Mlp>();
    const unsigned thread = threadIdx.x;
    const int q_size = attention.heads * HEAD_DIM, kv_size = attention.kv_heads * HEAD_DIM;
    const int most = max(max(of.hidden, q_size), of.intermediate);
    R ring(of.depth);
    {
        const Space<R, ROWS> space(ring, of, most);
        const auto* const from = reinterpret_cast<const long long*>(of.layers);
        const int words = of.layer_count * static_cast<int>(sizeof(ChainLayer) / 8), step = blockDim.x;
        for (int i = thread; i < words; i += step) reinterpret_cast<long long*>(space.layers)[i] = from[i];
        for (int i = thread; i < ROWS * of.hidden; i += step) space.x[i] = of.x[i];
        if (thread < ROWS) space.sequences[thread] = Sequence(max(static_cast<int>(attention.seq_lens[thread]), 1));
        if (thread < PRODUCTS) space.shares[thread] = deal(thread, of, q_size, kv_size);
        if (thread == 0) ring.begin();
    }
    unsigned target = arrived_at(of.arrived + 1);  // of the counter, when all are where this block is
    __syncthreads();
    if (thread >= CHAIN_THREADS) {
        const Space<R, ROWS> space(ring, of, most);
        const int left = of.phases % PHASES;
        if (thread == CHAIN_THREADS) ring.copy_all(space.layers, space.shares, of.phases / PHASES * PRODUCTS + left - (left >= 2));
        return;
    }
    const auto await_all = [&] {
        if (this_thread() == 0) await_count(of.arrived, target);
        sync_chain();
    };
    const auto stamp = [&](int phase, Stamp what) {
        if (of.stamps && this_thread() == 0 && phase / PHASES == of.stamped) {
            of.stamps[(blockIdx.x * PHASES + phase % PHASES) * STAMPS + what] = clock64();
        }
    };
    // One copy of each phase's code, since all of it is fetched again for each layer. Where things are is found out again in each
    // round, too: registers are scarce.
    for (int phase = 0;; ++phase) {
        const bool over = phase == of.phases;
        if (over && blockIdx.x > 0) return;
        const Space<R, ROWS> space(ring, of, settled(most));
        const ChainLayer& layer = space.layers[over ? 0 : phase / PHASES];
        float* const found_o = of.found + (q_size + 2 * kv_size) * of.parts * ROWS;
        float* const found_down = found_o + of.hidden * of.parts * ROWS;
        const int kind = over ? OF_QKV : phase % PHASES;
        if (kind == OF_ATTENTION) {
            int items = 0;  // blocks' worth of work
#pragma unroll
            for (int r = 0; r < ROWS; ++r) items += space.sequences[r].splits * attention.kv_heads;
            if (static_cast<int>(blockIdx.x) < items) {
                attend(attention, space.lengths(), layer, of.found, of.parts, space.attention(), items, [&] {
                    await_all();
                    stamp(phase, AFTER_WAIT);
                });
                stamp(phase, AFTER_PRODUCTS);
                if (this_thread() == 0) arrive_at(of.arrived);
                stamp(phase, AFTER_ARRIVAL);
            }
            target += min(items, static_cast<int>(gridDim.x));  // the others do not arrive
            continue;
        }
        if (kind == OF_QKV || kind == OF_GATE_UP) {
            const bool nothing = phase == 0 || (over && phase % PHASES != 0);
            copy_row(space.weight, over ? of.norm : kind == OF_QKV ? layer.input_norm : layer.post_norm, of.hidden);
            await_all();
            stamp(phase, AFTER_WAIT);
            add_norm<ROWS>(space.x, space.weight, kind == OF_QKV ? found_down : found_o, nothing ? 0 : of.parts, space.squares,
                           space.act, space.stride, of.hidden, of.eps);
            if (over) break;
        } else {
            await_all();
            stamp(phase, AFTER_WAIT);
            if (kind == OF_O) {
                add_splits(attention, space.lengths(), space.act, space.stride);
            } else {
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    copy_row(space.act + r * space.stride, of.gated + r * of.intermediate, of.intermediate);
                }
                wait_copies<0>();
            }
            sync_chain();
        }
        stamp(phase, AFTER_ROWS);
        const ChainShare& share = space.shares[kind == OF_QKV ? QKV : kind - 1];
        if (SAME || kind <= OF_O) multiply_units<Attention, ROWS>(ring, share, space.act, space.stride, space.sums);
        else multiply_units<Mlp, ROWS>(ring, share, space.act, space.stride, space.sums);
        stamp(phase, AFTER_PRODUCTS);
        sync_chain();
        if (kind == OF_GATE_UP) leave_gated<ROWS>(share, space.sums, of.gated, of.intermediate);
        else leave_parts<ROWS>(share, space.sums, kind == OF_QKV ? of.found : kind == OF_O ? found_o : found_down, of.parts);
        sync_chain();  // all have written
        if (this_thread() == 0) arrive_at(of.arrived);
        stamp(phase, AFTER_ARRIVAL);
        target += gridDim.x;
    }
    const Space<R, ROWS> space(ring, of, most);
    for (int i = thread; i < ROWS * of.hidden; i += CHAIN_THREADS) {
        of.hidden_out[i] = space.x[i], of.normed_out[i] = space.act[i / of.hidden * space.stride + i % of.hidden];
    }
    if (thread == 0) of.arrived[1] = target;
}

#define DECODE_CHAIN(NAME, ATTENTION, MLP, ROWS)                                                                             \
    extern "C" __global__ void __launch_bounds__(CHAIN_THREADS + 32, 1)                                                           \
        NAME(const half_t* x, const ChainLayer* layers, const half_t* norm, half_t* hidden_out, half_t* normed_out,          \
             const half_t* cos, const half_t* sin, const long long* block_table, const long long* seq_lens, float* found,    \
             half_t* gated, float* attended, unsigned* arrived, long long* stamps, int layer_count, int hidden,              \
             int intermediate, int heads, int kv_heads, int block_size, unsigned reciprocal, int columns, int depth,         \
             int parts, int most_tiles, int phases, int stamped, float eps, float scale_log2) {                              \
        decode_chain<ATTENTION, MLP, ROWS>(                                                                                  \
            {layers, x, norm, hidden_out, normed_out, found, gated, arrived, stamps, layer_count, hidden, intermediate,      \
             depth, parts, most_tiles, phases, stamped, eps},                                                                \
            {cos, sin, block_table, seq_lens, attended, heads, kv_heads, block_size, columns, reciprocal, scale_log2});      \
    }
