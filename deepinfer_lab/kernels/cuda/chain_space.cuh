// What decode_chain.cuh's kernels are given and what a block has in shared memory. All of it is found again there by each of
// the phases, which are functions of their own: registers are scarce, and a phase's have nothing to do with another's.
#pragma once
#include "chain_exchange.cuh"
#include "digits_ptx.cuh"
#include "norm.cuh"
#include "tile_units.cuh"

// Warps that multiply, four on each of a multiprocessor's schedulers: with two, a unit's latency was all that counted. One more
// warp copies.
constexpr int CHAIN_WARPS = 16, CHAIN_THREADS = 32 * CHAIN_WARPS;
constexpr int MOST_PARTS = 2;  // of a tile: blocks that share its units
constexpr int HEAD_DIM = 128, HEADS = 8, MOST_SPLITS = 8;
constexpr int EACH_WARP = 8, ROUND = CHAIN_WARPS * EACH_WARP, MOST_POSITIONS = 2 * ROUND;  // of a split
constexpr int CACHED_BYTES = 2 * ROUND * HEAD_DIM * 2;  // of a round's K and V
enum ChainProduct { QKV, O, GATE_UP, DOWN, PRODUCTS };
enum Phase { OF_QKV, OF_ATTENTION, OF_O, OF_GATE_UP, OF_DOWN, PHASES };
enum Stamp { AFTER_WAIT, AFTER_INPUT, AFTER_PRODUCTS, AFTER_LEAVING, STAMPS };

// A layer as the host lays it out: addresses. Tiles and scales as in quant/tiles.py, gate_up interleaved (quant/interleave.py).
struct ChainLayer {
    const char *tiles[PRODUCTS], *scales[PRODUCTS];
    const half_t *qkv_bias, *input_norm, *post_norm;  // no bias: null
    half_t *k, *v;                                    // [slots, kv_heads, D]
};

// What a launch is given. x: [hidden]. found: parts of qkv, o and down, one after another. gated: [intermediate].
// attended: of each split, heads * D values of fp16, and four words a head: its top, its sum, and two zeros; behind them what
// becomes of all splits, heads * D values.
// grains: of qkv, o and down, the units of K in a piece.
struct Chain {
    const half_t* x;
    const ChainLayer* layers;
    const half_t* norm;                      // the final one
    half_t *hidden_out, *normed_out;         // [hidden], its norm
    const half_t *cos, *sin;                 // [positions, D / 2]
    const long long *block_table, *seq_len;  // the sequence's blocks; how many positions it has
    unsigned *found, *gated, *attended;
    long long* stamps;  // [blocks, PHASES, STAMPS] of layer `stamped`, or null
    int layer_count, hidden, intermediate, heads, kv_heads, block_size;
    unsigned reciprocal;
    int depth, qkv_grain, o_grain, down_grain, most_tiles, phases, stamped;
    float eps, scale_log2;

    __device__ __forceinline__ int stats() const { return heads * (HEAD_DIM / 2); }  // words of a split in front of them
    __device__ __forceinline__ unsigned* split(int number) const { return attended + number * heads * (HEAD_DIM / 2 + 4); }
    __device__ __forceinline__ unsigned* joined() const { return split(MOST_SPLITS); }
};

// What a block has of a product: `count` units of all tiles', from unit `first` of tile `tile` on, which are that tile's part
// number `part`; tiles: how many tiles that are. units: of K. found: where parts are left, up to `parts` of a tile, words of
// one part of all tiles after those of the other.
struct ChainShare {
    int tile, first, count, tiles, part, units, parts, words;
    unsigned* found;

    // Of the block's tiles: whether it has the last unit.
    __device__ __forceinline__ bool ends(int number) const { return first + count >= (number + 1) * units; }
};

// What a block has of attention: positions begin .. end - 1 for one KV head, which are split number `split`.
struct Item {
    int kv_head, split, begin, end, last;  // last: the sequence's last position; end is 0 where the block has nothing

    __device__ __forceinline__ int rounds() const { return (end - begin + ROUND - 1) / ROUND; }
};

