// The weights of a chain of products on their way through shared memory (decode_chain.cuh).
//
// Weights are nobody's output: one warp copies them into a ring in the order in which the block will need them, whatever
// product of whatever layer that is, a ring's length ahead. So the memory stays busy while the blocks wait for one another. A
// slot has CHAIN_WARPS units that follow one another, one for each of the warps that multiply, and then their scales.
#pragma once
#include "chain_operand.cuh"

constexpr int SCALE_BYTES = 2 * MMA_N;  // of a unit: a group is 128 of k
constexpr int MOST_WORDS = 8;           // of a lane's weights of a unit
// Slots under way at once while the block multiplies, and while it waits for what others leave: that would stand in line behind
// them.
constexpr int UNDER_WAY = 3, UNDER_WAY_WAITING = 1;

// Bytes of a unit of 128 of k.
template <class Unpack>
__device__ constexpr int unit_bytes() { return MMA_K / Unpack::UNIT_K * Unpack::BYTES; }

// The ring, of `depth` slots, each with a barrier that is over when it is full and one for when it is empty. Attention, Mlp:
// the layouts of their weights.
template <class Attention, class Mlp>
struct Ring {
    static constexpr int MOST_BYTES = unit_bytes<Attention>() > unit_bytes<Mlp>() ? unit_bytes<Attention>() : unit_bytes<Mlp>();
    static constexpr int SCALES = CHAIN_WARPS * MOST_BYTES, BARRIERS = SCALES + CHAIN_WARPS * SCALE_BYTES;
    static constexpr int SLOT = BARRIERS + 2 * 8;
    const int first, end;  // bytes of shared memory
    int at;
    unsigned parity;

    // from: where the ring is.
    __device__ __forceinline__ Ring(int from, int depth, RingPlace place)
        : first(from), end(from + depth * SLOT), at(from + place.at), parity(place.parity) {}
    __device__ __forceinline__ RingPlace place() const { return {at - first, parity}; }
    __device__ __forceinline__ char* slot() const { return launch_patterns() + at; }
    __device__ __forceinline__ PhaseBarrier* full() const { return reinterpret_cast<PhaseBarrier*>(slot() + BARRIERS); }
    __device__ __forceinline__ PhaseBarrier* empty() const { return full() + 1; }
    // By one thread, before the others use it.
    __device__ __forceinline__ void begin() {
#pragma unroll 1
        for (; at < end; at += SLOT) start(full(), 1), start(empty(), CHAIN_THREADS);
        publish_barriers();
    }
    __device__ __forceinline__ void leave() {
        at += SLOT;
        if (at == end) at = first, parity ^= 1;
    }

