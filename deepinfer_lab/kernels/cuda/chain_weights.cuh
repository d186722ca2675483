// The weights of a chain of products on their way through shared memory (decode_chain.cuh).
//
// Weights are nobody's output: one warp copies them into a ring in the order in which the block will need them, whatever product
// of whatever layer that is, a ring's length ahead. So the memory stays busy while the blocks wait for one another. A slot has
// CHAIN_WARPS units that follow one another, one for each of the warps that multiply, and then their scales.
#pragma once
#include "grid_ptx.cuh"
#include "tile_units.cuh"

constexpr int CHAIN_WARPS = 8, CHAIN_THREADS = 32 * CHAIN_WARPS;  // that multiply; one warp more copies
constexpr int SCALE_BYTES = 2 * MMA_N;  // of a unit: a group is 128 of k
constexpr int MOST_PARTS = 3;              // of a tile: blocks that share its units
enum ChainProduct { QKV, O, GATE_UP, DOWN, PRODUCTS };

// A layer as the host lays it out: addresses. Tiles and scales as in quant/tiles.py, gate_up interleaved (quant/interleave.py).
struct ChainLayer {
    const char *tiles[PRODUCTS], *scales[PRODUCTS];
    const half_t *qkv_bias, *input_norm, *post_norm;  // no bias: null
    half_t *k, *v;                                    // [slots, kv_heads, D]
};

// What a block has of a product: units of all tiles' from `begin` on. It is the first tile's part number `part`.
struct ChainShare {
    int begin, count, part, units;  // units: of K

    __device__ __forceinline__ int first_tile() const { return begin / units; }
    __device__ __forceinline__ int tiles() const { return count > 0 ? (begin % units + count + units - 1) / units : 0; }
};

// Bytes of a unit of 128 of k.
template <class Unpack>
__device__ constexpr int unit_bytes() { return MMA_K / Unpack::UNIT_K * Unpack::BYTES; }

// The warps that multiply wait for one another.
__device__ __forceinline__ void sync_chain() { sync_team<CHAIN_THREADS>(0); }

// Where the ring is, and how far a warp has come in it. Attention, Mlp: the layouts of their weights.
template <class Attention, class Mlp>
struct Ring {
    static constexpr int MOST_BYTES = unit_bytes<Attention>() > unit_bytes<Mlp>() ? unit_bytes<Attention>() : unit_bytes<Mlp>();
    static constexpr int SCALES = CHAIN_WARPS * MOST_BYTES, SLOT = SCALES + CHAIN_WARPS * SCALE_BYTES;
    const int depth;
    int slot = 0;
    unsigned parity = 0;

    __device__ __forceinline__ explicit Ring(int depth) : depth(depth) {}
    __device__ __forceinline__ char* at() const { return launch_patterns() + slot * SLOT; }
    __device__ __forceinline__ PhaseBarrier* full() const {
        return reinterpret_cast<PhaseBarrier*>(launch_patterns() + depth * SLOT) + slot;
    }
    __device__ __forceinline__ PhaseBarrier* empty() const { return full() + depth; }
    __device__ __forceinline__ char* end() const { return launch_patterns() + depth * (SLOT + 2 * 8); }
    // By one thread, before the others use it.
    __device__ __forceinline__ void begin() const {
        for (int i = 0; i < depth; ++i) start(full() + i, 1), start(empty() + i, CHAIN_WARPS);
        publish_barriers();
    }
    __device__ __forceinline__ void leave() {
        if (++slot == depth) slot = 0, parity ^= 1;
    }

    // All weights of the first `products` products, by one thread.
    __device__ __forceinline__ void copy_all(const ChainLayer* layer, const ChainShare* shares, int products) {
        for (int product = QKV; products > 0; --products) {
            const ChainShare share = shares[product];
            const int bytes = product < GATE_UP ? unit_bytes<Attention>() : unit_bytes<Mlp>();
            const char* tiles = layer->tiles[product] + static_cast<size_t>(share.begin) * bytes;
            const char* scales = layer->scales[product] + static_cast<size_t>(share.begin) * SCALE_BYTES;
            for (int left = share.count; left > 0; left -= CHAIN_WARPS) {
                const int count = min(left, CHAIN_WARPS);
                await_copy(empty(), parity ^ 1);
                arrive_expecting(full(), count * (bytes + SCALE_BYTES));
                copy_bulk(at(), tiles, count * bytes, full());
                copy_bulk(at() + SCALES, scales, count * SCALE_BYTES, full());
                tiles += CHAIN_WARPS * bytes, scales += CHAIN_WARPS * SCALE_BYTES;
                leave();
            }
            if (++product == PRODUCTS) product = QKV, ++layer;
        }
    }
};

