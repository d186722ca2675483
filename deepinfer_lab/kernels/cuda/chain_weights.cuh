// The weights of a chain of products on their way through shared memory (decode_chain.cuh).
//
// Weights are nobody's output: one warp copies them into a ring in the order in which the block will need them, whatever
// product of whatever layer that is, a ring's length ahead. So the memory stays busy while the blocks wait for one another. A
// slot has CHAIN_WARPS units that follow one another, one for each of the warps that multiply, and then their scales.
#pragma once
#include "chain_space.cuh"

constexpr int SCALE_BYTES = 2 * MMA_N;  // of a unit: a group is 128 of k
// Slots under way at once: 34 KB to a multiprocessor keep the memory busy, and with more whatever else a block reads, and
// waits for, would stand in line behind them.
constexpr int FLIGHT = 2;

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
        for (; at < end; at += SLOT) start(full(), 1), start(empty(), CHAIN_WARPS);
        publish_barriers();
    }
    __device__ __forceinline__ void leave() {
        at += SLOT;
        if (at == end) at = first, parity ^= 1;
    }

    // All weights of the first `products` products, by one thread.
    __device__ __forceinline__ void copy_all(const ChainLayer* layer, const ChainShare* shares, int products) {
        Ring oldest = *this;  // of those under way
        int flying = 0;
#pragma unroll 1
        for (int product = QKV; products > 0; --products) {
            const ChainShare& share = shares[product];
            const size_t begin = share.tile * share.units + share.first;
            const int bytes = product < GATE_UP ? unit_bytes<Attention>() : unit_bytes<Mlp>();
            const char* tiles = layer->tiles[product] + begin * bytes;
            const char* scales = layer->scales[product] + begin * SCALE_BYTES;
#pragma unroll 1
            for (int left = share.count; left > 0; left -= CHAIN_WARPS) {
                const int count = min(left, CHAIN_WARPS);
                if (flying < FLIGHT) ++flying;
                else await_copy(oldest.full(), oldest.parity), oldest.leave();
                await_copy(empty(), parity ^ 1);
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

// Activations of a unit, as a product of lane 4g + t takes them. Column 2r of a product is about row r.
//
// 3 bits: fp16, eight of each quarter, the weights decoded to fp16 as well.
template <class Unpack>
struct Operand {
    static constexpr float LOW = 1.0f, HIGH = 1.0f;  // what sums of outputs 0 .. 7, and 8 .. 15, are to be multiplied with
    uint4 b[QUARTERS] = {};
    const half_t* row;
    bool there;  // the others' products are nobody's

    Operand() = default;
    template <int ROWS>
    __device__ __forceinline__ Operand(const Space<ROWS>& space, int g, int t)
        : row(space.act() + min(g / 2, ROWS - 1) * space.stride + 8 * t), there(g % 2 == 0 && g / 2 < ROWS) {}
    __device__ __forceinline__ void load(int unit) {
        if (!there) return;
#pragma unroll
        for (int i = 0; i < QUARTERS; ++i) b[i] = *reinterpret_cast<const uint4*>(row + unit * MMA_K + 32 * i);
    }
    static constexpr int STEPS = 8, AT_ONCE = 1;  // products of a unit; units that a warp has in hand
    struct Found { float sum[2][4]; };  // two chains: a product waits long for the one before it
    __device__ __forceinline__ Found begin() const { return {}; }
    __device__ __forceinline__ void multiply(int step, const Unpack (&part)[1], Found& found) const {
        unsigned a[4];
        part[0].fragment(step, a);
        const uint4& four = b[step / 2];
        mma(found.sum[step % 2], a, step % 2 ? four.z : four.x, step % 2 ? four.w : four.y);
    }
    // Outputs g and g + 8 of row t, without the weights' scales.
    __device__ __forceinline__ float low(const Found& found) const { return found.sum[0][0] + found.sum[1][0]; }
    __device__ __forceinline__ float high(const Found& found) const { return found.sum[0][2] + found.sum[1][2]; }
};

// 4 bits: two bytes, as `keep_four` (chain_digits.cuh) has made them, column 2r + 1 the lower. The weights are bytes as they
// lie: the four lower halves of a word's bytes are output g's, the upper ones, 16-fold, output g + 8's, so two instructions are
// enough for eight values. Sums are whole numbers, and exact. They begin with -8 times the activations': weights are stored as
// q + 8.
template <>
struct Operand<W4Tiles> {
    static constexpr float LOW = 1.0f, HIGH = 1.0f / 16.0f;
    static constexpr int STEPS = 4, AT_ONCE = 2;
    uint4 b[2] = {};
    int offset = 0;
    float unit_step = 0.0f;
    const char* digits;
    const Total* totals;
    int rows;
    bool there;

    Operand() = default;
    template <int ROWS>
    __device__ __forceinline__ Operand(const Space<ROWS>& space, int g, int t)
        : digits(space.digits(min(g / 2, ROWS - 1), g % 2) + 32 * t), totals(space.totals() + min(t, ROWS - 1)), rows(ROWS),
          there(g / 2 < ROWS) {}
    __device__ __forceinline__ void load(int unit) {
        const Total its = totals[unit * rows];
        offset = its.offset, unit_step = its.step;
        if (!there) return;
        const auto* const from = reinterpret_cast<const uint4*>(digits + unit * MMA_K);
        b[0] = from[0], b[1] = from[1];
    }
    struct Found {
        int sum[4];
        float step;
    };
    __device__ __forceinline__ Found begin() const { return {{0, offset, 0, offset * 16}, unit_step}; }
    __device__ __forceinline__ void multiply(int step, const W4Tiles (&part)[2], Found& found) const {
        const unsigned first = part[step / 2].word[step % 2 * 2], second = part[step / 2].word[step % 2 * 2 + 1];
        const unsigned a[4] = {first & 0x0F0F0F0Fu, first & 0xF0F0F0F0u, second & 0x0F0F0F0Fu, second & 0xF0F0F0F0u};
        const uint4& four = b[step / 2];
        mma_bytes(found.sum, a, step % 2 ? four.z : four.x, step % 2 ? four.w : four.y);
    }
    __device__ __forceinline__ float low(const Found& found) const { return (found.sum[0] * 256 + found.sum[1]) * found.step; }
    __device__ __forceinline__ float high(const Found& found) const { return (found.sum[2] * 256 + found.sum[3]) * found.step; }
};

// A lane's weights of a unit, and the scales of its outputs.
template <class Unpack>
struct Weights {
    static constexpr int PARTS = MMA_K / Unpack::UNIT_K;
    Unpack part[PARTS];
    unsigned scale;

    template <class R>
    __device__ __forceinline__ void load(const char* slot, int warp, int lane) {
        const char* const from = slot + warp * unit_bytes<Unpack>();
#pragma unroll
        for (int i = 0; i < PARTS; ++i) part[i].load(from + i * Unpack::BYTES, lane);
        scale = reinterpret_cast<const unsigned*>(slot + R::SCALES + warp * SCALE_BYTES)[lane / 4];
    }
};

// A block's units of a product. Leaves of each tile of the block and each warp the sums of 16 outputs of each row, to be
// multiplied as `Operand` says; complete after `sync_chain`.
template <class Unpack, int ROWS, class R>
__device__ __forceinline__ void multiply_units(int product) {
    constexpr int AT_ONCE = Operand<Unpack>::AT_ONCE;
    Space<ROWS>& space = space_of<ROWS>();
    const unsigned thread = this_thread();
    const int lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int units = space.shares[product].units, count = space.shares[product].count;
    float* to = space.sums() + (warp * ROWS + min(t, ROWS - 1)) * MMA_N + g;
    R ring(space.ring_at, space.of.depth, space.places[warp]);
    float sum[2] = {};
    int left_tiles = space.shares[product].tiles;
    int unit = space.shares[product].first + warp;  // of K, from the tile's first on
    const auto leave = [&] {
        if (t < ROWS) to[0] = sum[0], to[MMA_N / 2] = sum[1];
        sum[0] = sum[1] = 0.0f;
        to += CHAIN_WARPS * ROWS * MMA_N, --left_tiles;
    };
    int left = (count - warp + CHAIN_WARPS - 1) / CHAIN_WARPS;  // units of this warp
    const bool idle = left < (count + CHAIN_WARPS - 1) / CHAIN_WARPS;  // in the last slot
    Weights<Unpack> weights[AT_ONCE] = {};
    // Of the ring's next slots.
    const auto take = [&] {
        PhaseBarrier* read[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (i >= left) continue;
            await(ring.full(), ring.parity);
            weights[i].template load<R>(ring.slot(), warp, lane);
            read[i] = ring.empty(), ring.leave();
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (i < left && lane == 0) arrive(read[i]);
        }
    };
    Operand<Unpack> operand[AT_ONCE];
    int held[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) operand[i] = {space, g, t}, held[i] = -1;
    take();
#pragma unroll 1
    while (left > 0) {
        typename Operand<Unpack>::Found found[AT_ONCE];
        float scale[AT_ONCE][2];
        int next = unit;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i, next += CHAIN_WARPS) {
#pragma unroll 1
            while (next >= units) next -= units;
            if (next != held[i]) operand[i].load(next);  // where K has as many units as there are warps, it is the same always
            held[i] = next;
            found[i] = operand[i].begin();
            scale[i][0] = to_float(static_cast<half_t>(weights[i].scale));
            scale[i][1] = to_float(static_cast<half_t>(weights[i].scale >> 16));
        }
#pragma unroll
        for (int step = 0; step < Operand<Unpack>::STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) operand[i].multiply(step, weights[i].part, found[i]);
        }
        const int had = left;
        left -= AT_ONCE;
        take();  // while products are under way
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (i >= had) continue;
#pragma unroll 1
            for (; unit >= units; unit -= units) leave();
            sum[0] = fmaf(scale[i][0], operand[i].low(found[i]), sum[0]);
            sum[1] = fmaf(scale[i][1], operand[i].high(found[i]), sum[1]);
            unit += CHAIN_WARPS;
        }
    }
    if (idle) {
        await(ring.full(), ring.parity);
        if (lane == 0) arrive(ring.empty());
        ring.leave();
    }
#pragma unroll 1
    while (left_tiles > 0) leave();
    if (lane == 0) space.places[warp] = ring.place();
}