// A block's shared memory of attention. Its rows begin at different banks.
struct AttentionSpace {
    half_t rows[HEADS + 2][HEAD_DIM + 32];  // query heads, then K and V of the token
    float4 out[CHAIN_WARPS / 2][32];
    half_t weights[CHAIN_WARPS][HEADS][EACH_WARP];
    float top[CHAIN_WARPS][HEADS], sum[CHAIN_WARPS][HEADS];
};

// How far a warp has come in the ring of weights: where its slot is, in bytes, and which phase of the slot's barriers comes.
struct RingPlace {
    int at;
    unsigned parity;
};

// Of a unit of activations in digits: their sum, in units of `step`.
struct alignas(8) Total {
    int sum;
    float step;
};

// A block's shared memory, the ring of weights behind it (chain_weights.cuh). digits: activations of a product, two rows of
// bytes, which begin half of a load apart.
struct alignas(16) Space {
    Chain of;
    ChainShare shares[PRODUCTS];
    RingPlace places[CHAIN_WARPS];
    Item item;
    int splits;      // of the sequence's positions
    int ratio;       // query heads of a KV head
    int multiplies;  // a flag: whether the block does, or waits. The warp that copies asks
    int stride, digits_at, x_at, weight_at, sums_at, totals_at, layers_at, positions_at, ring_at, cached_at;  // bytes
    alignas(16) float squares[CHAIN_WARPS];

    template <class T>
    __device__ __forceinline__ T* at(int bytes) const { return reinterpret_cast<T*>(launch_patterns() + bytes); }
    __device__ __forceinline__ AttentionSpace& attention() const { return *at<AttentionSpace>(digits_at); }
    __device__ __forceinline__ half_t* x() const { return at<half_t>(x_at); }            // [hidden]
    __device__ __forceinline__ half_t* weight() const { return at<half_t>(weight_at); }  // of the next norm
    __device__ __forceinline__ float* sums() const { return at<float>(sums_at); }        // [most_tiles, CHAIN_WARPS, 16]
    __device__ __forceinline__ Total* totals() const { return at<Total>(totals_at); }    // [units of K]
    // Where the item's positions begin in a layer's K or V, in values; and of its last position cos and sin.
    __device__ __forceinline__ int* positions() const { return at<int>(positions_at); }
    __device__ __forceinline__ half_t* angles() const { return at<half_t>(positions_at + MOST_POSITIONS * 4); }
    // A round's K and V, where the block has an item: in the place of the ring's last slots.
    __device__ __forceinline__ uint4* cached() const { return at<uint4>(cached_at); }
    // Of what becomes of all splits, four dimensions each: where the share of the item's KV head begins that `split` makes.
    __device__ __forceinline__ int joined_at(int split) const {
        const unsigned each = ratio * (HEAD_DIM / 4);
        return item.kv_head * each + each * split / splits;
    }
    // which: of the upper bytes, 0, or the lower ones, 1.
    __device__ __forceinline__ char* digits(int which) const { return at<char>(digits_at) + which * stride; }
    __device__ __forceinline__ const ChainLayer& layer(int number) const { return at<const ChainLayer>(layers_at)[number]; }