// A lane's weights of a unit, and the scales of its outputs.
template <class Unpack>
struct Weights {
    static constexpr int PARTS = MMA_K / Unpack::UNIT_K, EACH = 8 / PARTS;  // products of a part
    Unpack part[PARTS];
    unsigned scale;

    // Of the ring's next slot, if there is a unit for this warp in it.
    template <class R>
    __device__ __forceinline__ void take(R& ring, int warp, int lane, bool there) {
        await_copy(ring.full(), ring.parity);
        if (there) {
            const char* const at = ring.at() + warp * unit_bytes<Unpack>();
#pragma unroll
            for (int i = 0; i < PARTS; ++i) part[i].load(at + i * Unpack::BYTES, lane);
            scale = reinterpret_cast<const unsigned*>(ring.at() + R::SCALES + warp * SCALE_BYTES)[lane / 4];
        }
        __syncwarp();
        if (lane == 0) arrive(ring.empty());
        ring.leave();
    }

    // sum += the products with eight activations of each quarter, `row`, 32 apart.
    __device__ __forceinline__ void multiply(const half_t* row, float (&sum)[1][4]) const {
        uint4 b[QUARTERS];
#pragma unroll
        for (int i = 0; i < QUARTERS; ++i) b[i] = *reinterpret_cast<const uint4*>(row + 32 * i);
        float found[4][4] = {};  // four chains: a product waits long for the one before it
#pragma unroll
        for (int p = 0; p < 8; ++p) {
            unsigned a[4];
            part[p / EACH].fragment(p % EACH, a);
            mma(found[p % 4], a, p % 2 ? b[p / 2].z : b[p / 2].x, p % 2 ? b[p / 2].w : b[p / 2].y);
        }
        float all[1][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) all[0][i] = (found[0][i] + found[1][i]) + (found[2][i] + found[3][i]);
        add_scaled(sum, all, scale);
    }
};

// A block's units of a product. rows: activations, ROWS of them `stride` apart, in shared memory. sums: of each tile of the
// block and each warp, 16 outputs of each row; complete after `sync_chain`.
template <class Unpack, int ROWS, class R>
__device__ __forceinline__ void multiply_units(R& ring, const ChainShare share, const half_t* rows, int stride, float* sums) {
    const unsigned thread = this_thread();
    const int lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4, tiles = share.tiles();
    const half_t* const row = rows + min(g, ROWS - 1) * stride + 8 * t;
    float* to = sums + warp * ROWS * MMA_N + g;
    float sum[1][4] = {};
    int tile = 0, unit = share.begin % share.units + warp;  // of K, from the tile's first on
    const auto leave = [&] {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (2 * t + i % 2 < ROWS) to[(2 * t + i % 2) * MMA_N + i / 2 * 8] = sum[0][i];
            sum[0][i] = 0.0f;
        }
        to += CHAIN_WARPS * ROWS * MMA_N, ++tile;
    };
    const auto multiply = [&](const Weights<Unpack>& weights) {
        for (; unit >= share.units; unit -= share.units) leave();
        weights.multiply(row + unit * MMA_K, sum);
        unit += CHAIN_WARPS;
    };
    Weights<Unpack> even, odd;  // one is on its way from shared memory while the other is multiplied
    int left = share.count - warp;  // units, of this warp if more than 0
    const int slots = (share.count + CHAIN_WARPS - 1) / CHAIN_WARPS;
    if (slots > 0) even.take(ring, warp, lane, left > 0);
#pragma unroll 1
    for (int i = 0; i < slots; i += 2, left -= 2 * CHAIN_WARPS) {
        if (i + 1 < slots) odd.take(ring, warp, lane, left > CHAIN_WARPS);
        if (left > 0) multiply(even);
        if (i + 2 < slots) even.take(ring, warp, lane, left > 2 * CHAIN_WARPS);
        if (left > CHAIN_WARPS) multiply(odd);
    }
    while (tile < tiles) leave();
}