    // All weights of the first `products` products, by one thread.
    __device__ __forceinline__ void copy_all(Space& space, int products) {
        const ChainLayer* layer = &space.layer(0);
        Ring oldest = *this;  // of slots under way
        int under_way = 0;
#pragma unroll 1
        for (int product = QKV; products > 0; --products) {
            const ChainShare& share = space.shares[product];
            const size_t begin = share.tile * share.units + share.first;
            const int bytes = product < GATE_UP ? unit_bytes<Attention>() : unit_bytes<Mlp>();
            const char* tiles = layer->tiles[product] + begin * bytes;
            const char* scales = layer->scales[product] + begin * SCALE_BYTES;
#pragma unroll 1
            for (int left = share.count; left > 0; left -= CHAIN_WARPS) {
                const int count = min(left, CHAIN_WARPS);
                for (; under_way >= (is_set(&space.multiplies) ? UNDER_WAY : UNDER_WAY_WAITING); --under_way) {
                    await_or_trap(oldest.full(), oldest.parity), oldest.leave();
                }
                ++under_way;
                await_or_trap(empty(), parity ^ 1);
                arrive_expecting(full(), count * (bytes + SCALE_BYTES));
                stream_bulk(slot(), tiles, count * bytes, full());
                stream_bulk(slot() + SCALES, scales, count * SCALE_BYTES, full());
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
    static constexpr int PARTS = MMA_K / Unpack::UNIT_K, WORDS = sizeof(Unpack) / 4;
    unsigned word[MOST_WORDS], scale;

    // Of the ring's next slot, which the warp leaves when products have them.
    template <class R>
    __device__ __forceinline__ void look_at(const R& ring, int warp, int lane) {
        await_or_trap(ring.full(), ring.parity);
        const char* const from = ring.slot() + warp * unit_bytes<Unpack>();
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            Unpack part;
            part.load(from + i * Unpack::BYTES, lane);
#pragma unroll
            for (int j = 0; j < WORDS; ++j) word[i * WORDS + j] = part.word[j];
        }
        scale = reinterpret_cast<const unsigned*>(ring.slot() + R::SCALES + warp * SCALE_BYTES)[lane / 4];
    }
    template <class R>
    static __device__ __forceinline__ void leave(R& ring) {
        finish_reads();
        arrive(ring.empty());
        ring.leave();
    }
};

// What a warp has of a product's first slot, before activations are there.
struct FirstUnit {
    unsigned word[MOST_WORDS], scale;

    template <class Unpack, class R>
    __device__ __forceinline__ void look_at(const ChainShare& share) {
        const Space& space = chain_space();
        const int warp = this_thread() / 32;
        if (warp >= share.count) return;
        Weights<Unpack> weights;
        weights.look_at(R(space.ring_at, space.of.depth, space.places[warp]), warp, this_thread() % 32);
#pragma unroll
        for (int i = 0; i < MOST_WORDS; ++i) word[i] = weights.word[i];
        scale = weights.scale;
    }
};

// A block's units of a product. Leaves of each tile of the block and each warp the sums of 16 outputs, to be multiplied as
// `Operand` says (chain_results.cuh does); complete after `sync_chain`. TILE_EACH: K has as many units as there are warps, so
// that each of a warp's is another tile's, and about the same activations. This is where most instructions are issued.
template <class Unpack, class R, bool TILE_EACH>
__device__ __forceinline__ void multiply_share(const ChainShare& share, const FirstUnit& first) {
    Space& space = chain_space();
    const unsigned thread = this_thread();
    const int lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int units = share.units, count = share.count;
    float* to = space.sums() + warp * MMA_N + g;
    R ring(space.ring_at, space.of.depth, space.places[warp]);
    float sum[2] = {};
    int left_tiles = share.tiles;
    int unit = share.first + warp;  // of K, from the tile's first on
    const auto leave = [&] {
        if (t == 0) to[0] = sum[0], to[MMA_N / 2] = sum[1];
        sum[0] = sum[1] = 0.0f;
        to += CHAIN_WARPS * MMA_N, --left_tiles;
    };
    int left = (count - warp + CHAIN_WARPS - 1) / CHAIN_WARPS;  // units of this warp
    const bool idle = left < (count + CHAIN_WARPS - 1) / CHAIN_WARPS;  // in the last slot
    if (left > 0) {
        Weights<Unpack> weights;
#pragma unroll
        for (int i = 0; i < MOST_WORDS; ++i) weights.word[i] = first.word[i];
        weights.scale = first.scale;
        Operand<Unpack> operand(space, g, t);
#pragma unroll 1
        for (; unit >= units; unit -= units) leave();
        if (TILE_EACH) operand.load(unit);
#pragma unroll 1
        for (;;) {
            if (!TILE_EACH) operand.load(unit);
            const auto found = operand.multiply(weights.word);
            const float low = to_float(static_cast<half_t>(weights.scale));
            const float high = to_float(static_cast<half_t>(weights.scale >> 16));
            weights.leave(ring);
            if (--left > 0) weights.look_at(ring, warp, lane);  // while products are under way
            sum[0] = fmaf(low, operand.low(found), sum[0]), sum[1] = fmaf(high, operand.high(found), sum[1]);
            if (left == 0) break;
            if (TILE_EACH) {
                leave();
            } else {
#pragma unroll 1
                for (unit += CHAIN_WARPS; unit >= units; unit -= units) leave();
            }
        }
    }
    if (idle) {
        await_or_trap(ring.full(), ring.parity);
        Weights<Unpack>::leave(ring);
    }
#pragma unroll 1
    while (left_tiles > 0) leave();
    __syncwarp();  // all have looked at the place
    if (lane == 0) space.places[warp] = ring.place();
}
template <class Unpack, class R>
__device__ __forceinline__ void multiply_units(const ChainShare& share, const FirstUnit& first) {
    if (share.units == CHAIN_WARPS) multiply_share<Unpack, R, true>(share, first);
    else multiply_share<Unpack, R, false>(share, first);
}