    // What the block has of a product: whole pieces. By one thread, which need not be that of `begin`.
    __device__ __forceinline__ void deal(const Chain& of, int product) {
        const int q_size = of.heads * HEAD_DIM, qkv_size = q_size + 2 * of.kv_heads * HEAD_DIM;
        const int outputs = product == QKV ? qkv_size : product == GATE_UP ? 2 * of.intermediate : of.hidden;
        const unsigned units = (product == O ? q_size : product == DOWN ? of.intermediate : of.hidden) / MMA_K;
        const int o_or_down = product == O ? of.o_grain : of.down_grain;
        const unsigned grain = product == GATE_UP ? units : product == QKV ? of.qkv_grain : o_or_down;
        const unsigned each = units / grain, all = outputs / MMA_N * each, blocks = gridDim.x, block = blockIdx.x;
        const unsigned first = all * block / blocks, end = all * (block + 1) / blocks;
        const unsigned owner = ((first / each * each + 1) * blocks - 1) / all;  // of the first tile's first piece
        const int from = first % each * grain, count = (end - first) * grain;
        const int qkv_parts = of.qkv_grain * MMA_K < of.hidden ? MOST_PARTS : 1;
        const int o_parts = of.o_grain * MMA_K < q_size ? MOST_PARTS : 1;
        const int before = product == QKV ? 0 : qkv_size * qkv_parts + (product == DOWN ? of.hidden * o_parts : 0);
        shares[product] = {static_cast<int>(first / each), from, count, static_cast<int>((from + count + units - 1) / units),
                           static_cast<int>(block - owner), static_cast<int>(units), each > 1 ? MOST_PARTS : 1, outputs,
                           of.found + before};
    }
    // By one thread. slot: bytes of the ring's.
    __device__ __forceinline__ void begin(const Chain& chain, int slot) {
        of = chain;
        const int q_size = of.heads * HEAD_DIM;
        const int most = max(max(of.hidden, q_size), of.intermediate);
        stride = most + 16;
        digits_at = sizeof(Space), x_at = digits_at + max(2 * stride, static_cast<int>(sizeof(AttentionSpace)));
        weight_at = x_at + of.hidden * 2, sums_at = weight_at + of.hidden * 2;
        layers_at = sums_at + of.most_tiles * CHAIN_WARPS * MMA_N * 4;
        totals_at = layers_at + of.layer_count * static_cast<int>(sizeof(ChainLayer));
        positions_at = (totals_at + most / MMA_K * static_cast<int>(sizeof(Total)) + 15) / 16 * 16;
        ring_at = positions_at + MOST_POSITIONS * 4 + HEAD_DIM * 2;
#pragma unroll 1
        for (int warp = 0; warp < CHAIN_WARPS; ++warp) places[warp] = {0, 0};
        ratio = static_cast<unsigned>(of.heads) / of.kv_heads, item = {}, multiplies = 0;
        // One round of positions to a split, while there are splits.
        const int most_splits = min(static_cast<int>(gridDim.x) / of.kv_heads, MOST_SPLITS);
        const int length = min(max(static_cast<int>(*of.seq_len), 1), most_splits * MOST_POSITIONS);
        const int wanted = min((length + ROUND - 1) / ROUND, most_splits);
        const int size = ((length + wanted - 1) / wanted + ROUND - 1) / ROUND * ROUND;
        splits = (length + size - 1) / size;
        const int kv_head = static_cast<int>(blockIdx.x) / splits, split = static_cast<int>(blockIdx.x) % splits;
        if (kv_head >= of.kv_heads) return;
        item = {kv_head, split, split * size, min(length, (split + 1) * size), length - 1};
        of.depth -= (CACHED_BYTES + slot - 1) / slot;
        cached_at = ring_at + of.depth * slot;
    }
};
__device__ __forceinline__ Space& chain_space() { return *reinterpret_cast<Space*>(launch_patterns()); }

// The block's clock, for whoever wants to know where the time goes.
__device__ __forceinline__ void stamp(int phase, Stamp what) {
    const Chain& of = chain_space().of;
    if (of.stamps && this_thread() == 0 && phase / PHASES == of.stamped) {
        of.stamps[(blockIdx.x * PHASES + phase % PHASES) * STAMPS + what] = clock64();
    }
}

// The warps that multiply wait for one another.
__device__ __forceinline__ void sync_chain() { sync_team<CHAIN_THREADS>(0); }

__device__ __forceinline__ uint2 half_four(const float (&v)[4]) { return {half_pair(v[0], v[1]), half_pair(v[2], v[3])}; }
__device__ __forceinline__ void float_four(const uint2& four, float (&v)[4]) {
    v[0] = low_half(four.x), v[1] = high_half(four.x), v[2] = low_half(four.y), v[3] = high_half(four.y);
}

// The sum of four outputs' parts and something more, rounded.
__device__ __forceinline__ uint2 add_four(const uint4 (&part)[MOST_PARTS], const uint2& more) {
    float sum[4] = {}, its[4];
    float_four(more, its);
#pragma unroll
    for (int p = 0; p < MOST_PARTS; ++p) {
        sum[0] += __uint_as_float(part[p].x), sum[1] += __uint_as_float(part[p].y);
        sum[2] += __uint_as_float(part[p].z), sum[3] += __uint_as_float(part[p].w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += its[i];
    return half_four(sum);
}
